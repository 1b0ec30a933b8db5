//! Where a control plane is reached: `status.address` (facts 2.6) and the names on its certificate (facts 2.8).

use std::net::IpAddr;

use portico_api::cluster::{Address, Cluster};
use portico_api::names::HostName;
use portico_api::strategy::ExposeStrategy;
use serde::Serialize;

use crate::services::APISERVER;

/// What only the world can tell. Whatever is empty is not known yet, and what depends on it stays open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// `status.loadBalancer.ingress` of `front-loadbalancer`.
    pub front: Vec<Ingress>,
    /// `spec.loadBalancerIP` of `front-loadbalancer`.
    pub front_ip: Option<IpAddr>,
    /// `status.loadBalancer.ingress` of `apiserver-external`, where a datacenter makes it a load balancer.
    pub apiserver: Vec<Ingress>,
    /// What DNS says about the external name.
    pub resolved: Vec<IpAddr>,
    /// External addresses of the seed's nodes.
    pub node_ips: Vec<IpAddr>,
}

/// One address of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ingress {
    /// Its address.
    pub ip: Option<IpAddr>,
    /// Its host name; empty if it has none.
    pub hostname: Box<str>,
}

/// Who answers at a cluster's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum AnsweredBy {
    /// The seed's one gateway.
    Gateway,
    /// Any node of the seed, because its nodeport-proxy is disabled. DNS must point at the nodes.
    SeedNodes,
    /// The cluster's own load balancer.
    LoadBalancer,
}

/// What the address of a cluster follows from.
#[derive(Debug)]
pub(crate) struct Reach<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) namespace: &'a str,
    pub(crate) strategy: ExposeStrategy,
    pub(crate) answered_by: AnsweredBy,
    /// NodePort of `apiserver-external`.
    pub(crate) node_port: Option<u16>,
    /// `apiserver-external` is a load balancer by itself.
    pub(crate) api_is_balancer: bool,
    /// Where the gateway routes by server name.
    pub(crate) sni_port: u16,
    /// `<cluster>.<seed>.<domain>`.
    pub(crate) host: Option<&'a HostName>,
    pub(crate) known: &'a Known,
}

impl Reach<'_> {
    /// `status.address`.
    pub(crate) fn address(&self) -> Address {
        let known = self.known;
        let current = self.cluster.status.address.ip;
        let (external_name, ip) = match self.answered_by {
            AnsweredBy::LoadBalancer => {
                let ip = balancer_address(known);
                let hostname = known.front.iter().rev().find(|ingress| !ingress.hostname.is_empty());
                let name = ip.map(|ip| ip.to_string()).or(hostname.map(|found| found.hostname.to_string()));
                (name, ip.or_else(|| steady(&known.resolved, current)))
            }
            AnsweredBy::Gateway => (self.host.map(ToString::to_string), steady(&known.resolved, current)),
            AnsweredBy::SeedNodes => (self.host.map(ToString::to_string), steady(&known.node_ips, current)),
        };
        // Without a domain there is no name; the address is then all there is to give to users.
        let external_name = external_name.or(ip.map(|ip| ip.to_string())).unwrap_or_default();
        let port = match self.strategy {
            ExposeStrategy::Tunneling => Some(self.sni_port),
            ExposeStrategy::NodePort | ExposeStrategy::LoadBalancer => self.node_port,
        };
        let url = match port {
            Some(port) if !external_name.is_empty() => {
                format!("https://{}:{port}", bracketed(&external_name))
            }
            _ => String::new(),
        };
        Address {
            url: url.into(),
            port,
            external_name: external_name.into(),
            internal_url: format!("{APISERVER}.{}.svc.cluster.local.", self.namespace).into(),
            ip,
            api_server_external_address: self.balancer_of_its_own().into(),
        }
    }

    fn balancer_of_its_own(&self) -> String {
        if !self.api_is_balancer {
            return String::new();
        }
        let ingress = &self.known.apiserver;
        let hostname = ingress.iter().map(|ingress| &*ingress.hostname).find(|name| !name.is_empty());
        let ip = ingress.iter().find_map(|ingress| ingress.ip).map(|ip| ip.to_string());
        hostname
            .map(str::to_owned)
            .or(ip)
            .map_or_else(String::new, |host| format!("https://{}", bracketed(&host)))
    }
}

