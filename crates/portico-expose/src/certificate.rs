//! The names on the API server's serving certificate, as in KKP.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use portico_api::cluster::Address;
use portico_api::names::HostName;
use portico_api::service::ServiceType;
use serde::Serialize;

use crate::inputs::{Ingress, Inputs};
use crate::networks;
use crate::services::APISERVER;

/// Names and addresses on the API server's serving certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SubjectNames {
    /// DNS names.
    pub dns: BTreeSet<String>,
    /// Addresses.
    pub ips: BTreeSet<IpAddr>,
}

impl SubjectNames {
    /// The names that the certificate has under every strategy. These are the names inside seed and user
    /// cluster, the external name, and the load balancer that a datacenter gives to the API server.
    pub(crate) fn common(inputs: &Inputs<'_>, address: &Address) -> Self {
        let cluster = inputs.scope.cluster;
        let written = &*cluster.spec.cluster_network.dns_domain;
        let domain = if written.is_empty() { "cluster.local" } else { written };
        let namespace = cluster.name().namespace();
        let mut names = Self::default();
        for name in ["kubernetes", "kubernetes.default", "kubernetes.default.svc", APISERVER] {
            names.add_host(name);
        }
        names.add_host(&format!("kubernetes.default.svc.{domain}"));
        for end in ["", ".svc", ".svc.cluster.local"] {
            names.add_host(&format!("{APISERVER}.{namespace}{end}"));
        }
        names.add_host(&address.external_name);
        names.add_ip(Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        names.add_ip(networks::in_cluster_api_address(cluster, inputs.scope.is_on("kubevirt")));
        if inputs.scope.api_server_type() == Some(ServiceType::LoadBalancer) {
            names.add_ingress(&inputs.known.apiserver);
        }
        names
    }

    /// The names on the certificate of a hosted API server: its host name, the agents' addresses, and the
    /// external names and addresses of its doors. Those that are not known are left out. No name of it
    /// depends on the strategy.
    ///
    /// `first` and `second` are the addresses of the doors, and `agent_ip` is what is recorded of the agents.
    pub fn hosted(
        inputs: &Inputs<'_>,
        (first, second): (&Address, &Address),
        agent_ip: Option<IpAddr>,
    ) -> Self {
        let cluster = inputs.scope.cluster;
        let mut names = Self::common(inputs, first);
        names.add_host(inputs.host().as_ref().map_or("", HostName::as_str));
        names.add_host(&second.external_name);
        let agents = [Some(networks::agent_ip(cluster)), agent_ip];
        let external = [first.ip, second.ip, cluster.status.address.ip];
        for ip in agents.into_iter().chain(external) {
            names.add_ip(ip);
        }
        names.add_ingress(&inputs.known.front);
        names
    }

    /// The names on the certificate of a hosted Konnectivity server. Agents find that server by the addresses
    /// of the API server and by a name of its own.
    pub fn hosted_konnectivity(
        inputs: &Inputs<'_>,
        (first, second): (&Address, &Address),
        agent_ip: Option<IpAddr>,
    ) -> Self {
        let api_server = Self::hosted(inputs, (first, second), agent_ip);
        let mut names = Self { dns: BTreeSet::new(), ips: api_server.ips };
        for host in [inputs.host(), inputs.host_of_konnectivity()].into_iter().flatten() {
            names.add_host(host.as_str());
        }
        for door in [first, second] {
            names.add_host(&door.external_name);
        }
        names.add_ingress(&inputs.known.front);
        names
    }

    /// Adds an address, if there is one.
    pub(crate) fn add_ip(&mut self, ip: Option<IpAddr>) {
        self.ips.extend(ip);
    }

    /// Adds the addresses and names of a load balancer.
    pub(crate) fn add_ingress(&mut self, ingress: &[Ingress]) {
        for ingress in ingress {
            self.add_ip(ingress.ip);
            self.add_host(&ingress.hostname);
        }
    }

    /// Adds a DNS name or an address in text form, unless it is empty.
    fn add_host(&mut self, host: &str) {
        match host.parse() {
            Ok(ip) => self.add_ip(Some(ip)),
            Err(_) if host.is_empty() => {}
            Err(_) => {
                self.dns.insert(host.to_owned());
            }
        }
    }
}
