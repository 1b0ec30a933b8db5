//! `portico ports`, `portico firewall` and `portico capacity`: the contract of JSON, exit codes, and the
//! messages about what is mistyped.

use std::process::Output;

use portico_yaml::Documents;
use serde_json::{Value, json};

use crate::common::{directory, run, stderr, stdout};

const SITE: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  exposeStrategy: NodePort
  ingress: {domain: kkp.example.com}
  userCluster: {nodePortRange: 31000-31099}
---
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  seedDNSOverwrite: north
  datacenters:
    lab: {spec: {bringyourown: {}}}
    stack: {spec: {openstack: {authURL: 'https://keystone.example.com:5000/v3'}}}
    cloud: {spec: {aws: {region: eu-central-1}}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: one}
spec: {cloud: {dc: lab}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: two}
spec: {exposeStrategy: Tunneling, cloud: {dc: lab}, cniPlugin: {type: canal}}
";

fn flows(arguments: &[&str]) -> Vec<Value> {
    let output = run(&[&["ports", "-o", "json"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn ids(flows: &[Value]) -> Vec<&str> {
    flows.iter().map(|flow| flow["id"].as_str().unwrap()).collect()
}

/// Wrong usage: exit code 2. Returns the message.
fn refusal(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stdout(&output));
    assert_eq!(stdout(&output), "", "{arguments:?}");
    stderr(&output)
}

#[test]
fn a_flow_in_json_is_as_the_contract_says() {
    let all = flows(&[]);
    let of = |id: &str| all.iter().find(|flow| flow["id"] == id).unwrap().clone();
    assert_eq!(
        of("kkp-8"),
        json!({
            "id": "kkp-8",
            "product": "kkp",
            "source": "User cluster nodes",
            "component": "Kubelet / Konnectivity / in-cluster api",
            "destination": "Seed cluster nodeport-proxy",
            "protocol": "TCP",
            "ports": ["6443", "8088"],
            "conditions": {"strategy": "Tunneling"},
            "overridable": "no",
            "purpose": "Access to User Cluster API Endpoints and Konnectivity",
            "reference": "KKP required ports, row 8",
        })
    );
    let (ip_in_ip, weave, provider) = (of("kublr-1.4"), of("kublr-1.8"), of("kkp-7"));
    assert_eq!((&ip_in_ip["protocol"], &ip_in_ip["ports"]), (&json!("4"), &json!([])));
    assert_eq!((&weave["protocol"], &weave["overridable"]), (&json!(["TCP", "UDP"]), &Value::Null));
    assert_eq!(provider["ports"], json!(["provider"]));
    assert_eq!(provider["conditions"], json!({"provider": {"not": ["fake", "edge", "bringyourown"]}}));
    assert_eq!(of("kublr-4.3")["conditions"], json!({"air-gap": true}));
    assert_eq!(of("kkp-5")["overridable"], "default-range");
}

#[test]
fn what_is_known_narrows_the_list() {
    let of_worker =
        flows(&["--product", "kkp", "--strategy", "tunneling", "--cni", "Canal", "--role", "worker"]);
    let of_worker = ids(&of_worker);
    assert!(of_worker.contains(&"kkp-8") && of_worker.contains(&"kkp-canal-vxlan"), "{of_worker:?}");
    assert!(!of_worker.contains(&"kkp-9") && !of_worker.contains(&"kkp-cilium-vxlan"), "{of_worker:?}");
    let by_name = flows(&["--role", "Managed Clusters' Masters"]);
    assert_eq!(ids(&by_name), ["kublr-5.3"]);
    let none = flows(&["--product", "kkp", "--set", "provider=edge"]);
    assert!(!ids(&none).contains(&"kkp-7"));
    let set = ["--product", "kkp", "--set", "node-port-range=31000-31099", "--set", "provider=hetzner"];
    let set = flows(&set);
    assert!(set.iter().any(|flow| flow["ports"] == json!(["31000-31099"])));
    let provider = set.iter().find(|flow| flow["id"] == "kkp-7").unwrap();
    assert_eq!((&provider["hosts"], &provider["ports"]), (&json!(["api.hetzner.cloud"]), &json!(["443"])));
}

#[test]
fn every_format_has_every_flow() {
    let count = flows(&["--product", "kublr"]).len();
    let print = |format: &str| stdout(&run(&["ports", "--product", "kublr", "-o", format]));
    assert_eq!(count, 24);
    assert_eq!(print("csv").lines().count(), count + 1);
    assert_eq!(print("md").lines().count(), count + 2);
    assert_eq!(print("table").lines().count(), count + 1);
    assert_eq!(print("yaml").matches("  id: kublr-").count(), count);
}

#[test]
fn a_mistyped_word_is_reported_with_the_nearest_and_all_that_there_are() {
    for (arguments, nearest) in [
        (["ports", "--role", "wroker"].as_slice(), "did you mean worker?"),
        (&["ports", "--strategy", "Tuneling"], "did you mean Tunneling?"),
        (
            &["ports", "--cni", "Cillium"],
            "there are Canal, Calico, Cilium, Flannel, Weave; did you mean Cilium?",
        ),
        (&["ports", "--set", "air-gab=true"], "did you mean air-gap?"),
        (&["ports", "--product", "kpp"], "did you mean kkp?"),
        (&["ports", "diff", "Tunneling", "NodePrt"], "did you mean NodePort?"),
        (&["capacity", "--lb", "aws-nbl"], "did you mean aws-nlb?"),
        (&["capacity", "--add", "1", "--strategy", "Loadbalancr"], "did you mean LoadBalancer?"),
        (&["firewall", "--for", "ticket", "--role", "sed"], "did you mean seed?"),
    ] {
        let said = refusal(arguments);
        assert!(said.contains(nearest), "{arguments:?}: {said}");
    }
}

#[test]
fn a_running_installation_needs_its_own_ports_addresses_and_reasons() {
    let folder = directory(&[("site.yaml", SITE)]);
    let path = folder.path().to_str().unwrap();
    let all = flows(&["--product", "kkp", "--manifests", path]);
    let of = |id: &str| all.iter().filter(|flow| flow["id"] == id).collect::<Vec<_>>();
    let workers = of("kkp-9");
    assert_eq!(workers.len(), 1, "{all:?}");
    assert_eq!(workers[0]["addresses"], json!(["one.north.kkp.example.com"]));
    let ports: Vec<u16> = workers[0]["ports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|port| port.as_str().unwrap().parse().unwrap())
        .collect();
    assert_eq!(ports.len(), 2);
    assert!(ports.iter().all(|port| (31_000..=31_099).contains(port)), "{ports:?}");
    let reason = workers[0]["reasons"][0].as_str().unwrap();
    assert!(
        reason.starts_with("cluster one (NodePort): ") && reason.contains("apiserver-external"),
        "{reason}"
    );
    assert_eq!(of("kkp-8")[0]["addresses"], json!(["two.north.kkp.example.com"]));
    assert!(of("kkp-10").is_empty(), "no cluster has the strategy LoadBalancer");
    assert_eq!(of("kkp-1")[0]["hosts"], json!(["kkp.example.com"]));
    let hosts: Vec<&Value> = of("kkp-7").iter().map(|flow| &flow["hosts"][0]).collect();
    assert_eq!(hosts, [&json!("ec2.eu-central-1.amazonaws.com"), &json!("keystone.example.com")]);
    assert_eq!((of("kkp-cilium-vxlan").len(), of("kkp-canal-vxlan").len()), (1, 1));

    let whole = flows(&["--product", "kkp", "--manifests", path, "--whole-range"]);
    let workers = whole.iter().find(|flow| flow["id"] == "kkp-9").unwrap();
    assert_eq!(workers["ports"], json!(["31000-31099"]));
}

/// As beside control planes that are not KKP's: the gateway serves what is annotated.
#[test]
fn services_without_a_cluster_need_their_ports_too() {
    let service = |name: &str, expose: &str, more: &str, spec: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Service, metadata: {{name: {name}, namespace: cluster-a, \
             annotations: {{nodeport-proxy.k8s.io/expose: {expose}{more}}}}}, spec: {spec}}}\n"
        )
    };
    let by_port =
        service("api", "NodePort", "", "{type: NodePort, ports: [{name: s, port: 443, nodePort: 31777}]}");
    let mapping = ", nodeport-proxy.k8s.io/port-mapping: '{\"s\": \"a.example.com\"}'";
    let by_name = service("named", "SNI", mapping, "{ports: [{name: s, port: 443}]}");
    let folder = directory(&[("a.yaml", &(by_port + &by_name))]);
    let path = folder.path().to_str().unwrap();
    let all = flows(&["--product", "portico", "--manifests", path]);
    let of =
        |row: &str| all.iter().find(|flow| flow["id"] == row).unwrap_or_else(|| panic!("{row}: {all:#?}"));
    assert_eq!(of("portico-users-node-port")["ports"], json!(["31777"]));
    assert_eq!(of("portico-workers-node-port")["reasons"], json!(["cluster a (NodePort): api 31777"]));
    assert_eq!(of("portico-users-sni")["addresses"], json!(["a.example.com"]));
}

