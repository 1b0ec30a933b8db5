//! Portico in a seed cluster, as its users deploy it: the image of the `Containerfile` and the objects of
//! `deploy/`. Three user clusters are exposed by annotated Services, each with the Cluster that KKP has of
//! it. A worker has joined through the gateway.
//!
//! Its steps are functions, named as what they promise.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::own_gateway::{self, EXPOSE_NAMESPACED};
use crate::support::{
    DOMAIN, Knocking, PodStreams, ROUNDS, SOON, Watch, Way, beat_all, carried_by_gateways,
    former_gateways_drain, others, wait_routed,
};
use anyhow::ensure;
use portico_lab::control_plane::Options;
use portico_lab::{Host, Image, Kubectl, Lab, Seed, UserCluster, kkp, programs, say, wait};
use serde_json::{Value, json};

/// Images imported, probes passed twice, seconds of `minReadySeconds`: half a minute on an idle machine.
const ROLLING_OUT: Duration = Duration::from_secs(240);

/// The NodePort of the cluster with strategy NodePort; with KKP the API server listens on the same number.
const NODE_PORT: u16 = 30_001;
/// The NodePort of the cluster with strategy LoadBalancer.
const BALANCED_PORT: u16 = 30_002;

/// Changes, a rolling update and a restart of one cluster are not noticed by the others either.
pub(crate) fn clusters_of_every_strategy_are_reached_through_a_deployed_gateway(lab: &Lab, seed: &Seed) {
    let client = lab.host("client").unwrap();
    let clusters = create_user_clusters(seed);
    deploy_portico(seed);
    clusters.iter().for_each(|cluster| cluster.wait_ready(seed).unwrap());
    deploy_gateway_of_balanced(seed);
    for deployment in ["portico-gateway", "portico-front"] {
        seed.kubectl().wait_rolled_out("portico", deployment, ROLLING_OUT).unwrap();
    }
    let front = seed.give_address("portico", "portico").unwrap();
    let balanced = own_gateway::address(seed, "cluster-balanced");
    for (name, address) in [("nodeport", front), ("tunneled", front), ("balanced", balanced)] {
        lab.name_resolves(&format!("{name}.{DOMAIN}"), address).unwrap();
    }
    say("deployed; looking at the gateway's pods");
    the_gateway_has_no_rights_it_does_not_need(seed);
    what_clusters_allow_is_written_for_gateways(seed);

    let [node_port, load_balancer, tunneled] = &clusters;
    let authority = "https://apiserver-external.cluster-tunneled.svc.cluster.local:443";
    let by_authority = tunneled.access(seed, authority).by_proxy(&format!("http://{front}:8088"));
    let by_name = tunneled.access(seed, &format!("https://tunneled.{DOMAIN}:6443"));
    let ways = [
        Way::new(
            "node-port",
            &client,
            &node_port.access(seed, &format!("https://nodeport.{DOMAIN}:{NODE_PORT}")),
        ),
        Way::new(
            "load-balancer",
            &client,
            &load_balancer.access(seed, &format!("https://balanced.{DOMAIN}:{BALANCED_PORT}")),
        ),
        Way::new("sni", &client, &by_name),
        Way::new("connect", &client, &by_authority),
    ];
    ways.iter().for_each(Way::wait_open);
    an_allow_list_reaches_the_gateway(seed, &ways[1], &client);

    let worker = tunneled.join_worker(seed, "worker-1", &by_name).unwrap();
    worker.import(&Image::busybox().unwrap()).unwrap();
    say("a worker joined; large objects, watches, logs, exec and port-forward");
    ways.iter().for_each(Way::serves_large_objects);
    let mut watches: Vec<Watch> = ways.iter().map(Way::watch).collect();
    let mut streams = PodStreams::open(&ways[2], &worker);

    let admins =
        [admin_addresses(seed.kubectl(), "portico"), admin_addresses(seed.kubectl(), "cluster-balanced")];
    let (by_port, balanced_by_port) =
        (format!("node_port:{NODE_PORT}"), format!("node_port:{BALANCED_PORT}"));
    let carried = [
        (by_port.as_str(), "nodeport"),
        (balanced_by_port.as_str(), "balanced"),
        ("sni", "tunneled"),
        ("tunnel", "tunneled"),
    ];
    carried_by_gateways(seed.host(), &admins.concat(), &client, &carried);

    changes_of_other_clusters_are_not_felt(seed, &watches);
    streams.beat();
    say("500 changes of other clusters were not felt");

    let knocking = Knocking::start(&ways);
    a_rolling_update_of_the_gateway_is_not_felt(seed, &watches);
    knocking.all_were_answered("a rolling update of the gateway");
    streams.beat();

    // The cluster by NodePort is the other one now: its watch ends with its API server.
    drop(watches.remove(0));
    let knocking = Knocking::start(&ways[1..]);
    restart_api_server(seed, node_port);
    ways[0].wait_open();
    beat_all(&watches);
    knocking.all_were_answered("a restart of another cluster's API server");
    streams.beat();
    ways[0].watch();
}

