//! The demo's site on disk and in memory: manifests, certificates, kubeconfigs, stand-in API servers.
//!
//! The folder is like a real one: it can be read, edited while the demo runs, and handed to `portico check`.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use portico_api::names::ClusterName;
use portico_api::strategy::ExposeStrategy;
use portico_expose::services::{APISERVER, KONNECTIVITY};
use portico_pki::Pair;
use tempfile::TempDir;

use super::api_server;
use super::nodes::{self, Nodes};
use super::pki::Authority;
use super::ports::Ports;
use super::stand_in::StandIn;

/// Base domain of the demo; `.test` never exists in DNS (RFC 6761).
const DOMAIN: &str = "portico.test";
/// Middle label of the host names.
const SEED: &str = "demo";

/// One user cluster of the demo.
#[derive(Debug)]
pub(super) struct UserCluster {
    /// Also the name of its `Cluster`.
    pub(super) name: &'static str,
    pub(super) strategy: ExposeStrategy,
    /// In one sentence.
    pub(super) story: &'static str,
}

/// The three.
pub(super) const CLUSTERS: [UserCluster; 3] = [
    WITH_NODE,
    UserCluster {
        name: "by-balancer",
        strategy: ExposeStrategy::LoadBalancer,
        story: "A load balancer of its own, whose part the gateway plays here: again a port.",
    },
    TUNNELED,
];

/// The one whose API server reaches a worker node.
pub(super) const WITH_NODE: UserCluster = UserCluster {
    name: "by-port",
    strategy: ExposeStrategy::NodePort,
    story: "The destination port says which cluster is meant.",
};

/// The one that has a node agent.
const TUNNELED: UserCluster = UserCluster {
    name: "by-name",
    strategy: ExposeStrategy::Tunneling,
    story: "All such clusters share two ports; the server name or the CONNECT authority says which is meant.",
};

/// The Konnectivity server's Unix socket, where its API server asks.
const SOCKET: &str = "konnectivity.socket";

/// Port of the CONNECT authority of an API server.
pub(super) const AUTHORITY_PORT: u16 = 443;

/// Everything the demo made. Gone when dropped.
pub(super) struct Site {
    folder: TempDir,
    /// The kubelet of the one worker node.
    kubelet: StandIn,
    /// Kept for as long as they are to serve.
    _servers: Vec<StandIn>,
}

impl UserCluster {
    /// The host name it is reached by.
    pub(super) fn host(&self) -> String {
        format!("{}.{SEED}.{DOMAIN}", self.name)
    }

    /// The host of its CONNECT authority.
    pub(super) fn internal_host(&self) -> String {
        format!("apiserver-external.{}.svc.cluster.local", ClusterName::new(self.name).namespace())
    }

    /// Opens its API server. A demo's secret: it guards nothing, and shows that headers pass unseen.
    pub(super) fn token(&self) -> String {
        format!("demo-token-{}", self.name)
    }
}

