//! `Cluster` (kubermatic.k8c.io/v1): a user cluster, with the fields that concern exposure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::annotations::{
    API_SERVER_CA, CONTROL_PLANE_FINALIZER, ENDPOINTS, FAIR_SHARE, KONNECTIVITY_ENDPOINTS, LAYOUT,
    MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, MIGRATION_LABEL,
};
use crate::api_server_ca::{ApiServerCa, BadCa};
use crate::hosting::{
    AuditLogging, Encryption, EtcdSettings, KonnectivitySettings, Oidc, PodSettings, SecretRef,
    ServiceAccountSettings, Version,
};
use crate::meta::ObjectMeta;
use crate::migration::{BadMigrationSettings, MIGRATION, MigrationSettings};
use crate::names::ClusterName;
use crate::network::Network;
use crate::port_range::PortRange;
use crate::seed::Present;
use crate::setting::{Setting, or_default};
use crate::strategy::ExposeStrategy;

/// A user cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Cluster {
    /// Name; no namespace, the kind is cluster-scoped.
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(deserialize_with = "or_default")]
    pub spec: ClusterSpec,
    /// What was found.
    #[serde(deserialize_with = "or_default")]
    pub status: ClusterStatus,
    /// The parsed annotation `api-server-ca`, once [`Self::trimmed`] has dropped its text.
    #[serde(skip)]
    ca: Option<ApiServerCa>,
}

impl Cluster {
    /// One of which nothing else is known.
    pub fn with_metadata(metadata: ObjectMeta) -> Self {
        Self { metadata, ..Self::default() }
    }

    /// Its name as an identity.
    pub fn name(&self) -> ClusterName {
        ClusterName::new(&self.metadata.name)
    }

    /// Whether its expose strategy may be changed.
    pub fn may_migrate(&self) -> bool {
        self.metadata.labels.contains_key(MIGRATION_LABEL)
    }

    /// How it migrates, or why its annotation cannot be used.
    pub fn migration_settings(&self) -> Result<MigrationSettings, BadMigrationSettings> {
        MigrationSettings::of(self.metadata.annotation(MIGRATION))
    }

    /// Whether it asks Portico to host its control plane.
    pub fn has_layout(&self) -> bool {
        self.metadata.annotation(LAYOUT).is_some()
    }

    /// Whether Portico hosts its control plane, as far as the Cluster says: it was begun. The annotation says
    /// less: it may be refused, and a control plane that was begun stays without it.
    pub fn is_hosted(&self) -> bool {
        self.metadata.has_finalizer(CONTROL_PLANE_FINALIZER)
    }

    /// Returns the Cluster as it is once Portico has begun its control plane.
    #[must_use]
    pub fn begun(mut self) -> Self {
        if !self.is_hosted() {
            let finalizers = std::mem::take(&mut self.metadata.finalizers).into_iter();
            self.metadata.finalizers = finalizers.chain([CONTROL_PLANE_FINALIZER.into()]).collect();
        }
        self
    }

    /// Whether its etcd has held data, as its condition says for ever: everything else may be deleted with
    /// its namespace.
    pub fn has_held_data(&self) -> bool {
        self.is_true(ETCD_INITIALIZED)
    }

    /// Whether this condition is true, as its status says.
    pub fn is_true(&self, condition: &str) -> bool {
        let condition = self.status.conditions.get(condition);
        condition.is_some_and(|condition| &*condition.status == "True")
    }

    /// Whether it runs on the cloud provider `name` (`aws`, `kubevirt`).
    pub fn is_on(&self, name: &str) -> bool {
        let cloud = &self.spec.cloud;
        &*cloud.provider_name == name
            || (name == "aws" && cloud.aws.0)
            || (name == "kubevirt" && cloud.kubevirt.0)
    }

    /// The CA of its API server, or why its annotation is no CA; `None` without the annotation.
    pub fn api_server_ca(&self) -> Option<Result<ApiServerCa, BadCa>> {
        let written = || self.metadata.annotation(API_SERVER_CA).map(ApiServerCa::parse);
        self.ca.clone().map(Ok).or_else(written)
    }