/// Three API servers as pods; only the one with the worker needs controllers.
fn create_user_clusters(seed: &Seed) -> [UserCluster; 3] {
    let cluster = |name: &str, port: u16, controllers: bool| {
        let options = Options {
            secure_port: port,
            names: vec![
                format!("{name}.{DOMAIN}"),
                format!("apiserver-external.cluster-{name}.svc.cluster.local"),
            ],
            controllers,
            ..Options::new(name)
        };
        UserCluster::create(seed, &options).unwrap()
    };
    let clusters = [
        cluster("nodeport", NODE_PORT, false),
        cluster("balanced", BALANCED_PORT, false),
        cluster("tunneled", 6443, true),
    ];
    let tunneled = json!({
        "nodeport-proxy.k8s.io/expose": "SNI,Tunneling",
        "nodeport-proxy.k8s.io/port-mapping": json!({"secure": format!("tunneled.{DOMAIN}")}).to_string(),
    });
    let exposed = [
        ("NodePort", json!({"nodeport-proxy.k8s.io/expose": "NodePort"})),
        ("NodePort", json!({EXPOSE_NAMESPACED: "true"})),
        ("ClusterIP", tunneled),
    ];
    for (cluster, (kind, annotations)) in clusters.iter().zip(exposed) {
        let mut port = json!({"name": "secure", "port": 443, "targetPort": cluster.port()});
        if kind == "NodePort" {
            port["nodePort"] = json!(cluster.port());
        }
        let service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": "apiserver-external",
                "namespace": cluster.namespace(),
                "annotations": annotations,
            },
            "spec": {"type": kind, "selector": {"app": "apiserver"}, "ports": [port]},
        });
        seed.kubectl().apply_json(&service).unwrap();
    }
    kkp::install(seed.kubectl()).unwrap();
    let seed_of_kkp = json!({
        "apiVersion": "kubermatic.k8c.io/v1",
        "kind": "Seed",
        "metadata": {"name": "north", "namespace": "default"},
        "spec": {"datacenters": {"lab-1": {}}},
    });
    let configuration = json!({
        "apiVersion": "kubermatic.k8c.io/v1",
        "kind": "KubermaticConfiguration",
        "metadata": {"name": "kkp", "namespace": "default"},
        "spec": {"ingress": {"domain": DOMAIN}},
    });
    let objects = [("nodeport", "NodePort"), ("balanced", "LoadBalancer"), ("tunneled", "Tunneling")]
        .map(|(name, strategy)| cluster_object(name, strategy, &json!(null)));
    for object in [seed_of_kkp, configuration].iter().chain(&objects) {
        seed.kubectl().apply_json(object).unwrap();
    }
    clusters
}

/// The object that KKP has of a user cluster. `allowed` is its `apiServerAllowedIPRanges`.
fn cluster_object(name: &str, strategy: &str, allowed: &Value) -> Value {
    json!({
        "apiVersion": "kubermatic.k8c.io/v1",
        "kind": "Cluster",
        "metadata": {"name": name},
        "spec": {
            "exposeStrategy": strategy,
            "cloud": {"dc": "lab-1"},
            "apiServerAllowedIPRanges": allowed,
        },
        "status": {"address": {"adminToken": "s3cret"}},
    })
}