impl Site {
    /// Makes everything and starts the stand-ins.
    pub(super) async fn build(ports: &Ports) -> anyhow::Result<Self> {
        // There are keys and tokens in it.
        let private = Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix("portico-demo-").permissions(private).tempdir();
        let folder = folder.context("cannot make a folder for the demo; is TMPDIR writable?")?;
        let authority = Authority::new()?;
        let kubelet = nodes::kubelet(&authority.server(&["node-1".into()], &[loopback()])?).await?;
        let mut site = Self { folder, kubelet, _servers: Vec::new() };
        site.write("ca.crt", &authority.certificate)?;
        site.write_identity("tunnel", &authority.server(&["localhost".into()], &[loopback()])?)?;
        site.write_identity("konnectivity", &authority.server(&[], &[loopback()])?)?;
        site.write("manifests/installation.yaml", &installation(ports))?;
        for cluster in &CLUSTERS {
            let names = [cluster.host(), cluster.internal_host()];
            let identity = authority.server(&names, &[loopback()])?;
            let has_node = cluster.name == WITH_NODE.name;
            let way = || Nodes::new(&site.path(SOCKET), site.kubelet.address, &authority.certificate);
            let nodes = has_node.then(way).transpose()?;
            let server = api_server::start(cluster.name, &identity, &cluster.token(), nodes).await?;
            let mut manifest = manifest(cluster, server.address.port());
            if has_node {
                manifest.push_str(&slice(cluster, KONNECTIVITY, ports.konnectivity));
            }
            site.write(&format!("manifests/{}.yaml", cluster.name), &manifest)?;
            site._servers.push(server);
            site.write_identity(cluster.name, &authority.client(cluster.name)?)?;
        }
        Ok(site)
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// The command line that serves this site.
    pub(super) fn gateway_arguments(&self, ports: &Ports) -> Vec<OsString> {
        let at = |port: u16| format!("127.0.0.1:{port}").into();
        let file = |name: &str| self.path(name).into_os_string();
        vec![
            "gateway".into(),
            "--manifests".into(),
            file("manifests"),
            "--sni-listen".into(),
            at(ports.sni),
            "--tunnel-listen".into(),
            at(ports.tunnel),
            "--tunnel-plaintext".into(),
            "--tunnel-tls-cert".into(),
            file("tunnel.crt"),
            "--tunnel-tls-key".into(),
            file("tunnel.key"),
            "--tunnel-client-ca".into(),
            file("ca.crt"),
            "--node-port-address".into(),
            "127.0.0.1".into(),
            "--admin-listen".into(),
            at(ports.admin),
            // Ctrl-C means now: a demo has no clients to wait for.
            "--drain-timeout".into(),
            "0s".into(),
        ]
    }

    /// The command line for a node of the Tunneling cluster, without the address, which takes root.
    pub(super) fn agent_arguments(&self, ports: &Ports) -> Vec<OsString> {
        let file = |name: &str| self.path(name).into_os_string();
        let cluster = &TUNNELED;
        vec![
            "agent".into(),
            "--gateway".into(),
            format!("127.0.0.1:{}", ports.tunnel).into(),
            "--proxy".into(),
            "off".into(),
            "--tls-ca".into(),
            file("ca.crt"),
            "--tls-cert".into(),
            file(&format!("{}.crt", cluster.name)),
            "--tls-key".into(),
            file(&format!("{}.key", cluster.name)),
            "--address".into(),
            "off".into(),
            "--forward".into(),
            format!("127.0.0.1:{}={}:{AUTHORITY_PORT}", ports.agent, cluster.internal_host()).into(),
            "--admin-listen".into(),
            format!("127.0.0.1:{}", ports.agent_admin).into(),
            "--drain-timeout".into(),
            "0s".into(),
        ]
    }

    /// The kubelet that only the Konnectivity agent reaches.
    pub(super) fn kubelet(&self) -> SocketAddr {
        self.kubelet.address
    }

    /// The command line of the Konnectivity server beside the API server of the cluster with a node.
    pub(super) fn konnectivity_server_arguments(&self, ports: &Ports) -> Vec<OsString> {
        let file = |flag: &str, name: &str| format!("--{flag}={}", self.path(name).display());
        [
            "konnectivity".into(),
            "server".into(),
            "--mode=http-connect".into(),
            file("uds-name", SOCKET),
            "--server-port=0".into(),
            "--agent-bind-address=127.0.0.1".into(),
            format!("--agent-port={}", ports.konnectivity),
            file("cluster-cert", "konnectivity.crt"),
            file("cluster-key", "konnectivity.key"),
            file("cluster-ca-cert", "ca.crt"),
            "--health-port=0".into(),
            format!("--admin-port={}", ports.konnectivity + 1),
        ]
        .map(OsString::from)
        .to_vec()
    }

    /// The command line of the agent on that node: it knows the NodePort that the gateway listens on.
    pub(super) fn konnectivity_agent_arguments(&self, ports: &Ports, node_port: u16) -> Vec<OsString> {
        let file = |flag: &str, name: &str| format!("--{flag}={}", self.path(name).display());
        let name = WITH_NODE.name;
        [
            "konnectivity".into(),
            "agent".into(),
            "--proxy=off".into(),
            "--proxy-server-host=127.0.0.1".into(),
            format!("--proxy-server-port={node_port}"),
            file("ca-cert", "ca.crt"),
            file("agent-cert", &format!("{name}.crt")),
            file("agent-key", &format!("{name}.key")),
            "--health-server-port=0".into(),
            format!("--admin-server-port={}", ports.konnectivity + 2),
            "--drain-idle=0s".into(),
        ]
        .map(OsString::from)
        .to_vec()
    }

    /// Writes a kubeconfig for `cluster` at `server`, whose certificate is for `tls_name`, and returns its
    /// path.
    pub(super) fn kubeconfig(
        &self,
        name: &str,
        cluster: &UserCluster,
        server: &str,
        tls_name: &str,
        proxy: Option<&str>,
    ) -> anyhow::Result<PathBuf> {
        let proxy = proxy.map(|url| format!("\n    proxy-url: {url}")).unwrap_or_default();
        let ca = self.path("ca.crt");
        let text = format!(
            "apiVersion: v1\n\
             kind: Config\n\
             current-context: demo\n\
             clusters:\n\
             - name: demo\n  cluster:\n    server: {server}\n    tls-server-name: {tls_name}\n    \
             certificate-authority: {ca}{proxy}\n\
             contexts:\n\
             - name: demo\n  context: {{cluster: demo, user: demo}}\n\
             users:\n\
             - name: demo\n  user: {{token: {token}}}\n",
            ca = ca.display(),
            token = cluster.token(),
        );
        self.write(name, &text)?;
        Ok(self.path(name))
    }

    /// Removes the folder, saying so if that fails.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        let folder = self.folder().to_owned();
        self.folder.close().with_context(|| format!("cannot remove {}; remove it by hand", folder.display()))
    }

