//! The clients that a user cluster allows, and its share of a gateway.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::api_server_ca::ApiServerCa;
use crate::names::{HostName, Tenant};
use crate::network::Network;

/// Client addresses that may reach a cluster. An empty list admits every client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct AllowList(Box<[IpNet]>);

impl AllowList {
    /// The union of `networks`: sorted, without repetition and without networks inside others.
    pub fn new(networks: impl IntoIterator<Item = IpNet>) -> Self {
        let plain = networks.into_iter().map(|network| IpNet::from(Network::from(network)));
        let networks: Vec<IpNet> = plain.map(|network| network.trunc()).collect();
        Self(IpNet::aggregate(&networks).into())
    }

    /// A list that admits no client, for a cluster whose real list cannot be known. It holds the one address
    /// that no client has.
    pub fn nobody() -> Self {
        Self([IpNet::from(IpAddr::from([0, 0, 0, 0]))].into())
    }

    /// Whether `client` may connect. An IPv4 address mapped into IPv6 counts as IPv4. No client has the
    /// unspecified address, whatever a PROXY header says.
    pub fn admits(&self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        let is_listed = || self.around(client).is_some_and(|network| network.contains(&client));
        self.0.is_empty() || (!client.is_unspecified() && is_listed())
    }

    /// The one network that may hold a range that begins at `address`. Networks are sorted, and none overlaps
    /// another. A list may have a hundred thousand, and is asked for each connection.
    fn around(&self, address: IpAddr) -> Option<&IpNet> {
        let after = self.0.partition_point(|network| network.network() <= address);
        self.0.get(after.checked_sub(1)?)
    }

    /// What both lists admit.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        match (&*self.0, &*other.0) {
            ([], _) => other.clone(),
            (_, []) => self.clone(),
            (ours, theirs) => {
                let is_in = |inner: &IpNet, list: &Self| {
                    list.around(inner.network()).is_some_and(|outer| outer.contains(inner))
                };
                let ours = ours.iter().filter(|network| is_in(network, other));
                let theirs = theirs.iter().filter(|network| is_in(network, self));
                let both = Self::new(ours.chain(theirs).copied());
                if both.0.is_empty() { Self::nobody() } else { both }
            }
        }
    }

    /// The networks, sorted.
    pub fn networks(&self) -> &[IpNet] {
        &self.0
    }
}

/// A part of something, in percent: from 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Percent(u8);

impl Percent {
    /// One half.
    pub const HALF: Self = Self(50);

    /// The number, from 1 to 100.
    pub fn get(self) -> u8 {
        self.0
    }

    /// This part of `whole`.
    pub fn of(self, whole: usize) -> usize {
        let part = whole as u128 * u128::from(self.0) / 100;
        usize::try_from(part).unwrap_or(whole)
    }
}

/// What is no part in percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not a whole number from 1 to 100")]
pub struct NoPercent;

impl TryFrom<u8> for Percent {
    type Error = NoPercent;

    fn try_from(number: u8) -> Result<Self, NoPercent> {
        if (1..=100).contains(&number) { Ok(Self(number)) } else { Err(NoPercent) }
    }
}

impl FromStr for Percent {
    type Err = NoPercent;

    fn from_str(text: &str) -> Result<Self, NoPercent> {
        text.trim().parse::<u8>().map_err(|_| NoPercent)?.try_into()
    }
}

impl From<Percent> for u8 {
    fn from(percent: Percent) -> Self {
        percent.0
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Limits of one user cluster on one gateway. `None` means the gateway's own default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Budget {
    /// Connections and tunnel streams open at once.
    pub max_connections: Option<u32>,
    /// New connections and tunnel streams per second; short bursts of the same number are admitted.
    pub max_connections_per_second: Option<u32>,
    /// What it may take of the memory and the descriptors that all others leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fair_share: Option<Percent>,
}

impl Budget {
    /// This budget, with the limits of `default` where it has none.
    pub fn or(self, default: Self) -> Self {
        Self {
            max_connections: self.max_connections.or(default.max_connections),
            max_connections_per_second: self
                .max_connections_per_second
                .or(default.max_connections_per_second),
            fair_share: self.fair_share.or(default.fair_share),
        }
    }
}

/// The policy that the gateway enforces for a tenant on each of its routes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterPolicy {
    /// Whose policy this is.
    #[serde(rename = "cluster")]
    pub tenant: Tenant,
    /// Clients that may connect, on every strategy and path.
    pub allow: AllowList,
    /// Clients that the load balancer in front admits. Counts only where the client's own address is known: a
    /// load balancer that masks it has judged it before.
    pub source_ranges: AllowList,
    /// Its limits.
    pub budget: Budget,
    /// Whether NodePort listeners may be opened (`false` where the seed's nodeport-proxy is disabled).
    pub node_port_listeners: bool,
    /// What else is known of its Cluster. In one place: of thousands of policies most have nothing.
    #[serde(skip)]
    pub cluster: Option<Arc<ClusterFacts>>,
}

/// What a policy knows of its Cluster, beside what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterFacts {
    /// The host name that follows from it; `None` without a domain.
    pub host: Option<HostName>,
    /// The CA of its API server; without one, tokens cannot be reviewed.
    pub api_server_ca: Option<ApiServerCa>,
}

