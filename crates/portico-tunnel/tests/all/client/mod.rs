//! The client half of a tunnel, from outside: against the server half, and against scripted gateways.

mod first_bytes;
mod harness;
mod identity;
mod names;
mod pool;
mod scripted;
mod streams;
