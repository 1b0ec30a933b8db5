//! KKP's rules as tables, each case under the name that KKP gives to the field or value. They cover the
//! strategy, validation, Services, addresses, allow lists and connection settings. What a proxy makes of
//! Services is in `portico-routes/tests/promises/kkp_rules.rs`.

use std::time::Duration;

use portico_api::cluster::{Address, Cluster};
use portico_api::meta::Strings;
use portico_api::service::Service;
use portico_api::strategy::ExposeStrategy;

use crate::inputs::{Ingress, Inputs, Known, LoadBalancers, Scope};
use crate::plan::{Plan, plan};
use crate::policy::policy;
use crate::resolve::{self, DecidedBy, Decision};
use crate::testing::{cluster, configuration, read, seed};
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
        let decision = Decision { strategy: ExposeStrategy::LoadBalancer, decided_by: DecidedBy::Cluster };
        let scope = Scope { cluster: &cluster, decision, seed: &seed, configuration: None };
        let policy = policy(&scope, LoadBalancers::Cloud);
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

/// The plan for `cluster`, below a Seed `kubermatic` with `seed_spec`, in an installation with a domain.
fn planned(cluster: &Cluster, seed_spec: &str, known: &Known, node_ports: &[(&str, u16)]) -> Plan {
    let (seed, above) =
        (seed("kubermatic", seed_spec), configuration(r#"{"ingress": {"domain": "kkp.example.com"}}"#));
    let decision = resolve::strategy(cluster, &seed, Some(&above));
    let scope = Scope { cluster, decision, seed: &seed, configuration: Some(&above) };
    let node_port = |service: &str, _: &str| {
        node_ports.iter().find(|(name, _)| *name == service).map(|(_, number)| *number)
    };
    let load_balancers = LoadBalancers::Cloud;
    plan(&Inputs { scope, node_ports: &node_port, known, load_balancers, sni_port: 6_443 })
}

/// `type port->targetPort [nodePort] annotations`, the last without their prefix and those of clouds.
fn row(service: &Service) -> String {
    let port = &service.spec.ports[0];
    let target = serde_json::to_string(&port.target_port).unwrap().replace('"', "");
    let node_port = port.node_port.map_or(String::new(), |number| format!(" nodePort={number}"));
    let annotations = |annotations: &Strings| {
        let ours = annotations.iter().filter_map(|(key, value)| {
            Some(format!(" {}={value}", key.strip_prefix("nodeport-proxy.k8s.io/")?))
        });
        ours.collect::<String>()
    };
    format!(
        "{:?} {}:{}->{target}{node_port}{}",
        service.spec.service_type,
        port.name,
        port.port,
        annotations(&service.metadata.annotations)
    )
}

#[test]
fn services_of_a_control_plane_are_those_of_kkp_under_every_strategy() {
    const ALLOCATED: &[(&str, u16)] =
        &[("apiserver-external", 31_234), ("konnectivity-server", 31_235), ("mla-gateway-ext", 31_236)];
    const SEED: &str = r#"{"mla": {"userClusterMLAEnabled": true}, "datacenters": {
        "as-is": {"spec": {}},
        "cluster-ip": {"spec": {"apiServerServiceType": "ClusterIP"}},
        "node-port": {"spec": {"apiServerServiceType": "NodePort"}},
        "balancer": {"spec": {"apiServerServiceType": "LoadBalancer"}}}}"#;
    const HOST: &str = "p4k2m7xzq9.kubermatic.kkp.example.com";
    let sni = |prefix: &str, port: &str| format!(r#"port-mapping={{"{port}":"{prefix}{HOST}"}}"#);
    for (strategy, datacenter, node_ports, service, expected) in [
        (
            "NodePort",
            "as-is",
            ALLOCATED,
            "apiserver-external",
            "NodePort secure:443->31234 nodePort=31234 expose=NodePort".to_owned(),
        ),
        (
            "NodePort",
            "as-is",
            ALLOCATED,
            "konnectivity-server",
            "NodePort secure:443->8132 nodePort=31235 expose=NodePort".to_owned(),
        ),
        (
            "NodePort",
            "as-is",
            ALLOCATED,
            "mla-gateway-ext",
            "NodePort http-ext:80->http-ext nodePort=31236 expose=NodePort".to_owned(),
        ),
        // The first pass, before the API server of the seed has allocated a number.
        (
            "NodePort",
            "as-is",
            &[],
            "apiserver-external",
            "NodePort secure:443->6443 expose=NodePort".to_owned(),
        ),
        (
            "NodePort",
            "node-port",
            ALLOCATED,
            "apiserver-external",
            "NodePort secure:443->31234 nodePort=31234 expose=NodePort".to_owned(),
        ),
        // The datacenter changes the type of one Service, and no annotation.
        (
            "NodePort",
            "cluster-ip",
            ALLOCATED,
            "apiserver-external",
            "ClusterIP secure:443->6443 expose=NodePort".to_owned(),
        ),
        (
            "NodePort",
            "cluster-ip",
            ALLOCATED,
            "konnectivity-server",
            "NodePort secure:443->8132 nodePort=31235 expose=NodePort".to_owned(),
        ),
        (
            "NodePort",
            "balancer",
            ALLOCATED,
            "apiserver-external",
            "LoadBalancer secure:443->31234 nodePort=31234 expose=NodePort".to_owned(),
        ),
        (
            "LoadBalancer",
            "as-is",
            ALLOCATED,
            "apiserver-external",
            "NodePort secure:443->31234 nodePort=31234 expose-namespaced=true".to_owned(),
        ),
        (
            "LoadBalancer",
            "as-is",
            ALLOCATED,
            "konnectivity-server",
            "NodePort secure:443->8132 nodePort=31235 expose-namespaced=true".to_owned(),
        ),
        (
            "LoadBalancer",
            "as-is",
            ALLOCATED,
            "mla-gateway-ext",
            "NodePort http-ext:80->http-ext nodePort=31236 expose-namespaced=true".to_owned(),
        ),
        // A placeholder: the ports follow those of the other Services.
        ("LoadBalancer", "as-is", ALLOCATED, "front-loadbalancer", "LoadBalancer secure:443->443".to_owned()),
        (
            "Tunneling",
            "as-is",
            ALLOCATED,
            "apiserver-external",
            format!("ClusterIP secure:443->6443 expose=SNI,Tunneling {}", sni("", "secure")),
        ),
        (
            "Tunneling",
            "as-is",
            ALLOCATED,
            "konnectivity-server",
            format!(
                "ClusterIP secure:443->8132 expose=SNI,Tunneling {}",
                sni("konnectivity-server.", "secure")
            ),
        ),
        (
            "Tunneling",
            "as-is",
            ALLOCATED,
            "mla-gateway-ext",
            format!("ClusterIP http-ext:80->http-ext expose=SNI {}", sni("mla-gateway.", "http-ext")),
        ),
        // The number is cleared only where the type that results is ClusterIP.
        (
            "Tunneling",
            "balancer",
            ALLOCATED,
            "apiserver-external",
            format!(
                "LoadBalancer secure:443->6443 nodePort=31234 expose=SNI,Tunneling {}",
                sni("", "secure")
            ),
        ),
    ] {
        let spec = format!(
            r#"{{"exposeStrategy": "{strategy}", "cloud": {{"dc": "{datacenter}"}},
                "mla": {{"monitoringEnabled": true}}}}"#
        );
        let plan = planned(&cluster("p4k2m7xzq9", &spec), SEED, &Known::default(), node_ports);
        let found = plan.services.iter().find(|found| *found.metadata.name == *service);
        assert_eq!(found.map(row), Some(expected), "{strategy} {datacenter} {service}");
    }
}