    fn write_identity(&self, name: &str, identity: &Pair) -> anyhow::Result<()> {
        self.write(&format!("{name}.crt"), &identity.certificate)?;
        self.write(&format!("{name}.key"), &identity.key)
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path(name);
        let secret = path.extension().is_some_and(|kind| kind == "key" || kind == "kubeconfig");
        let mode = if secret { 0o600 } else { 0o644 };
        let parent = path.parent().map_or(Ok(()), fs::create_dir_all);
        parent
            .and_then(|()| File::options().write(true).create(true).truncate(true).mode(mode).open(&path))
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

fn loopback() -> IpAddr {
    Ipv4Addr::LOCALHOST.into()
}

fn installation(ports: &Ports) -> String {
    let range = ports.node_port_range();
    format!(
        "apiVersion: kubermatic.k8c.io/v1\n\
         kind: KubermaticConfiguration\n\
         metadata: {{name: kubermatic, namespace: kubermatic}}\n\
         spec:\n  \
           ingress: {{domain: {DOMAIN}}}\n  \
           # The demo looked for free ports here.\n  \
           userCluster: {{nodePortRange: {range}}}\n\
         ---\n\
         apiVersion: kubermatic.k8c.io/v1\n\
         kind: Seed\n\
         metadata: {{name: kubermatic, namespace: kubermatic}}\n\
         spec: {{seedDNSOverwrite: {SEED}}}\n"
    )
}

/// A Cluster, and where its API server is.
fn manifest(cluster: &UserCluster, port: u16) -> String {
    let UserCluster { name, strategy, .. } = cluster;
    let slice = slice(cluster, APISERVER, port);
    format!(
        "apiVersion: kubermatic.k8c.io/v1\n\
         kind: Cluster\n\
         metadata: {{name: {name}}}\n\
         spec:\n  \
           exposeStrategy: {strategy}\n\
         {slice}"
    )
}

/// Where the endpoint of a Service is: there is no Kubernetes that would say so.
fn slice(cluster: &UserCluster, service: &str, port: u16) -> String {
    let namespace = ClusterName::new(cluster.name).namespace();
    format!(
        "---\n\
         apiVersion: discovery.k8s.io/v1\n\
         kind: EndpointSlice\n\
         metadata:\n  \
           name: {service}-demo\n  \
           namespace: {namespace}\n  \
           labels: {{kubernetes.io/service-name: {service}}}\n\
         addressType: IPv4\n\
         endpoints:\n\
         - addresses: [127.0.0.1]\n  \
           conditions: {{ready: true}}\n\
         ports:\n\
         - {{name: secure, port: {port}}}\n"
    )
}
