//! The flags of `portico preflight`, and what follows from them: inventory, facts, plan, tools.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgGroup, Args, ValueEnum};
use portico_api::meta::ObjectKey;
use portico_dial::{Dialer, ProxyFiles, ProxySetting, pem};
use portico_ports::Facts;
use portico_ports::model::{self, Product};
use portico_ports::nearest::UnknownWord;
use portico_ports::site::Site as Needs;
use portico_preflight::check::Limits;
use portico_preflight::local_addresses;
use portico_preflight::plan::{Plan, Site, TlsTrust, plan};
use portico_preflight::runner::{Pace, Tools};
use rustls::RootCertStore;

use crate::args::{Listen, object_key, positive_duration};
use crate::offline;
use crate::requirements::{self, Known};
use crate::verb::firewall::read_inventory;

// `portico preflight`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("machines").required(true))]
pub(crate) struct Flags {
    /// What this machine is: a role of the model, such as worker; may be repeated
    #[arg(long, value_name = "ROLE", required_unless_present = "mesh", value_delimiter = ',')]
    role: Vec<String>,
    /// Which addresses have which role: a YAML file, `worker: [10.0.1.1, 10.0.1.2]`
    #[arg(long, value_name = "FILE", group = "machines")]
    inventory: Option<PathBuf>,
    /// Objects of the installation: their ports and addresses are tried in place of the model's. A directory
    /// of manifests, or of a copy of a seed's objects (kubectl get -o yaml)
    #[arg(long, value_name = "DIR", conflicts_with = "mesh")]
    manifests: Option<PathBuf>,
    /// Of those objects, only what this cluster needs
    #[arg(long, value_name = "NAME", requires = "manifests")]
    cluster: Option<String>,
    /// Answer the checks of other machines until told to stop, and check nothing
    #[arg(long)]
    pub(super) listen: bool,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table", conflicts_with = "listen")]
    pub(super) output: Format,
    /// The products whose requirements count: kkp, kublr, portico; may be repeated
    #[arg(
        long,
        value_name = "PRODUCT",
        default_value = "kkp",
        value_delimiter = ',',
        help_heading = "Model"
    )]
    product: Vec<String>,
    #[command(flatten, next_help_heading = "Model")]
    known: Known,
    /// Nothing is installed here yet: a port that is taken is a failure
    #[arg(long, conflicts_with = "listen", help_heading = "Expected")]
    pub(super) new_machine: bool,
    /// `--listen` runs on all other machines: what does not come back is dropped. Found out by itself where
    /// the other machine has a TCP port to answer on
    #[arg(long, conflicts_with = "listen", help_heading = "Expected")]
    pub(super) peers_listen: bool,
    /// The MTU that pods have or will have; without it, no packet may vanish that the interface takes
    #[arg(long, value_name = "BYTES", help_heading = "Expected")]
    pub(super) pod_mtu: Option<u16>,
    /// The CA of the installation, PEM: certificates that others issued are then reported as interception
    #[arg(long, value_name = "FILE", help_heading = "Expected")]
    tls_ca: Option<PathBuf>,
    /// The server name to ask for where the inventory has an address
    #[arg(long, value_name = "NAME", help_heading = "Expected")]
    server_name: Option<String>,
    /// The corporate proxy to the outside: URL, env (as HTTPS_PROXY says), or off
    #[arg(long, value_name = "URL|env|off", default_value = "env", help_heading = "Way")]
    proxy: ProxySetting,
    /// File with USER:PASSWORD for the proxy
    #[arg(long, value_name = "FILE", help_heading = "Way")]
    proxy_credentials: Option<PathBuf>,
    /// The CA of an https:// proxy, PEM
    #[arg(long, value_name = "FILE", help_heading = "Way")]
    proxy_ca: Option<PathBuf>,
    /// How long an answer may take
    #[arg(long, value_name = "TIME", default_value = "3500ms", value_parser = positive_duration)]
    #[arg(help_heading = "Pace")]
    timeout: Duration,
    /// Checks at a time
    #[arg(long, value_name = "N", default_value = "64", help_heading = "Pace")]
    parallel: usize,
    /// Checks begun each second
    #[arg(long, value_name = "N", default_value = "200", help_heading = "Pace")]
    per_second: u32,
    #[command(flatten)]
    pub(super) mesh: MeshFlags,
}

