//! `portico check --kubeconfig` and `portico kubeconfig` against a real API server that holds what KKP's
//! controllers would have made.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::path::Path;
use std::process::{Command, Output};

use portico_lab::{ApiServer, Kubectl, kkp, manifests, programs};
use portico_pki::{Credential, Kubeconfig, Pair};
use serde_json::json;

use crate::common::portico;

const KKP: &str = "
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: north, namespace: kubermatic}
spec: {nodeportProxy: {envoy: {loadBalancerService: {sourceRanges: [203.0.113.0/24]}}}}
---
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec: {ingress: {domain: kkp.example.com}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: a}
spec: {exposeStrategy: NodePort}
status:
  address: {url: 'https://a.north.kkp.example.com:31234', port: 31234, externalName: a.north.kkp.example.com}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: t}
spec: {exposeStrategy: Tunneling}
status:
  address: {url: 'https://t.north.kkp.example.com:6443', port: 6443, externalName: t.north.kkp.example.com}
";

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata:
  name: apiserver-external
  namespace: cluster-a
  annotations: {nodeport-proxy.k8s.io/expose: NodePort}
spec: {type: NodePort, ports: [{name: secure, port: 443, targetPort: 31234, nodePort: 31234}]}
---
apiVersion: v1
kind: Service
metadata:
  name: apiserver-external
  namespace: cluster-t
  annotations:
    nodeport-proxy.k8s.io/expose: SNI,Tunneling
    nodeport-proxy.k8s.io/port-mapping: '{\"secure\": \"t.north.kkp.example.com\"}'
spec: {ports: [{name: secure, port: 443, targetPort: 6443}]}
---
apiVersion: v1
kind: Service
metadata: {name: nodeport-proxy, namespace: kubermatic}
spec:
  type: LoadBalancer
  ports:
  - {name: healthz, port: 8002, targetPort: 8002}
  - {name: sni-listener, port: 6443, targetPort: 6443}
  - {name: tunneling-listener, port: 8088, targetPort: 8088}
  - {name: cluster-a-apiserver-external-31234, port: 31234, targetPort: 31234}
";

fn endpoint(namespace: &str, address: &str, port: u16) -> String {
    manifests::slice(namespace, "apiserver-external", address.parse().unwrap(), port)
}

fn check(kubeconfig: &Path, more: &[&str]) -> (Output, String) {
    let mut command = portico();
    let output = command.args(["check", "--kubeconfig"]).arg(kubeconfig).args(more).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, said)
}

