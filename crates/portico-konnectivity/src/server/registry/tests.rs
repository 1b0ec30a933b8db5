use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;

#[derive(Debug)]
struct Agent {
    name: &'static str,
    identifiers: Identifiers,
    draining: AtomicBool,
}

impl Candidate for Agent {
    fn agent(&self) -> &str {
        self.name
    }

    fn identifiers(&self) -> &Identifiers {
        &self.identifiers
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }
}

fn agent(name: &'static str, identifiers: &str) -> Arc<Agent> {
    let identifiers = Identifiers::parse(identifiers).unwrap();
    Arc::new(Agent { name, identifiers, draining: AtomicBool::new(false) })
}

fn registry(strategies: &[Strategy], agents: &[&Arc<Agent>]) -> Registry<Agent> {
    let mut registry = Registry::new(strategies.to_vec(), true);
    agents.iter().for_each(|agent| registry.add(agent));
    registry
}

fn picked(registry: &Registry<Agent>, host: &str) -> Option<&'static str> {
    registry.pick(host, 0, &[]).map(|agent| agent.name)
}

#[test]
fn by_default_every_agent_gets_dials_in_turn() {
    let (a, b) = (agent("a", ""), agent("b", "host=x"));
    let registry = registry(&[Strategy::Default], &[&a, &b]);
    let names: Vec<_> = (0..4).map(|start| registry.pick("h", start, &[]).unwrap().name).collect();
    assert_eq!(names, ["a", "b", "a", "b"]);
    assert_eq!(registry.pick("h", 0, &[a]).unwrap().name, "b", "the next fit agent");
}

#[test]
fn an_agent_that_drains_gets_dials_only_if_all_do() {
    let (a, b) = (agent("a", "host=x"), agent("b", "host=x"));
    for strategy in [Strategy::Default, Strategy::DestHost] {
        let registry = registry(&[strategy], &[&a, &b]);
        a.draining.store(true, Relaxed);
        b.draining.store(false, Relaxed);
        assert!((0..9).all(|start| registry.pick("x", start, &[]).unwrap().name == "b"));
        b.draining.store(true, Relaxed);
        assert_eq!(picked(&registry, "x"), Some("a"));
    }
}

#[test]
fn of_the_streams_of_one_agent_the_oldest_that_does_not_drain_counts() {
    let (first, second) = (agent("a", "host=x"), agent("a", "host=x"));
    let mut registry = registry(&[Strategy::DestHost, Strategy::Default], &[&first, &second]);
    assert!((0..9).all(|start| Arc::ptr_eq(&registry.pick("x", start, &[]).unwrap(), &first)));
    let other = registry.pick("x", 0, &[Arc::clone(&first)]);
    assert!(other.is_some_and(|other| Arc::ptr_eq(&other, &second)), "the first has been tried");
    assert!(registry.pick("x", 0, &[Arc::clone(&first), Arc::clone(&second)]).is_none());
    let another = agent("b", "host=x");
    registry.add(&another);
    assert!((0..9).all(|start| registry.pick("x", start, &[Arc::clone(&first)]).unwrap().name == "b"));
    registry.remove(&another);
    first.draining.store(true, Relaxed);
    assert!((0..9).all(|start| Arc::ptr_eq(&registry.pick("x", start, &[]).unwrap(), &second)));
    second.draining.store(true, Relaxed);
    assert!(Arc::ptr_eq(&registry.pick("x", 0, &[]).unwrap(), &first), "all drain");
    registry.remove(&first);
    assert!(Arc::ptr_eq(&registry.pick("x", 0, &[]).unwrap(), &second));
    registry.remove(&second);
    assert!(registry.pick("x", 0, &[]).is_none() && registry.hosts.is_empty() && !registry.is_ready());
}

#[test]
fn strategies_are_asked_in_their_order() {
    let (named, route, other) =
        (agent("named", "host=x&ipv4=1.2.3.4"), agent("route", "default-route=true"), agent("z", ""));
    let all = [&other, &route, &named];
    let registry_of = |strategies: &[Strategy]| registry(strategies, &all);
    let chain = registry_of(&[Strategy::DestHost, Strategy::DefaultRoute, Strategy::Default]);
    assert_eq!(picked(&chain, "x"), Some("named"));
    assert_eq!(picked(&chain, "1.2.3.4"), Some("named"));
    assert_eq!(picked(&chain, "X"), Some("route"), "names are compared as they are");
    assert_eq!(picked(&registry_of(&[Strategy::DestHost]), "y"), None);
    assert_eq!(picked(&registry_of(&[Strategy::DestHost, Strategy::Default]), "y"), Some("z"));
    assert_eq!(
        [Strategy::Default, Strategy::DefaultRoute, Strategy::DestHost].map(|s| chain.count(s)),
        [3, 1, 1]
    );
}

#[test]
fn the_longest_network_around_an_address_wins_after_exact_matches() {
    let (wide, narrow, exact) = (
        agent("wide", "cidr=10.0.0.0/8"),
        agent("narrow", "cidr=10.1.0.0/16"),
        agent("exact", "ipv4=10.1.2.3"),
    );
    let six = agent("six", "cidr=fd00::/8");
    let agents = [&wide, &narrow, &exact, &six];
    let registry_with = registry(&[Strategy::DestHost], &agents);
    for (host, expected) in [
        ("10.1.2.3", Some("exact")),
        ("10.1.9.9", Some("narrow")),
        ("10.2.0.1", Some("wide")),
        ("fd12::1", Some("six")),
        ("11.0.0.1", None),
        ("name", None),
    ] {
        assert_eq!(picked(&registry_with, host), expected, "{host}");
    }
    assert_eq!(registry_with.pick("10.1.9.9", 0, &[narrow]).unwrap().name, "wide", "if that one is lost");
    let mut without = Registry::new(vec![Strategy::DestHost], false);
    without.add(&wide);
    assert_eq!(picked(&without, "10.2.0.1"), None, "as upstream, unless --route-cidr");
}

#[test]
fn an_agent_of_a_network_is_enough_to_be_ready_where_networks_are_routed() {
    let of_network = agent("a", "cidr=10.0.0.0/8");
    let again = agent("a", "cidr=10.0.0.0/8");
    let routes = registry(&[Strategy::DestHost], &[&of_network, &again]);
    assert!(routes.is_ready());
    assert_eq!(routes.count(Strategy::DestHost), 1, "one agent, which found the server twice");
    let mut ignores = Registry::new(vec![Strategy::DestHost], false);
    ignores.add(&of_network);
    assert!(!ignores.is_ready());
}

#[test]
fn only_an_agent_of_the_first_strategy_makes_a_server_ready() {
    let unnamed = agent("a", "");
    let by_host_first = registry(&[Strategy::DestHost, Strategy::Default], &[&unnamed]);
    assert!(!by_host_first.is_ready(), "as upstream");
    assert_eq!(picked(&by_host_first, "x"), Some("a"));
    assert!(registry(&[Strategy::Default, Strategy::DestHost], &[&unnamed]).is_ready());
}

#[test]
fn an_identifier_that_is_repeated_counts_once() {
    let repeated = agent("a", "host=x&host=x&cidr=10.0.0.0/8&cidr=10.0.0.0/8");
    let mut registry = registry(&[Strategy::DestHost], &[&repeated]);
    registry.remove(&repeated);
    assert!(registry.hosts.is_empty() && registry.networks.is_empty());
}