/// The first public IPv4 address, else private IPv4, else public IPv6, else private IPv6.
fn balancer_address(known: &Known) -> Option<IpAddr> {
    let rank = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => u8::from(v4.is_private()),
        IpAddr::V6(v6) => 2 + u8::from(v6.is_unique_local()),
    };
    // `min_by_key` keeps the first of equals.
    let ingress = known.front.iter().filter_map(|ingress| ingress.ip).min_by_key(rank);
    if known.front.is_empty() { known.front_ip } else { ingress }
}

/// The current address while it is among `found`, so that it does not flap; else the lowest IPv4, else the lowest IPv6.
fn steady(found: &[IpAddr], current: Option<IpAddr>) -> Option<IpAddr> {
    let any_v4 = found.iter().any(IpAddr::is_ipv4);
    let eligible = || found.iter().copied().filter(|ip| ip.is_ipv4() == any_v4);
    eligible().find(|&ip| Some(ip) == current).or_else(|| eligible().min())
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// Names and addresses on the API server's serving certificate, each sorted and without repetition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SubjectNames {
    /// DNS names.
    pub dns: Vec<String>,
    /// Addresses.
    pub ips: Vec<IpAddr>,
}

impl SubjectNames {
    /// The names a client of this cluster may use. `agent_ip` is `Some` for Tunneling, where it takes the place of the
    /// external address.
    pub(crate) fn of(
        reach: &Reach<'_>,
        address: &Address,
        in_cluster: Option<IpAddr>,
        agent_ip: Option<IpAddr>,
    ) -> Self {
        let written = &*reach.cluster.spec.cluster_network.dns_domain;
        let domain = if written.is_empty() { "cluster.local" } else { written };
        let namespace = reach.namespace;
        let mut names = Self {
            dns: ["kubernetes", "kubernetes.default", "kubernetes.default.svc", APISERVER]
                .map(str::to_owned)
                .into(),
            ips: vec![IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)],
        };
        names.dns.push(format!("kubernetes.default.svc.{domain}"));
        for end in ["", ".svc", ".svc.cluster.local"] {
            names.dns.push(format!("{APISERVER}.{namespace}{end}"));
        }
        names.add(&address.external_name);
        names.ips.extend(in_cluster);
        names.ips.extend(agent_ip.or(address.ip));
        let front = if reach.answered_by == AnsweredBy::LoadBalancer { &*reach.known.front } else { &[] };
        let api = if reach.api_is_balancer { &*reach.known.apiserver } else { &[] };
        for ingress in front.iter().chain(api) {
            names.ips.extend(ingress.ip);
            names.add(&ingress.hostname);
        }
        names.dns.sort();
        names.dns.dedup();
        names.ips.sort();
        names.ips.dedup();
        names
    }

    fn add(&mut self, host: &str) {
        match host.parse() {
            Ok(ip) => self.ips.push(ip),
            Err(_) if host.is_empty() => {}
            Err(_) => self.dns.push(host.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn an_address_stays_while_dns_still_knows_it() {
        let found = ips(&["203.0.113.9", "203.0.113.7", "2001:db8::1"]);
        assert_eq!(steady(&found, None), Some(ips(&["203.0.113.7"])[0]));
        assert_eq!(steady(&found, Some(found[0])), Some(found[0]));
        assert_eq!(steady(&found, Some(ips(&["192.0.2.1"])[0])), Some(ips(&["203.0.113.7"])[0]));
        assert_eq!(steady(&found[2..], None), Some(found[2]));
        assert_eq!(steady(&[], Some(found[0])), None);
    }

    #[test]
    fn a_public_ipv4_address_of_a_load_balancer_is_preferred() {
        let known = |list: &[&str]| Known {
            front: ips(list).into_iter().map(|ip| Ingress { ip: Some(ip), hostname: "".into() }).collect(),
            front_ip: Some(ips(&["192.0.2.1"])[0]),
            ..Known::default()
        };
        let chosen = |list: &[&str]| balancer_address(&known(list)).unwrap().to_string();
        assert_eq!(
            chosen(&["fd00::1", "2001:db8::1", "10.0.0.1", "203.0.113.9", "203.0.113.1"]),
            "203.0.113.9"
        );
        assert_eq!(chosen(&["fd00::1", "2001:db8::1", "10.0.0.1"]), "10.0.0.1");
        assert_eq!(chosen(&["fd00::1", "2001:db8::1"]), "2001:db8::1");
        assert_eq!(chosen(&["fd00::1"]), "fd00::1");
        assert_eq!(chosen(&[]), "192.0.2.1");
    }
}