#[test]
fn a_dry_run_says_what_each_cluster_would_get_and_what_is_to_be_done() {
    let api = ApiServer::start("seed-check").unwrap();
    let (kubeconfig, kubectl) = (api.admin().unwrap(), api.kubectl());

    // A seed without KKP has nothing that KKP serves.
    let (output, said) = check(&kubeconfig, &[]);
    assert_eq!(output.status.code(), Some(0), "{said}{output:?}");

    kkp::install(kubectl).unwrap();
    for name in ["kubermatic", "cluster-a", "cluster-t"] {
        kubectl.apply(&format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")).unwrap();
    }
    kubectl.apply(KKP).unwrap();
    let slices = endpoint("cluster-a", "192.0.2.7", 31234) + &endpoint("cluster-t", "192.0.2.8", 6443);
    kubectl.apply(&(SERVICES.to_owned() + &slices)).unwrap();

    let (output, said) = check(&kubeconfig, &[]);
    assert_eq!(output.status.code(), Some(0), "{said}{output:?}");
    for expected in [
        "https://a.north.kkp.example.com:31234",
        "https://t.north.kkp.example.com:6443",
        "192.0.2.7:31234",
        "apiserver-external.cluster-t.svc.cluster.local:443",
        "Cluster t: the agents on its nodes are KKP's",
        "Service kubermatic/nodeport-proxy: port 8002",
        "gateways read ExposedClusters and admit nobody without: a, t have none",
        "0 errors",
    ] {
        assert!(said.contains(expected), "no {expected} in:\n{said}");
    }

    // `portico ports` derives from the same objects what this seed needs, with its own ports and addresses.
    let mut ports = portico();
    ports.args(["ports", "--product", "kkp", "-o", "json", "--kubeconfig"]).arg(&kubeconfig);
    let output = ports.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let flows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |row: &str| flows.as_array().unwrap().iter().find(|flow| flow["id"] == row);
    let by_port = of("kkp-9").expect("a cluster is reached by NodePort");
    assert_eq!(by_port["ports"], serde_json::json!(["31234"]), "{by_port}");
    assert_eq!(by_port["addresses"], serde_json::json!(["a.north.kkp.example.com"]), "{by_port}");
    assert_eq!(of("kkp-8").unwrap()["addresses"], serde_json::json!(["t.north.kkp.example.com"]));
    assert!(of("kkp-10").is_none(), "no cluster has a load balancer of its own");
    let seed_api = of("kkp-2").unwrap();
    assert!(seed_api["reasons"][0].as_str().unwrap().starts_with("the kubeconfig leads to"), "{seed_api}");

    // What is served today and would not be: the answer is no, and a program can read why.
    let (output, said) = check(&kubeconfig, &["--endpoint-networks", "192.0.2.0/29", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1), "{said}{output:?}");
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    let broken = |problem: &&serde_json::Value| problem["reason"] == "would-break";
    let broken: Vec<_> = report["problems"].as_array().unwrap().iter().filter(broken).collect();
    assert_eq!(broken.len(), 2, "a host and an authority: {broken:?}");
    assert_eq!(report["clusters"][0]["url"], "https://a.north.kkp.example.com:31234");

    // Without the right to read a kind, what follows from it is not left out unseen.
    let nobody = api.access().kubeconfig("nobody", None).unwrap();
    let (output, _) = check(&nobody, &[]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("listing KubermaticConfigurations") && said.contains("forbidden"), "{said}");

    // The manifest for the admin ports is one that an API server takes, every field of it.
    kubectl.run(&["create", "namespace", "portico"]).unwrap();
    let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/network-policy.yaml");
    kubectl.run(&["apply", "--validate=strict", "-f", policy]).unwrap();
}

fn kubeconfig(seed: &Path, more: &[&str]) -> Output {
    let mut command = portico();
    command.args(["kubeconfig", "--kubeconfig"]).arg(seed).args(more).output().unwrap()
}

/// Why there is no kubeconfig.
fn refusal(seed: &Path, more: &[&str]) -> String {
    let output = kubeconfig(seed, more);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The API server is the seed's, and at its real address the user cluster's too.
#[test]
fn a_kubeconfig_of_a_former_address_is_written_with_the_present_one_and_works() {
    let api = ApiServer::start("seed-kubeconfig").unwrap();
    let (seed, kubectl) = (api.admin().unwrap(), api.kubectl());
    assert!(refusal(&seed, &["a"]).contains("reading Cluster a: the API server answered 404"));
    kkp::install(kubectl).unwrap();
    assert!(refusal(&seed, &["a"]).contains("there is no Cluster a; `kubectl get clusters` lists them"));

    let cluster = |status| {
        json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "metadata": {"name": "a"},
            "status": status})
    };
    let waits = json!({"conditions": {"PorticoExposed": {"status": "False", "reason": "NodePortPending",
        "message": "no NodePort yet"}}});
    kubectl.apply_json(&cluster(waits)).unwrap();
    assert!(refusal(&seed, &["a"]).contains("has no address yet: no NodePort yet (NodePortPending)"));
    kubectl.apply_json(&cluster(json!({"address": {"url": api.access().server()}}))).unwrap();
    kubectl.run(&["create", "namespace", "cluster-a"]).unwrap();
    let missing = refusal(&seed, &["a"]);
    assert!(missing.contains("there is no Secret cluster-a/admin-kubeconfig: "), "{missing}");

    // As KKP keeps it, with the address that was before.
    let admin = api.access().authority().client("admin", Some("system:masters")).unwrap();
    let stored = Kubeconfig {
        cluster: "a".to_owned(),
        server: "https://192.0.2.1:31000".to_owned(),
        authority: api.access().authority().cert(),
        credential: Credential::Certificate(Pair { certificate: admin.cert, key: admin.key }),
    };
    let secret = json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "admin-kubeconfig", "namespace": "cluster-a"},
        "stringData": {"kubeconfig": stored.to_yaml()}});
    kubectl.apply_json(&secret).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.kubeconfig");
    let output = kubeconfig(&seed, &["a", "-o", &file.display().to_string()]);
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let as_user = Kubectl::new(api.host(), &file).unwrap();
    assert!(as_user.run(&["get", "namespaces"]).unwrap().contains("cluster-a"));
    let printed = kubeconfig(&seed, &["a"]);
    assert_eq!(printed.stdout, std::fs::read(&file).unwrap());

    let nobody = api.access().kubeconfig("nobody", None).unwrap();
    let said = refusal(&nobody, &["a"]);
    assert!(said.contains("reading Cluster a: the API server answered 403: "), "{said}");
}

