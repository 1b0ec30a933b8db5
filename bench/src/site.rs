//! The user clusters of a run: their names, and which backend plays their API server.
//!
//! Each cluster is exposed as KKP's strategy `Tunneling` does, with three routes: the API server by SNI and
//! by CONNECT authority, the Konnectivity server by SNI. Every proxy gets the same set.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;

/// Backends have addresses of their own (127.8.0.1 and up). So upstream connections spread over as many
/// address pairs as in a real seed, and no proxy pays for a crowded ephemeral port range.
pub(crate) const BACKENDS: usize = 100;

/// One user cluster.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    /// The name of the Cluster object.
    pub(crate) id: String,
    /// Server name of the API server.
    pub(crate) host: String,
    /// Server name of the Konnectivity server.
    pub(crate) konnectivity_host: String,
    /// CONNECT authority of the API server.
    pub(crate) authority: String,
    /// The endpoint of both.
    pub(crate) backend: SocketAddrV4,
}

impl Cluster {
    /// The cluster with this number; equal numbers give equal clusters.
    pub(crate) fn numbered(number: usize, backend_port: u16) -> Self {
        let id = format!("c{number:09}");
        let host = format!("{id}.bench.kkp.example.com");
        let last = u8::try_from(number % BACKENDS + 1).expect("there are at most 255 backends");
        Self {
            konnectivity_host: format!("konnectivity-server.{host}"),
            authority: format!("apiserver-external.cluster-{id}.svc.cluster.local:443"),
            backend: SocketAddrV4::new(Ipv4Addr::new(127, 8, 0, last), backend_port),
            id,
            host,
        }
    }
}

/// What one proxy process serves and where.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Configuration, logs and sockets of this process.
    pub(crate) dir: PathBuf,
    /// SNI passthrough.
    pub(crate) sni: SocketAddrV4,
    /// HTTP/2 CONNECT, for proxies that have it.
    pub(crate) tunnel: SocketAddrV4,
    /// Health and metrics, for proxies that have it.
    pub(crate) admin: SocketAddrV4,
    /// In the order they were added.
    pub(crate) clusters: Vec<Cluster>,
}