#[test]
fn a_folder_without_manifests_is_no_installation_without_needs() {
    let folder = directory(&[]);
    assert!(refusal(&["ports", "--manifests", folder.path().to_str().unwrap()]).contains("no manifest"));
}

#[test]
fn what_changes_between_strategies_is_reported_and_an_old_answer_is_one_side() {
    let output = run(&["ports", "diff", "NodePort", "Tunneling", "--product", "kkp", "-o", "json"]);
    let change: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((change["open"].as_array().unwrap().len(), change["close"].as_array().unwrap().len()), (3, 3));
    let folder = directory(&[]);
    let old = folder.path().join("old.json");
    let arguments = ["ports", "--product", "kublr", "--set", "cni=Canal", "-o", "json"];
    std::fs::write(&old, run(&arguments).stdout).unwrap();
    let output =
        run(&["ports", "diff", old.to_str().unwrap(), "cni=Canal,air-gap=true", "--product", "kublr"]);
    assert!(stdout(&output).lines().all(|line| !line.starts_with("open")), "{}", stdout(&output));
    std::fs::write(&old, "{}").unwrap();
    assert!(refusal(&["ports", "diff", old.to_str().unwrap(), "Canal"]).contains("is not what"));
}

fn firewall(inventory: &str, arguments: &[&str]) -> Output {
    let folder = directory(&[("site.yaml", inventory)]);
    let file = folder.path().join("site.yaml");
    run(&[&["firewall", "--inventory", file.to_str().unwrap()], arguments].concat())
}

