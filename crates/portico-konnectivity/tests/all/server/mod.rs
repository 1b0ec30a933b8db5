//! The server, with agents and frontends of plain h2 and plain sockets.

mod agents;
mod connect;
mod leaks;
mod proxy;
mod streams;
mod support;
