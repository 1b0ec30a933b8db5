//! The protocol of Konnectivity: packets between frontend, server and agent, in gRPC messages.
//!
//! A stream is read in this order. [`frame`] finds the message, [`packet`] decodes the [`Packet`] in it, and
//! [`address`] takes the host from the address of a DIAL_REQ. [`identifiers`] reads what an agent says about
//! itself when it connects, [`status`] is how a stream ends.
//!
//! The protocol is the one of `sigs.k8s.io/apiserver-network-proxy`: proto3 without a package, services
//! [`PROXY_PATH`] and [`CONNECT_PATH`]. Streams, flow control and deadlines are `portico-konnectivity`'s.

pub mod address;
mod field;
pub mod frame;
pub mod identifiers;
pub mod packet;
pub mod status;

pub use frame::Frame;
pub use identifiers::Identifiers;
pub use packet::{ConnectId, DataHead, DialId, Packet};
pub use status::Code;

/// The stream of a frontend: it calls, the server serves.
pub const PROXY_PATH: &str = "/ProxyService/Proxy";

/// The stream of an agent: it calls, the server serves.
pub const CONNECT_PATH: &str = "/AgentService/Connect";
