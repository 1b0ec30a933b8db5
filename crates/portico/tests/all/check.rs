//! `portico check`: exit codes, and messages with file, line and object.

use crate::common::{directory, run, stdout, without_path};

const CONFIGURATION: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  exposeStrategy: NodePort
  ingress: {domain: kkp.example.com}
";

const SEED_LOAD_BALANCER: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  # Override the global expose strategy with 'LoadBalancer'
  exposeStrategy: LoadBalancer
";

const SEED_DISABLED: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  # Configure the expose strategy to NodePort and disable the nodeport-proxy
  exposeStrategy: NodePort
  nodeportProxy: {disable: true}
";

const CLUSTER_TUNNELING: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: clustername}
spec:
  # Override the expose strategy for this cluster only
  exposeStrategy: Tunneling
";

const CLUSTER_FOLLOWER: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: follower}
";

#[test]
fn the_documents_of_the_manual_have_no_problem() {
    let text = [CONFIGURATION, SEED_LOAD_BALANCER, CLUSTER_TUNNELING].join("---\n");
    let folder = directory(&[("all.yaml", &text)]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(stdout(&output), "3 objects: 0 errors, 0 warnings\n");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn clusters_may_follow_a_seed_without_a_proxy() {
    let text = [CONFIGURATION, SEED_DISABLED, CLUSTER_FOLLOWER].join("---\n");
    let folder = directory(&[("all.yaml", &text)]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
}

#[test]
fn each_problem_has_its_file_line_and_object() {
    let broken = CLUSTER_TUNNELING.replace("Tunneling", "Tunnel");
    let folder = directory(&[
        ("1-base.yaml", &[CONFIGURATION, SEED_DISABLED].join("---\n")),
        ("2-cluster.yaml", &broken),
        ("3-tunnel.yaml", &CLUSTER_TUNNELING.replace("clustername", "tunnelled")),
        ("4-syntax.yaml", "kind: [\n"),
        ("5-pod.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n"),
    ]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(without_path(&stdout(&output), folder.path()));
}

#[test]
fn what_keeps_a_cluster_from_being_exposed_hides_nothing_that_keeps_it_from_being_hosted() {
    let hosted =
        CLUSTER_FOLLOWER.replace("name: follower", "name: a, annotations: {portico.k8c.io/layout: huge}");
    let no_domain = CONFIGURATION.replace("  ingress: {domain: kkp.example.com}\n", "");
    let tunneling = SEED_LOAD_BALANCER.replace("LoadBalancer", "Tunneling");
    for (objects, exposure) in [
        (&[&*no_domain, &*tunneling][..], "there is no domain"),
        (&[CONFIGURATION], "there is no Seed that could host this cluster"),
    ] {
        let text = [objects, &[&hosted]].concat().join("---\n");
        let folder = directory(&[("all.yaml", &text)]);
        let output = run(&["check", folder.path().to_str().unwrap()]);
        let found = stdout(&output);
        for problem in [exposure, "\"huge\" is no layout", "spec.version: it is missing"] {
            assert!(found.contains(problem), "{found}");
        }
    }
}

#[test]
fn a_service_that_is_added_cannot_take_the_host_name_of_a_cluster() {
    let service = "\
apiVersion: v1
kind: Service
metadata:
  name: s1
  namespace: aaa
  creationTimestamp: 2020-01-01T00:00:00Z
  annotations:
    nodeport-proxy.k8s.io/expose: SNI
    nodeport-proxy.k8s.io/port-mapping: '{\"secure\": \"clustername.kubermatic.kkp.example.com\"}'
spec:
  ports: [{name: secure, port: 443}]
";
    let base = [CONFIGURATION, SEED_LOAD_BALANCER, CLUSTER_TUNNELING].join("---\n");
    let folder = directory(&[("base.yaml", &base), ("new.yaml", service)]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(
        without_path(&stdout(&output), folder.path()),
        "DIR/new.yaml:9: error: Service aaa/s1: metadata.annotations[nodeport-proxy.k8s.io/port-mapping]: \
         host clustername.kubermatic.kkp.example.com belongs to Cluster clustername: what a Cluster asks \
         for comes before any Service; choose another host name\n4 objects: 1 error, 0 warnings\n"
    );
}

#[test]
fn a_seed_that_is_not_there_is_told_from_no_seed_at_all() {
    let text = [CONFIGURATION, SEED_DISABLED, CLUSTER_FOLLOWER].join("---\n");
    let folder = directory(&[("all.yaml", &text)]);
    let output = run(&["check", folder.path().to_str().unwrap(), "--seed", "nope"]);
    let found = stdout(&output);
    let said = "no Seed is called \"nope\", as --seed says; there are: kubermatic";
    assert!(found.contains(said), "{found}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_directory_without_manifests_is_not_called_right() {
    let folder = directory(&[("README.md", "# here\n"), (".hidden.yaml", "kind: [")]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        without_path(&stdout(&output), folder.path()),
        "DIR: error: no manifest is there: no file ends in .yaml, .yml or .json (hidden ones do not count); \
         name the directory that holds the manifests\n0 objects: 1 error, 0 warnings\n"
    );
}

#[test]
fn a_manifest_may_be_named_in_capitals() {
    let folder = directory(&[("A.YAML", CONFIGURATION)]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(stdout(&output), "1 object: 0 errors, 0 warnings\n");
}

#[test]
fn a_node_port_on_which_the_gateway_listens_is_an_error() {
    let service = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: apps, annotations: {nodeport-proxy.k8s.io/expose: NodePort}}
spec: {type: NodePort, ports: [{port: 443, nodePort: 8088}]}
";
    let folder = directory(&[("web.yaml", service)]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    let printed = stdout(&output);
    assert!(
        printed.contains("web.yaml:4: error: Service apps/web: spec.ports[0].nodePort: 8088 cannot be used"),
        "{printed}"
    );
}

#[test]
fn a_program_reads_the_same_as_json() {
    let folder = directory(&[
        ("base.yaml", &[CONFIGURATION, SEED_LOAD_BALANCER].join("---\n")),
        ("cluster.yaml", &CLUSTER_TUNNELING.replace("Tunneling", "Tunnel")),
    ]);
    let output = run(&["check", "-o", "json", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = &findings[0];
    assert_eq!(finding["severity"], "error");
    assert_eq!(finding["object"]["name"], "clustername");
    assert_eq!(finding["field"], "spec.exposeStrategy");
    assert_eq!(finding["line"], 6);
}

/// What `kubectl get -o yaml` prints of a seed, with an address that KKP gave and Portico would not.
const COPY: &str = "\
apiVersion: v1
kind: List
items:
- apiVersion: kubermatic.k8c.io/v1
  kind: Seed
  metadata: {name: north, namespace: kubermatic}
- apiVersion: kubermatic.k8c.io/v1
  kind: Cluster
  metadata: {name: a}
  spec: {exposeStrategy: NodePort}
  status: {address: {url: 'https://a.given.example.com:31234'}}
- apiVersion: v1
  kind: Service
  metadata:
    name: apiserver-external
    namespace: cluster-a
    uid: 5d5c6f5e-0000-4000-8000-000000000001
    creationTimestamp: '2026-01-01T00:00:00Z'
    annotations: {nodeport-proxy.k8s.io/expose: NodePort}
  spec: {type: NodePort, clusterIP: 10.0.0.1, ports: [{name: secure, port: 443, nodePort: 31234}]}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata:
    name: apiserver-external-x
    namespace: cluster-a
    labels: {kubernetes.io/service-name: apiserver-external}
  addressType: IPv4
  endpoints: [{addresses: [192.0.2.7], conditions: {ready: true}}]
  ports: [{name: secure, port: 31234}]
";

#[test]
fn a_copy_of_a_seed_is_read_as_a_gateway_there_reads_it() {
    let folder = directory(&[("seed.yaml", COPY)]);
    let path = folder.path().to_str().unwrap();
    let output = run(&["check", path]);
    assert_eq!(
        stdout(&output),
        "read as a copy of a seed's objects; --read-as directory plans them instead\n4 objects: 0 errors, 0 \
         warnings\n"
    );
    assert_eq!(output.status.code(), Some(0));
    let routes = stdout(&run(&["routes", path]));
    assert!(routes.contains("https://a.given.example.com:31234"), "{routes}");
    // Nothing else is planned, such as a Service for Konnectivity.
    assert!(!routes.contains("konnectivity-server"), "{routes}");
    let planned = stdout(&run(&["routes", path, "--read-as", "directory"]));
    assert!(planned.contains("konnectivity-server"), "{planned}");
}

#[test]
fn what_would_break_is_an_error() {
    let copy = COPY.replace("192.0.2.7", "169.254.1.7");
    let folder = directory(&[("seed.yaml", &copy)]);
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let said = stdout(&output);
    assert!(said.contains("port 31234 is served today, and would not be"), "{said}");
}

#[test]
fn an_api_server_that_never_answers_is_given_up() {
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let kubeconfig = format!(
        "apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}]
users: [{{name: u}}]
",
        mute.local_addr().unwrap()
    );
    let folder = directory(&[("kubeconfig", &kubeconfig)]);
    let file = folder.path().join("kubeconfig");
    let output = run(&["check", "--kubeconfig", file.to_str().unwrap(), "--timeout", "1s"]);
    assert_eq!(output.status.code(), Some(2));
    let said = crate::common::stderr(&output);
    assert!(said.contains("listing KubermaticConfigurations: no answer within 1s"), "{said}");
}
