//! Sequences of changes, and what follows from each step.

use std::collections::BTreeMap;
use std::net::IpAddr;

use portico_api::configuration::KubermaticConfiguration;
use portico_api::names::Tenant;
use portico_api::port_range::PortRange;
use proptest::prelude::*;

use super::*;
use crate::strategy::{self, AnsweredBy};
use crate::testing::{cluster, configuration, migrating, read, seed};

const DOMAIN: &str = r#"{"exposeStrategy": "NodePort", "ingress": {"domain": "kkp.example.com"}}"#;

fn planner(mode: Mode) -> Planner {
    let settings = Settings { reserved_ports: vec![6_443, 8_002, 8_088], ..Settings::new(mode) };
    Planner::new(settings, PersistedState::default(), 42)
}

/// A planner that knows a configuration and the seed `kubermatic` with `spec`.
fn with_seed(spec: &str) -> Planner {
    let mut planner = planner(Mode::Plan);
    planner.apply([set_configuration(DOMAIN), set_seed(spec)]);
    planner
}

fn apply_configuration(configuration: KubermaticConfiguration) -> PlannerChange {
    PlannerChange::Configuration(Change::Apply(Box::new(configuration)))
}

fn set_configuration(spec: &str) -> PlannerChange {
    apply_configuration(configuration(spec))
}

fn apply_seed(seed: Seed) -> PlannerChange {
    PlannerChange::Seed(Change::Apply(Box::new(seed)))
}

fn set_seed(spec: &str) -> PlannerChange {
    apply_seed(seed("kubermatic", spec))
}

fn set(cluster: Cluster) -> PlannerChange {
    PlannerChange::Cluster(Change::Apply(Box::new(cluster)))
}

fn delete_cluster(name: ClusterName) -> PlannerChange {
    PlannerChange::Cluster(Change::Delete(name))
}

fn delete_service(key: ObjectKey) -> PlannerChange {
    PlannerChange::Service(Change::Delete(key))
}

fn set_cluster(name: &str, spec: &str) -> PlannerChange {
    set(cluster(name, spec))
}

fn service(namespace: &str, name: &str, node_port: &str) -> Service {
    read(&format!(
        r#"{{"metadata": {{"namespace": "{namespace}", "name": "{name}",
                "annotations": {{"nodeport-proxy.k8s.io/expose": "NodePort"}}}},
            "spec": {{"type": "NodePort", "ports": [{{"name": "secure", "port": 443 {node_port}}}]}}}}"#
    ))
}

fn set_service(namespace: &str, name: &str, node_port: &str) -> PlannerChange {
    PlannerChange::Service(Change::Apply(Box::new(service(namespace, name, node_port))))
}

/// Outputs as one line each.
fn shown(outputs: &[Output]) -> Vec<String> {
    let line = |output: &Output| match output {
        Output::Service(Change::Apply(service)) | Output::PlannedService(Change::Apply(service)) => {
            let kind = service.spec.service_type;
            let expose = service.metadata.annotation("nodeport-proxy.k8s.io/expose").unwrap_or("-");
            format!("service {} {kind:?} {expose}", service.metadata.key())
        }
        Output::Service(Change::Delete(key)) | Output::PlannedService(Change::Delete(key)) => {
            format!("no service {key}")
        }
        Output::Policy(Change::Apply(policy)) => {
            let closed = if policy.node_port_listeners { "" } else { " no-node-ports" };
            format!("policy {} {}{closed}", policy.tenant, policy.allow)
        }
        Output::Policy(Change::Delete(name)) => format!("no policy {name}"),
        Output::Problems(object, problems) => {
            let reasons: Vec<&str> = problems.iter().map(|problem| problem.reason).collect();
            format!("problems {object} [{}]", reasons.join(","))
        }
        Output::Note(object, text) => format!("note {object} {text}"),
        Output::Timeouts(timeouts) => format!("timeouts {:?}", timeouts.sni_idle),
    };
    outputs.iter().map(line).collect()
}

fn strategy_of(planner: &Planner, name: &str) -> (String, String) {
    let decision = planner.plan(&ClusterName::new(name)).unwrap().decision;
    (decision.strategy.to_string(), decision.decided_by.to_string())
}

fn node_port(planner: &Planner, name: &str) -> u16 {
    planner.plan(&ClusterName::new(name)).unwrap().address.port.unwrap()
}