#[test]
fn rules_need_addresses_and_are_not_opened_to_everybody_instead() {
    let said = refusal(&["firewall", "--for", "nftables", "--role", "worker", "--strategy", "Tunneling"]);
    for wanted in ["the role front has no address (kkp-8)", "dns: []", "front: []", "worker: []"] {
        assert!(said.contains(wanted), "{said}");
    }
    let inventory = "worker: [10.0.1.0/24]\nfront: [203.0.113.9]\ndns: [10.0.0.53]\n";
    let output = firewall(inventory, &["--for", "nftables", "--role", "worker", "--strategy", "Tunneling"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("ip daddr { 203.0.113.9/32 } tcp dport { 6443, 8088 }"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn each_mistake_in_an_inventory_is_reported_with_its_line_and_a_remedy() {
    let inventory = "wroker: [10.0.1.0/24]\nfront: []\nseed: [10.0.3.7/24]\nmaster: [10.0.4.0/33]\n";
    let output = firewall(inventory, &["--for", "ticket", "--role", "worker", "--strategy", "NodePort"]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    for wanted in ["site.yaml:1: ", "site.yaml:2: ", "site.yaml:3: ", "site.yaml:4: ", "did you mean worker?"]
    {
        assert!(said.contains(wanted), "{said}");
    }
}

/// Where each role has a network of its own.
const SEED: &str = "user: [any]\nworker: [10.0.1.0/24]\nseed-api: [10.0.3.7]\nfront: [10.244.1.0/24]\n\
                    seed: [10.244.2.0/24]\ncontrol-plane: [10.244.3.0/24]\nprobes: [10.244.4.0/24]\n\
                    worker-pods: [10.245.0.0/16]\n";

#[test]
fn policies_of_the_seeds_pods_admit_operator_metrics_and_prometheus() {
    let metrics = [2378, 6443, 8134, 10257, 10259].as_slice();
    for (role, direction, peer, ports) in [
        ("seed", "ingress", "10.244.4.0/24", [8002, 8007].as_slice()),
        ("seed", "ingress", "10.0.3.7/32", &[8002, 9443]),
        ("seed", "egress", "10.244.1.0/24", &[6443, 8002]),
        ("seed", "egress", "10.244.3.0/24", metrics),
        ("seed", "egress", "10.0.3.7/32", &[6443]),
        ("front", "ingress", "10.244.2.0/24", &[8002]),
        ("front", "ingress", "10.244.4.0/24", &[8002]),
        ("front", "ingress", "10.0.3.7/32", &[8002]),
        ("control-plane", "ingress", "10.244.2.0/24", metrics),
        ("control-plane", "ingress", "10.244.1.0/24", &[6443, 8132]),
    ] {
        let flags = ["--for", "networkpolicy", "--product", "portico", "--strategy", "Tunneling", "--role"];
        let output = firewall(SEED, &[&flags[..], &[role]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let text = stdout(&output);
        let policy = Documents::new(&text).next().unwrap().unwrap().to_value();
        let side = if direction == "ingress" { "from" } else { "to" };
        let entries = policy["spec"][direction].as_array().unwrap().iter();
        let of_peer = entries.filter(|entry| entry[side][0]["ipBlock"]["cidr"] == peer);
        let admitted: Vec<_> = of_peer.flat_map(|entry| entry["ports"].as_array().unwrap()).collect();
        for port in ports {
            let is_there = admitted.iter().any(|admitted| admitted["port"] == *port);
            assert!(is_there, "{role}, {direction}, {peer}: {port} is missing\n{text}");
        }
    }
}

#[test]
fn rules_in_force_that_lack_something_end_with_exit_code_1() {
    let inventory = "worker: [10.0.1.0/24]\nfront: [203.0.113.9]\ndns: [10.0.0.53]\n";
    let folder = directory(&[
        ("site.yaml", inventory),
        (
            "rules.txt",
            "# Generated by iptables-save v1.8.9\n*filter\n:INPUT DROP [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n",
        ),
    ]);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (rules, inventory) = (file("rules.txt"), file("site.yaml"));
    let arguments = [
        "firewall",
        "diff",
        &rules,
        "--role",
        "worker",
        "--strategy",
        "Tunneling",
        "--inventory",
        &inventory,
    ];
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("missing") && stdout(&output).contains("kkp-kubelet"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn capacity_says_which_limit_is_hit_first_and_exits_with_1_if_clusters_do_not_fit() {
    let folder = directory(&[("site.yaml", SITE)]);
    let path = folder.path().to_str().unwrap();
    let output = run(&["capacity", "--manifests", path, "-o", "json"]);
    let answer: Value = serde_json::from_str(&stdout(&output)).unwrap();
    // One cluster has two of the 100 ports.
    assert_eq!(answer["limits"][0]["left"], 98, "{answer}");
    assert_eq!(answer["strategies"][0]["room"], 49, "{answer}");
    let add = |count: &str, strategy: &str| {
        let arguments =
            ["capacity", "--manifests", path, "--lb", "aws-nlb", "--add", count, "--strategy", strategy];
        let output = run(&arguments);
        (output.status.code(), stdout(&output))
    };
    let (code, text) = add("23", "NodePort");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("listeners of the front load balancer end after 22"), "{text}");
    assert!(text.contains("lifted by Tunneling"), "{text}");
    assert_eq!(add("22", "NodePort").0, Some(0));
    assert_eq!(add("500", "Tunneling").0, Some(0));
}