#[test]
fn mla_gateway_ext_exists_where_the_seed_and_the_cluster_both_have_monitoring_or_logging() {
    for (of_seed, of_cluster, exists) in [
        (false, r#"{"monitoringEnabled": true}"#, false),
        (true, "{}", false),
        (true, r#"{"monitoringEnabled": true}"#, true),
        (true, r#"{"loggingEnabled": true}"#, true),
    ] {
        let seed = format!(r#"{{"mla": {{"userClusterMLAEnabled": {of_seed}}}}}"#);
        let cluster = cluster("a", &format!(r#"{{"mla": {of_cluster}}}"#));
        let services = planned(&cluster, &seed, &Known::default(), &[]).services;
        let found = services.iter().any(|service| &*service.metadata.name == "mla-gateway-ext");
        assert_eq!(found, exists, "seed {of_seed}, cluster {of_cluster}");
    }
}

/// What is known outside: ingress of `front-loadbalancer` and of `apiserver-external`, answers of DNS. An
/// entry that is no address is a host name.
fn known(front: &[&str], apiserver: &[&str], resolved: &[&str]) -> Known {
    let ingress = |entries: &[&str]| {
        let ingress = |entry: &&str| match entry.parse() {
            Ok(ip) => Ingress { ip: Some(ip), hostname: "".into() },
            Err(_) => Ingress { ip: None, hostname: (*entry).into() },
        };
        entries.iter().map(ingress).collect()
    };
    Known {
        front: ingress(front),
        apiserver: ingress(apiserver),
        resolved: resolved.iter().map(|ip| ip.parse().unwrap()).collect(),
        ..Known::default()
    }
}

/// `externalName port ip apiServerExternalAddress`, and `url`, which must follow from the first two.
fn address_row(address: &Address) -> String {
    let or_none = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let ip = address.ip.map_or("-".to_owned(), |ip| ip.to_string());
    let port = address.port.map_or("-".to_owned(), |port| port.to_string());
    let external = or_none(&address.api_server_external_address);
    format!("{} {port} {ip} {external} {}", or_none(&address.external_name), or_none(&address.url))
}

#[test]
fn status_address_is_what_kkp_computes_under_every_strategy() {
    const NORTH: &str = r#"{"seedDNSOverwrite": "north"}"#;
    const BALANCER: &str = r#"{"datacenters": {"dc": {"spec": {"apiServerServiceType": "LoadBalancer"}}}}"#;
    const V4: &[&str] = &["203.0.113.9", "203.0.113.7", "2001:db8::1"];
    for (strategy, seed, known, number, expected) in [
        // By name, at the NodePort; the middle label is the Seed's name unless the Seed says otherwise.
        (
            "NodePort",
            "{}",
            known(&[], &[], V4),
            Some(31_234),
            "a.kubermatic.kkp.example.com 31234 203.0.113.7 - https://a.kubermatic.kkp.example.com:31234",
        ),
        (
            "NodePort",
            NORTH,
            known(&[], &[], V4),
            Some(31_234),
            "a.north.kkp.example.com 31234 203.0.113.7 - https://a.north.kkp.example.com:31234",
        ),
        // IPv6 only where DNS knows no IPv4.
        (
            "NodePort",
            NORTH,
            known(&[], &[], &["2001:db8::2", "2001:db8::1"]),
            Some(31_234),
            "a.north.kkp.example.com 31234 2001:db8::1 - https://a.north.kkp.example.com:31234",
        ),
        // No number is allocated yet.
        ("NodePort", NORTH, known(&[], &[], &[]), None, "a.north.kkp.example.com - - - -"),
        (
            "Tunneling",
            NORTH,
            known(&[], &[], V4),
            None,
            "a.north.kkp.example.com 6443 203.0.113.7 - https://a.north.kkp.example.com:6443",
        ),
        // The load balancer's address or, without one, its last host name, and what DNS says of that.
        (
            "LoadBalancer",
            NORTH,
            known(&["203.0.113.9"], &[], &[]),
            Some(31_234),
            "203.0.113.9 31234 203.0.113.9 - https://203.0.113.9:31234",
        ),
        (
            "LoadBalancer",
            NORTH,
            known(&["lb.example.com", "10.0.0.9", "203.0.113.9"], &[], &[]),
            Some(31_234),
            "203.0.113.9 31234 203.0.113.9 - https://203.0.113.9:31234",
        ),
        (
            "LoadBalancer",
            NORTH,
            known(&["a.example.com", "b.example.com"], &[], V4),
            Some(31_234),
            "b.example.com 31234 203.0.113.7 - https://b.example.com:31234",
        ),
        (
            "LoadBalancer",
            NORTH,
            known(&["2001:db8::9"], &[], &[]),
            Some(31_234),
            "2001:db8::9 31234 2001:db8::9 - https://[2001:db8::9]:31234",
        ),
        ("LoadBalancer", NORTH, known(&[], &[], &[]), Some(31_234), "- 31234 - - -"),
        // A Service apiserver-external of type LoadBalancer has an address of its own beside it.
        (
            "Tunneling",
            BALANCER,
            known(&[], &["203.0.113.5"], &[]),
            Some(31_234),
            "a.kubermatic.kkp.example.com 6443 - https://203.0.113.5 \
             https://a.kubermatic.kkp.example.com:6443",
        ),
        (
            "Tunneling",
            BALANCER,
            known(&[], &["203.0.113.5", "api.example.com"], &[]),
            Some(31_234),
            "a.kubermatic.kkp.example.com 6443 - https://api.example.com \
             https://a.kubermatic.kkp.example.com:6443",
        ),
        (
            "Tunneling",
            NORTH,
            known(&[], &["203.0.113.5"], &[]),
            None,
            "a.north.kkp.example.com 6443 - - https://a.north.kkp.example.com:6443",
        ),
    ] {
        let cluster =
            cluster("a", &format!(r#"{{"exposeStrategy": "{strategy}", "cloud": {{"dc": "dc"}}}}"#));
        let numbers: Vec<_> = number.map(|number| ("apiserver-external", number)).into_iter().collect();
        let address = planned(&cluster, seed, &known, &numbers).address;
        assert_eq!(address_row(&address), expected, "{strategy} {seed} {known:?}");
        assert_eq!(&*address.internal_url, "apiserver-external.cluster-a.svc.cluster.local.");
    }
}

#[test]
fn status_address_that_kkp_wrote_stands() {
    let given = r#"{"metadata": {"name": "a"}, "spec": {"exposeStrategy": "NodePort"}, "status": {"address":
        {"url": "https://given.example.com:30001", "externalName": "given.example.com", "port": 30001}}}"#;
    let plan = planned(&read(given), "{}", &Known::default(), &[("apiserver-external", 31_234)]);
    assert_eq!(&*plan.address.url, "https://given.example.com:30001");
}
