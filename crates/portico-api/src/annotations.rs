//! The annotations and labels that say what is exposed and how.
//!
//! Keys with the prefix `nodeport-proxy.k8s.io/` are those of KKP, so that an existing installation can be
//! read as it is. Keys with the prefix `portico.k8c.io/` are Portico's own.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use thiserror::Error;

use crate::meta::ObjectMeta;

/// On a Service: exposed by the seed-wide gateway, as the value says ([`ExposeTypes`]).
pub const EXPOSE: &str = "nodeport-proxy.k8s.io/expose";
/// On a Service: exposed by the proxy of its own cluster only (KKP's strategy LoadBalancer). The value is
/// `"true"`.
pub const EXPOSE_NAMESPACED: &str = "nodeport-proxy.k8s.io/expose-namespaced";
/// On a Service: a JSON object from port name to SNI host name.
pub const PORT_MAPPING: &str = "nodeport-proxy.k8s.io/port-mapping";
/// On a Service: the gateway sends a PROXY header on each upstream connection. The only value is
/// [`SEND_PROXY_V2`].
pub const SEND_PROXY: &str = "portico.k8c.io/send-proxy-protocol";
/// The value of [`SEND_PROXY`] that asks for PROXY protocol version 2.
pub const SEND_PROXY_V2: &str = "v2";
/// On a Cluster, or on a Service without one: most connections and tunnel streams open at once.
pub const MAX_CONNECTIONS: &str = "portico.k8c.io/max-connections";
/// On a Cluster, or on a Service without one: most new connections and tunnel streams per second.
pub const MAX_CONNECTIONS_PER_SECOND: &str = "portico.k8c.io/max-connections-per-second";
/// On a Cluster, or on a Service without one: its share of the gateway, in percent of the part that all
/// others leave.
pub const FAIR_SHARE: &str = "portico.k8c.io/fair-share";
/// On a Service without a Cluster: client networks that may connect, as CIDRs separated by commas.
pub const ALLOW: &str = "portico.k8c.io/allow";
/// On a Cluster, or on a Service: CA certificates of its API server in PEM. That API server reviews the
/// tokens of tunnel clients.
pub const API_SERVER_CA: &str = "portico.k8c.io/api-server-ca";
/// On a Cluster whose API server runs elsewhere: its addresses, `IP:PORT` separated by commas.
pub const ENDPOINTS: &str = "portico.k8c.io/endpoints";
/// On a Cluster with [`ENDPOINTS`]: the addresses of its Konnectivity server, in the same form.
pub const KONNECTIVITY_ENDPOINTS: &str = "portico.k8c.io/konnectivity-endpoints";
/// On a Cluster: Portico hosts its control plane, with this [`Layout`](crate::hosting::Layout). An
/// annotation, because KKP's definition of the kind drops fields that it does not know.
pub const LAYOUT: &str = "portico.k8c.io/layout";
/// A finalizer on a Cluster: its control plane was begun here, and is not gone.
pub const CONTROL_PLANE_FINALIZER: &str = "portico.k8c.io/control-plane";
/// On a Cluster with [`LAYOUT`]: feature gates of Kubernetes, as the flag `--feature-gates` takes them.
pub const FEATURE_GATES: &str = "portico.k8c.io/feature-gates";
/// On a Cluster with [`LAYOUT`]: parts that it does not get inside, separated by commas.
pub const WITHOUT: &str = "portico.k8c.io/without";
/// On a Cluster with [`LAYOUT`]: whether it gets a Prometheus of its own, `"true"` or `"false"`.
pub const PROMETHEUS: &str = "portico.k8c.io/prometheus";
/// On a Seed: where the certificate of the tunnel listener comes from. The only value is [`PROVIDED`].
pub const TUNNEL_CERTIFICATE: &str = "portico.k8c.io/tunnel-certificate";
/// The value of [`TUNNEL_CERTIFICATE`] for a certificate that something else makes, such as cert-manager.
pub const PROVIDED: &str = "provided";
/// On a Seed: most clusters whose control planes it hosts.
pub const MAX_HOSTED: &str = "portico.k8c.io/max-hosted-clusters";
/// On a Cluster, with any value: its expose strategy may be changed.
pub const MIGRATION_LABEL: &str = "unsafe-expose-strategy-migration";

/// The value of [`MIGRATION_LABEL`] as `portico migrate` sets it: for one migration, after which it goes.
pub const MIGRATION_LABEL_OURS: &str = "portico";
/// On a Service: source ranges for clouds that do not read `spec.loadBalancerSourceRanges`.
pub const LOAD_BALANCER_SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

/// Whether a key is one of KKP's or of Portico's, or has source ranges.
pub fn is_known(key: &str) -> bool {
    let prefixes = ["nodeport-proxy.k8s.io/", "portico.k8c.io/"];
    prefixes.into_iter().any(|prefix| key.starts_with(prefix)) || key == LOAD_BALANCER_SOURCE_RANGES
}

/// The annotations by which a Service asks to be exposed. A Service is exposed by all of them together, as by
/// KKP's two proxies; a void one costs itself alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExposeKeys(Arc<[Box<str>]>);

