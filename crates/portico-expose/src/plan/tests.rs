//! Plans on the documents of real installations, compared in full.

use proptest::prelude::*;

use portico_api::names::Authority;
use portico_api::strategy::ExposeStrategy;

use super::*;
use crate::inputs::{Ingress, Known, LoadBalancers};
use crate::networks::DEFAULT_AGENT_IP;
use crate::resolve;
use crate::services::APISERVER;
use crate::testing::{behind, cluster, plan_of, seed, shown};

fn p4k2(spec: &str, seed_spec: &str) -> Plan {
    plan_of(
        &cluster("p4k2m7xzq9", spec),
        &seed("kubermatic", seed_spec),
        &Known::default(),
        LoadBalancers::Cloud,
    )
}

#[test]
fn a_node_port_cluster_has_node_port_services() {
    let plan = p4k2("{}", r#"{"seedDNSOverwrite": "north"}"#);
    assert_eq!(
        shown(&plan.services),
        "cluster-p4k2m7xzq9/apiserver-external NodePort secure 443 -> 31234 nodePort 31234 \
         {\"app\":\"apiserver\"}\n  \
           nodeport-proxy.k8s.io/expose: NodePort\n\
         cluster-p4k2m7xzq9/konnectivity-server NodePort secure 443 -> 8132 nodePort 31235 \
         {\"app\":\"apiserver\"}\n  \
           nodeport-proxy.k8s.io/expose: NodePort\n"
    );
    assert_eq!(&*plan.address.url, "https://p4k2m7xzq9.north.kkp.example.com:31234");
    assert_eq!(&*plan.address.internal_url, "apiserver-external.cluster-p4k2m7xzq9.svc.cluster.local.");
    assert_eq!(plan.answered_by, AnsweredBy::Gateway);
}

#[test]
fn a_tunneling_cluster_has_host_names_and_authorities() {
    let plan = p4k2(
        r#"{"exposeStrategy": "Tunneling", "mla": {"monitoringEnabled": true}}"#,
        r#"{"seedDNSOverwrite": "north", "mla": {"userClusterMLAEnabled": true}}"#,
    );
    assert_eq!(
        shown(&plan.services),
        "cluster-p4k2m7xzq9/apiserver-external ClusterIP secure 443 -> 6443 {\"app\":\"apiserver\"}\n  \
           nodeport-proxy.k8s.io/expose: SNI,Tunneling\n  \
           nodeport-proxy.k8s.io/port-mapping: {\"secure\":\"p4k2m7xzq9.north.kkp.example.com\"}\n\
         cluster-p4k2m7xzq9/konnectivity-server ClusterIP secure 443 -> 8132 {\"app\":\"apiserver\"}\n  \
           nodeport-proxy.k8s.io/expose: SNI,Tunneling\n  \
           nodeport-proxy.k8s.io/port-mapping: \
           {\"secure\":\"konnectivity-server.p4k2m7xzq9.north.kkp.example.com\"}\n\
         cluster-p4k2m7xzq9/mla-gateway-ext ClusterIP http-ext 80 -> \"http-ext\" \
           {\"app.kubernetes.io/name\":\"mla-gateway\"}\n  \
           nodeport-proxy.k8s.io/expose: SNI\n  \
           nodeport-proxy.k8s.io/port-mapping: \
           {\"http-ext\":\"mla-gateway.p4k2m7xzq9.north.kkp.example.com\"}\n"
    );
    assert_eq!(&*plan.address.url, "https://p4k2m7xzq9.north.kkp.example.com:6443");
    let entries: Vec<_> = plan
        .entries
        .iter()
        .map(|entry| (entry.host.as_ref().unwrap().as_str(), entry.authority.as_ref().map(Authority::as_str)))
        .collect();
    assert_eq!(
        entries,
        [
            (
                "p4k2m7xzq9.north.kkp.example.com",
                Some("apiserver-external.cluster-p4k2m7xzq9.svc.cluster.local:443")
            ),
            (
                "konnectivity-server.p4k2m7xzq9.north.kkp.example.com",
                Some("konnectivity-server.cluster-p4k2m7xzq9.svc.cluster.local:443")
            ),
            ("mla-gateway.p4k2m7xzq9.north.kkp.example.com", None),
        ]
    );
    assert_eq!(plan.agent_ip, Some(DEFAULT_AGENT_IP));
    assert_eq!(
        serde_json::to_string(&plan.certificate).unwrap(),
        r#"{"dns":["apiserver-external","apiserver-external.cluster-p4k2m7xzq9",
"apiserver-external.cluster-p4k2m7xzq9.svc","apiserver-external.cluster-p4k2m7xzq9.svc.cluster.local",
"kubernetes","kubernetes.default","kubernetes.default.svc","kubernetes.default.svc.cluster.local",
"p4k2m7xzq9.north.kkp.example.com"],"ips":["10.240.16.1","100.64.30.10","127.0.0.1"]}"#
            .replace('\n', "")
    );
}

