//! KKP's rules as tables, each case under the name that KKP gives to the field or value: resolution of the
//! strategy, validation, allow lists, connection settings.

use std::time::Duration;

use portico_api::cluster::Cluster;
use portico_api::strategy::ExposeStrategy;

use crate::inputs::{LoadBalancers, Scope};
use crate::policy::policy;
use crate::resolve;
use crate::testing::{cluster, configuration, seed};
use crate::validate;

/// Whether a Cluster may be used, and the reasons of its problems, by the strategy that is resolved for it.
fn validated(cluster: &Cluster) -> (bool, Vec<&'static str>) {
    let (seed, above) =
        (seed("kubermatic", "{}"), configuration(r#"{"ingress": {"domain": "example.com"}}"#));
    let decision = resolve::strategy(cluster, &seed, Some(&above));
    let scope = Scope { cluster, decision, seed: &seed, configuration: Some(&above) };
    let verdict = validate::cluster(&scope, None);
    (!verdict.refused, verdict.problems.iter().map(|problem| problem.reason).collect())
}

#[test]
fn expose_strategy_is_the_first_that_is_set_of_cluster_seed_and_configuration() {
    for (on_cluster, on_seed, global, expected) in [
        ("", "", "", "NodePort"),
        ("", "", "Tunneling", "Tunneling"),
        ("", "LoadBalancer", "Tunneling", "LoadBalancer"),
        ("NodePort", "LoadBalancer", "Tunneling", "NodePort"),
        ("Tunneling", "", "", "Tunneling"),
        ("LoadBalancer", "NodePort", "", "LoadBalancer"),
    ] {
        let spec = |value| format!(r#"{{"exposeStrategy": "{value}"}}"#);
        let (seed, above) = (seed("kubermatic", &spec(on_seed)), configuration(&spec(global)));
        let decision = resolve::strategy(&cluster("a", &spec(on_cluster)), &seed, Some(&above));
        assert_eq!(decision.strategy.to_string(), expected, "{on_cluster:?} {on_seed:?} {global:?}");
    }
}

#[test]
fn tunneling_agent_ip_belongs_to_tunneling_and_strategies_are_spelled_exactly() {
    for (spec, usable) in [
        (r#"{"exposeStrategy": "NodePort"}"#, true),
        (r#"{"exposeStrategy": "LoadBalancer"}"#, true),
        (r#"{"exposeStrategy": "Tunneling"}"#, true),
        (r#"{"exposeStrategy": "tunneling"}"#, false),
        (r#"{"exposeStrategy": "ClusterIP"}"#, false),
        (r#"{"exposeStrategy": "Tunneling", "clusterNetwork": {"tunnelingAgentIP": "100.64.30.10"}}"#, true),
        (r#"{"exposeStrategy": "Tunneling", "clusterNetwork": {"tunnelingAgentIP": ""}}"#, true),
        (r#"{"exposeStrategy": "NodePort", "clusterNetwork": {"tunnelingAgentIP": "100.64.30.10"}}"#, false),
        (r#"{"exposeStrategy": "NodePort", "clusterNetwork": {"tunnelingAgentIP": ""}}"#, true),
        (
            r#"{"exposeStrategy": "LoadBalancer",
                "apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24"]}}"#,
            true,
        ),
    ] {
        let (is_usable, reasons) = validated(&cluster("a", spec));
        assert_eq!(is_usable, usable, "{spec}: {reasons:?}");
    }
}

#[test]
fn load_balancer_source_ranges_are_the_union_that_kkp_writes_to_front_loadbalancer() {
    const SEED: &str = r#"{"defaultAPIServerAllowedIPRanges": ["198.51.100.0/24"],
        "nodeportProxy": {"envoy": {"loadBalancerService": {"sourceRanges": ["203.0.113.0/24"]}}}}"#;
    const DEFAULTS: &str = r#"{"defaultAPIServerAllowedIPRanges": ["198.51.100.0/24"]}"#;
    const OWN: &str = r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24", "192.0.2.0/24"]}}"#;
    const EMPTY: &str = r#"{"apiServerAllowedIPRanges": {}}"#;
    for (on_cluster, on_seed, expected) in [
        ("{}", "{}", "any"),
        ("{}", DEFAULTS, "any"),
        ("{}", SEED, "203.0.113.0/24"),
        (EMPTY, "{}", "any"),
        (EMPTY, DEFAULTS, "198.51.100.0/24"),
        (EMPTY, SEED, "198.51.100.0/24,203.0.113.0/24"),
        (OWN, "{}", "192.0.2.0/24"),
        (OWN, DEFAULTS, "192.0.2.0/24,198.51.100.0/24"),
        (OWN, SEED, "192.0.2.0/24,198.51.100.0/24,203.0.113.0/24"),
    ] {
        let (cluster, seed) = (cluster("a", on_cluster), seed("kubermatic", on_seed));
        let policy = policy(&cluster, ExposeStrategy::LoadBalancer, &seed, LoadBalancers::Cloud);
        assert_eq!(policy.source_ranges.to_string(), expected, "{on_cluster} {on_seed}");
    }
}

#[test]
fn connection_settings_of_zero_are_unset_and_one_keepalive_value_is_enough() {
    let settings = |text: &str| {
        let spec = format!(r#"{{"nodeportProxy": {{"envoy": {{"connectionSettings": {text}}}}}}}"#);
        seed("kubermatic", &spec).spec.nodeport_proxy.envoy.connection_settings.effective()
    };
    let unset = settings("{}");
    for zero in [
        r#"{"downstreamTCPKeepaliveProbes": 0}"#,
        r#"{"upstreamTCPKeepaliveProbes": 0, "upstreamTCPKeepaliveTime": "0s"}"#,
        r#"{"sniListenerIdleTimeout": 0, "tunnelingConnectionIdleTimeout": "0s"}"#,
        r#"{"tunnelingStreamIdleTimeout": null, "downstreamTCPKeepaliveInterval": ""}"#,
    ] {
        assert_eq!(settings(zero), unset, "{zero}");
    }
    let probes = settings(r#"{"downstreamTCPKeepaliveProbes": 3}"#).downstream_keepalive.unwrap();
    assert_eq!((probes.probes, probes.time), (Some(3), None));
    let cut = settings(r#"{"upstreamTCPKeepaliveTime": "60.9s"}"#).upstream_keepalive.unwrap();
    assert_eq!(cut.time, Some(Duration::from_secs(60)), "parts of a second are cut");
    assert_eq!(settings(r#"{"sniListenerIdleTimeout": "1h"}"#).sni_idle, Some(Duration::from_secs(3_600)));
}
