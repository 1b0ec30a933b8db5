//! Portico: one manifest file a cluster in a watched directory; and its agent.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use super::agent::{Agent, Way};
use super::{Proxy, Running, Staged, stage};
use crate::pki::Pki;
use crate::site::{Cluster, Site};

/// The program under test.
pub(crate) struct Portico {
    /// The `portico` binary.
    pub(crate) program: PathBuf,
    /// Arguments after the ones every run has.
    pub(crate) arguments: Vec<String>,
    /// Certificates of the tunnel; without, it is plaintext, as Envoy's is.
    pub(crate) tls: Option<Pki>,
    /// Whether the gateway also admits agents by tokens, which their API servers review.
    pub(crate) reviews: bool,
}

impl Proxy for Portico {
    fn name(&self) -> &'static str {
        "Portico"
    }

    fn agent(&self) -> Option<&dyn Agent> {
        Some(self)
    }

    fn with_tls(&self, pki: &Pki) -> Option<Box<dyn Proxy>> {
        let (program, arguments) = (self.program.clone(), self.arguments.clone());
        Some(Box::new(Self { program, arguments, tls: Some(pki.clone()), reviews: false }))
    }

    fn open_to_strangers(&self, pki: &Pki) -> Option<Box<dyn Proxy>> {
        let (program, arguments) = (self.program.clone(), self.arguments.clone());
        Some(Box::new(Self { program, arguments, tls: Some(pki.clone()), reviews: true }))
    }

    fn configure(&self, site: &Site) -> Result<()> {
        let manifests = site.dir.join("manifests");
        fs::create_dir_all(&manifests).with_context(|| format!("cannot create {}", manifests.display()))?;
        site.clusters.iter().try_for_each(|cluster| self.staged_manifest(site, cluster)?.publish())
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("gateway").arg("--manifests").arg(site.dir.join("manifests"));
        command.args(["--sni-listen", &site.sni.to_string()]);
        command.args(["--tunnel-listen", &site.tunnel.to_string()]);
        match &self.tls {
            None => command.arg("--tunnel-plaintext"),
            Some(pki) => command
                .arg("--tunnel-tls-cert")
                .arg(pki.gateway().certificate)
                .arg("--tunnel-tls-key")
                .arg(pki.gateway().key)
                .arg("--tunnel-client-ca")
                .arg(pki.ca()),
        };
        if self.reviews {
            command.arg("--tunnel-token-review");
        }
        command.args(["--admin-listen", &site.admin.to_string()]);
        command.args(["--node-port-address", "127.0.0.1", "--workers", "1"]);
        command.args(["--connect-timeout", "1s"]);
        command.arg("--take-over").arg(site.dir.join("take-over"));
        command.args(&self.arguments);
        command
    }

    fn publish(&self, site: &Site, _running: &mut Running) -> Result<Instant> {
        let cluster = site.clusters.last().context("the site has no cluster to add")?;
        let staged = self.staged_manifest(site, cluster)?;
        let start = Instant::now();
        staged.publish()?;
        Ok(start)
    }

    fn publishes_by(&self) -> &'static str {
        "manifest"
    }
}

impl Agent for Portico {
    fn name(&self) -> &'static str {
        "Portico's agent"
    }

    fn configure(&self, _way: &Way) -> Result<()> {
        Ok(())
    }

    fn command(&self, way: &Way) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["agent", "--address", "off", "--admin-listen", "off", "--proxy", "off"]);
        command.arg("--forward").arg(format!("{}={}", way.listen, way.cluster.authority));
        match &self.tls {
            None => command.arg("--gateway").arg(format!("h2c://{}", way.gateway)),
            Some(pki) => {
                let identity = pki.cluster(&way.cluster.id);
                command
                    .arg("--gateway")
                    .arg(format!("tls://{}", way.gateway))
                    .arg("--tls-ca")
                    .arg(pki.ca())
                    .arg("--tls-cert")
                    .arg(identity.certificate)
                    .arg("--tls-key")
                    .arg(identity.key)
            }
        };
        command
    }
}

impl Portico {
    fn staged_manifest(&self, site: &Site, cluster: &Cluster) -> Result<Staged> {
        let path = site.dir.join("manifests").join(format!("{}.yaml", cluster.id));
        // Any CA will do: the API servers of a run do not get as far as a handshake.
        let api_server_ca = match &self.tls {
            Some(pki) if self.reviews => Some(fs::read_to_string(pki.ca()).context("cannot read the CA")?),
            _ => None,
        };
        stage(path, manifest(cluster, api_server_ca.as_deref()))
    }
}

/// The Services and EndpointSlices of a cluster under strategy `Tunneling`.
fn manifest(cluster: &Cluster, api_server_ca: Option<&str>) -> String {
    let services = [
        ("apiserver-external", "SNI,Tunneling", 6443, &cluster.host),
        ("konnectivity-server", "SNI", 8132, &cluster.konnectivity_host),
    ];
    let namespace = format!("cluster-{}", cluster.id);
    let documents = services.iter().flat_map(|&(name, expose, target, host)| {
        let mut service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "annotations": {
                    "nodeport-proxy.k8s.io/expose": expose,
                    "nodeport-proxy.k8s.io/port-mapping": json!({"secure": host}).to_string(),
                },
            },
            "spec": {
                "type": "ClusterIP",
                "selector": {"app": "apiserver"},
                "ports": [{"name": "secure", "port": 443, "targetPort": target, "protocol": "TCP"}],
            },
        });
        if let Some(ca) = api_server_ca {
            service["metadata"]["annotations"]["portico.k8c.io/api-server-ca"] = json!(ca);
        }
        let endpoints = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{name}-bench"),
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [cluster.backend.ip().to_string()], "conditions": {"ready": true}}],
            "ports": [{"name": "secure", "port": cluster.backend.port(), "protocol": "TCP"}],
        });
        [service, endpoints]
    });
    // JSON is YAML, so JSON documents between separators are a YAML file.
    documents.map(|document| document.to_string()).collect::<Vec<_>>().join("\n---\n")
}
