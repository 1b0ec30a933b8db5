//! Konnectivity: the way back from an API server to the nodes of its cluster.
//!
//! A frontend (kube-apiserver) asks the server for a connection, the server asks an agent in the user
//! cluster, and the agent dials. The protocol is that of `sigs.k8s.io/apiserver-network-proxy`, so that
//! either half works with an upstream peer. Between our own halves each connection is an HTTP/2 stream of its
//! own.
//!
//! [`server`] asks, [`agent`] dials. [`grpc`] carries messages over h2. [`authority`] lets h2 serve
//! kube-apiserver on a Unix socket. [`streams`] is the agreement of our own halves. [`counting`] and
//! [`requests`] have the counts of both.
//!
//! Elsewhere: packets and messages as bytes (`portico-wire`), the way to a server (`portico-dial`), HTTP/2
//! connections and the bridge between stream and socket (`portico-tunnel`).

pub mod agent;
pub mod authority;
pub mod counting;
pub mod grpc;
mod lease;
pub mod requests;
pub mod server;
pub mod streams;
