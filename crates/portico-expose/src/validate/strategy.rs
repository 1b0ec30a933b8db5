//! Whether a Cluster can be exposed by its strategy: what the strategy needs, by what it has.

use std::net::IpAddr;

use ipnet::IpNet;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::network::Special;
use portico_api::service::ServiceType;
use portico_api::setting::Setting;

use crate::findings::Findings;
use crate::inputs::Scope;
use crate::networks::{self, DEFAULT_AGENT_IP};
use crate::resolve::Decision;
use crate::services::KONNECTIVITY_PREFIX;
use crate::strategy;

impl Findings {
    /// Checks what the strategy of a Cluster needs.
    pub(super) fn exposable(&mut self, scope: &Scope<'_>) {
        let strategy = strategy::of(scope.decision.strategy);
        if strategy.has_node_ports() {
            self.api_server_type(scope);
        }
        if strategy.needs_domain() {
            self.gateway(scope);
            self.host_names(scope);
        }
        if strategy.has_agent() {
            self.agent_ip(scope);
        } else {
            self.no_agent_ip(scope);
        }
    }

    /// A datacenter may override the type of one Service, and thereby take its NodePort away.
    fn api_server_type(&mut self, scope: &Scope<'_>) {
        let Some(found) = scope.api_server_type().filter(|&found| found != ServiceType::NodePort) else {
            return;
        };
        let dc = &scope.cluster.spec.cloud.dc;
        let message = format!(
            "the datacenter {dc:?} sets apiServerServiceType: {found:?}, but the strategy {} exposes \
             NodePort Services only: the API server is not reachable through the gateway",
            scope.decision.strategy
        );
        let others = strategy::names(|strategy| !strategy.has_node_ports());
        let remedy =
            format!("remove apiServerServiceType from the datacenter in the Seed, or choose {others}");
        self.warn("service-type", "spec.cloud.dc", message, &remedy);
    }

    /// Only the seed-wide gateway routes by name.
    fn gateway(&mut self, scope: &Scope<'_>) {
        if scope.seed.spec.nodeport_proxy.disable {
            let message = format!(
                "{} (decided by: {}) needs the gateway of the seed, and {} has \
                 spec.nodeportProxy.disable: true",
                scope.decision.strategy,
                scope.decision.decided_by,
                ObjectRef::new(Kind::Seed, &scope.seed.metadata)
            );
            let others = strategy::names(|strategy| strategy.has_node_ports());
            let remedy = format!("enable the nodeport-proxy of the Seed, or choose {others}");
            self.refuse("tunneling-without-proxy", "spec.exposeStrategy", message, &remedy);
        }
    }

    fn host_names(&mut self, scope: &Scope<'_>) {
        let field = "spec.exposeStrategy";
        let Some(suffix) = scope.host_suffix() else {
            let Decision { strategy, decided_by } = scope.decision;
            let message =
                format!("{strategy} (decided by: {decided_by}) needs host names, and there is no domain");
            let others = strategy::names(|strategy| !strategy.needs_domain());
            let remedy =
                format!("set spec.ingress.domain of the KubermaticConfiguration, or choose {others}");
            return self.refuse("domain-missing", field, message, &remedy);
        };
        // The longest of the names; the others are valid if it is.
        if let Err(error) = suffix.host(KONNECTIVITY_PREFIX) {
            let message = format!("its host names are not valid: {error}");
            self.refuse("host-name", field, message, "use a shorter name, seed label or domain");
        }
    }

    fn agent_ip(&mut self, scope: &Scope<'_>) {
        let field = "spec.clusterNetwork.tunnelingAgentIP";
        let written = &scope.cluster.spec.cluster_network.tunneling_agent_ip;
        let remedy = format!("choose an address that no other network uses, such as {DEFAULT_AGENT_IP}");
        if let Setting::Bad(bad) = written {
            let message = format!("{:?} is no IP address: {}", bad.value, bad.why);
            return self.refuse("agent-ip", field, message, &remedy);
        }
        let address = networks::agent_ip(scope.cluster);
        if let Some(why) = unusable(address) {
            let message = format!("{address} cannot be used: {why}");
            return self.refuse("agent-ip", field, message, &remedy);
        }
        if let Some((what, network)) = network_around(scope, address) {
            let default = if written.is_unset() { " (the default)" } else { "" };
            let message = format!("{address}{default} lies in the {what} network {network}");
            let remedy = "choose an address outside pod, service and machine networks";
            self.refuse("agent-ip-in-network", field, message, remedy);
        }
    }

    /// Refuses the address of an agent where the strategy has none.
    fn no_agent_ip(&mut self, scope: &Scope<'_>) {
        let strategy = scope.decision.strategy;
        let value = match &scope.cluster.spec.cluster_network.tunneling_agent_ip {
            Setting::Unset => return,
            Setting::Good(address) => address.to_string(),
            Setting::Bad(bad) => format!("{:?}", bad.value),
        };
        let with_agent = strategy::names(|strategy| strategy.has_agent());
        let message =
            format!("{value} is forbidden: the strategy is {strategy}, and only {with_agent} has an agent");
        let remedy = format!("remove the field, or set spec.exposeStrategy: {with_agent}");
        self.refuse("agent-ip-forbidden", "spec.clusterNetwork.tunnelingAgentIP", message, &remedy);
    }
}

/// Why no agent can listen on `address`, or why Kubernetes refuses it as an endpoint.
fn unusable(address: IpAddr) -> Option<&'static str> {
    Some(match Special::of(address)? {
        Special::Unspecified => "it stands for any address",
        Special::Loopback => "it is a loopback address, which pods cannot reach on their node",
        Special::LinkLocal => "it is a link-local address, which Kubernetes refuses as an endpoint",
        Special::Multicast => "it is a multicast address",
    })
}

/// The network of the cluster that holds `address`.
fn network_around(scope: &Scope<'_>, address: IpAddr) -> Option<(&'static str, IpNet)> {
    let (cluster, kubevirt) = (scope.cluster, scope.is_on("kubevirt"));
    [
        ("pod", networks::pods(cluster, kubevirt)),
        ("service", networks::services(cluster, kubevirt)),
        ("machine", networks::machines(cluster)),
    ]
    .into_iter()
    .find_map(|(what, networks)| {
        networks.into_iter().find(|network| network.contains(&address)).map(|network| (what, network))
    })
}