#[test]
fn the_documents_of_the_manual_work_as_written() {
    let mut planner = planner(Mode::Plan);
    let outputs = planner.apply([
        set_cluster("clustername", r#"{"exposeStrategy": "Tunneling"}"#),
        set_cluster("follower", "{}"),
        set_seed(r#"{"exposeStrategy": "LoadBalancer"}"#),
        set_configuration(DOMAIN),
    ]);
    assert_eq!(
        shown(&outputs),
        [
            "policy clustername any",
            "service cluster-clustername/apiserver-external ClusterIP SNI,Tunneling",
            "service cluster-clustername/konnectivity-server ClusterIP SNI,Tunneling",
            "policy follower any",
            "service cluster-follower/apiserver-external NodePort NodePort",
            "service cluster-follower/konnectivity-server NodePort NodePort",
        ]
    );
    assert_eq!(strategy_of(&planner, "clustername"), ("Tunneling".into(), "Cluster".into()));
    assert_eq!(strategy_of(&planner, "follower"), ("LoadBalancer".into(), "Seed".into()));
    assert_eq!(planner.problems().count(), 0);
}

/// The plan of cluster `a`, and what is wrong with clusters.
fn address_of(settings: Settings, seed: &str, configuration_spec: &str) -> (Plan, Vec<String>) {
    let mut planner = Planner::new(settings, PersistedState::default(), 42);
    let configuration = set_configuration(configuration_spec);
    planner.apply([configuration, set_seed(seed), set_cluster("a", "{}")]);
    let of_clusters = planner.problems().filter(|problem| problem.object.kind == Kind::Cluster);
    let problems = of_clusters.map(ToString::to_string).collect();
    (planner.plan(&ClusterName::new("a")).unwrap(), problems)
}

#[test]
fn an_address_names_the_port_the_gateway_listens_on() {
    let settings = Settings { sni_port: 27_402, ..Settings::new(Mode::Plan) };
    let (plan, _) = address_of(settings, r#"{"exposeStrategy": "Tunneling"}"#, DOMAIN);
    assert_eq!(&*plan.address.url, "https://a.kubermatic.kkp.example.com:27402");
}

#[test]
fn clusters_of_a_seed_without_a_proxy_are_reached_on_its_nodes() {
    let nodes: Vec<IpAddr> = ["192.0.2.2", "192.0.2.1"].map(|ip| ip.parse().unwrap()).into();
    let settings = Settings { node_ips: nodes.clone(), ..Settings::new(Mode::Plan) };
    let disabled = r#"{"nodeportProxy": {"disable": true}}"#;
    for (configuration, host) in [(DOMAIN, "a.kubermatic.kkp.example.com"), ("{}", "192.0.2.1")] {
        let (plan, problems) = address_of(settings.clone(), disabled, configuration);
        assert_eq!((plan.answered_by, plan.address.ip), (AnsweredBy::SeedNodes, Some(nodes[1])));
        assert_eq!(*plan.address.url, format!("https://{host}:{}", plan.address.port.unwrap()));
        assert_eq!(plan.node_ips, nodes);
        assert!(problems.is_empty(), "{problems:?}");
    }
    let (plan, _) = address_of(settings, "{}", DOMAIN);
    assert!(plan.node_ips.is_empty(), "the gateway answers");
}

#[test]
fn a_cluster_without_a_known_address_is_reported() {
    let disabled = r#"{"nodeportProxy": {"disable": true}}"#;
    for (seed, remedy) in [(disabled, "--node-address"), ("{}", "status.address.ip")] {
        let (_, problems) = address_of(Settings::new(Mode::Plan), seed, "{}");
        assert!(problems[0].starts_with("Cluster a: no address can be given to its users"), "{problems:?}");
        assert!(problems[0].contains(remedy), "{problems:?}");
        let (_, problems) = address_of(Settings::new(Mode::Plan), seed, DOMAIN);
        assert!(problems.is_empty(), "a name is enough: {problems:?}");
    }
}

#[test]
fn a_seed_with_a_disabled_proxy_opens_no_node_ports() {
    let mut planner = with_seed(r#"{"exposeStrategy": "NodePort", "nodeportProxy": {"disable": true}}"#);
    let outputs =
        planner.apply([set_cluster("a", "{}"), set_cluster("b", r#"{"exposeStrategy": "Tunneling"}"#)]);
    assert_eq!(
        shown(&outputs),
        [
            "policy a any no-node-ports",
            "service cluster-a/apiserver-external NodePort NodePort",
            "service cluster-a/konnectivity-server NodePort NodePort",
            "policy b any no-node-ports",
            "problems Cluster b [tunneling-without-proxy]",
        ]
    );
}

#[test]
fn one_change_touches_one_cluster() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", "{}"), set_cluster("b", "{}")]);
    let outputs = planner
        .apply([set_cluster("b", r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24"]}}"#)]);
    assert_eq!(shown(&outputs), ["policy b 192.0.2.0/24"]);
    assert_eq!(planner.apply([set_cluster("a", "{}")]), [], "the same again");
}

#[test]
fn a_changed_seed_plans_its_own_clusters_anew() {
    let mut planner = planner(Mode::Plan);
    let other = |spec: &str| apply_seed(seed("south", spec));
    planner.apply([
        set_configuration(DOMAIN),
        set_seed(r#"{"datacenters": {"north-1": {}}}"#),
        other(r#"{"datacenters": {"south-1": {}}}"#),
        set_cluster("a", r#"{"cloud": {"dc": "north-1"}}"#),
        set_cluster("b", r#"{"cloud": {"dc": "south-1"}, "apiServerAllowedIPRanges": {}}"#),
    ]);
    let outputs = planner.apply([other(
        r#"{"datacenters": {"south-1": {}}, "defaultAPIServerAllowedIPRanges": ["10.0.0.0/8"]}"#,
    )]);
    assert_eq!(shown(&outputs), ["policy b 10.0.0.0/8"]);
}

#[test]
fn of_several_seeds_none_decides_for_the_clusters_of_another() {
    let first = || {
        seed(
            "aaa",
            r#"{"datacenters": {"one": {}}, "seedDNSOverwrite": "first", "exposeStrategy":
        "Tunneling", "nodeportProxy": {"envoy": {"connectionSettings": {"sniListenerIdleTimeout": "1h"}}}}"#,
        )
    };
    let second = || seed("bbb", r#"{"datacenters": {"two": {}}}"#);
    let objects = || {
        [
            set_configuration(DOMAIN),
            apply_seed(first()),
            apply_seed(second()),
            set_cluster("a", r#"{"cloud": {"dc": "one"}}"#),
            set_cluster("b", r#"{"cloud": {"dc": "two"}}"#),
        ]
    };
    let mut both = planner(Mode::Plan);
    both.apply(objects());
    let named = |planner: &Planner| {
        planner.plans().map(|plan| format!("{} {}", plan.seed, plan.decision.strategy)).collect::<Vec<_>>()
    };
    assert_eq!(named(&both), ["aaa Tunneling", "bbb NodePort"]);
    assert_eq!(both.timeouts, Timeouts::default());
    let reasons: Vec<_> = both.problems().map(|problem| problem.reason).collect();
    assert_eq!(reasons, ["several-seeds", "several-seeds"]);
    for (only, expected) in [("aaa", ["aaa Tunneling"; 2]), ("bbb", ["bbb NodePort"; 2])] {
        let settings = Settings { seed: Some(only.into()), ..Settings::new(Mode::Plan) };
        let mut one = Planner::new(settings, PersistedState::default(), 42);
        one.apply(objects());
        assert_eq!(named(&one), expected);
        assert_eq!(one.timeouts.sni_idle.is_some(), only == "aaa");
        assert_eq!(one.problems().count(), 0);
    }
    let settings = Settings { seed: Some("ccc".into()), ..Settings::new(Mode::Plan) };
    let mut none = Planner::new(settings, PersistedState::default(), 42);
    none.apply(objects());
    let problem = none.problems().next().unwrap();
    assert_eq!(problem.message, "no Seed is called \"ccc\", as --seed says; there are: aaa, bbb");
    assert_eq!(problem.remedy, "correct --seed, or leave it out");
    let same = seed(
        "bbb",
        r#"{"datacenters": {"two": {}},
        "nodeportProxy": {"envoy": {"connectionSettings": {"sniListenerIdleTimeout": "60m"}}}}"#,
    );
    both.apply([apply_seed(same)]);
    assert!(both.timeouts.sni_idle.is_some() && both.problems().count() == 0);
}

#[test]
fn what_worked_stays_in_force_when_a_cluster_becomes_invalid() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", r#"{"apiServerAllowedIPRanges": {}}"#)]);
    let port = node_port(&planner, "a");
    let outputs = planner
        .apply([set_cluster("a", r#"{"exposeStrategy": "tunneling", "apiServerAllowedIPRanges": {}}"#)]);
    assert_eq!(shown(&outputs), ["problems Cluster a [unknown-strategy]"]);
    assert_eq!(node_port(&planner, "a"), port);
    // A later change of the seed counts for what is in force.
    let outputs = planner.apply([set_seed(r#"{"defaultAPIServerAllowedIPRanges": ["10.0.0.0/8"]}"#)]);
    assert_eq!(shown(&outputs), ["policy a 10.0.0.0/8"]);
    let outputs = planner.apply([set_cluster("a", r#"{"apiServerAllowedIPRanges": {}}"#)]);
    assert_eq!(shown(&outputs), ["problems Cluster a []"]);
}

#[test]
fn a_cluster_that_never_was_usable_admits_no_client_if_its_list_cannot_be_read() {
    let mut planner = with_seed("{}");
    let outputs = planner.apply([
        set_cluster("a", r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["10.0.0.0/8", "10.0.0"]}}"#),
        set_cluster(
            "b",
            r#"{"exposeStrategy": "?", "apiServerAllowedIPRanges": {"cidrBlocks": ["10.0.0.0/8"]}}"#,
        ),
    ]);
    assert_eq!(
        shown(&outputs),
        [
            "policy a 0.0.0.0/32",
            "problems Cluster a [not-a-network]",
            "policy b 10.0.0.0/8",
            "problems Cluster b [unknown-strategy]",
        ]
    );
}

#[test]
fn a_strategy_change_needs_the_label() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", r#"{"exposeStrategy": "NodePort"}"#)]);
    let tunneling = r#"{"exposeStrategy": "Tunneling"}"#;
    let outputs = planner.apply([set_cluster("a", tunneling)]);
    assert_eq!(shown(&outputs), ["problems Cluster a [strategy-change]"]);
    assert_eq!(strategy_of(&planner, "a").0, "NodePort");

    let outputs = planner.apply([set(migrating("a", tunneling))]);
    assert_eq!(
        shown(&outputs),
        [
            "service cluster-a/apiserver-external ClusterIP SNI,Tunneling",
            "service cluster-a/konnectivity-server ClusterIP SNI,Tunneling",
            "problems Cluster a []",
        ]
    );
    assert_eq!(planner.persisted().node_ports.of_namespace("cluster-a").count(), 0, "its NodePorts are free");
    assert_eq!(planner.apply([set_cluster("a", tunneling)]), [], "the label may go afterwards");
}

#[test]
fn seed_and_configuration_do_not_move_existing_clusters() {
    let mut planner = with_seed(r#"{"exposeStrategy": "NodePort"}"#);
    planner.apply([set_cluster("a", "{}"), set(migrating("b", "{}"))]);
    let outputs = planner.apply([set_seed(r#"{"exposeStrategy": "Tunneling"}"#), set_cluster("new", "{}")]);
    assert_eq!(
        shown(&outputs),
        [
            "problems Cluster a [keeps-strategy]",
            "service cluster-b/apiserver-external ClusterIP SNI,Tunneling",
            "service cluster-b/konnectivity-server ClusterIP SNI,Tunneling",
            "policy new any",
            "service cluster-new/apiserver-external ClusterIP SNI,Tunneling",
            "service cluster-new/konnectivity-server ClusterIP SNI,Tunneling",
        ]
    );
    assert_eq!(
        planner.problems().next().unwrap().to_string(),
        "Cluster a: spec.exposeStrategy: it stays at NodePort although Seed now says Tunneling: existing \
         clusters are not moved; write NodePort to make it plain, or add the label \
         unsafe-expose-strategy-migration to move it"
    );
    assert_eq!(strategy_of(&planner, "a"), ("NodePort".into(), "before".into()));
    assert_eq!(
        shown(&planner.apply([set_cluster("a", r#"{"exposeStrategy": "NodePort"}"#)])),
        ["problems Cluster a []"]
    );
}

#[test]
fn a_cluster_that_goes_frees_its_ports_and_its_services() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", "{}")]);
    assert_eq!(planner.persisted().node_ports.of_namespace("cluster-a").count(), 2);
    let outputs = planner.apply([delete_cluster(ClusterName::new("a"))]);
    assert_eq!(
        shown(&outputs),
        [
            "no service cluster-a/apiserver-external",
            "no service cluster-a/konnectivity-server",
            "no policy a"
        ]
    );
    assert_eq!(planner.persisted().node_ports.of_namespace("cluster-a").count(), 0);
}

#[test]
fn node_ports_are_the_same_after_a_restart() {
    let mut first = with_seed("{}");
    first.apply([set_cluster("a", "{}"), set_cluster("gone", "{}")]);
    let mut second = restarted(&first);
    second.apply([set_seed("{}"), set_cluster("a", "{}")]);
    assert_eq!(second.initial_sync_complete(true), []);
    assert_eq!(node_port(&second, "a"), node_port(&first, "a"));
    assert_eq!(second.persisted().node_ports.of_namespace("cluster-gone").count(), 0);
    assert_eq!(second.persisted().node_ports.of_namespace("cluster-a").count(), 2);
}

fn restarted(first: &Planner) -> Planner {
    let settings = Settings::new(Mode::Plan);
    let persisted = PersistedState::from_json(&first.persisted().to_json().unwrap()).unwrap();
    let mut second = Planner::new(settings, persisted, 43);
    second.apply([set_configuration(DOMAIN)]);
    second
}

#[test]
fn a_strategy_that_changed_while_no_gateway_ran_is_refused_and_the_old_one_stays() {
    let mut first = with_seed("{}");
    first.apply([set_cluster("a", "{}"), set_cluster("b", "{}")]);
    let mut second = restarted(&first);
    second.apply([
        set_seed(r#"{"exposeStrategy": "Tunneling"}"#),
        set_cluster("a", r#"{"exposeStrategy": "LoadBalancer"}"#),
        set_cluster("b", "{}"),
    ]);
    second.initial_sync_complete(true);
    assert_eq!(node_port(&second, "a"), node_port(&first, "a"));
    assert_eq!(node_port(&second, "b"), node_port(&first, "b"));
    let problems: Vec<_> =
        second.problems().map(|problem| (&*problem.object.key.name, problem.reason)).collect();
    assert_eq!(problems, [("a", "strategy-change"), ("b", "keeps-strategy")]);
    let mut third = restarted(&second);
    third.apply([set_seed("{}"), set(migrating("a", r#"{"exposeStrategy": "LoadBalancer"}"#))]);
    assert_eq!(third.persisted().strategies[&ClusterName::new("a")], ExposeStrategy::LoadBalancer);
}

#[test]
fn a_manifest_that_cannot_be_read_for_a_while_costs_neither_strategy_nor_node_ports() {
    let mut first = with_seed("{}");
    first.apply([set_cluster("a", "{}")]);
    let mut second = restarted(&first);
    second.apply([set_seed("{}"), set_cluster("other", "{}")]);
    second.initial_sync_complete(false);
    second.apply([set_cluster("a", r#"{"exposeStrategy": "Tunneling"}"#)]);
    assert_eq!(node_port(&second, "a"), node_port(&first, "a"));
    second.apply([delete_cluster(ClusterName::new("a"))]);
    second.apply([set_cluster("a", "{}")]);
    assert_eq!(node_port(&second, "a"), node_port(&first, "a"), "it was away for a moment");
}

#[test]
fn a_cluster_is_judged_when_its_whole_step_is_there() {
    let mut planner = planner(Mode::Plan);
    assert_eq!(planner.note([set_cluster("a", "{}"), set_seed("{}")]), []);
    let global = r#"{"exposeStrategy": "Tunneling", "ingress": {"domain": "kkp.example.com"}}"#;
    planner.apply([set_configuration(global)]);
    assert_eq!(planner.persisted().strategies[&ClusterName::new("a")], ExposeStrategy::Tunneling);
    assert_eq!(planner.problems().count(), 0);
}

const FEW_PORTS: &str =
    r#"{"ingress": {"domain": "kkp.example.com"}, "userCluster": {"nodePortRange": "30000-30002"}}"#;

#[test]
fn a_cluster_without_free_node_ports_is_reported_and_gets_them_later() {
    let mut planner = planner(Mode::Plan);
    planner.apply([set_configuration(FEW_PORTS), set_seed("{}")]);
    let outputs = planner.apply([set_cluster("a", "{}"), set_cluster("b", "{}")]);
    assert_eq!(
        shown(&outputs),
        [
            "policy a any",
            "service cluster-a/apiserver-external NodePort NodePort",
            "service cluster-a/konnectivity-server NodePort NodePort",
            "policy b any",
            "problems Cluster b [node-ports-exhausted]",
        ]
    );
    let without = strategy::names(|strategy| !strategy.has_node_ports());
    assert_eq!(
        planner.problems().next().unwrap().to_string(),
        format!(
            "Cluster b: the NodePort range 30000-30002 is used up: 2 of 3 ports are in use, 2 more are \
             needed; widen spec.userCluster.nodePortRange of the KubermaticConfiguration (it must equal the \
             seed's own range), remove clusters, or use the strategy {without}, which needs no NodePorts"
        )
    );
    let outputs = planner.apply([delete_cluster(ClusterName::new("a"))]);
    assert_eq!(
        shown(&outputs)[3..],
        [
            "service cluster-b/apiserver-external NodePort NodePort",
            "service cluster-b/konnectivity-server NodePort NodePort",
            "problems Cluster b []",
        ]
    );
}

#[test]
fn a_service_that_a_user_wrote_replaces_a_planned_one() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", "{}")]);
    let written = set_service("cluster-a", "apiserver-external", r#", "nodePort": 31000"#);
    let outputs = planner.apply([written.clone()]);
    assert_eq!(
        shown(&outputs),
        [
            "service cluster-a/apiserver-external NodePort NodePort",
            "note Service cluster-a/apiserver-external takes the place of the Service planned for Cluster a",
        ]
    );
    assert_eq!(node_port(&planner, "a"), 31_000);
    assert_eq!(shown(&planner.apply([written])), ["service cluster-a/apiserver-external NodePort NodePort"]);

    let outputs = planner.apply([delete_service(ObjectKey::new("cluster-a", "apiserver-external"))]);
    assert_eq!(
        shown(&outputs),
        ["service cluster-a/apiserver-external NodePort NodePort"],
        "the planned one is back"
    );
    assert_ne!(node_port(&planner, "a"), 31_000);
}

#[test]
fn a_written_service_without_a_node_port_gets_one_that_stays_until_it_goes() {
    let mut planner = planner(Mode::Plan);
    let outputs = planner.apply([set_service("apps", "web", "")]);
    let [Output::Service(Change::Apply(first))] = &*outputs else { panic!("{:?}", shown(&outputs)) };
    let port = first.spec.ports[0].node_port.unwrap();
    assert!(PortRange::NODE_PORTS.contains(port));
    let again = planner.apply([set_service("apps", "web", "")]);
    assert_eq!(again, outputs);
    let outputs = planner.apply([delete_service(ObjectKey::new("apps", "web"))]);
    assert_eq!(shown(&outputs), ["no service apps/web"]);
    assert_eq!(planner.persisted().node_ports.of_namespace("apps").count(), 0);
}

#[test]
fn a_node_port_outside_the_range_is_warned_of_whenever_the_range_is_known() {
    let mut planner = planner(Mode::Plan);
    let warnings = |planner: &Planner| planner.problems().map(ToString::to_string).collect::<Vec<_>>();
    let outputs = planner.apply([set_service("apps", "web", r#", "nodePort": 22"#)]);
    let Some(Output::Service(Change::Apply(served))) = outputs.last() else {
        panic!("{:?}", shown(&outputs))
    };
    assert_eq!(served.spec.ports[0].node_port, Some(22), "it is served");
    assert_eq!(
        warnings(&planner),
        ["Service apps/web: spec.ports[0].nodePort: 22 lies outside the NodePort range 30000-32767, and \
             is opened all the same; choose a number from the range, or widen spec.userCluster.nodePortRange \
             of the KubermaticConfiguration"]
    );
    let wide = r#"{"ingress": {"domain": "kkp.example.com"}, "userCluster": {"nodePortRange": "20-40000"}}"#;
    planner.apply([set_configuration(wide)]);
    assert!(warnings(&planner).is_empty(), "{:?}", warnings(&planner));
    planner.apply([set_configuration(DOMAIN)]);
    assert_eq!(warnings(&planner).len(), 1);
}

#[test]
fn a_written_service_cannot_take_a_port_of_the_gateway() {
    let mut planner = planner(Mode::Plan);
    planner.apply([set_service("apps", "web", r#", "nodePort": 8002"#)]);
    let found: Vec<_> = planner.problems().map(ToString::to_string).collect();
    assert!(found[0].contains("8002 cannot be used: the gateway itself listens there"), "{found:?}");
    assert_eq!(found.len(), 1, "{found:?}");
}

#[test]
fn a_written_service_cannot_take_the_node_port_of_a_cluster() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", "{}")]);
    let port = node_port(&planner, "a");
    let outputs = planner.apply([set_service("apps", "web", &format!(r#", "nodePort": {port}"#))]);
    let [Output::Problems(_, problems), Output::Service(Change::Apply(served))] = &*outputs else {
        panic!("{:?}", shown(&outputs))
    };
    assert_eq!(
        problems[0].to_string(),
        format!(
            "Service apps/web: spec.ports[0].nodePort: {port} cannot be used: NodePort {port} belongs to \
             cluster-a/apiserver-external/secure; choose another number, or leave it out and let one be drawn"
        )
    );
    assert_eq!(served.spec.ports[0].node_port, None);

    let outputs = planner.apply([delete_cluster(ClusterName::new("a"))]);
    let Some(Output::Service(Change::Apply(served))) = outputs.last() else {
        panic!("{:?}", shown(&outputs))
    };
    assert_eq!(served.spec.ports[0].node_port, Some(port), "it is free now");
}

#[test]
fn duplicates_are_reported_and_the_older_object_counts() {
    let mut planner = planner(Mode::Plan);
    let elder = |kind: &str, name: &str, namespace: &str, born: &str| {
        format!(
            r#"{{"kind": "{kind}", "metadata": {{"name": "{name}", "namespace": "{namespace}",
                "creationTimestamp": "{born}"}}, "spec": {{"ingress": {{"domain": "kkp.example.com"}},
                "datacenters": {{"lab": {{}}}}}}}}"#
        )
    };
    planner.apply([
        apply_seed(read(&elder("Seed", "north", "a", "2026-02-01T00:00:00Z"))),
        apply_seed(read(&elder("Seed", "north", "b", "2026-01-01T00:00:00Z"))),
        apply_seed(read(&elder("Seed", "south", "a", "2026-03-01T00:00:00Z"))),
        apply_configuration(read(&elder("KubermaticConfiguration", "k", "a", "2026-02-01T00:00:00Z"))),
        apply_configuration(read(&elder("KubermaticConfiguration", "k", "b", "2026-01-01T00:00:00Z"))),
    ]);
    let problems: Vec<String> = planner.problems().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        [
            "KubermaticConfiguration a/k: an installation has one configuration, and KubermaticConfiguration \
             b/k is it: this one is ignored; remove one of the two",
            "Seed a/north: metadata.name: Seed b/north has the same name \"north\" and is the elder, or the \
             first of equals; remove or rename one of the two",
            "Seed a/south: spec.datacenters.lab: the datacenter \"lab\" belongs to Seed b/north, whose \
             clusters keep it; rename it, or remove it from one of the two",
        ]
    );
}

#[test]
fn a_seed_that_becomes_invalid_stays_as_it_was() {
    let mut planner = with_seed(r#"{"defaultAPIServerAllowedIPRanges": ["10.0.0.0/8"]}"#);
    planner.apply([set_cluster("a", r#"{"apiServerAllowedIPRanges": {}}"#)]);
    let outputs = planner.apply([set_seed(r#"{"defaultAPIServerAllowedIPRanges": ["10.0.0"]}"#)]);
    assert_eq!(shown(&outputs), ["problems Seed kubermatic/kubermatic [not-a-network]"]);
    let outputs = planner.apply([set_cluster("b", r#"{"apiServerAllowedIPRanges": {}}"#)]);
    assert_eq!(shown(&outputs)[0], "policy b 10.0.0.0/8");
}

#[test]
fn clusters_wait_for_a_seed_that_never_was_usable() {
    let mut planner =
        with_seed(r#"{"exposeStrategy": "Other", "defaultAPIServerAllowedIPRanges": ["10.0.0.0/8"]}"#);
    let outputs = planner.apply([set_cluster("a", r#"{"apiServerAllowedIPRanges": {}}"#)]);
    assert_eq!(shown(&outputs), ["policy a 10.0.0.0/8", "problems Cluster a [waits-for-another]"]);
    assert_eq!(
        planner.problems().next_back_of_clusters(),
        "Cluster a: it cannot be exposed while Seed kubermatic/kubermatic has problems of its own; mend Seed \
         kubermatic/kubermatic"
    );
    let outputs = planner.apply([set_seed("{}")]);
    assert_eq!(
        shown(&outputs),
        [
            "problems Seed kubermatic/kubermatic []",
            "policy a any",
            "service cluster-a/apiserver-external NodePort NodePort",
            "service cluster-a/konnectivity-server NodePort NodePort",
            "problems Cluster a []",
        ]
    );
}

trait LastOfClusters {
    fn next_back_of_clusters(self) -> String;
}

impl<'a, I: Iterator<Item = &'a Problem>> LastOfClusters for I {
    fn next_back_of_clusters(self) -> String {
        self.filter(|problem| problem.object.kind == Kind::Cluster).last().unwrap().to_string()
    }
}

#[test]
fn a_paused_cluster_stays_as_it_is() {
    let mut planner = with_seed("{}");
    planner.apply([set_cluster("a", "{}")]);
    assert_eq!(planner.apply([set_cluster("a", r#"{"pause": true}"#)]), []);
    let changed = |pause: bool| {
        set_cluster(
            "a",
            &format!(r#"{{"pause": {pause}, "apiServerAllowedIPRanges": {{"cidrBlocks": ["10.0.0.0/8"]}}}}"#),
        )
    };
    assert_eq!(shown(&planner.apply([changed(true)])), ["problems Cluster a [paused]"]);
    assert_eq!(shown(&planner.apply([changed(false)])), ["policy a 10.0.0.0/8", "problems Cluster a []"]);
}

#[test]
fn beside_kkp_only_policies_and_problems_come_out() {
    let mut planner = planner(Mode::Observe);
    let outputs = planner.apply([
        set_configuration(DOMAIN),
        set_seed(r#"{"nodeportProxy": {"envoy": {"connectionSettings": {"sniListenerIdleTimeout": "1h"}}}}"#),
        set_cluster("a", r#"{"exposeStrategy": "NodePort"}"#),
        set_service("cluster-a", "apiserver-external", r#", "nodePort": 31000"#),
    ]);
    assert_eq!(
        shown(&outputs),
        ["service cluster-a/apiserver-external NodePort NodePort", "timeouts Some(3600s)", "policy a any",]
    );
    let outputs = planner.apply([set_cluster("a", r#"{"exposeStrategy": "Tunneling"}"#)]);
    assert_eq!(outputs, [], "the webhook of KKP has judged the change already");
    assert_eq!(planner.revision(), 0);
}

#[test]
fn of_several_changes_for_one_object_the_last_counts() {
    let mut planner = with_seed("{}");
    let outputs = planner.apply([set_cluster("a", "{}"), delete_cluster(ClusterName::new("a"))]);
    assert_eq!(outputs, []);
    let outputs = planner.apply([delete_cluster(ClusterName::new("a")), set_cluster("a", "{}")]);
    assert_eq!(outputs.len(), 3);
}

#[derive(Debug, Clone)]
enum Step {
    Cluster(u8, Option<&'static str>, bool),
    NoCluster(u8),
    Seed(Option<&'static str>, bool),
    Service(u8, Option<u16>),
    NoService(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let strategy =
        || prop::option::of(prop::sample::select(vec!["NodePort", "LoadBalancer", "Tunneling", "bad"]));
    prop_oneof![
        6 => (0..4_u8, strategy(), any::<bool>()).prop_map(|(n, s, label)| Step::Cluster(n, s, label)),
        2 => (0..4_u8).prop_map(Step::NoCluster),
        2 => (strategy(), any::<bool>()).prop_map(|(s, disable)| Step::Seed(s, disable)),
        2 => (0..4_u8, prop::option::of(30_000..30_006_u16)).prop_map(|(n, p)| Step::Service(n, p)),
        2 => (0..4_u8).prop_map(Step::NoService),
    ]
}

fn change(step: &Step) -> PlannerChange {
    let spec = |strategy: &Option<&str>, rest: &str| match strategy {
        Some(strategy) => format!(r#"{{"exposeStrategy": "{strategy}" {rest}}}"#),
        None => format!("{{ {} }}", rest.trim_start_matches(',')),
    };
    match step {
        Step::Cluster(n, strategy, true) => set(migrating(&format!("c{n}"), &spec(strategy, ""))),
        Step::Cluster(n, strategy, false) => set_cluster(&format!("c{n}"), &spec(strategy, "")),
        Step::NoCluster(n) => delete_cluster(ClusterName::new(&format!("c{n}"))),
        Step::Seed(strategy, disable) => {
            set_seed(&spec(strategy, &format!(r#", "nodeportProxy": {{"disable": {disable}}}"#)))
        }
        Step::Service(n, port) => {
            let port = port.map_or(String::new(), |port| format!(r#", "nodePort": {port}"#));
            set_service(&format!("cluster-c{n}"), "apiserver-external", &port)
        }
        Step::NoService(n) => delete_service(ObjectKey::new(&format!("cluster-c{n}"), "apiserver-external")),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_outputs_add_up_to_what_is_in_force(steps in prop::collection::vec(step(), 1..60)) {
        let mut planner = planner(Mode::Plan);
        planner.apply([set_configuration(FEW_PORTS), set_seed("{}")]);
        let mut services: BTreeMap<ObjectKey, Arc<Service>> = BTreeMap::new();
        let mut policies: BTreeMap<Tenant, Arc<ClusterPolicy>> = BTreeMap::new();
        let mut problems: BTreeMap<ObjectRef, Vec<Problem>> = BTreeMap::new();
        let mut written = BTreeSet::new();
        for step in &steps {
            let change = change(step);
            match &change {
                PlannerChange::Service(Change::Apply(service)) => { written.insert(service.metadata.key()); }
                PlannerChange::Service(Change::Delete(key)) => { written.remove(key); }
                _ => {}
            }
            for output in planner.apply([change]) {
                match output {
                    Output::Service(Change::Apply(service))
                    | Output::PlannedService(Change::Apply(service)) => {
                        services.insert(service.metadata.key(), service);
                    }
                    Output::Service(Change::Delete(key))
                    | Output::PlannedService(Change::Delete(key)) => {
                        prop_assert!(services.remove(&key).is_some(), "{key} was not there");
                    }
                    Output::Policy(Change::Apply(policy)) => {
                        policies.insert(policy.tenant.clone(), policy);
                    }
                    Output::Policy(Change::Delete(name)) => prop_assert!(policies.remove(&name).is_some()),
                    Output::Problems(object, found) if found.is_empty() => { problems.remove(&object); }
                    Output::Problems(object, found) => { problems.insert(object, found); }
                    Output::Note(..) | Output::Timeouts(_) => {}
                }
            }
            let mut expected = BTreeMap::new();
            for plan in planner.plans() {
                for service in plan.services {
                    let is_front = &*service.metadata.name == "front-loadbalancer";
                    if !is_front && !written.contains(&service.metadata.key()) {
                        expected.insert(service.metadata.key(), service);
                    }
                }
                prop_assert_eq!(&**policies.get(&Tenant::from(plan.cluster)).unwrap(), &plan.policy);
            }
            let served: BTreeMap<_, _> = services.iter().filter(|(key, _)| !written.contains(key))
                .map(|(key, service)| (key.clone(), (**service).clone())).collect();
            prop_assert_eq!(served, expected);
            prop_assert!(written.iter().all(|key| services.contains_key(key)));
            let by_planner: Vec<&Problem> = planner.problems().collect();
            prop_assert_eq!(by_planner, problems.values().flatten().collect::<Vec<_>>());

            let mut ports: Vec<u16> = services.values()
                .filter(|service| !written.contains(&service.metadata.key()))
                .flat_map(|service| service.spec.ports.iter().filter_map(|port| port.node_port)).collect();
            let count = ports.len();
            ports.sort_unstable();
            ports.dedup();
            prop_assert_eq!(ports.len(), count, "a NodePort was given twice");
        }
    }
}
