//! `Seed` (kubermatic.k8c.io/v1): a cluster that hosts control planes, with the fields that concern exposure.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::annotations::MAX_HOSTED;
use crate::duration::GoDuration;
use crate::meta::{ObjectMeta, Strings};
use crate::network::Network;
use crate::service::ServiceType;
use crate::setting::{Setting, or_default};
use crate::strategy::ExposeStrategy;

/// A seed cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Seed {
    /// Name and namespace.
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(deserialize_with = "or_default")]
    pub spec: SeedSpec,
}

impl Seed {
    /// The middle label of the host names of this seed's clusters.
    pub fn dns_label(&self) -> &str {
        let spec = &self.spec;
        [&*spec.seed_dns_overwrite, &*spec.seed_dns_overwrite_old, &*self.metadata.name]
            .into_iter()
            .find(|label| !label.is_empty())
            .unwrap_or_default()
    }

    /// Most clusters whose control planes it hosts; `None` for any number.
    ///
    /// # Errors
    /// The value of the annotation [`MAX_HOSTED`], if it is no number.
    pub fn max_hosted(&self) -> Result<Option<usize>, &str> {
        let value = self.metadata.annotation(MAX_HOSTED);
        value.map(|text| text.parse().map_err(|_| text)).transpose()
    }
}

impl AsRef<Seed> for Seed {
    fn as_ref(&self) -> &Seed {
        self
    }
}

/// `Seed.spec`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SeedSpec {
    /// The strategy of this seed's clusters that do not choose one.
    pub expose_strategy: Setting<ExposeStrategy>,
    /// Replaces the seed's name in host names.
    #[serde(rename = "seedDNSOverwrite", deserialize_with = "or_default")]
    pub seed_dns_overwrite: Box<str>,
    /// The old spelling of the same field, which the REST API still uses.
    #[serde(rename = "seed_dns_overwrite", deserialize_with = "or_default")]
    pub seed_dns_overwrite_old: Box<str>,
    /// The seed-wide proxy.
    #[serde(deserialize_with = "or_default")]
    pub nodeport_proxy: NodeportProxy,
    /// Locations of worker nodes, by name; names are unique over all seeds.
    #[serde(deserialize_with = "or_default")]
    pub datacenters: BTreeMap<Box<str>, Option<Datacenter>>,
    /// Networks that are added to the allow list of each cluster that sets one, even an empty one.
    #[serde(rename = "defaultAPIServerAllowedIPRanges", deserialize_with = "or_default")]
    pub default_api_server_allowed_ip_ranges: Vec<Setting<Network>>,
    /// Monitoring, logging and alerting.
    #[serde(deserialize_with = "or_default")]
    pub mla: SeedMla,
}

/// `spec.mla`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SeedMla {
    /// Whether user clusters may have an MLA gateway at all.
    #[serde(rename = "userClusterMLAEnabled", deserialize_with = "or_default")]
    pub user_cluster_mla_enabled: bool,
}

/// One datacenter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Datacenter {
    /// What is wanted.
    #[serde(deserialize_with = "or_default")]
    pub spec: DatacenterSpec,
}

/// `datacenters.<name>.spec`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DatacenterSpec {
    /// Overrides the type, and only the type, of the Service `apiserver-external`.
    pub api_server_service_type: Setting<ServiceType>,
    /// Its cloud, by the key of the provider; KKP allows one. `null` counts as absent.
    pub clouds: BTreeMap<&'static str, CloudFields>,
}

/// The fields of a cloud that are text or a number, such as the address of its API and its region.
pub type CloudFields = BTreeMap<Box<str>, Box<str>>;

/// The keys of cloud providers.
pub const CLOUD_PROVIDERS: [&str; 16] = [
    "alibaba",
    "anexia",
    "aws",
    "azure",
    "baremetal",
    "bringyourown",
    "digitalocean",
    "edge",
    "fake",
    "gcp",
    "hetzner",
    "kubevirt",
    "nutanix",
    "openstack",
    "vmwareclouddirector",
    "vsphere",
];

