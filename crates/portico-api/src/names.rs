//! Identities that must never be mixed up: the user cluster, the tenant, the host name, the tunnel authority.
//! Each is normalised once, at construction, so that both sides of every comparison are in the same form.
//!
//! And names of Portico's own objects, which several programs must spell alike.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use thiserror::Error;

/// Longest host name DNS can carry in text form (RFC 1035 section 2.3.4, without the trailing dot).
pub const MAX_HOST_NAME: usize = 253;

/// Longest name of an object of Kubernetes.
pub const MAX_OBJECT_NAME: usize = 253;

/// Whether Kubernetes accepts a text as the name of an object: a subdomain of RFC 1123. Such a name may stand
/// in a path.
pub fn is_object_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len() <= MAX_OBJECT_NAME && text.split('.').all(is_label)
}

/// The gateway of a seed: its Deployment and what belongs to that (deploy/gateway.yaml).
pub const GATEWAY: &str = "portico-gateway";

/// Selects the pods of gateways.
pub const GATEWAY_PODS: &str = "app.kubernetes.io/name=portico-gateway";

/// The condition on a node that `portico preflight --mesh` writes.
pub const MESH_CONDITION: &str = "PorticoMesh";

/// Namespace of a user cluster's control plane on the seed: this prefix and the Cluster's name.
pub const CLUSTER_NAMESPACE_PREFIX: &str = "cluster-";

/// Name of a user cluster: the name of its `Cluster` object, which is its namespace without the prefix
/// `cluster-`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterName(Arc<str>);

impl ClusterName {
    /// The user cluster named `name`.
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// The user cluster whose control plane is in `namespace`; `None` if the namespace is of no cluster.
    pub fn of_namespace(namespace: &str) -> Option<Self> {
        let name = namespace.strip_prefix(CLUSTER_NAMESPACE_PREFIX)?;
        (!name.is_empty()).then(|| Self::new(name))
    }

    /// The namespace of this cluster's control plane on the seed.
    pub fn namespace(&self) -> String {
        format!("{CLUSTER_NAMESPACE_PREFIX}{}", self.0)
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The party that a Service belongs to. Budget, allow list, tunnel identity, metrics and listings are by
/// tenant, and none of them is shared between two.
///
/// As text a user cluster is its name alone, and a namespace that is of no cluster is `namespace:NAME`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant {
    text: Arc<str>,
    /// Part of the identity: a Cluster whose name is not valid must not pass for a namespace.
    is_cluster: bool,
}

/// What the text of a namespace begins with. No name of a Cluster holds a `:`.
const NAMESPACE_TENANT: &str = "namespace:";

impl Tenant {
    /// The tenant whose Services are in `namespace`.
    pub fn of_namespace(namespace: &str) -> Self {
        ClusterName::of_namespace(namespace).map_or_else(
            || Self { text: format!("{NAMESPACE_TENANT}{namespace}").into(), is_cluster: false },
            Self::from,
        )
    }

    /// The tenant that reads as `text`. Any text names one, whether or not it exists.
    pub fn of_text(text: &str) -> Self {
        Self { text: text.into(), is_cluster: !text.starts_with(NAMESPACE_TENANT) }
    }

    /// The tenant that reads as `text`, which comes from outside. `None` if no cluster and no namespace can
    /// have such a name: names are DNS labels.
    pub fn parse(text: &str) -> Option<Self> {
        let name = text.strip_prefix(NAMESPACE_TENANT).unwrap_or(text);
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let is_label = (1..=63).contains(&name.len())
            && name.bytes().all(inner)
            && !name.starts_with('-')
            && !name.ends_with('-');
        is_label.then(|| Self::of_text(text))
    }

    /// The namespace that its Services are in.
    pub fn namespace(&self) -> String {
        if self.is_cluster {
            return format!("{CLUSTER_NAMESPACE_PREFIX}{}", self.text);
        }
        self.text.strip_prefix(NAMESPACE_TENANT).unwrap_or_default().to_owned()
    }

    /// Whether it is a user cluster.
    pub fn is_cluster(&self) -> bool {
        self.is_cluster
    }

