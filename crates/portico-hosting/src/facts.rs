//! The inputs of all parts of a plan: the fields of a Cluster, with defaults filled in.

use std::collections::BTreeMap;

use ipnet::IpNet;
use portico_api::annotations::{FEATURE_GATES, LAYOUT};
use portico_api::cluster::HostingSpec;
use portico_api::hosting::{Layout, Version};
use portico_api::port_range::PortRange;
use portico_expose::inputs::Scope;
use portico_pki::Secrets;
use portico_pki::inventory::{KUBECONFIG_OF_FILES, LEAVES, Stored};

use crate::config::Configs;
use crate::settings::Settings;
use crate::versions::{Minor, Versions};

/// KKP's label with the name of the Cluster, on everything that its control plane is made of.
pub const CLUSTER: &str = "cluster";

/// Members of etcd where a Cluster does not say, as in KKP.
const MEMBERS: u16 = 3;
/// Replicas of the API server where a Cluster does not say, as in KKP.
const API_SERVERS: u16 = 2;
/// Size of the pod network of a node where a Cluster does not say: IPv4 and IPv6, as in KKP.
const NODE_MASKS: [u8; 2] = [24, 64];

/// What programs read of Secrets at their start only, as [`digests`] tells it, by name. Those that are not
/// known yet are left out.
pub type Digests = BTreeMap<String, String>;

/// What all parts of a plan follow from.
pub(crate) struct Facts<'a> {
    pub(crate) scope: Scope<'a>,
    pub(crate) hosting: &'a HostingSpec,
    pub(crate) layout: Layout,
    pub(crate) version: Version,
    pub(crate) minor: &'a Minor,
    pub(crate) settings: &'a Settings,
    pub(crate) digests: &'a Digests,
    pub(crate) namespace: String,
    /// Replicas of the API server.
    pub(crate) api_servers: u16,
    /// Members of etcd.
    pub(crate) members: u16,
    pub(crate) kubevirt: bool,
    pub(crate) feature_gates: Option<String>,
    /// Every ConfigMap, by name.
    pub(crate) configs: Configs,
}

/// Digests of Secrets, for the templates of pods: a change replaces the pods. Certificates and keys of
/// servers and clients are left out: programs read those files again, so a renewal restarts nothing. The
/// digest of a kubeconfig covers its address and authority.
pub fn digests(secrets: &Secrets) -> Digests {
    let read_once = |name: &str, key: &str| match LEAVES.iter().find(|leaf| leaf.secret == name) {
        None => true,
        Some(leaf) => matches!(leaf.stored, Stored::Kubeconfig(_)) && key == KUBECONFIG_OF_FILES,
    };
    let of = |(name, data): (&String, &BTreeMap<String, String>)| {
        let data = data.iter().map(|(key, value)| (&**key, &**value));
        let mut values = data.filter(|(key, _)| read_once(name, key)).peekable();
        values.peek()?;
        Some((name.clone(), digest(values)))
    };
    secrets.iter().filter_map(of).collect()
}

/// A short text that differs when one of the values does.
pub(crate) fn digest<'a>(data: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    for text in data.into_iter().flat_map(|(key, value)| [key, value]) {
        context.update(&(text.len() as u64).to_be_bytes());
        context.update(text.as_bytes());
    }
    context.finish().as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Networks, separated by commas.
pub(crate) fn joined(networks: &[IpNet]) -> String {
    networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

impl<'a> Facts<'a> {
    /// Nothing for a Cluster that names no layout, or no version that is known.
    pub(crate) fn of(
        scope: Scope<'a>,
        hosting: &'a HostingSpec,
        settings: &'a Settings,
        digests: &'a Digests,
        configs: Configs,
    ) -> Option<Self> {
        let cluster = scope.cluster;
        let layout: Layout = cluster.metadata.annotation(LAYOUT)?.parse().ok()?;
        let version = *hosting.version.get()?;
        let components = &cluster.spec.components_override;
        let replicas = components.apiserver.pods.as_ref().and_then(|pods| pods.replicas.get());
        let members = components.etcd.as_ref().and_then(|etcd| etcd.cluster_size.get());
        let or_default = |written: Option<&u16>, default| match layout {
            Layout::Compact => 1,
            Layout::Dedicated => written.copied().unwrap_or(default),
        };
        let gates = cluster.metadata.annotation(FEATURE_GATES).map(str::trim).filter(|text| !text.is_empty());
        Some(Self {
            scope,
            hosting,
            layout,
            version,
            minor: Versions::known().of(version)?,
            settings,
            digests,
            namespace: cluster.name().namespace(),
            api_servers: or_default(replicas, API_SERVERS),
            members: or_default(members, MEMBERS),
            kubevirt: scope.is_on("kubevirt"),
            feature_gates: gates.map(str::to_owned),
            configs,
        })
    }

    /// An image of Kubernetes.
    pub(crate) fn kubernetes(&self, program: &str) -> String {
        self.settings.upstream(program, &format!("v{}", self.version))
    }

    pub(crate) fn node_port_range(&self) -> PortRange {
        let own = self.scope.cluster.spec.components_override.apiserver.node_port_range.get();
        let configured = || self.scope.configuration?.spec.user_cluster.node_port_range.get();
        own.or_else(configured).copied().unwrap_or(PortRange::NODE_PORTS)
    }

    /// Size of the pod network of a node: IPv4 and IPv6.
    pub(crate) fn node_masks(&self) -> [u8; 2] {
        let network = &self.scope.cluster.spec.cluster_network;
        let written = [&network.node_cidr_mask_size_ipv4, &network.node_cidr_mask_size_ipv6];
        [0, 1].map(|index| written[index].get().copied().unwrap_or(NODE_MASKS[index]))
    }

    /// The digest of a ConfigMap of this plan.
    pub(crate) fn config_digest(&self, name: &str) -> Option<String> {
        let (_, files) = self.configs.iter().find(|(found, _)| *found == name)?;
        Some(digest(files.iter().map(|(&key, value)| (key, &**value))))
    }
}