impl DatacenterSpec {
    /// Whether its cloud is `provider`.
    pub fn is_on(&self, provider: &str) -> bool {
        self.clouds.contains_key(provider)
    }
}

impl<'de> Deserialize<'de> for DatacenterSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = BTreeMap::<Box<str>, Value>::deserialize(deserializer)?;
        let service_type = fields.remove("apiServerServiceType").map(Setting::deserialize).transpose();
        let mut clouds = BTreeMap::new();
        for key in CLOUD_PROVIDERS {
            if let Some(cloud) = fields.remove(key).filter(|cloud| !cloud.is_null()) {
                clouds.insert(key, cloud_fields(&cloud));
            }
        }
        let api_server_service_type = service_type.map_err(serde::de::Error::custom)?.unwrap_or_default();
        Ok(Self { api_server_service_type, clouds })
    }
}

fn cloud_fields(cloud: &Value) -> CloudFields {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.as_str().into()),
        Value::Number(number) => Some(number.to_string().into()),
        _ => None,
    };
    let fields = cloud.as_object().into_iter().flatten();
    fields.filter_map(|(key, value)| Some((key.as_str().into(), text(value)?))).collect()
}

/// Whether a field is present, with any content; `null` counts as absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Present(pub bool);

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Option::<IgnoredAny>::deserialize(deserializer)?.is_some()))
    }
}

/// `spec.nodeportProxy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeportProxy {
    /// No seed-wide proxy: clusters are reached at the nodes of the seed.
    #[serde(deserialize_with = "or_default")]
    pub disable: bool,
    /// Deprecated: replaces the annotations of load balancer Services.
    #[serde(deserialize_with = "or_default")]
    pub annotations: Strings,
    /// `ipFamilyPolicy` of the load balancer Service; empty leaves it to the API server.
    #[serde(deserialize_with = "or_default")]
    pub ip_family_policy: Box<str>,
    /// `ipFamilies` of the load balancer Service; empty leaves them to the API server.
    #[serde(deserialize_with = "or_default")]
    pub ip_families: Vec<Box<str>>,
    /// Settings of the proxy itself.
    #[serde(deserialize_with = "or_default")]
    pub envoy: ProxySettings,
}

/// `spec.nodeportProxy.envoy`. The name is KKP's; the settings hold for any proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProxySettings {
    /// Pods of the proxy.
    pub replicas: Setting<i32>,
    /// What the container of the proxy asks for and is limited to.
    #[serde(deserialize_with = "or_default")]
    pub resources: Resources,
    /// Timeouts and keep-alive.
    #[serde(deserialize_with = "or_default")]
    pub connection_settings: ConnectionSettings,
    /// The load balancer in front of it.
    #[serde(deserialize_with = "or_default")]
    pub load_balancer_service: LoadBalancerService,
}

/// Resources of a container: quantities by the name of the resource, as written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// What the scheduler sets aside.
    #[serde(deserialize_with = "or_default")]
    pub requests: BTreeMap<Box<str>, Value>,
    /// What it may use.
    #[serde(deserialize_with = "or_default")]
    pub limits: BTreeMap<Box<str>, Value>,
}

/// `spec.nodeportProxy.envoy.loadBalancerService`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerService {
    /// Merged over the deprecated ones. `None` means KKP's defaults.
    pub annotations: Option<Strings>,
    /// Client networks that every load balancer of the seed admits.
    #[serde(deserialize_with = "or_default")]
    pub source_ranges: Vec<Setting<Network>>,
}

