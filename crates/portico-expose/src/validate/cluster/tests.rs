//! Every problem of a Cluster, as it reads.

use portico_api::seed::Seed;
use portico_api::strategy::UnknownStrategy;

use super::*;
use crate::resolve;
use crate::testing::{cluster as read, configuration, migrating, read as json, seed};

const DOMAIN: &str = r#"{"ingress": {"domain": "kkp.example.com"}}"#;

fn judge(cluster: &Cluster, before: Option<&Cluster>, seed: &Seed, configuration_spec: &str) -> String {
    let configuration = configuration(configuration_spec);
    let configuration = Some(&configuration);
    let strategy = |cluster| resolve::strategy(cluster, seed, configuration);
    let before = before.map(|cluster| Before { cluster, strategy: strategy(cluster).strategy });
    let scope = Scope { cluster, decision: strategy(cluster), seed, configuration };
    let verdict = super::cluster(&scope, before);
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
            r#"{{"exposeStrategy": "{strategy}",
                "apiServerAllowedIPRanges": {{"cidrBlocks": ["10.0.0.0/8"]}}}}"#
        );
        assert_eq!(problems(&spec), "refused: false\n");
    }
}

#[test]
fn a_cluster_that_wants_openvpn_is_warned_that_there_is_none() {
    let found = problems(r#"{"clusterNetwork": {"konnectivityEnabled": false}}"#);
    assert!(
        found.starts_with("refused: false\nCluster a: spec.clusterNetwork.konnectivityEnabled: false"),
        "{found}"
    );
    assert!(found.contains("OpenVPN"), "{found}");
    assert_eq!(problems(r#"{"clusterNetwork": {"konnectivityEnabled": true}}"#), "refused: false\n");
}

#[test]
fn a_mistyped_strategy_is_refused() {
    let all = ExposeStrategy::one_of(ExposeStrategy::ALL);
    assert_eq!(
        problems(r#"{"exposeStrategy": "tunneling"}"#),
        format!(
            "refused: true\n\
             Cluster a: spec.exposeStrategy: \"tunneling\" is no strategy: {UnknownStrategy}; write {all}, \
             or leave the field out to follow the Seed"
        )
    );
}

#[test]
fn a_name_that_is_no_label_or_too_long_is_refused() {
    let refused = |name: &str| judge(&read(name, "{}"), None, &seed("north", "{}"), DOMAIN);
    assert_eq!(
        refused("1a"),
        "refused: true\n\
         Cluster 1a: metadata.name: \"1a\" is no name for a cluster; use a lower case letter, then lower \
         case letters, digits and '-', not ending with '-', 36 characters at most"
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
         Cluster a: spec.exposeStrategy: it cannot change from NodePort to Tunneling (decided by: Cluster): \
         users and nodes would lose the address they know; put NodePort back, or add the label \
         unsafe-expose-strategy-migration to the Cluster and migrate its nodes"
    );
    assert_eq!(judge(&migrating("a", new), Some(&old), &north, DOMAIN), "refused: false\n");
}

#[test]
fn tunneling_needs_the_gateway_of_the_seed() {
    let disabled = seed("north", r#"{"nodeportProxy": {"disable": true}, "exposeStrategy": "Tunneling"}"#);
    let others = strategy::names(|strategy| strategy.has_node_ports());
    assert_eq!(
        judge(&read("a", "{}"), None, &disabled, DOMAIN),
        format!(
            "refused: true\n\
             Cluster a: spec.exposeStrategy: Tunneling (decided by: Seed) needs the gateway of the seed, and \
             Seed kubermatic/north has spec.nodeportProxy.disable: true; enable the nodeport-proxy of the \
             Seed, or choose {others}"
        )
    );
}

#[test]
fn tunneling_needs_host_names() {
    let cluster = read("a", r#"{"exposeStrategy": "Tunneling"}"#);
    let others = strategy::names(|strategy| !strategy.needs_domain());
    assert_eq!(
        judge(&cluster, None, &seed("north", "{}"), "{}"),
        format!(
            "refused: true\n\
             Cluster a: spec.exposeStrategy: Tunneling (decided by: Cluster) needs host names, and there is \
             no domain; set spec.ingress.domain of the KubermaticConfiguration, or choose {others}"
        )
    );
    let long = ["a".repeat(60).as_str(); 4].join(".");
    let long = format!(r#"{{"ingress": {{"domain": "{long}"}}}}"#);
    assert_eq!(
        judge(&cluster, None, &seed("north", "{}"), &long),
        "refused: true\n\
         Cluster a: spec.exposeStrategy: its host names are not valid: it is longer than 253 characters; use \
         a shorter name, seed label or domain"
    );
}

#[test]
fn every_network_must_parse() {
    assert_eq!(
        problems(
            r#"{"clusterNetwork": {"pods": {"cidrBlocks": ["pods"]},
                    "services": {"cidrBlocks": ["10.0.0.0/8", 5]}},
                "machineNetworks": [{"cidr": "10.0.0.0"}, {}],
                "apiServerAllowedIPRanges": {"cidrBlocks": ["10.0.0.0/8", "10.0.0.0 /8"]}}"#
        )
        .replace("; write address and prefix length, as in 198.51.100.0/24 or 198.51.100.7/32", ""),
        "refused: true\n\
         Cluster a: spec.clusterNetwork.pods.cidrBlocks[0]: \"pods\" is no network in CIDR \
         notation: \"pods\" is no IP address\n\
         Cluster a: spec.clusterNetwork.services.cidrBlocks[1]: \"5\" is no network in CIDR notation: \"5\" \
         is no IP address\n\
         Cluster a: spec.machineNetworks[0].cidr: \"10.0.0.0\" is no network in CIDR notation: it has no \
         prefix length\n\
         Cluster a: spec.machineNetworks[1].cidr: it is empty\n\
         Cluster a: spec.apiServerAllowedIPRanges.cidrBlocks[1]: \"10.0.0.0 /8\" is no network in CIDR \
         notation: \"10.0.0.0 \" is no IP address"
    );
}

fn agent(ip: &str, rest: &str) -> String {
    problems(&format!(
        r#"{{"exposeStrategy": "Tunneling", "clusterNetwork": {{"tunnelingAgentIP": {ip}}} {rest}}}"#
    ))
}

#[test]
fn an_agent_ip_is_forbidden_without_tunneling() {
    let with_agent = strategy::names(|strategy| strategy.has_agent());
    assert_eq!(
        problems(r#"{"clusterNetwork": {"tunnelingAgentIP": "100.64.30.10"}}"#),
        format!(
            "refused: true\n\
             Cluster a: spec.clusterNetwork.tunnelingAgentIP: 100.64.30.10 is forbidden: the strategy is \
             NodePort, and only {with_agent} has an agent; remove the field, or set spec.exposeStrategy: \
             {with_agent}"
        )
    );
}

#[test]
fn an_agent_ip_must_be_an_address_that_an_agent_can_listen_on() {
    assert_eq!(
        agent(r#""100.64.30""#, ""),
        "refused: true\n\
         Cluster a: spec.clusterNetwork.tunnelingAgentIP: \"100.64.30\" is no IP address: invalid IP address \
         syntax; choose an address that no other network uses, such as 100.64.30.10"
    );
    assert_eq!(
        agent(r#""127.0.0.1""#, ""),
        "refused: true\n\
         Cluster a: spec.clusterNetwork.tunnelingAgentIP: 127.0.0.1 cannot be used: it is a loopback \
         address, which pods cannot reach on their node; choose an address that no other network uses, such \
         as 100.64.30.10"
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
         Cluster a: spec.clusterNetwork.tunnelingAgentIP: 172.25.3.4 lies in the pod network 172.25.0.0/16; \
         choose an address outside pod, service and machine networks"
    );
    assert!(agent(r#""10.240.17.1""#, "").contains("lies in the service network 10.240.16.0/20"));
    assert!(
        agent(r#""192.0.2.7""#, r#", "machineNetworks": [{"cidr": "192.0.2.0/24"}]"#)
            .contains("lies in the machine network 192.0.2.0/24")
    );
    assert_eq!(agent(r#""172.26.3.4""#, ""), "refused: false\n");
    assert!(agent(r#""172.26.3.4""#, r#", "cloud": {"kubevirt": {}}"#).contains("pod network 172.26.0.0/16"));
    assert_eq!(
        problems(
            r#"{"exposeStrategy": "Tunneling",
                "clusterNetwork": {"pods": {"cidrBlocks": ["100.64.0.0/16"]}}}"#
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
        read("a", &format!(r#"{{"componentsOverride": {{"apiserver": {{"nodePortRange": "{range}"}}}}}}"#))
    };
    let north = seed("north", "{}");
    assert_eq!(
        judge(&with("30000:32767"), None, &north, DOMAIN),
        "refused: true\n\
         Cluster a: spec.componentsOverride.apiserver.nodePortRange: \"30000:32767\" is no port range: it \
         must read FIRST-LAST, FIRST+COUNT or FIRST, with ports from 1 to 65535; write it as in 30000-32767, \
         or leave the field out for the installation's range"
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
fn settings_of_a_migration_that_cannot_be_read_close_nothing() {
    let with = |value: &str| {
        let meta = format!(r#"{{"name": "a", "annotations": {{"portico.k8c.io/migration": "{value}"}}}}"#);
        // What gateways and the webhook hold is reported too.
        let cluster = json::<Cluster>(&format!(r#"{{"metadata": {meta}}}"#)).trimmed();
        judge(&cluster, None, &seed("north", "{}"), DOMAIN)
    };
    assert_eq!(with("quiet=1h,close=NodePort"), "refused: false\n");
    assert_eq!(
        with("quiet=1d"),
        "refused: false\n\
         Cluster a: metadata.annotations[portico.k8c.io/migration]: quiet: \"1d\" is no time: a unit is \
         missing or unknown, as in 90s or 1m30s, so the former way in is not closed at the end of a \
         migration; write it as in quiet=10m,nodes=by-hand, each setting at most once, or remove the \
         annotation"
    );
}

#[test]
fn budgets_that_are_no_bounds_are_void() {
    let cluster: Cluster = json(
        r#"{"metadata": {"name": "a", "annotations": {"portico.k8c.io/max-connections": "0",
            "portico.k8c.io/max-connections-per-second": "ten", "portico.k8c.io/fair-share": "101"}}}"#,
    );
    assert_eq!(
        judge(&cluster, None, &seed("north", "{}"), DOMAIN),
        "refused: false\n\
         Cluster a: metadata.annotations[portico.k8c.io/max-connections]: \"0\" is no bound, so the \
         gateway's own applies; write a whole number from 1 to 4294967295\n\
         Cluster a: metadata.annotations[portico.k8c.io/max-connections-per-second]: \"ten\" is no bound, so \
         the gateway's own applies; write a whole number from 1 to 4294967295\n\
         Cluster a: metadata.annotations[portico.k8c.io/fair-share]: \"101\" is no bound, so the gateway's \
         own applies; write a whole number from 1 to 100"
    );
}

#[test]
fn an_api_server_ca_that_is_no_ca_is_reported() {
    let cluster: Cluster =
        json(r#"{"metadata": {"name": "a", "annotations": {"portico.k8c.io/api-server-ca": "ca.crt"}}}"#);
    let found = "refused: false\n\
         Cluster a: metadata.annotations[portico.k8c.io/api-server-ca]: it holds no certificate, so no token \
         of this cluster can be reviewed; write the CA certificates of its API server in PEM, or remove the \
         annotation";
    for cluster in [cluster.clone(), cluster.trimmed()] {
        assert_eq!(judge(&cluster, None, &seed("north", "{}"), DOMAIN), found);
    }
}

#[test]
fn a_datacenter_that_takes_the_node_port_away_is_reported() {
    let north = seed("north", r#"{"datacenters": {"lab": {"spec": {"apiServerServiceType": "ClusterIP"}}}}"#);
    let others = strategy::names(|strategy| !strategy.has_node_ports());
    assert_eq!(
        judge(&read("a", r#"{"cloud": {"dc": "lab"}}"#), None, &north, DOMAIN),
        format!(
            "refused: false\n\
             Cluster a: spec.cloud.dc: the datacenter \"lab\" sets apiServerServiceType: ClusterIP, but the \
             strategy NodePort exposes NodePort Services only: the API server is not reachable through the \
             gateway; remove apiServerServiceType from the datacenter in the Seed, or choose {others}"
        )
    );
}

#[test]
fn another_namespace_than_its_own_is_ignored_and_reported() {
    let cluster: Cluster = json(r#"{"metadata": {"name": "a"}, "status": {"namespaceName": "kube-system"}}"#);
    assert_eq!(
        judge(&cluster, None, &seed("north", "{}"), DOMAIN),
        "refused: false\n\
         Cluster a: status.namespaceName: \"kube-system\" is ignored, the namespace is always \"cluster-a\"; \
         leave the field out"
    );
}
