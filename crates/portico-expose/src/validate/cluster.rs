//! What is wrong with a Cluster, in the light of its seed, of the configuration, and of what it was before.

use std::net::IpAddr;

use ipnet::IpNet;
use portico_api::annotations::{API_SERVER_CA, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, MIGRATION_LABEL};
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::port_range::PortRange;
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Seed;
use portico_api::service::ServiceType;
use portico_api::setting::Setting;
use portico_api::strategy::ExposeStrategy;

use super::{Findings, Verdict};
use crate::hosts::HostSuffix;
use crate::networks::{self, DEFAULT_AGENT_IP};
use crate::plan::KONNECTIVITY_PREFIX;
use crate::policy;
use crate::resolve::Decision;

/// Longest name of a Cluster: what KKP allows. It must fit, with what is put before it, into one DNS label.
const MAX_CLUSTER_NAME: usize = 36;

/// A Cluster and what it is judged by.
#[derive(Debug, Clone, Copy)]
pub struct ClusterContext<'a> {
    /// The Cluster.
    pub cluster: &'a Cluster,
    /// What exposes it.
    pub decision: Decision,
    /// The seed that hosts it.
    pub seed: &'a Seed,
    /// The configuration of the installation, if there is one.
    pub configuration: Option<&'a KubermaticConfiguration>,
    /// What it was before, if it was there before.
    pub before: Option<Before<'a>>,
}

/// The version of a Cluster that is in force.
#[derive(Debug, Clone, Copy)]
pub struct Before<'a> {
    /// The object.
    pub cluster: &'a Cluster,
    /// What exposes it.
    pub strategy: ExposeStrategy,
}

/// Checks a Cluster.
pub fn cluster(context: &ClusterContext<'_>) -> Verdict {
    let cluster = context.cluster;
    let mut findings = Findings::of(Kind::Cluster, &cluster.metadata);
    findings.cluster_name(cluster);
    findings.strategy(&cluster.spec.expose_strategy, "or leave the field out to follow the Seed");
    findings.strategy_change(context);
    findings.tunneling_possible(context);
    findings.cluster_networks(cluster);
    findings.agent_ip(context);
    findings.konnectivity(cluster);
    findings.node_port_range(context);
    findings.service_type(context);
    findings.budget(cluster);
    findings.api_server_ca(cluster);
    findings.verdict
}