    /// Returns the object without the parts that planning does not read: other labels and annotations,
    /// feature switches, and derived status fields. Some annotations are as long as the object itself, such
    /// as `kubectl.kubernetes.io/last-applied-configuration`. A gateway holds 10,000 Clusters.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        if let Some(Ok(ca)) = self.api_server_ca() {
            self.ca = Some(ca);
            self.metadata.annotations.remove(API_SERVER_CA);
        }
        let meta = &mut self.metadata;
        meta.labels.retain(|key, _| &**key == MIGRATION_LABEL);
        // A CA that could not be read is still here: validation reports it.
        let kept = [
            MAX_CONNECTIONS,
            MAX_CONNECTIONS_PER_SECOND,
            FAIR_SHARE,
            API_SERVER_CA,
            ENDPOINTS,
            KONNECTIVITY_ENDPOINTS,
            LAYOUT,
            MIGRATION,
        ];
        meta.annotations.retain(|key, _| kept.contains(&&**key));
        self.spec.human_readable_name = Box::default();
        self.spec.features.clear();
        self.spec.cni_plugin = CniPlugin::default();
        self.spec.hosting = None;
        let apiserver = ApiserverSettings { pods: None, ..self.spec.components_override.apiserver };
        self.spec.components_override = ComponentsOverride { apiserver, ..ComponentsOverride::default() };
        self.status.address = Address { ip: self.status.address.ip, ..Address::default() };
        self.status.conditions.clear();
        self.status.extended_health.clear();
        self.status.phase = "".into();
        // `is_hosted` depends on it.
        let begun = self.metadata.has_finalizer(CONTROL_PLANE_FINALIZER);
        self.metadata.finalizers = begun.then(|| CONTROL_PLANE_FINALIZER.into()).into_iter().collect();
        if *self.status.namespace_name == *self.name().namespace() {
            self.status.namespace_name = "".into();
        }
        self
    }
}

/// `Cluster.spec`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterSpec {
    /// Its name for people.
    #[serde(deserialize_with = "or_default")]
    pub human_readable_name: Box<str>,
    /// Its own choice of strategy.
    pub expose_strategy: Setting<ExposeStrategy>,
    /// Controllers leave a paused cluster as it is.
    #[serde(deserialize_with = "or_default")]
    pub pause: bool,
    /// Where it runs.
    #[serde(deserialize_with = "or_default")]
    pub cloud: Cloud,
    /// Its networks.
    #[serde(deserialize_with = "or_default")]
    pub cluster_network: ClusterNetwork,
    /// Networks of its worker nodes, if an IPAM assigns them.
    #[serde(deserialize_with = "or_default")]
    pub machine_networks: Box<[MachineNetwork]>,
    /// Client networks that may reach its control plane. Even without any, those that the Seed adds hold.
    #[serde(rename = "apiServerAllowedIPRanges")]
    pub api_server_allowed_ip_ranges: Option<ClientRanges>,
    /// Settings of single control plane components.
    #[serde(deserialize_with = "or_default")]
    pub components_override: ComponentsOverride,
    /// Its network plugin.
    #[serde(deserialize_with = "or_default")]
    pub cni_plugin: CniPlugin,
    /// Monitoring, logging and alerting.
    #[serde(deserialize_with = "or_default")]
    pub mla: ClusterMla,
    /// Feature switches.
    #[serde(deserialize_with = "or_default")]
    pub features: BTreeMap<Box<str>, bool>,
    /// What only hosting reads; `None` if nothing of it is written.
    #[serde(flatten, deserialize_with = "boxed")]
    pub hosting: Option<Box<HostingSpec>>,
}

/// The fields of `Cluster.spec` that only hosting reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostingSpec {
    /// Version of Kubernetes.
    pub version: Setting<Version>,
    /// Tokens of service accounts.
    #[serde(deserialize_with = "or_default")]
    pub service_account: ServiceAccountSettings,
    /// The audit log.
    #[serde(deserialize_with = "or_default")]
    pub audit_logging: AuditLogging,
    /// Users of one identity provider.
    #[serde(deserialize_with = "or_default")]
    pub oidc: Oidc,
    /// Users of identity providers, in Kubernetes' own words.
    #[serde(deserialize_with = "or_default")]
    pub authentication_configuration: SecretRef,
    /// Other ways to decide which user may do what.
    pub authorization_config: Option<Value>,
    /// Encryption of Secrets.
    #[serde(deserialize_with = "or_default")]
    pub encryption_configuration: Encryption,
    /// Admission plugins beside those that every cluster has.
    #[serde(deserialize_with = "or_default")]
    pub admission_plugins: Vec<Box<str>>,
    /// Whether PodNodeSelector is one of them.
    #[serde(deserialize_with = "or_default")]
    pub use_pod_node_selector_admission_plugin: bool,
    /// Its configuration: node selectors by namespace.
    #[serde(deserialize_with = "or_default")]
    pub pod_node_selector_admission_plugin_config: BTreeMap<Box<str>, Box<str>>,
    /// Whether EventRateLimit is one of them.
    #[serde(deserialize_with = "or_default")]
    pub use_event_rate_limit_admission_plugin: bool,
    /// Its configuration: limits by type.
    #[serde(deserialize_with = "or_default")]
    pub event_rate_limit_config: BTreeMap<Box<str>, Option<EventRateLimit>>,
}

