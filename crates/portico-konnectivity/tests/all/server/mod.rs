//! The server, with agents and frontends of plain h2 and plain sockets.

mod agents;
mod any_sequence;
mod connect;
mod hostile;
mod hostile_frontends;
mod leaks;
mod leases;
mod proxy;
mod sequences;
mod silence;
mod streams;
mod support;