    /// The tenant as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl From<ClusterName> for Tenant {
    fn from(name: ClusterName) -> Self {
        Self { text: name.0, is_cluster: true }
    }
}

/// A DNS host name in lower case, without a trailing dot. The key of an SNI route.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(Arc<str>);

/// Why a text is no host name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HostNameError {
    /// Empty, not counting a trailing dot.
    #[error("it is empty")]
    Empty,
    /// Longer than [`MAX_HOST_NAME`].
    #[error("it is longer than {MAX_HOST_NAME} characters")]
    TooLong,
    /// A label that is empty or longer than 63 characters.
    #[error("the label {0:?} must have 1 to 63 characters")]
    Label(Box<str>),
    /// A character that is not a letter, a digit, `-` or `_`, or a `-` at the edge of a label.
    #[error("the label {0:?} may only hold letters, digits, '-' and '_', and must not begin or end with '-'")]
    Character(Box<str>),
}

impl HostName {
    /// Normalises `text` (lower case, without one trailing dot) and checks it as a DNS name. `_` is accepted,
    /// because it is common in internal names and harmless in a comparison.
    ///
    /// # Errors
    /// Why the text is no host name.
    pub fn parse(text: &str) -> Result<Self, HostNameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(HostNameError::Empty);
        }
        if text.len() > MAX_HOST_NAME {
            return Err(HostNameError::TooLong);
        }
        for label in text.split('.') {
            if label.is_empty() || label.len() > 63 {
                return Err(HostNameError::Label(label.into()));
            }
            let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
            if !label.bytes().all(legal) || label.starts_with('-') || label.ends_with('-') {
                return Err(HostNameError::Character(label.into()));
            }
        }
        Ok(Self(text.to_ascii_lowercase().into()))
    }

    /// [`Self::parse`], or a wildcard: `*.` and a name, which stands for every name below that one.
    ///
    /// # Errors
    /// Why the text is neither.
    pub fn parse_pattern(text: &str) -> Result<Self, HostNameError> {
        match text.strip_prefix("*.") {
            Some(parent) => Ok(Self(format!("*.{}", Self::parse(parent)?).into())),
            None => Self::parse(text),
        }
    }

    /// The name below which a wildcard stands for every name; `None` if it is no wildcard.
    pub fn parent_of_wildcard(&self) -> Option<Self> {
        Some(Self(self.0.strip_prefix("*.")?.into()))
    }

    /// The names above this one, the longest first: those of its wildcards.
    pub fn parents(&self) -> impl Iterator<Item = &str> {
        self.0.match_indices('.').map(|(dot, _)| &self.0[dot + 1..])
    }

    /// Whether this is `above` or lies below it. A wildcard does if every name does that it stands for.
    pub fn is_within(&self, above: &Self) -> bool {
        let name = self.0.strip_prefix("*.").unwrap_or(&self.0);
        name.strip_suffix(&*above.0).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }

    /// The name as text, lower case, without a trailing dot.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A tunnel authority: `host:port` with the host normalised as a [`HostName`]. The key of a CONNECT route.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Authority(Arc<str>);

/// Why a text is no authority.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AuthorityError {
    /// No `:` before a port.
    #[error("a port is missing, as in name:443")]
    NoPort,
    /// The port is not a number from 1 to 65535.
    #[error("the port must be a number from 1 to 65535")]
    Port,
    /// The host part is no host name.
    #[error("the host is not valid: {0}")]
    Host(#[from] HostNameError),
}

impl Authority {
    /// Normalises `text`, the authority of a CONNECT request.
    ///
    /// # Errors
    /// Why the text is no authority.
    pub fn parse(text: &str) -> Result<Self, AuthorityError> {
        let (host, port) = text.rsplit_once(':').ok_or(AuthorityError::NoPort)?;
        if !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(AuthorityError::Port);
        }
        let port = port.parse().ok().filter(|&port: &u16| port != 0).ok_or(AuthorityError::Port)?;
        Ok(Self::new(&HostName::parse(host)?, port))
    }

    /// The authority of a host and port.
    pub fn new(host: &HostName, port: u16) -> Self {
        Self(format!("{host}:{port}").into())
    }

    /// The authority as text: lower case, no trailing dot, decimal port.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! shown_as_text {
    ($($name:ident),+) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    )+};
}

shown_as_text!(ClusterName, Tenant, HostName, Authority);

