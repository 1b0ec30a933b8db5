//! A site whose tunnel is under TLS: certificates of its gateway and of its clusters, manifests, and
//! `portico gateway` on them.

use std::net::SocketAddr;

use portico_lab::pki::{Certificate, Pki};

use crate::common::{Process, port_of};
use crate::proof::{LOOPBACK, Site, echo, manifest};

/// Certificates, manifests and other files of one site.
pub(crate) struct SecureSite {
    pub(crate) pki: Pki,
    pub(crate) manifests: Site,
}

/// A gateway with the ports that it listens on.
pub(crate) struct SecureGateway {
    pub(crate) process: Process,
    pub(crate) admin: u16,
    pub(crate) tunnel: u16,
}

impl SecureSite {
    /// Clusters a and b, whose API servers send back what they get.
    pub(crate) fn new() -> Self {
        let site = Self::without_clusters();
        for cluster in ["a", "b"] {
            site.put(cluster, echo(LOOPBACK));
        }
        site
    }

    /// Certificates of the gateway and of agents of a and b.
    pub(crate) fn without_clusters() -> Self {
        let pki = Pki::new();
        pki.issue("gateway", Certificate::server(&["127.0.0.1", "gateway.test"]));
        for cluster in ["a", "b"] {
            pki.issue(cluster, Certificate::cluster(cluster));
        }
        Self { pki, manifests: Site::new() }
    }

    /// Says where the cluster's API server is.
    pub(crate) fn put(&self, cluster: &str, upstream: SocketAddr) {
        self.manifests.put(cluster, &manifest(cluster, None, upstream));
    }

    /// A gateway with TLS on its tunnel, ready. `listen` are its listeners.
    pub(crate) fn gateway(&self, listen: &[&str], more: &[&str]) -> SecureGateway {
        let [cert, key] = ["gateway.crt", "gateway.key"].map(|name| self.pki.path(name));
        let manifests = self.manifests.manifests();
        let arguments =
            ["gateway", "--manifests", &manifests, "--admin-listen", "127.0.0.1:0", "--workers", "1"];
        let tls = ["--tunnel-tls-cert", &cert, "--tunnel-tls-key", &key, "--access-log", "text"];
        let mut process = Process::start(&[&arguments[..], listen, &tls, more].concat());
        let admin = port_of(&process.wait_for("listener=admin"));
        let tunnel = port_of(&process.wait_for("listener=tunnel"));
        SecureGateway { process, admin, tunnel }
    }
}