const LOAD_BALANCER: &str = r#"{"exposeStrategy": "LoadBalancer",
    "apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24", "198.51.100.0/25"]}}"#;
const RANGES: &str = r#"{"defaultAPIServerAllowedIPRanges": ["198.51.100.0/24"],
    "nodeportProxy": {"annotations": {"example.com/a": "1", "example.com/b": "1"},
        "envoy": {"loadBalancerService": {"sourceRanges": ["203.0.113.0/24"],
            "annotations": {"example.com/b": "2"}}}}}"#;

#[test]
fn a_load_balancer_cluster_has_a_load_balancer_of_its_own() {
    assert_eq!(
        shown(&p4k2(LOAD_BALANCER, RANGES).services),
        "cluster-p4k2m7xzq9/apiserver-external NodePort secure 443 -> 31234 nodePort 31234 \
         {\"app\":\"apiserver\"}\n  \
           nodeport-proxy.k8s.io/expose-namespaced: true\n\
         cluster-p4k2m7xzq9/konnectivity-server NodePort secure 443 -> 8132 nodePort 31235 \
         {\"app\":\"apiserver\"}\n  \
           nodeport-proxy.k8s.io/expose-namespaced: true\n\
         cluster-p4k2m7xzq9/front-loadbalancer LoadBalancer secure 443 -> 443 \
         {\"app\":\"nodeport-proxy-envoy\"}\n  \
           example.com/a: 1\n  \
           example.com/b: 2\n  \
           service.beta.kubernetes.io/load-balancer-source-ranges: \
           192.0.2.0/24,198.51.100.0/24,203.0.113.0/24\n  \
           ranges: 192.0.2.0/24 198.51.100.0/24 203.0.113.0/24\n"
    );
}

