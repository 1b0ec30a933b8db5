//! The problems of a Cluster, given its seed, the configuration, and the version in force.

use portico_api::annotations::{
    API_SERVER_CA, ENDPOINTS, FAIR_SHARE, KONNECTIVITY_ENDPOINTS, MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_SECOND, MIGRATION_LABEL,
};
use portico_api::cluster::Cluster;
use portico_api::endpoints;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::migration::MIGRATION;
use portico_api::policy::Percent;
use portico_api::port_range::PortRange;
use portico_api::problem::{Problem, Severity};
use portico_api::setting::Setting;
use portico_api::strategy::ExposeStrategy;

use crate::findings::{Findings, Verdict};
use crate::inputs::Scope;
use crate::policy;
use crate::resolve::Decision;
use crate::strategy;

/// Longest name of a Cluster, as in KKP. With a prefix before it, it must fit into one DNS label.
const MAX_CLUSTER_NAME: usize = 36;

/// The version of a Cluster that is in force.
#[derive(Debug, Clone, Copy)]
pub struct Before<'a> {
    /// The object.
    pub cluster: &'a Cluster,
    /// What exposes it.
    pub strategy: ExposeStrategy,
}

/// Checks a Cluster. `before` is the version in force, if there is one.
pub fn cluster(scope: &Scope<'_>, before: Option<Before<'_>>) -> Verdict {
    let cluster = scope.cluster;
    let mut findings = Findings::of(Kind::Cluster, &cluster.metadata);
    findings.cluster_name(cluster);
    findings.strategy(&cluster.spec.expose_strategy, "or leave the field out to follow the Seed");
    findings.strategy_change(scope, before);
    findings.cluster_networks(cluster);
    findings.agent_ip_without_agent(scope);
    strategy::of(scope.decision.strategy).check(scope, strategy::names, &mut findings);
    findings.konnectivity(cluster);
    findings.node_port_range(scope, before);
    findings.budget(cluster);
    findings.api_server_ca(cluster);
    findings.endpoints(cluster);
    findings.migration(cluster);
    findings.verdict
}

/// The strategy of a Cluster that is in force with `old` must not change.
pub(crate) fn strategy_change(cluster: &Cluster, old: ExposeStrategy, decision: Decision) -> Problem {
    let Decision { strategy: new, decided_by } = decision;
    Problem {
        severity: Severity::Error,
        reason: "strategy-change",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: "spec.exposeStrategy".into(),
        message: format!(
            "it cannot change from {old} to {new} (decided by: {decided_by}): users and nodes would lose the \
             address they know"
        ),
        remedy: format!(
            "put {old} back, or add the label {MIGRATION_LABEL} to the Cluster and migrate its nodes"
        ),
    }
}

impl Findings {
    fn cluster_name(&mut self, cluster: &Cluster) {
        let name = &*cluster.metadata.name;
        let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let label = name.starts_with(|first: char| first.is_ascii_lowercase())
            && !name.ends_with('-')
            && name.bytes().all(legal);
        if !label || name.len() > MAX_CLUSTER_NAME {
            let message = format!("{name:?} is no name for a cluster");
            let remedy = "use a lower case letter, then lower case letters, digits and '-', not ending with \
                          '-', 36 characters at most";
            self.refuse("cluster-name", "metadata.name", message, remedy);
        }
        let namespace = &cluster.status.namespace_name;
        if !namespace.is_empty() && **namespace != *cluster.name().namespace() {
            let message =
                format!("{namespace:?} is ignored, the namespace is always {:?}", cluster.name().namespace());
            self.warn("namespace-name", "status.namespaceName", message, "leave the field out");
        }
    }

    fn strategy_change(&mut self, scope: &Scope<'_>, before: Option<Before<'_>>) {
        let Some(before) = before else { return };
        if before.strategy != scope.decision.strategy && !scope.cluster.may_migrate() {
            self.verdict.problems.push(strategy_change(scope.cluster, before.strategy, scope.decision));
            self.verdict.refused = true;
        }
    }

    fn cluster_networks(&mut self, cluster: &Cluster) {
        let spec = &cluster.spec;
        let network = &spec.cluster_network;
        self.networks("spec.clusterNetwork.pods.cidrBlocks", &network.pods.cidr_blocks);
        self.networks("spec.clusterNetwork.services.cidrBlocks", &network.services.cidr_blocks);
        for (index, machines) in spec.machine_networks.iter().enumerate() {
            self.network(&format!("spec.machineNetworks[{index}].cidr"), &machines.cidr);
        }
        if let Some(ranges) = &spec.api_server_allowed_ip_ranges {
            self.networks("spec.apiServerAllowedIPRanges.cidrBlocks", &ranges.cidr_blocks);
        }
    }