/// `spec.nodeportProxy.envoy.connectionSettings`, as written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectionSettings {
    /// Idle timeout of a connection of the SNI listener.
    pub sni_listener_idle_timeout: Setting<GoDuration>,
    /// Idle timeout of a tunnel connection.
    pub tunneling_connection_idle_timeout: Setting<GoDuration>,
    /// Idle timeout of one stream of a tunnel connection.
    pub tunneling_stream_idle_timeout: Setting<GoDuration>,
    /// Idle time before the first keep-alive probe, client side.
    #[serde(rename = "downstreamTCPKeepaliveTime")]
    pub downstream_tcp_keepalive_time: Setting<GoDuration>,
    /// Time between probes, client side.
    #[serde(rename = "downstreamTCPKeepaliveInterval")]
    pub downstream_tcp_keepalive_interval: Setting<GoDuration>,
    /// Probes without an answer before the connection ends, client side.
    #[serde(rename = "downstreamTCPKeepaliveProbes")]
    pub downstream_tcp_keepalive_probes: Setting<i32>,
    /// Idle time before the first keep-alive probe, API server side.
    #[serde(rename = "upstreamTCPKeepaliveTime")]
    pub upstream_tcp_keepalive_time: Setting<GoDuration>,
    /// Time between probes, API server side.
    #[serde(rename = "upstreamTCPKeepaliveInterval")]
    pub upstream_tcp_keepalive_interval: Setting<GoDuration>,
    /// Probes without an answer before the connection ends, API server side.
    #[serde(rename = "upstreamTCPKeepaliveProbes")]
    pub upstream_tcp_keepalive_probes: Setting<i32>,
}

/// The shortest valid duration of a connection setting. A shorter one is most likely a missing unit, and
/// would cut live watches.
pub const SHORTEST_CONNECTION_SETTING: Duration = Duration::from_secs(1);

/// Connection settings that are in effect; `None` for a setting that is absent or not valid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// Idle timeout of a connection of the SNI listener.
    pub sni_idle: Option<Duration>,
    /// Idle timeout of a tunnel connection.
    pub tunnel_connection_idle: Option<Duration>,
    /// Idle timeout of one tunnel stream.
    pub tunnel_stream_idle: Option<Duration>,
    /// Keep-alive on client connections; `None` if none of its three values is set.
    pub downstream_keepalive: Option<Keepalive>,
    /// Keep-alive on connections to API servers; `None` if none of its three values is set.
    pub upstream_keepalive: Option<Keepalive>,
}

/// TCP keep-alive in whole seconds. `None` means the kernel's default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe.
    pub time: Option<Duration>,
    /// Time between probes.
    pub interval: Option<Duration>,
    /// Probes without an answer before the connection ends.
    pub probes: Option<u32>,
}

impl ConnectionSettings {
    /// The settings that are valid.
    pub fn effective(&self) -> Timeouts {
        Timeouts {
            sni_idle: valid(&self.sni_listener_idle_timeout),
            tunnel_connection_idle: valid(&self.tunneling_connection_idle_timeout),
            tunnel_stream_idle: valid(&self.tunneling_stream_idle_timeout),
            downstream_keepalive: Keepalive::of(
                &self.downstream_tcp_keepalive_time,
                &self.downstream_tcp_keepalive_interval,
                &self.downstream_tcp_keepalive_probes,
            ),
            upstream_keepalive: Keepalive::of(
                &self.upstream_tcp_keepalive_time,
                &self.upstream_tcp_keepalive_interval,
                &self.upstream_tcp_keepalive_probes,
            ),
        }
    }
}

impl Keepalive {
    fn of(time: &Setting<GoDuration>, interval: &Setting<GoDuration>, probes: &Setting<i32>) -> Option<Self> {
        let whole = |setting| valid(setting).map(|duration| Duration::from_secs(duration.as_secs()));
        let probes = probes.get().and_then(|&probes| u32::try_from(probes).ok()).filter(|&probes| probes > 0);
        let keepalive = Self { time: whole(time), interval: whole(interval), probes };
        (keepalive != Self::default()).then_some(keepalive)
    }
}

fn valid(setting: &Setting<GoDuration>) -> Option<Duration> {
    setting.get()?.get().filter(|&duration| duration >= SHORTEST_CONNECTION_SETTING)
}