/// The links of a chain by name, each with its state.
fn why(seed: &Path, what: &str) -> (Option<i32>, Vec<(String, String)>, String) {
    let mut command = portico();
    let output = command.args(["why", what, "-o", "json", "--kubeconfig"]).arg(seed).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let links: Vec<serde_json::Value> = serde_json::from_str(&said).unwrap_or_default();
    let text = |link: &serde_json::Value, field: &str| link[field].as_str().unwrap().to_owned();
    let states = links.iter().map(|link| (text(link, "link"), text(link, "state"))).collect();
    (output.status.code(), states, said + &String::from_utf8_lossy(&output.stderr))
}

/// The one that is broken, after all before it were passed.
fn broken(seed: &Path, what: &str) -> String {
    let (code, states, said) = why(seed, what);
    assert_eq!(code, Some(1), "{said}");
    let (last, before) = states.split_last().unwrap();
    assert!(before.iter().all(|(_, state)| state != "broken"), "{said}");
    assert_eq!(last.1, "broken", "{said}");
    last.0.clone()
}

/// A gateway's pod as a kubelet would report it, at the address of the API server's own machine.
fn gateway_pod(api: &ApiServer) {
    let pod = serde_json::json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "gateway-0", "namespace": "portico",
            "labels": {"app.kubernetes.io/name": "portico-gateway"}},
        "spec": {"nodeName": "n", "containers": [{"name": "gateway", "image": "x"}]}});
    api.kubectl().apply_json(&pod).unwrap();
    let address = api.host().address().to_string();
    let status = serde_json::json!({"status": {"phase": "Running", "podIP": address,
        "podIPs": [{"ip": address}], "conditions": [{"type": "Ready", "status": "True"}]}});
    let patch = ["patch", "pod", "gateway-0", "-n", "portico", "--subresource=status", "--type=merge", "-p"];
    api.kubectl().run(&[&patch[..], &[&status.to_string()]].concat()).unwrap();
}