/// By `portico front`, and without what a gateway is not to know.
fn what_clusters_allow_is_written_for_gateways(seed: &Seed) {
    let kubectl = seed.kubectl();
    let written = kubectl.get(&["exposedclusters"]).unwrap();
    let items = written["items"].as_array().unwrap();
    let names: Vec<&str> = items.iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["balanced", "nodeport", "tunneled"]);
    assert!(!written.to_string().contains("s3cret"));
    let gateway = "--as=system:serviceaccount:portico:portico-gateway";
    assert!(!kubectl.can_i(&["list", "clusters.kubermatic.k8c.io", gateway]).unwrap());
    assert!(kubectl.can_i(&["list", "exposedclusters.portico.k8c.io", gateway]).unwrap());
}

/// From the Cluster by `portico front` to the gateway, which closes and opens.
fn an_allow_list_reaches_the_gateway(seed: &Seed, way: &Way, client: &Host) {
    let allow = |networks: &Value| {
        let cluster = cluster_object("balanced", "LoadBalancer", networks);
        seed.kubectl().apply_json(&cluster).unwrap();
    };
    allow(&json!({"cidrBlocks": ["192.0.2.0/24"]}));
    wait::until("a client that is not on the list to be refused", SOON, || {
        ensure!(way.ask().is_err(), "it is answered");
        Ok(())
    })
    .unwrap();
    allow(&json!({"cidrBlocks": ["192.0.2.0/24", format!("{}/32", client.address())]}));
    way.wait_open();
    allow(&json!(null));
    way.wait_open();
}

/// The objects of `deploy/`, with the one choice they leave to their user: how the tunnel is served.
fn deploy_portico(seed: &Seed) {
    let deploy = programs::checkout().join("deploy");
    seed.kubectl().apply(&fs::read_to_string(deploy.join("crds.yaml")).unwrap()).unwrap();
    let gateway = fs::read_to_string(deploy.join("gateway.yaml")).unwrap();
    let last = "- --log-format=json\n";
    assert_eq!(gateway.matches(last).count(), 1, "the arguments of deploy/gateway.yaml end otherwise now");
    let gateway = gateway.replace(last, &format!("{last}        - --tunnel-plaintext\n"));
    seed.kubectl().apply(&gateway).unwrap();
    let front = fs::read_to_string(deploy.join("front.yaml")).unwrap();
    let off = "        - --tunnel-port=off\n";
    assert_eq!(front.matches(off).count(), 1, "the arguments of deploy/front.yaml are others now");
    seed.kubectl().apply(&front.replace(off, "")).unwrap();
}

/// The gateway of the cluster with strategy LoadBalancer.
fn deploy_gateway_of_balanced(seed: &Seed) {
    let namespace = "cluster-balanced";
    // The objects that belong to no namespace are those of its own cluster.
    let objects = [
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": namespace},
            "rules": [{
                "apiGroups": ["portico.k8c.io"],
                "resources": ["exposedclusters"],
                "resourceNames": ["balanced"],
                "verbs": ["list", "watch"],
            }],
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": namespace},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": namespace,
            },
            "subjects": [{"kind": "ServiceAccount", "name": "portico-gateway", "namespace": namespace}],
        }),
    ];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    seed.kubectl().apply_json(&list).unwrap();
    own_gateway::deploy(seed, namespace, "portico-gateway", "exposed-clusters", BALANCED_PORT);
}

/// Not what the manifest says, but what the kernel knows about the running processes.
fn the_gateway_has_no_rights_it_does_not_need(seed: &Seed) {
    let processes = processes_named(seed, "portico");
    // Two gateways and two of the front in the namespace portico, one gateway of the cluster with its own.
    assert_eq!(processes.len(), 5, "{processes:?}");
    for process in &processes {
        let status = fs::read_to_string(process.join("status")).unwrap();
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(value("Uid:"), "65532 65532 65532 65532");
        assert_eq!(value("Gid:"), "65532 65532 65532 65532");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(value(set), "0000000000000000", "{set}");
        }
        assert_eq!(value("NoNewPrivs:"), "1");
        assert_eq!(value("Seccomp:"), "2", "filtered");
        let mounts = fs::read_to_string(process.join("mountinfo")).unwrap();
        let mounts: Vec<Vec<&str>> = mounts.lines().map(|line| line.split(' ').collect()).collect();
        let root = mounts.iter().find(|words| words[4] == "/");
        assert!(root.unwrap()[5].split(',').any(|option| option == "ro"), "its root is read-only");
        // Mount points of the runtime and of volumes aside, there is one file, and no shell.
        let is_mount = |name: &String| mounts.iter().any(|words| words[4].strip_prefix('/') == Some(name));
        let mut found: Vec<String> = fs::read_dir(process.join("root"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| !["dev", "etc", "proc", "sys", "var"].contains(&name.as_str()) && !is_mount(name))
            .collect();
        found.sort();
        assert_eq!(found, ["portico"]);
    }
}