    /// Refuses the address of an agent where the strategy has none.
    fn agent_ip_without_agent(&mut self, scope: &Scope<'_>) {
        let strategy = scope.decision.strategy;
        if strategy::of(strategy).has_agent() {
            return;
        }
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

    fn konnectivity(&mut self, cluster: &Cluster) {
        if cluster.spec.cluster_network.konnectivity_enabled == Some(false) {
            let message = "false does not count: OpenVPN, which it once stood for, is left out, and \
                           konnectivity-server is exposed all the same";
            let field = "spec.clusterNetwork.konnectivityEnabled";
            let remedy = "leave the field out, and migrate the cluster to Konnectivity";
            self.warn("konnectivity-disabled", field, message.into(), remedy);
        }
    }

    fn node_port_range(&mut self, scope: &Scope<'_>, before: Option<Before<'_>>) {
        let field = "spec.componentsOverride.apiserver.nodePortRange";
        let range_of = |cluster: &Cluster| cluster.spec.components_override.apiserver.node_port_range.clone();
        let default = || {
            let range = scope.configuration.and_then(|found| found.spec.user_cluster.node_port_range.get());
            range.copied().unwrap_or(PortRange::NODE_PORTS)
        };
        let new = range_of(scope.cluster);
        if let Some(bad) = new.bad() {
            let message = format!("{:?} is no port range: {}", bad.value, bad.why);
            let remedy = "write it as in 30000-32767, or leave the field out for the installation's range";
            return self.refuse("node-port-range", field, message, remedy);
        }
        let Some(before) = before else { return };
        let old = range_of(before.cluster);
        let (old, new) = match (old.get(), new.get()) {
            (None, None) => return,
            (old, new) => (old.copied().unwrap_or_else(default), new.copied().unwrap_or_else(default)),
        };
        if old != new {
            let message = format!(
                "it cannot change from {old} to {new}: Services of the user cluster hold ports of it"
            );
            self.refuse("node-port-range-change", field, message, &format!("put {old} back"));
        }
    }

    fn api_server_ca(&mut self, cluster: &Cluster) {
        let Some(Err(error)) = cluster.api_server_ca() else { return };
        let message = format!("{error}, so no token of this cluster can be reviewed");
        let field = format!("metadata.annotations[{API_SERVER_CA}]");
        let remedy = "write the CA certificates of its API server in PEM, or remove the annotation";
        self.void("api-server-ca", &field, message, remedy);
    }

    /// Addresses that cannot be used refuse the whole Cluster: without them its Services would select pods.
    fn endpoints(&mut self, cluster: &Cluster) {
        for key in [ENDPOINTS, KONNECTIVITY_ENDPOINTS] {
            let Some(Err(error)) = cluster.metadata.annotation(key).map(endpoints::parse) else { continue };
            let remedy = "write the addresses of the control plane as IP:PORT, separated by commas";
            self.refuse("endpoints", &format!("metadata.annotations[{key}]"), error.to_string(), remedy);
        }
        let of_konnectivity = cluster.metadata.annotation(KONNECTIVITY_ENDPOINTS).is_some();
        if of_konnectivity && cluster.metadata.annotation(ENDPOINTS).is_none() {
            let message = format!("it does not count without the annotation {ENDPOINTS}");
            let remedy = "name the addresses of the API server too, or remove this one";
            self.void(
                "endpoints",
                &format!("metadata.annotations[{KONNECTIVITY_ENDPOINTS}]"),
                message,
                remedy,
            );
        }
    }

    fn migration(&mut self, cluster: &Cluster) {
        let Err(error) = cluster.migration_settings() else { return };
        let message = format!("{error}, so the former way in is not closed at the end of a migration");
        let field = format!("metadata.annotations[{MIGRATION}]");
        let remedy =
            "write it as in quiet=10m,nodes=by-hand, each setting at most once, or remove the annotation";
        self.void("migration", &field, message, remedy);
    }

    fn budget(&mut self, cluster: &Cluster) {
        for key in [MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, FAIR_SHARE] {
            let Some(value) = cluster.metadata.annotation(key) else { continue };
            let (is_bound, remedy) = match key {
                FAIR_SHARE => (value.parse::<Percent>().is_ok(), "write a whole number from 1 to 100"),
                _ => (policy::bound(value).is_some(), "write a whole number from 1 to 4294967295"),
            };
            if !is_bound {
                let message = format!("{value:?} is no bound, so the gateway's own applies");
                let field = format!("metadata.annotations[{key}]");
                self.void("budget", &field, message, remedy);
            }
        }
    }
}

#[cfg(test)]
mod tests;