#[test]
fn why_names_the_first_broken_link_from_the_object_to_the_name() {
    let api = ApiServer::start("seed-why").unwrap();
    let (seed, kubectl) = (api.admin().unwrap(), api.kubectl());
    let crds = portico().arg("crds").output().unwrap();
    let definitions = String::from_utf8(crds.stdout).unwrap();
    kubectl.run_with_input(&["apply", "--server-side", "-f", "-"], &definitions).unwrap();
    for kind in ["clusters.kubermatic.k8c.io", "exposedclusters.portico.k8c.io"] {
        kubectl.wait_served(kind).unwrap();
    }
    assert_eq!(broken(&seed, "a"), "Cluster");

    for name in ["kubermatic", "portico", "cluster-a", "cluster-t"] {
        kubectl.run(&["create", "namespace", name]).unwrap();
    }
    kubectl.run(&["create", "serviceaccount", "default", "-n", "portico"]).unwrap();
    kubectl.apply(KKP).unwrap();
    assert_eq!(broken(&seed, "t"), "Service");
    kubectl.apply(SERVICES).unwrap();
    assert_eq!(broken(&seed, "t"), "endpoints");
    assert_eq!(broken(&seed, "t.north.kkp.example.com"), "endpoints", "by the host, too");
    kubectl.apply(&endpoint("cluster-t", "192.0.2.8", 6443)).unwrap();
    // Beside KKP its proxy is the way, whose Service has no address here.
    assert_eq!(broken(&seed, "t"), "load balancer");
    kubectl.run(&["delete", "service", "nodeport-proxy", "-n", "kubermatic"]).unwrap();
    assert_eq!(broken(&seed, "t"), "gateways");

    // A gateway beside the API server, which reaches it as it would a pod.
    gateway_pod(&api);
    let exposed = serde_json::json!({"apiVersion": "portico.k8c.io/v1alpha1", "kind": "ExposedCluster",
        "metadata": {"name": "t"}, "spec": {"exposeStrategy": "Tunneling", "seed": "north",
            "tunnel": {"agentIP": "100.64.30.10"}}});
    kubectl.apply_json(&exposed).unwrap();
    let mut command = api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
    let address = api.host().address();
    // The API server has port 6443 there.
    command.args(["gateway", "--sni-listen=127.0.0.1:7443", "--tunnel-listen=off"]);
    command.args(["--clusters-from=exposed-clusters", "--kubeconfig"]);
    command.arg(&seed).arg(format!("--admin-listen={address}:8002"));
    let _gateway = api.host().spawn_command("gateway", command).unwrap();
    portico_lab::wait::until("the gateway to have the route", std::time::Duration::from_secs(60), || {
        let (_, states, said) = why(&seed, "t");
        anyhow::ensure!(states.contains(&("gateways".to_owned(), "holds".to_owned())), "{said}");
        Ok(())
    })
    .unwrap();
    assert_eq!(broken(&seed, "t"), "load balancer");

    let front = serde_json::json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "portico", "namespace": "portico"},
        "spec": {"type": "LoadBalancer", "ports": [{"name": "sni-listener", "port": 6443}]}});
    kubectl.apply_json(&front).unwrap();
    assert_eq!(broken(&seed, "t"), "load balancer", "it has no address");
    let status = r#"{"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}}"#;
    let patch =
        ["patch", "service", "portico", "-n", "portico", "--subresource=status", "--type=merge", "-p"];
    kubectl.run(&[&patch[..], &[status]].concat()).unwrap();
    let address = r#"{"status": {"address": {"externalName": "t.kkp.invalid", "port": 6443}}}"#;
    let patch = ["patch", "cluster", "t", "--subresource=status", "--type=merge", "-p", address];
    kubectl.run(&patch).unwrap();
    assert_eq!(broken(&seed, "t"), "name");

    let as_kubectl_would = |words: &[&str]| {
        let mut command = portico();
        let output = command.args(words).env("KUBECONFIG", &seed).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (_, said) = as_kubectl_would(&["why", "t"]);
    assert!(said.contains("let it lead to 203.0.113.1"), "{said}");

    // One line each: one has no endpoint, of the other nothing is broken on the seed.
    let (code, said) = as_kubectl_would(&["status"]);
    assert_eq!(code, Some(1), "{said}");
    let line = |name: &str| said.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("a ").contains("BROKEN") && line("a ").contains("endpoints: "), "{said}");
    assert!(line("t ").contains(" ok"), "{said}");
    assert!(said.contains("2 clusters, 1 of them broken; 1 of 1 gateways ready"), "{said}");
    // Under this name in the PATH it is a plugin of kubectl.
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_portico"), folder.path().join("kubectl-portico")).unwrap();
    let mut plugin = Command::new(programs::kube().unwrap().join("kubectl"));
    plugin.env("KUBECONFIG", &seed).env("PATH", folder.path()).args(["portico", "status"]);
    let output = plugin.output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stdout)), (code, said.into()));

    let (code, said) = as_kubectl_would(&["status", "t", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &status["clusters"][0]["ok"]), (Some(1), &json!(false)), "{said}");
    assert_eq!(status["clusters"][0]["links"].as_array().unwrap().last().unwrap()["link"], "name");
    the_way_goes_on_to_a_node(&api, &seed);
}

