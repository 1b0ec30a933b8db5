//! Two doors on the documents of real installations, compared in full, and what holds for any two.

use std::fmt::Write as _;

use proptest::prelude::*;

use portico_api::annotations::ENDPOINTS;
use portico_api::seed::Seed;

use super::*;
use crate::inputs::LoadBalancers;
use crate::networks::DEFAULT_AGENT_IP;
use crate::services::{APISERVER, APISERVER_PORT};
use crate::testing::{behind, cluster, plan_of, seed, shown};

const BY_PORT: [ExposeStrategy; 2] = [ExposeStrategy::NodePort, ExposeStrategy::LoadBalancer];

/// What runs the API server of a cluster.
#[derive(Debug, Clone, Copy)]
enum Runs {
    Portico,
    Elsewhere,
    Kkp,
}

impl Runs {
    const ALL: [Self; 3] = [Self::Portico, Self::Elsewhere, Self::Kkp];

    fn cluster(self, spec: &str) -> Cluster {
        let mut cluster = cluster("a", spec);
        match self {
            Self::Portico => return cluster.begun(),
            Self::Elsewhere => {
                cluster.metadata.annotations.insert(ENDPOINTS.into(), "203.0.113.50:6443".into());
            }
            Self::Kkp => {}
        }
        cluster
    }
}

/// The plan of `cluster` with the door by `strategy` alone.
fn by(strategy: ExposeStrategy, cluster: &Cluster, seed: &Seed, load_balancers: LoadBalancers) -> Plan {
    let known = behind(&[("203.0.113.9", "lb.example.com")]);
    plan_of(&Door::of(cluster, strategy).alone(cluster), seed, &known, load_balancers)
}

/// Each two different strategies, in one order.
fn pairs() -> [[ExposeStrategy; 2]; 3] {
    use ExposeStrategy::{LoadBalancer, NodePort, Tunneling};
    [[NodePort, LoadBalancer], [NodePort, Tunneling], [LoadBalancer, Tunneling]]
}

/// What should exist for each two doors of a cluster that Portico hosts.
fn of_each_pair(spec: &str, seed_spec: &str) -> String {
    fn json(value: &impl Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }
    let (cluster, seed) = (Runs::Portico.cluster(spec), seed("north", seed_spec));
    let mut text = String::new();
    for pair in pairs() {
        let [first, second] =
            pair.map(|strategy| by(strategy, &cluster, &seed, LoadBalancers::CloudAndGateway));
        let both = both(&first, &second);
        assert_eq!(both.conflicts, []);
        writeln!(text, "=== {} and {}\n{}", pair[0], pair[1], shown(&both.services)).unwrap();
        for entry in &both.entries {
            writeln!(text, "{}", json(entry)).unwrap();
        }
        writeln!(text, "\n{}\n\n{}\n", json(&both.certificate), json(&both.policy)).unwrap();
    }
    text
}

#[test]
fn two_doors_of_a_cluster_are_one_set_of_services() {
    insta::assert_snapshot!(of_each_pair("{}", "{}"));
}

#[test]
fn two_doors_of_a_cluster_with_everything() {
    let spec = r#"{"cloud": {"dc": "here"}, "mla": {"monitoringEnabled": true},
        "apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24"]}}"#;
    let seed_spec = r#"{"seedDNSOverwrite": "n", "mla": {"userClusterMLAEnabled": true},
        "datacenters": {"here": {"spec": {"aws": {"region": "x"}}}},
        "defaultAPIServerAllowedIPRanges": ["198.51.100.0/24"],
        "nodeportProxy": {"envoy": {"loadBalancerService": {"sourceRanges": ["203.0.113.0/24"]}}}}"#;
    insta::assert_snapshot!(of_each_pair(spec, seed_spec));
}

#[test]
fn clients_of_two_doors_are_told_apart_unless_both_come_by_port() {
    use ListenerKind::{NodePort, Sni, Tunnel};
    let spec = r#"{"cloud": {"dc": "here"}, "mla": {"monitoringEnabled": true}}"#;
    let seed_spec = r#"{"mla": {"userClusterMLAEnabled": true}, "datacenters": {"here": {}}}"#;
    let (cluster, seed) = (Runs::Portico.cluster(spec), seed("north", seed_spec));
    let plan = |strategy| by(strategy, &cluster, &seed, LoadBalancers::CloudAndGateway);
    let tunneling = plan(ExposeStrategy::Tunneling);
    for by_port in BY_PORT {
        assert_eq!(told_apart(&plan(by_port), &tunneling), Ok(BTreeSet::from([NodePort])), "{by_port}");
        assert_eq!(told_apart(&tunneling, &plan(by_port)), Ok(BTreeSet::from([Sni, Tunnel])), "{by_port}");
        // The port of a NodePort that is not allocated yet is unknown.
        let unallocated = plan(by_port);
        let entries = unallocated.entries.iter().cloned().map(|entry| Entry { node_port: None, ..entry });
        let unallocated = Plan { entries: entries.collect(), ..unallocated };
        assert_eq!(told_apart(&unallocated, &tunneling), Ok(BTreeSet::from([NodePort])), "{by_port}");
    }
    let [node_port, load_balancer] = BY_PORT.map(plan);
    for (closes, stays) in [(&node_port, &load_balancer), (&load_balancer, &node_port)] {
        assert_eq!(told_apart(closes, stays), Err(NotCounted::SameListeners));
    }
    let on_nodes = Plan { answered_by: AnsweredBy::SeedNodes, ..node_port };
    assert_eq!(told_apart(&on_nodes, &tunneling), Err(NotCounted::PastGateways));
}