/// `/proc/PID` of every process of this name on the seed's host.
fn processes_named(seed: &Seed, name: &str) -> Vec<PathBuf> {
    let pids = seed.host().cgroup().pids().unwrap();
    let dirs = pids.iter().map(|pid| Path::new("/proc").join(pid.to_string()));
    // One that ended meanwhile is not meant.
    dirs.filter(|dir| fs::read_to_string(dir.join("comm")).is_ok_and(|comm| comm.trim() == name)).collect()
}

/// Five rounds of 100 clusters that come, change and go, by NodePort too, so that the front Service changes
/// as well.
fn changes_of_other_clusters_are_not_felt(seed: &Seed, watches: &[Watch]) {
    let kubectl = seed.kubectl();
    let gateways = admin_addresses(kubectl, "portico");
    let before = front_ports(kubectl);
    kubectl.run(&["create", "namespace", "others"]).unwrap();
    for round in 0..ROUNDS {
        let objects = others(round).concat();
        if objects.is_empty() {
            kubectl.run(&["delete", "services,endpointslices", "--all", "-n", "others"]).unwrap();
        } else {
            kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": objects})).unwrap();
        }
        gateways.iter().for_each(|admin| wait_routed(seed.host(), admin, round));
        beat_all(watches);
    }
    wait::until("the front Service to be as before", SOON, || {
        let ports = front_ports(kubectl);
        ensure!(ports == before, "it has {ports}");
        Ok(())
    })
    .unwrap();
    beat_all(watches);
}

/// Where the gateways of a namespace answer questions about themselves.
fn admin_addresses(kubectl: &Kubectl, namespace: &str) -> Vec<String> {
    let pods = gateway_pods(kubectl, namespace);
    pods.iter().map(|pod| format!("{}:8002", pod["status"]["podIP"].as_str().unwrap())).collect()
}

fn gateway_pods(kubectl: &Kubectl, namespace: &str) -> Vec<Value> {
    let label = "app.kubernetes.io/name=portico-gateway";
    let mut pods = kubectl.get(&["pods", "-n", namespace, "-l", label]).unwrap();
    serde_json::from_value(pods["items"].take()).unwrap()
}

fn front_ports(kubectl: &Kubectl) -> Value {
    kubectl.get(&["service", "-n", "portico", "portico"]).unwrap()["spec"]["ports"].take()
}

/// New pods serve new connections, while the old ones let the watches they carry go on.
fn a_rolling_update_of_the_gateway_is_not_felt(seed: &Seed, watches: &[Watch]) {
    let kubectl = seed.kubectl();
    kubectl.run(&["rollout", "restart", "-n", "portico", "deployment/portico-gateway"]).unwrap();
    kubectl.wait_rolled_out("portico", "portico-gateway", ROLLING_OUT).unwrap();
    former_gateways_drain(seed, "portico-gateway");
    beat_all(watches);
    // The worker's kubelet alone sees to it that one of the old pods has something to wait for.
    let pods = gateway_pods(kubectl, "portico");
    let draining = pods.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_string()).count();
    assert!((1..=2).contains(&draining), "{draining} of {} pods drain", pods.len());
}

/// As after a crash or an update of that cluster's control plane: its pod goes, and another comes.
fn restart_api_server(seed: &Seed, cluster: &UserCluster) {
    let kubectl = seed.kubectl();
    let pods = || kubectl.run(&["get", "pods", "-n", cluster.namespace(), "--output=name"]);
    let old = pods().unwrap();
    kubectl
        .run(&["delete", "pod", "-n", cluster.namespace(), "-l", "app=apiserver", "--wait=false"])
        .unwrap();
    wait::until("the old API server to be gone", SOON, || {
        let now = pods()?;
        ensure!(!now.contains(old.trim()), "there are {now}");
        Ok(())
    })
    .unwrap();
    cluster.wait_ready(seed).unwrap();
}