/// The API server is the cluster's own, too; nothing is behind its nodes.
fn the_way_goes_on_to_a_node(api: &ApiServer, seed: &Path) {
    let (kubectl, host) = (api.kubectl(), api.host().address().to_string());
    let status = json!({"status": {"address": {"externalName": host, "port": 6443, "ip": host,
        "url": api.access().server()}}});
    let patch = ["patch", "cluster", "t", "--subresource=status", "--type=merge", "-p", &status.to_string()];
    kubectl.run(&patch).unwrap();
    let api_server = |state: &str| ("API server".to_owned(), state.to_owned());
    let (code, states, said) = why(seed, "t");
    assert_eq!(code, Some(0), "{said}");
    assert!(states.contains(&api_server("unknown")), "without a kubeconfig nobody can ask it: {said}");
    assert_eq!(broken(seed, "t/n"), "kubeconfig");

    let admin = api.access().authority().client("admin", Some("system:masters")).unwrap();
    let stored = Kubeconfig {
        cluster: "t".to_owned(),
        server: api.access().server().to_owned(),
        authority: api.access().authority().cert(),
        credential: Credential::Certificate(Pair { certificate: admin.cert, key: admin.key }),
    };
    let secret = json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "admin-kubeconfig", "namespace": "cluster-t"},
        "stringData": {"kubeconfig": stored.to_yaml()}});
    kubectl.apply_json(&secret).unwrap();
    let (code, states, said) = why(seed, "t");
    assert!(code == Some(0) && states.contains(&api_server("holds")), "{said}");
    let other = portico_lab::pki::Authority::new("other").unwrap();
    let elsewhere = Kubeconfig { authority: other.cert(), ..stored };
    let mut foreign = secret.clone();
    foreign["stringData"]["kubeconfig"] = elsewhere.to_yaml().into();
    kubectl.apply_json(&foreign).unwrap();
    assert_eq!(broken(seed, "t"), "API server", "its certificate is not that of the cluster");
    kubectl.apply_json(&secret).unwrap();
    assert_eq!(broken(seed, "t/n"), "Node");
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})).unwrap();
    assert_eq!(broken(seed, "t/n"), "Node", "it has never reported");
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}],
        "addresses": [{"type": "InternalIP", "address": host}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}}}});
    let patch = ["patch", "node", "n", "--subresource=status", "--type=merge", "-p", &ready.to_string()];
    kubectl.run(&patch).unwrap();
    assert_eq!(broken(seed, "t/n"), "agent");
    // KKP's agent does as well as Portico's.
    let labels = json!({"app.kubernetes.io/name": "envoy-agent"});
    let agents = json!({"apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "envoy-agent", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [{"name": "agent", "image": "x"}]}}}});
    kubectl.apply_json(&agents).unwrap();
    assert_eq!(broken(seed, "t/n"), "agent");
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "agent", "namespace": "kube-system", "labels": labels},
        "spec": {"nodeName": "n", "containers": [{"name": "agent", "image": "x"}]}});
    kubectl.run(&["create", "serviceaccount", "default", "-n", "kube-system"]).unwrap();
    kubectl.apply_json(&pod).unwrap();
    let running = json!({"status": {"phase": "Running",
        "containerStatuses": [{"name": "agent", "ready": true, "restartCount": 0, "image": "x",
            "imageID": "x", "state": {"running": {}}}]}});
    let patch = ["patch", "pod", "agent", "-n", "kube-system", "--subresource=status", "--type=merge", "-p"];
    kubectl.run(&[&patch[..], &[&running.to_string()]].concat()).unwrap();
    assert_eq!(broken(seed, "t/n"), "kubelet", "nothing listens there");
}