#[test]
fn pods_that_listen_on_their_node_port_cannot_be_behind_both_doors() {
    for runs in Runs::ALL {
        let (cluster, seed) = (runs.cluster("{}"), seed("north", "{}"));
        let conflicts = |first, second| {
            let plan = |strategy| by(strategy, &cluster, &seed, LoadBalancers::Cloud);
            both(&plan(first), &plan(second)).conflicts
        };
        let ports = [31_234, APISERVER_PORT].map(|number| Some(TargetPort::Number(number)));
        for by_port in BY_PORT {
            let there = conflicts(by_port, ExposeStrategy::Tunneling);
            let back = conflicts(ExposeStrategy::Tunneling, by_port);
            if let Runs::Kkp = runs {
                let [first, second] = ports.clone();
                let one = PortConflict { service: APISERVER, first, second };
                let other =
                    PortConflict { service: APISERVER, first: one.second.clone(), second: one.first.clone() };
                assert_eq!((there, back), (vec![one], vec![other]), "{by_port}");
            } else {
                assert_eq!((there, back), (vec![], vec![]), "{by_port}, {runs:?}");
            }
        }
        assert_eq!(conflicts(BY_PORT[0], BY_PORT[1]), [], "{runs:?}: the number is the same");
    }
}

fn agents_at(text: &str) -> Cluster {
    cluster("a", &format!(r#"{{"clusterNetwork": {{"tunnelingAgentIP": "{text}"}}}}"#))
}

#[test]
fn a_door_without_agents_takes_their_address_along_and_back() {
    let custom = agents_at("100.64.30.99");
    let tunneling = Door::of(&custom, ExposeStrategy::Tunneling);
    assert_eq!(tunneling.agent_ip, "100.64.30.99".parse().ok());
    let left = Door::of(&custom, ExposeStrategy::NodePort).alone(&custom);
    assert_eq!(left.spec.expose_strategy, Setting::Good(ExposeStrategy::NodePort));
    assert!(left.spec.cluster_network.tunneling_agent_ip.is_unset());

    let back = tunneling.alone(&left);
    assert_eq!(back.spec.expose_strategy, Setting::Good(ExposeStrategy::Tunneling));
    assert_eq!(back.spec.cluster_network, custom.spec.cluster_network);
}

#[test]
fn what_a_cluster_says_of_its_agents_stays_as_it_is_written() {
    for written in ["", "nonsense"] {
        let cluster = agents_at(written);
        let door = Door::of(&cluster, ExposeStrategy::Tunneling);
        assert_eq!(door.agent_ip, Some(DEFAULT_AGENT_IP));
        assert_eq!(door.alone(&cluster).spec.cluster_network, cluster.spec.cluster_network, "{written:?}");
    }
}

/// Everything that a plan depends on and that differs between clusters.
#[derive(Debug, Clone)]
struct Case {
    cluster: Cluster,
    seed: Seed,
    load_balancers: LoadBalancers,
}

impl Case {
    fn plan(&self, strategy: ExposeStrategy) -> Plan {
        by(strategy, &self.cluster, &self.seed, self.load_balancers)
    }
}

fn case() -> impl Strategy<Value = Case> {
    let runs = prop::sample::select(Runs::ALL.to_vec());
    let own = prop::sample::select(vec!["null", "[]", r#"["192.0.2.0/24", "203.0.113.0/25"]"#]);
    let of_seed = prop::sample::select(vec!["[]", r#"["203.0.113.0/24"]"#]);
    let api_type = prop::sample::select(vec!["", "ClusterIP", "NodePort", "LoadBalancer"]);
    let load_balancers = prop::sample::select(vec![
        LoadBalancers::Cloud,
        LoadBalancers::Gateway,
        LoadBalancers::CloudAndGateway,
    ]);
    let flags = any::<[bool; 3]>();
    (runs, own, of_seed, api_type, load_balancers, flags).prop_map(
        |(runs, own, of_seed, api_type, load_balancers, [mla, aws, disable])| {
            let cloud = if aws { r#""dc": "here", "aws": {"region": "x"}"# } else { r#""dc": "here""# };
            let cluster = runs.cluster(&format!(
                r#"{{"cloud": {{{cloud}}}, "mla": {{"loggingEnabled": {mla}}},
                    "apiServerAllowedIPRanges": {{"cidrBlocks": {own}}}}}"#
            ));
            let seed = seed(
                "north",
                &format!(
                    r#"{{"mla": {{"userClusterMLAEnabled": true}},
                    "datacenters": {{"here": {{"spec": {{"apiServerServiceType": "{api_type}"}}}}}},
                    "nodeportProxy": {{"disable": {disable},
                        "envoy": {{"loadBalancerService": {{"sourceRanges": {of_seed}}}}}}}}}"#
                ),
            );
            Case { cluster, seed, load_balancers }
        },
    )
}

fn any_strategy() -> impl Strategy<Value = ExposeStrategy> {
    prop::sample::select(ExposeStrategy::ALL.to_vec())
}

/// Inside and outside of each list.
const CLIENTS: [&str; 4] = ["192.0.2.7", "203.0.113.7", "203.0.113.200", "198.51.100.7"];

/// Whether everything that `plan` opens is open in `both`.
fn assert_open(both: &BothDoors, plan: &Plan) {
    for service in &plan.services {
        let merged = both.services.iter().find(|one| one.metadata.name == service.metadata.name).unwrap();
        let (ports, merged_ports) = (&service.spec.ports, &merged.spec.ports);
        assert_eq!((ports.len(), merged_ports.len()), (1, 1));
        assert!(ports[0].node_port.is_none() || ports[0].node_port == merged_ports[0].node_port);
        assert!(reach(merged.spec.service_type) >= reach(service.spec.service_type));
        for (key, value) in &service.metadata.annotations {
            let found = &merged.metadata.annotations[key];
            if **key == *EXPOSE {
                let [value, found] = [value, found].map(|text| ExposeTypes::parse(text).unwrap());
                assert_eq!(value.and(found), found);
            } else {
                assert_eq!(value, found);
            }
        }
    }
    for entry in &plan.entries {
        let merged = both.entries.iter().find(|one| one.service == entry.service).unwrap();
        assert!(entry.node_port.is_none() || entry.node_port == merged.node_port);
        assert!(entry.host.is_none() || entry.host == merged.host);
        assert!(entry.authority.is_none() || entry.authority == merged.authority);
    }
    assert!(both.certificate.dns.is_superset(&plan.certificate.dns));
    assert!(both.certificate.ips.is_superset(&plan.certificate.ips));
    assert!(both.policy.node_port_listeners || !plan.policy.node_port_listeners);
}

proptest! {
    #[test]
    fn what_either_door_needs_is_there_and_nothing_else(
        case in case(),
        strategies in [any_strategy(), any_strategy()],
    ) {
        let plans = strategies.map(|strategy| case.plan(strategy));
        let [first, second] = &plans;
        let both = both(first, second);
        assert_open(&both, first);
        assert_open(&both, second);
        for service in &both.services {
            let of = |plan: &Plan| {
                plan.services.iter().find(|one| one.metadata.name == service.metadata.name).cloned()
            };
            let parts: Vec<Service> = plans.iter().filter_map(of).collect();
            prop_assert!(parts.iter().any(|part| part.spec.service_type == service.spec.service_type));
            for key in service.metadata.annotations.keys() {
                prop_assert!(parts.iter().any(|part| part.metadata.annotations.contains_key(key)));
            }
        }
        for (client, is_real) in CLIENTS.into_iter().flat_map(|client| [(client, false), (client, true)]) {
            let admits = |policy: &ClusterPolicy| policy.admits(client.parse().unwrap(), is_real);
            let by_either = plans.iter().any(|plan| admits(&plan.policy));
            prop_assert_eq!(admits(&both.policy), by_either, "{} {}", client, is_real);
        }
    }

    #[test]
    fn one_door_twice_is_that_door(case in case(), strategy in any_strategy()) {
        let plan = case.plan(strategy);
        let Plan { services, entries, certificate, policy, .. } = plan.clone();
        let expected = BothDoors { services, entries, certificate, policy, conflicts: Vec::new() };
        prop_assert_eq!(both(&plan, &plan), expected);
    }

    #[test]
    fn only_the_ports_of_pods_depend_on_which_door_is_the_first(
        case in case(),
        strategies in [any_strategy(), any_strategy()],
    ) {
        let [first, second] = strategies.map(|strategy| case.plan(strategy));
        let (there, back) = (both(&first, &second), both(&second, &first));
        let swapped = |PortConflict { service, first, second }: PortConflict| {
            PortConflict { service, first: second, second: first }
        };
        let expected: Vec<PortConflict> = back.conflicts.iter().cloned().map(swapped).collect();
        prop_assert_eq!(&there.conflicts, &expected);
        let without_ports = |mut both: BothDoors| {
            let ports = both.services.iter_mut().flat_map(|service| &mut service.spec.ports);
            ports.for_each(|port| port.target_port = None);
            BothDoors { conflicts: Vec::new(), ..both }
        };
        prop_assert_eq!(without_ports(there), without_ports(back));
    }
}