impl Borrow<str> for HostName {
    /// Hash and order are those of the text.
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl From<HostName> for Arc<str> {
    fn from(name: HostName) -> Self {
        name.0
    }
}

impl From<Authority> for Arc<str> {
    fn from(authority: Authority) -> Self {
        authority.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_an_object_is_what_kubernetes_accepts() {
        for name in ["a", "node-1", "ip-10-0-0-1.eu.compute.internal", "0", &"a".repeat(253)] {
            assert!(is_object_name(name), "{name}");
        }
        for name in ["", ".", "..", "a..b", "a.", "-a", "a-", "A", "a_b", "a/b", "ä", &"a".repeat(254)] {
            assert!(!is_object_name(name), "{name}");
        }
    }

    #[test]
    fn case_and_trailing_dot_do_not_make_another_name() {
        let name = HostName::parse("P4k2.North.KKP.example.com.").unwrap();
        assert_eq!(name, HostName::parse("p4k2.north.kkp.example.com").unwrap());
        assert_eq!(name.as_str(), "p4k2.north.kkp.example.com");
    }

    #[test]
    fn a_name_is_within_itself_and_those_above_it() {
        let above = HostName::parse("A.example.com").unwrap();
        for inside in ["a.example.com", "x.a.example.com", "y.x.a.example.com", "*.a.example.com"] {
            assert!(HostName::parse_pattern(inside).unwrap().is_within(&above), "{inside}");
        }
        for outside in ["example.com", "*.example.com", "xa.example.com", "a.example.com.x", "b.example.com"]
        {
            assert!(!HostName::parse_pattern(outside).unwrap().is_within(&above), "{outside}");
        }
    }

    #[test]
    fn what_dns_cannot_carry_is_no_host_name() {
        for text in ["", ".", "a..b", "-a.b", "a-.b", "a b", "ä.de", "*.example.com", "a:443"] {
            assert!(HostName::parse(text).is_err(), "{text:?}");
        }
        assert!(HostName::parse(&format!("{}.de", "a".repeat(64))).is_err());
        assert!(HostName::parse(&["a"; 128].join(".")).is_err());
    }

    #[test]
    fn a_wildcard_is_one_label_and_a_name() {
        let wildcard = HostName::parse_pattern("*.KKP.example.com.").unwrap();
        assert_eq!(wildcard.as_str(), "*.kkp.example.com");
        assert_eq!(wildcard.parent_of_wildcard(), Some(HostName::parse("kkp.example.com").unwrap()));
        assert_eq!(HostName::parse_pattern("a.b").unwrap().parent_of_wildcard(), None);
        for text in ["*", "*.", "*.*.a", "a.*.b", "*a.b", "**.a"] {
            assert!(HostName::parse_pattern(text).is_err(), "{text:?}");
        }
        let name = HostName::parse("a.b.example.com").unwrap();
        assert_eq!(name.parents().collect::<Vec<_>>(), ["b.example.com", "example.com", "com"]);
    }

    #[test]
    fn an_authority_is_compared_by_host_name_and_port_number() {
        let authority = Authority::parse("Svc.Ns.svc.cluster.local.:0443").unwrap();
        assert_eq!(authority.as_str(), "svc.ns.svc.cluster.local:443");
        for text in ["svc", "svc:", "svc:0", "svc:65536", "svc:+1", ":443", "svc:443:443"] {
            assert!(Authority::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_cluster_is_named_by_its_namespace_less_the_prefix() {
        assert_eq!(ClusterName::of_namespace("cluster-abc"), Some(ClusterName::new("abc")));
        assert_eq!(ClusterName::new("abc").namespace(), "cluster-abc");
        for namespace in ["monitoring", "cluster-", "Cluster-abc", "my-cluster-abc"] {
            assert_eq!(ClusterName::of_namespace(namespace), None, "{namespace}");
        }
    }

    #[test]
    fn a_namespace_and_the_cluster_of_the_same_name_are_two_tenants() {
        let (cluster, namespace) = (Tenant::of_namespace("cluster-x"), Tenant::of_namespace("x"));
        assert_ne!(cluster, namespace);
        assert_eq!((cluster.as_str(), namespace.as_str()), ("x", "namespace:x"));
        assert_ne!(Tenant::from(ClusterName::new("namespace:x")), namespace);
        for tenant in [cluster, namespace] {
            assert_eq!(Tenant::of_text(tenant.as_str()), tenant);
            assert_eq!(Tenant::of_namespace(&tenant.namespace()), tenant);
        }
    }
}
