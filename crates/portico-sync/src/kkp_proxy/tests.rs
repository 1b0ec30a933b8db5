use std::path::Path;

use portico_source::load::read_text_as;

use super::*;
use crate::site::{Site, SiteSettings};

const CONFIGURATION: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec: {ingress: {domain: kkp.example.com}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: north, namespace: kubermatic}
spec: {nodeportProxy: {envoy: {loadBalancerService: {sourceRanges: [203.0.113.0/24]}}}}
";

fn cluster(name: &str, strategy: &str) -> String {
    format!(
        "---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {{name: {name}}}
spec: {{exposeStrategy: {strategy}}}
status: {{address: {{url: 'https://{name}.given.example.com:31234'}}}}
"
    )
}

/// A Service of the age `age` with its annotations, and one endpoint.
fn service(namespace: &str, name: &str, age: u8, annotations: &str, kind: &str, ready: bool) -> String {
    let node_port = if kind == "NodePort" { format!(", nodePort: 310{age:02}") } else { String::new() };
    format!(
        "---
apiVersion: v1
kind: Service
metadata:
  name: {name}
  namespace: {namespace}
  uid: u{age}
  creationTimestamp: '2026-01-{age:02}T00:00:00Z'
  annotations: {{{annotations}}}
spec:
  type: {kind}
  clusterIP: 10.0.0.{age}
  ports: [{{name: secure, port: 443{node_port}}}, {{name: other, port: 444}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}-1
  namespace: {namespace}
  labels: {{kubernetes.io/service-name: {name}}}
addressType: IPv4
endpoints: [{{addresses: [192.0.2.{age}], conditions: {{ready: {ready}}}}}]
ports: [{{name: secure, port: 6443}}, {{name: other, port: 6444}}]
"
    )
}

const NODE_PORT: &str = "nodeport-proxy.k8s.io/expose: NodePort";

fn sni(hosts: &[(&str, &str)]) -> String {
    let hosts: Vec<String> = hosts.iter().map(|(port, host)| format!("\"{port}\": \"{host}\"")).collect();
    format!(
        "nodeport-proxy.k8s.io/expose: SNI, nodeport-proxy.k8s.io/port-mapping: '{{{}}}'",
        hosts.join(", ")
    )
}

fn site(documents: &[String]) -> Site {
    let text = CONFIGURATION.to_owned() + &documents.concat();
    let loaded = read_text_as(Path::new("seed.yaml"), &text);
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let settings = SiteSettings::default();
    Site::of_seed(loaded, &settings)
}

/// The differences, as `severity reason object: message`.
fn differences(documents: &[String]) -> Vec<String> {
    let severity = |problem: &Problem| match problem.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    let line = |problem: &Problem| {
        format!("{} {} {}: {}", severity(problem), problem.reason, problem.object, problem.message)
    };
    let mut lines: Vec<String> = site(documents).differences.iter().map(line).collect();
    lines.sort();
    lines
}

#[test]
fn a_cluster_by_node_port_needs_nothing_and_the_others_what_is_listed() {
    let tunnel = "nodeport-proxy.k8s.io/expose: 'SNI,Tunneling', nodeport-proxy.k8s.io/port-mapping: \
                  '{\"secure\": \"t.example.com\"}'";
    let found = differences(&[
        cluster("n", "NodePort"),
        service("cluster-n", "apiserver-external", 1, NODE_PORT, "NodePort", true),
        cluster("t", "Tunneling"),
        service("cluster-t", "apiserver-external", 2, tunnel, "ClusterIP", true),
        cluster("l", "LoadBalancer"),
        service(
            "cluster-l",
            "apiserver-external",
            3,
            "nodeport-proxy.k8s.io/expose-namespaced: 'true'",
            "NodePort",
            true,
        ),
    ]);
    let reasons: Vec<&str> = found.iter().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(
        reasons,
        [
            "warning agents-without-identity Cluster t",
            "warning no-projection Cluster n",
            "warning own-proxy Cluster l"
        ],
        "{found:#?}"
    );
}

#[test]
fn a_service_that_loses_one_name_today_loses_all_and_here_only_that_one() {
    let found = differences(&[
        service("x", "older", 1, &sni(&[("secure", "a.example.com")]), "ClusterIP", true),
        service(
            "y",
            "younger",
            2,
            &sni(&[("secure", "a.example.com"), ("other", "b.example.com")]),
            "ClusterIP",
            true,
        ),
    ]);
    assert_eq!(
        found,
        ["warning newly-reachable Service y/younger: host b.example.com is not served today, and would be"]
    );
}

#[test]
fn wildcards_are_names_like_others() {
    let hosts = [("secure", "*.Example.com"), ("other", "a.example.com")];
    let found = differences(&[service("x", "api", 1, &sni(&hosts), "ClusterIP", true)]);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_name_that_only_the_younger_service_can_serve_today_would_break() {
    let found = differences(&[
        service("x", "older", 1, &sni(&[("secure", "a.example.com")]), "ClusterIP", false),
        service("y", "younger", 2, &sni(&[("secure", "a.example.com")]), "ClusterIP", true),
    ]);
    assert_eq!(
        found,
        ["error would-break Service y/younger: host a.example.com is served today, and would not be"]
    );
}

#[test]
fn an_allow_list_that_nothing_enforces_today_is_shown() {
    let found = differences(&[service(
        "x",
        "api",
        1,
        &format!("{NODE_PORT}, portico.k8c.io/allow: 198.51.100.0/24"),
        "NodePort",
        true,
    )]);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        found[0].starts_with("warning allow-list-enforced Service x/api: port 31001 admits"),
        "{found:#?}"
    );
}

#[test]
fn a_service_in_the_namespace_of_a_cluster_that_is_not_there_would_break() {
    let found = differences(&[service("cluster-x", "api", 1, NODE_PORT, "NodePort", true)]);
    assert_eq!(
        found,
        ["error would-break Service cluster-x/api: port 31001 is served today, and would not be"]
    );
}

#[test]
fn an_endpoint_that_no_connection_may_go_to_is_missed() {
    let exposed = service("x", "api", 1, NODE_PORT, "NodePort", true).replace("192.0.2.1]", "169.254.0.1]");
    let found = differences(&[exposed]);
    assert_eq!(found, ["error would-break Service x/api: port 31001 is served today, and would not be"]);
}

/// KKP's front Service, with a port that nothing has any more.
const KKP_FRONT: &str = "---
apiVersion: v1
kind: Service
metadata: {name: nodeport-proxy, namespace: kubermatic}
spec:
  type: LoadBalancer
  loadBalancerSourceRanges: [203.0.113.0/24, 198.51.100.0/24]
  ports:
  - {name: healthz, port: 8002, targetPort: 8002}
  - {name: sni-listener, port: 6443, targetPort: 6443}
  - {name: tunneling-listener, port: 8088, targetPort: 8088}
  - {name: x-api-31001, port: 31001, targetPort: 31001}
  - {name: gone, port: 31099, targetPort: 31099}
";

#[test]
fn the_front_service_keeps_its_ports_but_for_the_admin_port() {
    let list = "nodeport-proxy.k8s.io/expose: 'NodePort, Tunneling'";
    let found = differences(&[
        KKP_FRONT.to_owned(),
        service("x", "api", 1, NODE_PORT, "NodePort", true),
        service("y", "list", 2, list, "NodePort", true),
    ]);
    let front = "Service kubermatic/nodeport-proxy";
    let starts = [
        format!("error front-port-lost {front}: port 31099"),
        format!("warning front-has-another-writer {front}"),
        format!("warning front-port-new {front}: port 31002"),
        format!("warning front-source-ranges {front}: it admits 198.51.100.0/24,"),
        format!("warning front-without-admin-port {front}: port 8002"),
    ];
    assert_eq!(found.len(), starts.len(), "{found:#?}");
    for (line, start) in found.iter().zip(starts) {
        assert!(line.starts_with(&start), "{line}");
    }
}

#[test]
fn clusters_that_gateways_cannot_know_are_named_once() {
    let text = CONFIGURATION.to_owned() + &cluster("a", "NodePort") + &cluster("b", "Tunneling");
    let mut objects = read_text_as(Path::new("seed.yaml"), &text).objects;
    let found = unprojected(&objects);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].message.ends_with("a, b have none"), "{found:?}");
    let clusters: Vec<Box<Cluster>> = objects
        .iter()
        .filter_map(|object| match object {
            Object::Cluster(cluster) => Some(cluster.clone()),
            _ => None,
        })
        .collect();
    let (Object::KubermaticConfiguration(configuration), Object::Seed(seed)) =
        (objects[0].clone(), objects[1].clone())
    else {
        panic!("they come first");
    };
    let project = |cluster: &Cluster| {
        exposed_cluster(cluster, std::slice::from_ref(&seed), Some(&configuration), None).unwrap()
    };
    let mut behind = project(&clusters[1]);
    behind.spec.paused = true;
    objects.extend([project(&clusters[0]).into(), behind.into()]);
    let found = unprojected(&objects);
    assert_eq!((found.len(), found[0].reason), (1, "projection-differs"), "{found:?}");
}

#[test]
fn addresses_are_those_that_users_were_given() {
    let site = site(&[cluster("n", "NodePort")]);
    let plans: Vec<_> = site.pipeline.plans().map(|plan| plan.address.url).collect();
    assert_eq!(plans, ["https://n.given.example.com:31234".into()]);
}

#[test]
fn a_seed_whose_clusters_the_operator_exposes_has_no_proxy_of_kkp_to_differ_from() {
    let tunnel = "nodeport-proxy.k8s.io/expose: 'SNI,Tunneling', nodeport-proxy.k8s.io/port-mapping: \
                  '{\"secure\": \"a.example.com\"}'";
    let theirs = service("cluster-a", "apiserver-external", 1, tunnel, "ClusterIP", true);
    assert_ne!(differences(&[cluster("a", "Tunneling"), theirs.clone()]).join("\n"), "");
    let ours = theirs.replace("  uid: u1", "  uid: u1\n  labels: {app.kubernetes.io/managed-by: portico}");
    let found = differences(&[cluster("a", "Tunneling"), ours]);
    assert!(found.iter().all(|line| !line.contains("KKP")), "{found:?}");
}