#[test]
fn a_load_balancer_on_aws_has_the_annotations_that_keep_idle_connections() {
    let plan = p4k2(r#"{"exposeStrategy": "LoadBalancer", "cloud": {"aws": {"region": "x"}}}"#, RANGES);
    let front = plan.services.last().unwrap();
    assert_eq!(
        front
            .metadata
            .annotation("service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled"),
        Some("true")
    );
    assert_eq!(
        front.metadata.annotation("service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout"),
        Some("3600")
    );
}

#[test]
fn the_address_of_a_load_balancer_cluster_is_that_of_its_load_balancer() {
    let (cluster, seed) = (cluster("a", LOAD_BALANCER), seed("north", "{}"));
    let plan = plan_of(&cluster, &seed, &behind(&[("203.0.113.9", "")]), LoadBalancers::Cloud);
    assert_eq!(&*plan.address.url, "https://203.0.113.9:31234");
    assert!(plan.certificate.ips.contains(&"203.0.113.9".parse().unwrap()));

    let plan = plan_of(&cluster, &seed, &behind(&[("", "lb.example.com")]), LoadBalancers::Cloud);
    assert_eq!((&*plan.address.url, plan.address.ip), ("https://lb.example.com:31234", None));
    assert!(plan.certificate.dns.contains("lb.example.com"));

    let plan = plan_of(&cluster, &seed, &behind(&[("2001:db8::9", "")]), LoadBalancers::Cloud);
    assert_eq!(&*plan.address.url, "https://[2001:db8::9]:31234");

    let plan = plan_of(&cluster, &seed, &Known::default(), LoadBalancers::Cloud);
    assert_eq!((&*plan.address.url, plan.address.port), ("", Some(31_234)), "not known yet");
}

#[test]
fn without_a_cloud_the_gateway_takes_the_place_of_the_load_balancer() {
    let plan = plan_of(
        &cluster("a", LOAD_BALANCER),
        &seed("north", "{}"),
        &Known::default(),
        LoadBalancers::Gateway,
    );
    assert_eq!(plan.answered_by, AnsweredBy::Gateway);
    assert_eq!(&*plan.address.url, "https://a.north.kkp.example.com:31234");
    let apiserver = plan.services.iter().find(|service| &*service.metadata.name == APISERVER).unwrap();
    assert_eq!(apiserver.metadata.annotation("nodeport-proxy.k8s.io/expose"), Some("NodePort"));
}

#[test]
fn with_the_proxy_disabled_addresses_point_at_the_nodes() {
    let known = Known {
        node_ips: ["203.0.113.22", "203.0.113.21"].map(|ip| ip.parse().unwrap()).into(),
        resolved: vec!["198.51.100.1".parse().unwrap()],
        ..Known::default()
    };
    let disabled = seed("north", r#"{"nodeportProxy": {"disable": true}}"#);
    let plan = plan_of(&cluster("a", "{}"), &disabled, &known, LoadBalancers::Gateway);
    assert_eq!(plan.answered_by, AnsweredBy::SeedNodes);
    assert_eq!(plan.address.ip, Some("203.0.113.21".parse().unwrap()));
    assert!(!plan.policy.node_port_listeners);
}

#[test]
fn a_datacenter_overrides_the_type_of_the_api_server_only() {
    let north = r#"{"datacenters": {"lab": {"spec": {"apiServerServiceType": "LoadBalancer"}}}}"#;
    let (cluster, seed) =
        (cluster("a", r#"{"cloud": {"dc": "lab"}, "exposeStrategy": "Tunneling"}"#), seed("north", north));
    let known = Known {
        apiserver: vec![Ingress { ip: "203.0.113.9".parse().ok(), hostname: "api.example.com".into() }],
        ..Known::default()
    };
    let plan = plan_of(&cluster, &seed, &known, LoadBalancers::Cloud);
    let types: Vec<_> = plan.services.iter().map(|service| service.spec.service_type).collect();
    assert_eq!(types, [ServiceType::LoadBalancer, ServiceType::ClusterIP]);
    assert_eq!(plan.services[0].spec.ports[0].node_port, Some(31_234));
    assert_eq!(&*plan.address.api_server_external_address, "https://api.example.com");
    assert_eq!(plan.address.port, Some(6_443));
    let decision = resolve::strategy(&cluster, &seed, None);
    let scope = Scope { cluster: &cluster, decision, seed: &seed, configuration: None };
    let needed: Vec<_> = node_ports_needed(scope).collect();
    assert_eq!(needed, [("apiserver-external", "secure")]);
}

#[test]
fn the_names_of_a_kubevirt_cluster_use_its_own_service_network() {
    let plan = p4k2(r#"{"cloud": {"kubevirt": {}}}"#, "{}");
    assert!(plan.certificate.ips.contains(&"10.241.0.1".parse().unwrap()));
}

proptest! {
    #[test]
    fn a_plan_is_determined_by_its_inputs(
        strategy in prop::sample::select(ExposeStrategy::ALL.to_vec()),
        name in "[a-z][a-z0-9]{0,9}",
        label in "[a-z]{0,8}",
        mla: bool,
        disable: bool,
    ) {
        let cluster = cluster(&name, &format!(
            r#"{{"exposeStrategy": "{strategy}", "mla": {{"loggingEnabled": {mla}}}}}"#));
        let seed = seed("s", &format!(
            r#"{{"seedDNSOverwrite": "{label}", "mla": {{"userClusterMLAEnabled": true}},
                "nodeportProxy": {{"disable": {disable}}}}}"#));
        let known = behind(&[("203.0.113.9", "lb.example.com")]);
        let first = plan_of(&cluster, &seed, &known, LoadBalancers::Cloud);
        let (same_cluster, same_seed, same_known) = (cluster.clone(), seed.clone(), known.clone());
        prop_assert_eq!(&first, &plan_of(&same_cluster, &same_seed, &same_known, LoadBalancers::Cloud));
        prop_assert_eq!(first.entries.len(), if mla { 3 } else { 2 });
        for service in &first.services {
            let port = &service.spec.ports[0];
            prop_assert_eq!(&*service.metadata.namespace, &format!("cluster-{name}"));
            prop_assert!(strategy::of(strategy).has_node_ports() || port.node_port.is_none());
        }
    }
}