/// A limit of events.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EventRateLimit {
    /// Events a second.
    pub qps: Setting<u32>,
    /// Events at once.
    pub burst: Setting<u32>,
    /// How many namespaces or users are counted separately.
    pub cache_size: Setting<u32>,
}

/// A part that hardly any object has, on the heap. `None` if it equals the default.
fn boxed<'de, D, T>(deserializer: D) -> Result<Option<Box<T>>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default + PartialEq,
{
    let part = T::deserialize(deserializer)?;
    Ok((part != T::default()).then(|| Box::new(part)))
}

/// `spec.cniPlugin`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CniPlugin {
    /// `canal`, `cilium` or `none`; empty for KKP's default.
    #[serde(rename = "type", deserialize_with = "or_default")]
    pub kind: Box<str>,
}

/// `spec.cloud`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cloud {
    /// The datacenter, and with it the seed.
    #[serde(deserialize_with = "or_default")]
    pub dc: Box<str>,
    /// The provider, once KKP has filled it in.
    #[serde(deserialize_with = "or_default")]
    pub provider_name: Box<str>,
    /// The provider is AWS.
    pub aws: Present,
    /// The provider is KubeVirt.
    pub kubevirt: Present,
}

/// `spec.clusterNetwork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterNetwork {
    /// Pod networks.
    #[serde(deserialize_with = "or_default")]
    pub pods: NetworkRanges,
    /// Service networks.
    #[serde(deserialize_with = "or_default")]
    pub services: NetworkRanges,
    /// `IPv4` or `IPv4+IPv6`; may be empty.
    #[serde(deserialize_with = "or_default")]
    pub ip_family: Box<str>,
    /// Last part of the user cluster's internal names; empty means `cluster.local`.
    #[serde(deserialize_with = "or_default")]
    pub dns_domain: Box<str>,
    /// How kube-proxy works; `ebpf` means that there is none. Empty for the default.
    #[serde(deserialize_with = "or_default")]
    pub proxy_mode: Box<str>,
    /// Address on which the agent on each worker node listens; strategy Tunneling only.
    #[serde(rename = "tunnelingAgentIP")]
    pub tunneling_agent_ip: Setting<IpAddr>,
    /// `false` used to select OpenVPN; KKP refuses it now.
    pub konnectivity_enabled: Option<bool>,
    /// Size of the pod network of each node, IPv4.
    #[serde(rename = "nodeCidrMaskSizeIPv4")]
    pub node_cidr_mask_size_ipv4: Setting<u8>,
    /// Size of the pod network of each node, IPv6.
    #[serde(rename = "nodeCidrMaskSizeIPv6")]
    pub node_cidr_mask_size_ipv6: Setting<u8>,
}

/// A list of networks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkRanges {
    /// In CIDR notation.
    #[serde(deserialize_with = "or_default")]
    pub cidr_blocks: Box<[Setting<IpNet>]>,
}

/// A list of networks of clients.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientRanges {
    /// In CIDR notation, or single addresses.
    #[serde(deserialize_with = "or_default")]
    pub cidr_blocks: Box<[Setting<Network>]>,
}

/// One of `spec.machineNetworks`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MachineNetwork {
    /// The network.
    pub cidr: Setting<IpNet>,
}

/// `spec.componentsOverride`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ComponentsOverride {
    /// The API server.
    #[serde(deserialize_with = "or_default")]
    pub apiserver: ApiserverSettings,
    /// The controller manager.
    pub controller_manager: Option<Box<PodSettings>>,
    /// The scheduler.
    pub scheduler: Option<Box<PodSettings>>,
    /// etcd.
    pub etcd: Option<Box<EtcdSettings>>,
    /// The Konnectivity server, and its agents.
    pub konnectivity_proxy: Option<Box<KonnectivitySettings>>,
}