impl ClusterFacts {
    /// `None` if nothing is known.
    pub fn of(host: Option<HostName>, api_server_ca: Option<ApiServerCa>) -> Option<Arc<Self>> {
        (host.is_some() || api_server_ca.is_some()).then(|| Arc::new(Self { host, api_server_ca }))
    }
}

impl ClusterPolicy {
    /// The policy of a tenant without settings: every client may connect, the gateway's own limits apply.
    pub fn open(tenant: impl Into<Tenant>) -> Self {
        Self {
            tenant: tenant.into(),
            allow: AllowList::default(),
            source_ranges: AllowList::default(),
            budget: Budget::default(),
            node_port_listeners: true,
            cluster: None,
        }
    }

    /// The policy of a tenant of which nothing is known, though it should be: no client may connect.
    pub fn nobody(tenant: impl Into<Tenant>) -> Self {
        Self { allow: AllowList::nobody(), ..Self::open(tenant) }
    }

    /// The host name that follows from its Cluster, as does every name and wildcard below.
    pub fn host(&self) -> Option<&HostName> {
        self.cluster.as_ref()?.host.as_ref()
    }

    /// The CA of its Cluster's API server.
    pub fn api_server_ca(&self) -> Option<&ApiServerCa> {
        self.cluster.as_ref()?.api_server_ca.as_ref()
    }

    /// Whether `client` may connect. `is_real` is whether that is the client's own address for certain.
    pub fn admits(&self, client: IpAddr, is_real: bool) -> bool {
        self.allow.admits(client) && (!is_real || self.source_ranges.admits(client))
    }

    /// [`Self::open`] for the tenant whose Services are in `namespace`.
    pub fn open_for_namespace(namespace: &str) -> Arc<Self> {
        Arc::new(Self::open(Tenant::of_namespace(namespace)))
    }
}

impl fmt::Display for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("any");
        }
        for (index, network) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            write!(f, "{separator}{network}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(networks: &[&str]) -> AllowList {
        AllowList::new(networks.iter().map(|network| network.parse().unwrap()))
    }

    #[test]
    fn an_empty_list_admits_every_client() {
        assert!(AllowList::default().admits("203.0.113.9".parse().unwrap()));
    }

    #[test]
    fn no_client_is_not_every_client() {
        assert!(!AllowList::nobody().admits("203.0.113.9".parse().unwrap()));
        assert!(!AllowList::nobody().networks().is_empty());
        for unspecified in ["0.0.0.0", "::", "::ffff:0.0.0.0"] {
            let client = unspecified.parse().unwrap();
            assert!(!AllowList::nobody().admits(client) && !list(&["0.0.0.0/0", "::/0"]).admits(client));
        }
    }

    #[test]
    fn only_listed_networks_are_admitted() {
        let list = list(&["198.51.100.0/24", "2001:db8::/32"]);
        assert!(list.admits("198.51.100.7".parse().unwrap()));
        assert!(list.admits("2001:db8::7".parse().unwrap()));
        assert!(!list.admits("198.51.101.7".parse().unwrap()));
    }

    #[test]
    fn two_lists_admit_together_what_each_of_them_admits() {
        let everybody = AllowList::default();
        let (wide, narrow) =
            (list(&["10.0.0.0/8", "192.0.2.0/24"]), list(&["10.1.0.0/16", "198.51.100.0/24"]));
        assert_eq!(wide.intersection(&narrow).to_string(), "10.1.0.0/16");
        assert_eq!(narrow.intersection(&wide), wide.intersection(&narrow));
        assert_eq!(
            (everybody.intersection(&narrow), narrow.intersection(&everybody)),
            (narrow.clone(), narrow)
        );
        assert_eq!(wide.intersection(&list(&["203.0.113.0/24"])), AllowList::nobody());
    }

    #[test]
    fn an_ipv4_client_of_a_dual_stack_listener_is_judged_as_ipv4() {
        assert!(list(&["198.51.100.0/24"]).admits("::ffff:198.51.100.7".parse().unwrap()));
        assert!(list(&["::ffff:198.51.100.0/120"]).admits("198.51.100.7".parse().unwrap()));
        assert!(!list(&["::ffff:198.51.100.0/120", "::/0"]).admits("192.0.2.7".parse().unwrap()));
    }

    #[test]
    fn of_many_networks_each_admits_its_own_clients() {
        let even = AllowList::new(
            (0..=255)
                .step_by(2)
                .map(|third| IpNet::new([10, 0, third, 0].into(), 24).expect("24 is a prefix length")),
        );
        assert_eq!(even.networks().len(), 128);
        for third in 0..=255 {
            for last in [0, 7, 255] {
                assert_eq!(even.admits([10, 0, third, last].into()), third % 2 == 0, "{third}.{last}");
            }
        }
        assert!(!even.admits([9, 255, 255, 255].into()) && !even.admits("2001:db8::1".parse().unwrap()));
        let half = list(&["10.0.0.0/17", "2001:db8::/32"]);
        assert_eq!(even.intersection(&half).networks(), &even.networks()[..64]);
    }

    #[test]
    fn order_and_repetition_make_no_difference() {
        let list = list(&["10.1.0.0/16", "10.0.0.0/8", "10.0.0.5/8", "192.0.2.1/32"]);
        assert_eq!(list.to_string(), "10.0.0.0/8,192.0.2.1/32");
    }
}
