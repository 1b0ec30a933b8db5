//! The agent, with a server of plain h2.

mod any_sequence;
mod leaks;
mod packets;
mod servers;
mod silence;
mod streams;
mod support;