/// A Cluster that is in force with the strategy `old` must not get another.
pub(crate) fn strategy_change(cluster: &Cluster, old: ExposeStrategy, decision: Decision) -> Problem {
    let Decision { strategy: new, decided_by } = decision;
    Problem {
        severity: Severity::Error,
        reason: "strategy-change",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: "spec.exposeStrategy".into(),
        message: format!(
            "it cannot change from {old} to {new} (decided by: {decided_by}): users and nodes would lose the address \
             they know"
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
            let remedy = "use a lower case letter, then lower case letters, digits and '-', not ending with '-', 36 \
                          characters at most";
            self.refuse("cluster-name", "metadata.name", message, remedy);
        }
        let namespace = &cluster.status.namespace_name;
        if !namespace.is_empty() && **namespace != *cluster.name().namespace() {
            let message =
                format!("{namespace:?} is ignored, the namespace is always {:?}", cluster.name().namespace());
            self.warn("namespace-name", "status.namespaceName", message, "leave the field out");
        }
    }

    fn strategy_change(&mut self, context: &ClusterContext<'_>) {
        let Some(before) = context.before else { return };
        if before.strategy != context.decision.strategy && !context.cluster.may_migrate() {
            self.verdict.problems.push(strategy_change(context.cluster, before.strategy, context.decision));
            self.verdict.refused = true;
        }
    }

    /// Tunneling needs the seed-wide gateway and host names.
    fn tunneling_possible(&mut self, context: &ClusterContext<'_>) {
        if context.decision.strategy != ExposeStrategy::Tunneling {
            return;
        }
        let (seed, field) = (context.seed, "spec.exposeStrategy");
        let by = context.decision.decided_by;
        if seed.spec.nodeport_proxy.disable {
            let message = format!(
                "Tunneling (decided by: {by}) needs the gateway of the seed, and {} has spec.nodeportProxy.disable: true",
                ObjectRef::new(Kind::Seed, &seed.metadata)
            );
            let remedy = "enable the nodeport-proxy of the Seed, or choose NodePort or LoadBalancer";
            self.refuse("tunneling-without-proxy", field, message, remedy);
        }
        let remedy =
            "set spec.ingress.domain of the KubermaticConfiguration, or choose NodePort or LoadBalancer";
        match HostSuffix::of(&context.cluster.name(), seed, context.configuration) {
            None => {
                let message =
                    format!("Tunneling (decided by: {by}) needs host names, and there is no domain");
                self.refuse("domain-missing", field, message, remedy);
            }
            Some(suffix) => {
                // The longest of the names; the others are fine if it is.
                if let Err(error) = suffix.host(KONNECTIVITY_PREFIX) {
                    let message = format!("its host names are not valid: {error}");
                    self.refuse("host-name", field, message, "use a shorter name, seed label or domain");
                }
            }
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
        self.networks(
            "spec.apiServerAllowedIPRanges.cidrBlocks",
            &spec.api_server_allowed_ip_ranges.cidr_blocks,
        );
    }

    fn agent_ip(&mut self, context: &ClusterContext<'_>) {
        let field = "spec.clusterNetwork.tunnelingAgentIP";
        let written = &context.cluster.spec.cluster_network.tunneling_agent_ip;
        let strategy = context.decision.strategy;
        if strategy != ExposeStrategy::Tunneling {
            let value = match written {
                Setting::Unset => return,
                Setting::Good(address) => address.to_string(),
                Setting::Bad(bad) => format!("{:?}", bad.value),
            };
            let message =
                format!("{value} is forbidden: the strategy is {strategy}, and only Tunneling has an agent");
            let remedy = "remove the field, or set spec.exposeStrategy: Tunneling";
            return self.refuse("agent-ip-forbidden", field, message, remedy);
        }
        let remedy = format!("choose an address that no other network uses, such as {DEFAULT_AGENT_IP}");
        let address = match written {
            Setting::Unset => DEFAULT_AGENT_IP,
            Setting::Good(address) => *address,
            Setting::Bad(bad) => {
                let message = format!("{:?} is no IP address: {}", bad.value, bad.why);
                return self.refuse("agent-ip", field, message, &remedy);
            }
        };
        if let Some(why) = unusable(address) {
            let message = format!("{address} cannot be used: {why}");
            return self.refuse("agent-ip", field, message, &remedy);
        }
        if let Some((what, network)) = network_around(context, address) {
            let default = if written.is_unset() { " (the default)" } else { "" };
            let message = format!("{address}{default} lies in the {what} network {network}");
            let remedy = "choose an address outside pod, service and machine networks";
            self.refuse("agent-ip-in-network", field, message, remedy);
        }
    }

    fn konnectivity(&mut self, cluster: &Cluster) {
        if cluster.spec.cluster_network.konnectivity_enabled == Some(false) {
            let message = "false does not count: OpenVPN, which it once stood for, is left out, and konnectivity-server is \
                           exposed all the same";
            let field = "spec.clusterNetwork.konnectivityEnabled";
            let remedy = "leave the field out, and migrate the cluster to Konnectivity";
            self.warn("konnectivity-disabled", field, message.into(), remedy);
        }
    }

    fn node_port_range(&mut self, context: &ClusterContext<'_>) {
        let field = "spec.componentsOverride.apiserver.nodePortRange";
        let range_of = |cluster: &Cluster| cluster.spec.components_override.apiserver.node_port_range.clone();
        let default = || {
            let range = context.configuration.and_then(|found| found.spec.user_cluster.node_port_range.get());
            range.copied().unwrap_or(PortRange::NODE_PORTS)
        };
        let new = range_of(context.cluster);
        if let Some(bad) = new.bad() {
            let message = format!("{:?} is no port range: {}", bad.value, bad.why);
            let remedy = "write it as in 30000-32767, or leave the field out for the installation's range";
            return self.refuse("node-port-range", field, message, remedy);
        }
        let Some(before) = context.before else { return };
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

    /// A datacenter may override the type of one Service, and thereby take its NodePort away.
    fn service_type(&mut self, context: &ClusterContext<'_>) {
        let strategy = context.decision.strategy;
        let dc = &context.cluster.spec.cloud.dc;
        let Some(kind) = crate::plan::service_type_override(context.cluster, context.seed) else { return };
        if strategy != ExposeStrategy::Tunneling && kind != ServiceType::NodePort {
            let message = format!(
                "the datacenter {dc:?} sets apiServerServiceType: {kind:?}, but the strategy {strategy} exposes NodePort \
                 Services only: the API server is not reachable through the gateway"
            );
            let remedy = "remove apiServerServiceType from the datacenter in the Seed, or choose Tunneling";
            self.warn("service-type", "spec.cloud.dc", message, remedy);
        }
    }

    fn api_server_ca(&mut self, cluster: &Cluster) {
        let Some(Err(error)) = cluster.api_server_ca() else { return };
        let message = format!("{error}, so no token of this cluster can be reviewed");
        let field = format!("metadata.annotations[{API_SERVER_CA}]");
        let remedy = "write the CA certificates of its API server in PEM, or remove the annotation";
        self.void("api-server-ca", &field, message, remedy);
    }

    fn budget(&mut self, cluster: &Cluster) {
        for key in [MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND] {
            let Some(value) = cluster.metadata.annotation(key) else { continue };
            if policy::bound(value).is_none() {
                let message = format!("{value:?} is no bound, so the gateway's own applies");
                let field = format!("metadata.annotations[{key}]");
                self.void("budget", &field, message, "write a whole number from 1 to 4294967295");
            }
        }
    }
}

/// Why no agent can listen on `address`, or why Kubernetes refuses it as an endpoint.
fn unusable(address: IpAddr) -> Option<&'static str> {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if address.is_unspecified() {
        Some("it stands for any address")
    } else if address.is_loopback() {
        Some("it is a loopback address, which pods cannot reach on their node")
    } else if link_local {
        Some("it is a link-local address, which Kubernetes refuses as an endpoint")
    } else if address.is_multicast() {
        Some("it is a multicast address")
    } else {
        None
    }
}