// The flags of `portico preflight --mesh`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Mesh")]
pub(crate) struct MeshFlags {
    /// Check from node to node for ever, as a DaemonSet (deploy/mesh.yaml), and keep the condition
    /// PorticoMesh on this node
    #[arg(long, group = "machines", conflicts_with_all = ["listen", "role", "output", "new_machine"])]
    #[arg(requires = "node")]
    pub(super) mesh: bool,
    /// This node
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub(super) node: Option<String>,
    /// The headless Service whose endpoints are the other nodes
    #[arg(long, value_name = "NS/NAME", default_value = "kube-system/portico-mesh")]
    #[arg(value_parser = object_key)]
    pub(super) mesh_service: ObjectKey,
    /// Between the beginnings of two rounds
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = positive_duration)]
    pub(super) interval: Duration,
    /// Most nodes that are checked in one round; the next round goes on with the next ones
    #[arg(long, value_name = "N", default_value = "50")]
    pub(super) most_peers: usize,
    /// How to reach the Kubernetes API; without it, as a pod of that cluster
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// Where /healthz, /readyz, /metrics and /status are served; off for none
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8006")]
    pub(super) admin_listen: Listen,
}

/// How findings are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// For programs; the field names are stable
    Json,
    /// For CI systems: one suite a row of the model
    Junit,
}

impl Flags {
    /// What this machine has to try.
    pub(super) fn plan(&self) -> anyhow::Result<Plan> {
        let (products, facts) = (self.products()?, self.facts()?);
        let path = self.inventory.as_deref().context("--inventory is missing")?;
        let inventory = read_inventory(path, &facts)?;
        let here = local_addresses().context("reading the addresses of this machine")?;
        let (tls, needs) = (self.trust()?, self.needs()?);
        let (roles, products, here, needs) = (&self.role, products.as_slice(), &*here, needs.as_ref());
        Ok(plan(&Site { products, roles, facts: &facts, inventory: &inventory, needs, here, tls: &tls })?)
    }

    /// What objects tell, if there are any.
    fn needs(&self) -> anyhow::Result<Option<Needs>> {
        let Some(directory) = &self.manifests else { return Ok(None) };
        let mut needs = requirements::needs(&offline::read(directory)?, None)?;
        if let Some(name) = &self.cluster {
            let known: Vec<String> = needs.clusters.iter().map(|cluster| cluster.name.clone()).collect();
            needs.clusters.retain(|cluster| cluster.name == *name);
            if needs.clusters.is_empty() {
                return Err(UnknownWord::new("cluster", name, known.iter().map(String::as_str)).into());
            }
        }
        Ok(Some(needs))
    }

    pub(super) fn products(&self) -> anyhow::Result<Vec<&'static Product>> {
        Ok(self.product.iter().map(|word| model::product(word)).collect::<Result<_, _>>()?)
    }

    pub(super) fn facts(&self) -> anyhow::Result<Facts> {
        self.known.facts()
    }

    pub(super) fn trust(&self) -> anyhow::Result<TlsTrust> {
        let own = self.tls_ca.as_deref().map(roots).transpose()?.map(Arc::new);
        let server_name = self.server_name.as_deref().map(Into::into);
        let mut public = portico_dial::system_roots()?;
        public.extend(own.iter().flat_map(|own: &Arc<RootCertStore>| own.roots.iter().cloned()));
        Ok(TlsTrust { public: Arc::new(public), own, server_name })
    }

    /// What checks need.
    pub(super) fn tools(&self) -> anyhow::Result<Tools> {
        let files = ProxyFiles { credentials: self.proxy_credentials.clone(), ca: self.proxy_ca.clone() };
        let dialer = Dialer::new(self.proxy.clone(), files)?;
        let direct = Dialer::new(ProxySetting::Off, ProxyFiles::default())?;
        Ok(Tools { dialer, direct, limits: self.limits() })
    }

    pub(super) fn limits(&self) -> Limits {
        Limits { answer: self.timeout, ..Limits::default() }
    }

    pub(super) fn pace(&self) -> Pace {
        Pace { parallel: self.parallel, per_second: self.per_second }
    }
}

fn roots(path: &Path) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in pem::certificates(path, &pem::read(path)?)? {
        roots.add(certificate).with_context(|| format!("{}: no CA certificate", path.display()))?;
    }
    Ok(roots)
}