impl ExposeKeys {
    /// The annotations of `meta` with one of these keys, each with its value.
    pub fn all<'a>(&'a self, meta: &'a ObjectMeta) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.iter().filter_map(|key| Some((&**key, meta.annotation(key)?)))
    }

    /// The first; [`EXPOSE`] if there is none.
    pub fn first(&self) -> &str {
        self.0.first().map_or(EXPOSE, |key| key)
    }
}

impl Default for ExposeKeys {
    /// [`EXPOSE`] alone.
    fn default() -> Self {
        Self::from_iter([EXPOSE])
    }
}

impl<T: Into<Box<str>>> FromIterator<T> for ExposeKeys {
    /// A key that is there twice counts once, or each of its mistakes would be reported twice.
    fn from_iter<I: IntoIterator<Item = T>>(keys: I) -> Self {
        let mut once: Vec<Box<str>> = Vec::new();
        for key in keys.into_iter().map(Into::into) {
            if !once.contains(&key) {
                once.push(key);
            }
        }
        Self(once.into())
    }
}

/// The ways a Service asks to be exposed: the value of [`EXPOSE`]. At least one is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExposeTypes {
    /// A TCP listener on the NodePort number of each port.
    pub node_port: bool,
    /// By the server name of the ClientHello.
    pub sni: bool,
    /// By the authority of a CONNECT request.
    pub tunneling: bool,
}

/// Why a value of the expose annotation is void: it exposes the Service in no way.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VoidAnnotation {
    /// Empty, or an empty item between two commas.
    #[error("an item of {value:?} is empty")]
    Empty {
        /// The value as written.
        value: Box<str>,
    },
    /// The alias stands for the whole value, not for an item of a list.
    #[error("\"true\" must stand alone, not in the list {value:?}")]
    AliasInList {
        /// The value as written.
        value: Box<str>,
    },
    /// Not one of the three, in exactly that spelling.
    #[error("{item:?} is none of NodePort, SNI, Tunneling (upper and lower case matter)")]
    Unknown {
        /// The item that is not known.
        item: Box<str>,
    },
}

impl ExposeTypes {
    /// By NodePort only; what the alias `true` means.
    pub const NODE_PORT: Self = Self { node_port: true, sni: false, tunneling: false };

    /// Reads the annotation's value: `true`, or a comma list of `NodePort`, `SNI` and `Tunneling` with spaces
    /// around items ignored.
    ///
    /// # Errors
    /// One bad item voids the whole value, as in KKP, so that no Service is half exposed.
    pub fn parse(value: &str) -> Result<Self, VoidAnnotation> {
        if value == "true" {
            return Ok(Self::NODE_PORT);
        }
        let mut types = Self { node_port: false, sni: false, tunneling: false };
        for item in value.split(',').map(str::trim) {
            match item {
                "NodePort" => types.node_port = true,
                "SNI" => types.sni = true,
                "Tunneling" => types.tunneling = true,
                "" => return Err(VoidAnnotation::Empty { value: value.into() }),
                "true" if value.contains(',') => {
                    return Err(VoidAnnotation::AliasInList { value: value.into() });
                }
                _ => return Err(VoidAnnotation::Unknown { item: item.into() }),
            }
        }
        Ok(types)
    }

    /// In all ways of either.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            node_port: self.node_port || other.node_port,
            sni: self.sni || other.sni,
            tunneling: self.tunneling || other.tunneling,
        }
    }
}

impl fmt::Display for ExposeTypes {
    /// The annotation's value in one agreed order: `NodePort,SNI,Tunneling`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (set, name) in [(self.node_port, "NodePort"), (self.sni, "SNI"), (self.tunneling, "Tunneling")] {
            if set {
                write!(f, "{separator}{name}")?;
                separator = ",";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_the_union_of_its_items_whatever_the_order_and_spaces() {
        let types = ExposeTypes::parse(" Tunneling , SNI").unwrap();
        assert_eq!(types, ExposeTypes { node_port: false, sni: true, tunneling: true });
        assert_eq!(types.to_string(), "SNI,Tunneling");
        assert_eq!(types.and(ExposeTypes::NODE_PORT).to_string(), "NodePort,SNI,Tunneling");
    }

    #[test]
    fn each_annotation_that_a_service_has_counts_once() {
        let annotations = [("b", "2"), ("a", "1"), ("x", "0")].map(|(key, value)| (key.into(), value.into()));
        let meta = ObjectMeta { annotations: annotations.into(), ..ObjectMeta::default() };
        let all = |keys: &[&str]| {
            let keys: ExposeKeys = keys.iter().copied().collect();
            keys.all(&meta).map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(all(&["a", "b", "a", "c"]), ["a=1", "b=2"]);
        assert_eq!(all(&["c"]), [""; 0]);
    }

    #[test]
    fn true_alone_is_an_old_name_of_node_port() {
        assert_eq!(ExposeTypes::parse("true"), Ok(ExposeTypes::NODE_PORT));
    }

    #[test]
    fn one_bad_item_voids_the_whole_value() {
        for value in
            ["", " ", "SNI,", ",SNI", "true,SNI", " true", "nodeport", "SNI,Tunnelling", "SNI;Tunneling"]
        {
            assert!(ExposeTypes::parse(value).is_err(), "{value:?}");
        }
    }
}