fn network_around(context: &ClusterContext<'_>, address: IpAddr) -> Option<(&'static str, IpNet)> {
    let cluster = context.cluster;
    let kubevirt = crate::plan::is_on_kubevirt(cluster, context.seed);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve;
    use crate::testing::{cluster as read, configuration, migrating, read as json, seed};

    const DOMAIN: &str = r#"{"ingress": {"domain": "kkp.example.com"}}"#;

    fn judge(cluster: &Cluster, before: Option<&Cluster>, seed: &Seed, configuration_spec: &str) -> String {
        let configuration = configuration(configuration_spec);
        let configuration = Some(&configuration);
        let strategy = |cluster| resolve::strategy(cluster, seed, configuration);
        let before = before.map(|cluster| Before { cluster, strategy: strategy(cluster).strategy });
        let context = ClusterContext { cluster, decision: strategy(cluster), seed, configuration, before };
        let verdict = super::cluster(&context);
        let lines: Vec<String> = verdict.problems.iter().map(ToString::to_string).collect();
        format!("refused: {}\n{}", verdict.refused, lines.join("\n"))
    }

    fn problems(spec: &str) -> String {
        judge(&read("a", spec), None, &seed("north", "{}"), DOMAIN)
    }

    #[test]
    fn a_cluster_of_each_strategy_has_no_problems() {
        for strategy in ExposeStrategy::ALL {
            let spec = format!(
                r#"{{"exposeStrategy": "{strategy}", "apiServerAllowedIPRanges": {{"cidrBlocks": ["10.0.0.0/8"]}}}}"#
            );
            assert_eq!(problems(&spec), "refused: false\n");
        }
    }

    #[test]
    fn a_cluster_that_wants_openvpn_is_told_that_there_is_none() {
        let told = problems(r#"{"clusterNetwork": {"konnectivityEnabled": false}}"#);
        assert!(
            told.starts_with("refused: false\nCluster a: spec.clusterNetwork.konnectivityEnabled: false"),
            "{told}"
        );
        assert!(told.contains("OpenVPN"), "{told}");
        assert_eq!(problems(r#"{"clusterNetwork": {"konnectivityEnabled": true}}"#), "refused: false\n");
    }

    #[test]
    fn a_mistyped_strategy_is_refused() {
        assert_eq!(
            problems(r#"{"exposeStrategy": "tunneling"}"#),
            "refused: true\n\
             Cluster a: spec.exposeStrategy: \"tunneling\" is no strategy: it is none of NodePort, LoadBalancer, Tunneling \
             (upper and lower case matter); write NodePort, LoadBalancer or Tunneling, or leave the field out to follow \
             the Seed"
        );
    }

    #[test]
    fn a_name_that_is_no_label_or_too_long_is_refused() {
        let refused = |name: &str| judge(&read(name, "{}"), None, &seed("north", "{}"), DOMAIN);
        assert_eq!(
            refused("1a"),
            "refused: true\n\
             Cluster 1a: metadata.name: \"1a\" is no name for a cluster; use a lower case letter, then lower case letters, \
             digits and '-', not ending with '-', 36 characters at most"
        );
        for name in ["", "A", "a-", "a.b", "a_b", &"a".repeat(37)] {
            assert!(refused(name).contains("is no name for a cluster"), "{name:?}");
        }
        assert_eq!(refused(&"a".repeat(36)), "refused: false\n");
    }

    #[test]
    fn a_strategy_change_without_the_label_is_refused() {
        let old = read("a", r#"{"exposeStrategy": "NodePort"}"#);
        let north = seed("north", "{}");
        let new = r#"{"exposeStrategy": "Tunneling"}"#;
        assert_eq!(
            judge(&read("a", new), Some(&old), &north, DOMAIN),
            "refused: true\n\
             Cluster a: spec.exposeStrategy: it cannot change from NodePort to Tunneling (decided by: Cluster): users and \
             nodes would lose the address they know; put NodePort back, or add the label \
             unsafe-expose-strategy-migration to the Cluster and migrate its nodes"
        );
        assert_eq!(judge(&migrating("a", new), Some(&old), &north, DOMAIN), "refused: false\n");
    }

    #[test]
    fn tunneling_needs_the_gateway_of_the_seed() {
        let disabled =
            seed("north", r#"{"nodeportProxy": {"disable": true}, "exposeStrategy": "Tunneling"}"#);
        assert_eq!(
            judge(&read("a", "{}"), None, &disabled, DOMAIN),
            "refused: true\n\
             Cluster a: spec.exposeStrategy: Tunneling (decided by: Seed) needs the gateway of the seed, and Seed \
             kubermatic/north has spec.nodeportProxy.disable: true; enable the nodeport-proxy of the Seed, or choose \
             NodePort or LoadBalancer"
        );
    }

    #[test]
    fn tunneling_needs_host_names() {
        let cluster = read("a", r#"{"exposeStrategy": "Tunneling"}"#);
        assert_eq!(
            judge(&cluster, None, &seed("north", "{}"), "{}"),
            "refused: true\n\
             Cluster a: spec.exposeStrategy: Tunneling (decided by: Cluster) needs host names, and there is no domain; \
             set spec.ingress.domain of the KubermaticConfiguration, or choose NodePort or LoadBalancer"
        );
        let long = ["a".repeat(60).as_str(); 4].join(".");
        let long = format!(r#"{{"ingress": {{"domain": "{long}"}}}}"#);
        assert_eq!(
            judge(&cluster, None, &seed("north", "{}"), &long),
            "refused: true\n\
             Cluster a: spec.exposeStrategy: its host names are not valid: it is longer than 253 characters; use a \
             shorter name, seed label or domain"
        );
    }

    #[test]
    fn every_network_must_parse() {
        assert_eq!(
            problems(
                r#"{"clusterNetwork": {"pods": {"cidrBlocks": ["pods"]}, "services": {"cidrBlocks": ["10.0.0.0/8", 5]}},
                    "machineNetworks": [{"cidr": "10.0.0.0"}, {}],
                    "apiServerAllowedIPRanges": {"cidrBlocks": ["10.0.0.0/8", "10.0.0.0 /8"]}}"#
            )
            .replace("; write address and prefix length, as in 198.51.100.0/24 or 198.51.100.7/32", ""),
            "refused: true\n\
             Cluster a: spec.clusterNetwork.pods.cidrBlocks[0]: \"pods\" is no network in CIDR notation: \"pods\" is no IP address\n\
             Cluster a: spec.clusterNetwork.services.cidrBlocks[1]: \"5\" is no network in CIDR notation: \"5\" is no IP address\n\
             Cluster a: spec.machineNetworks[0].cidr: \"10.0.0.0\" is no network in CIDR notation: it has no prefix length\n\
             Cluster a: spec.machineNetworks[1].cidr: it is empty\n\
             Cluster a: spec.apiServerAllowedIPRanges.cidrBlocks[1]: \"10.0.0.0 /8\" is no network in CIDR notation: \
             \"10.0.0.0 \" is no IP address"
        );
    }

    fn agent(ip: &str, rest: &str) -> String {
        problems(&format!(
            r#"{{"exposeStrategy": "Tunneling", "clusterNetwork": {{"tunnelingAgentIP": {ip}}} {rest}}}"#
        ))
    }

    #[test]
    fn an_agent_ip_is_forbidden_without_tunneling() {
        assert_eq!(
            problems(r#"{"clusterNetwork": {"tunnelingAgentIP": "100.64.30.10"}}"#),
            "refused: true\n\
             Cluster a: spec.clusterNetwork.tunnelingAgentIP: 100.64.30.10 is forbidden: the strategy is NodePort, and \
             only Tunneling has an agent; remove the field, or set spec.exposeStrategy: Tunneling"
        );
    }

    #[test]
    fn an_agent_ip_must_be_an_address_that_an_agent_can_listen_on() {
        assert_eq!(
            agent(r#""100.64.30""#, ""),
            "refused: true\n\
             Cluster a: spec.clusterNetwork.tunnelingAgentIP: \"100.64.30\" is no IP address: invalid IP address syntax; \
             choose an address that no other network uses, such as 100.64.30.10"
        );
        assert_eq!(
            agent(r#""127.0.0.1""#, ""),
            "refused: true\n\
             Cluster a: spec.clusterNetwork.tunnelingAgentIP: 127.0.0.1 cannot be used: it is a loopback address, which \
             pods cannot reach on their node; choose an address that no other network uses, such as 100.64.30.10"
        );
        for ip in ["0.0.0.0", "::", "::1", "169.254.1.1", "fe80::1", "224.0.0.1", "255.255.255.255"] {
            assert!(agent(&format!("{ip:?}"), "").contains("cannot be used"), "{ip}");
        }
    }

    #[test]
    fn an_agent_ip_lies_outside_pod_service_and_machine_networks_given_or_default() {
        assert_eq!(
            agent(r#""172.25.3.4""#, ""),
            "refused: true\n\
             Cluster a: spec.clusterNetwork.tunnelingAgentIP: 172.25.3.4 lies in the pod network 172.25.0.0/16; choose an \
             address outside pod, service and machine networks"
        );
        assert!(agent(r#""10.240.17.1""#, "").contains("lies in the service network 10.240.16.0/20"));
        assert!(
            agent(r#""192.0.2.7""#, r#", "machineNetworks": [{"cidr": "192.0.2.0/24"}]"#)
                .contains("lies in the machine network 192.0.2.0/24")
        );
        assert_eq!(agent(r#""172.26.3.4""#, ""), "refused: false\n");
        assert!(
            agent(r#""172.26.3.4""#, r#", "cloud": {"kubevirt": {}}"#).contains("pod network 172.26.0.0/16")
        );
        assert_eq!(
            problems(
                r#"{"exposeStrategy": "Tunneling", "clusterNetwork": {"pods": {"cidrBlocks": ["100.64.0.0/16"]}}}"#
            ),
            "refused: true\n\
             Cluster a: spec.clusterNetwork.tunnelingAgentIP: 100.64.30.10 (the default) lies in the pod network \
             100.64.0.0/16; choose an address outside pod, service and machine networks"
        );
        let dual = r#"{"exposeStrategy": "Tunneling", "clusterNetwork": {"ipFamily": "IPv4+IPv6",
                       "tunnelingAgentIP": "fd01::7"}}"#;
        assert!(problems(dual).contains("fd01::7 lies in the pod network fd01::/48"));
    }

    #[test]
    fn a_node_port_range_must_parse_and_never_changes() {
        let with = |range: &str| {
            read(
                "a",
                &format!(r#"{{"componentsOverride": {{"apiserver": {{"nodePortRange": "{range}"}}}}}}"#),
            )
        };
        let north = seed("north", "{}");
        assert_eq!(
            judge(&with("30000:32767"), None, &north, DOMAIN),
            "refused: true\n\
             Cluster a: spec.componentsOverride.apiserver.nodePortRange: \"30000:32767\" is no port range: it must read \
             FIRST-LAST, FIRST+COUNT or FIRST, with ports from 1 to 65535; write it as in 30000-32767, or leave the \
             field out for the installation's range"
        );
        assert_eq!(
            judge(&with("31000-32000"), Some(&with("30000-32767")), &north, DOMAIN),
            "refused: true\n\
             Cluster a: spec.componentsOverride.apiserver.nodePortRange: it cannot change from 30000-32767 to \
             31000-32000: Services of the user cluster hold ports of it; put 30000-32767 back"
        );
        let unset = read("a", "{}");
        assert_eq!(judge(&with("30000-32767"), Some(&unset), &north, DOMAIN), "refused: false\n");
        assert!(judge(&unset, Some(&with("31000-32000")), &north, DOMAIN).contains("cannot change"));
    }

    #[test]
    fn budgets_that_are_no_bounds_are_void() {
        let cluster: Cluster = json(
            r#"{"metadata": {"name": "a", "annotations": {"portico.k8c.io/max-connections": "0",
                "portico.k8c.io/max-connections-per-second": "ten"}}}"#,
        );
        assert_eq!(
            judge(&cluster, None, &seed("north", "{}"), DOMAIN),
            "refused: false\n\
             Cluster a: metadata.annotations[portico.k8c.io/max-connections]: \"0\" is no bound, so the gateway's own \
             applies; write a whole number from 1 to 4294967295\n\
             Cluster a: metadata.annotations[portico.k8c.io/max-connections-per-second]: \"ten\" is no bound, so the \
             gateway's own applies; write a whole number from 1 to 4294967295"
        );
    }

    #[test]
    fn an_api_server_ca_that_is_none_is_told() {
        let cluster: Cluster =
            json(r#"{"metadata": {"name": "a", "annotations": {"portico.k8c.io/api-server-ca": "ca.crt"}}}"#);
        let told = "refused: false\n\
             Cluster a: metadata.annotations[portico.k8c.io/api-server-ca]: it holds no certificate, so no token of this \
             cluster can be reviewed; write the CA certificates of its API server in PEM, or remove the annotation";
        for cluster in [cluster.clone(), cluster.trimmed()] {
            assert_eq!(judge(&cluster, None, &seed("north", "{}"), DOMAIN), told);
        }
    }

    #[test]
    fn a_datacenter_that_takes_the_node_port_away_is_told() {
        let north =
            seed("north", r#"{"datacenters": {"lab": {"spec": {"apiServerServiceType": "ClusterIP"}}}}"#);
        assert_eq!(
            judge(&read("a", r#"{"cloud": {"dc": "lab"}}"#), None, &north, DOMAIN),
            "refused: false\n\
             Cluster a: spec.cloud.dc: the datacenter \"lab\" sets apiServerServiceType: ClusterIP, but the strategy \
             NodePort exposes NodePort Services only: the API server is not reachable through the gateway; remove \
             apiServerServiceType from the datacenter in the Seed, or choose Tunneling"
        );
    }

    #[test]
    fn another_namespace_than_its_own_is_ignored_and_told() {
        let cluster: Cluster =
            json(r#"{"metadata": {"name": "a"}, "status": {"namespaceName": "kube-system"}}"#);
        assert_eq!(
            judge(&cluster, None, &seed("north", "{}"), DOMAIN),
            "refused: false\n\
             Cluster a: status.namespaceName: \"kube-system\" is ignored, the namespace is always \"cluster-a\"; leave \
             the field out"
        );
    }
}