/// `spec.componentsOverride.apiserver`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiserverSettings {
    /// NodePorts inside the user cluster; never changes.
    pub node_port_range: Setting<PortRange>,
    /// No controller reconciles the `kubernetes` endpoints of the user cluster.
    #[serde(deserialize_with = "or_default")]
    pub endpoint_reconciling_disabled: bool,
    /// Its pods; `None` if nothing is written about them.
    #[serde(flatten, deserialize_with = "boxed")]
    pub pods: Option<Box<PodSettings>>,
}

/// `spec.mla`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterMla {
    /// Metrics are sent to the seed.
    #[serde(deserialize_with = "or_default")]
    pub monitoring_enabled: bool,
    /// Logs are sent to the seed.
    #[serde(deserialize_with = "or_default")]
    pub logging_enabled: bool,
}

/// `Cluster.status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterStatus {
    /// Where the API server is reached.
    #[serde(deserialize_with = "or_default")]
    pub address: Address,
    /// Namespace of the control plane on the seed; `cluster-` and the name.
    #[serde(deserialize_with = "or_default")]
    pub namespace_name: Box<str>,
    /// What controllers found, by type.
    #[serde(deserialize_with = "or_default")]
    pub conditions: BTreeMap<Box<str>, ClusterCondition>,
    /// How it stands with each program of its control plane, by KKP's names: `HealthStatusUp`.
    #[serde(deserialize_with = "or_default")]
    pub extended_health: BTreeMap<Box<str>, Value>,
    /// `Creating`, `Updating`, `Running` or `Terminating`.
    #[serde(deserialize_with = "or_default")]
    pub phase: Box<str>,
}

/// The condition that says whether clients find the cluster.
pub const EXPOSED: &str = "PorticoExposed";

/// The condition that says how far a migration between expose strategies is. A Cluster that never migrated
/// has none.
pub const MIGRATING: &str = "PorticoMigration";

/// The condition that says whether the control plane runs that Portico hosts.
pub const CONTROL_PLANE_READY: &str = "PorticoControlPlaneReady";

/// KKP's condition that says, for ever, that the cluster's etcd has held data.
pub const ETCD_INITIALIZED: &str = "EtcdClusterInitialized";

/// KKP's condition that says, for ever, that everything of the cluster has run once.
pub const INITIALIZED: &str = "ClusterInitialized";

/// KKP's condition that says whether all pods of the control plane are as they should be.
pub const UP_TO_DATE: &str = "SeedResourcesUpToDate";

/// The condition that says whether what is inside the cluster is as it should be.
pub const USER_CLUSTER_READY: &str = "PorticoUserClusterReady";

/// One of `status.conditions`. In KKP they are a map by type.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterCondition {
    /// `True`, `False` or `Unknown`.
    #[serde(deserialize_with = "or_default")]
    pub status: Box<str>,
    /// One word for programs.
    #[serde(deserialize_with = "or_default")]
    pub reason: Box<str>,
    /// A sentence for people.
    #[serde(deserialize_with = "or_default")]
    pub message: Box<str>,
    /// When `status` became what it is, as written.
    #[serde(deserialize_with = "or_default")]
    pub last_transition_time: Box<str>,
    /// When the condition was written last, as written.
    #[serde(deserialize_with = "or_default")]
    pub last_heartbeat_time: Box<str>,
}

/// `status.address`; an empty field or `None` is not known yet. The admin token is left out because it is a
/// secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Address {
    /// `https://` with external name and port.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "str_is_empty")]
    pub url: Box<str>,
    /// Port the API server listens on and is reached at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Host name or load balancer address.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "str_is_empty")]
    pub external_name: Box<str>,
    /// Internal DNS name with a trailing dot. It has no scheme, despite the name of the field.
    #[serde(rename = "internalURL", deserialize_with = "or_default", skip_serializing_if = "str_is_empty")]
    pub internal_url: Box<str>,
    /// External address.
    #[serde(deserialize_with = "ip_or_none", skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// `https://` with host or address, without port; only where `apiserver-external` is of type
    /// LoadBalancer.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "str_is_empty")]
    pub api_server_external_address: Box<str>,
}

fn str_is_empty(text: &str) -> bool {
    text.is_empty()
}

/// A status field that is no address counts as not known: users cannot correct it.
fn ip_or_none<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    Ok(Setting::<IpAddr>::deserialize(deserializer)?.get().copied())
}
