//! The controller that makes clusters reachable: every strategy from one object, what admins break, a kill at
//! every write, KKP beside it, and many clusters.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use kube::Client;
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::{ApiServer, Kubectl, long_form};
use portico_operator::WorkStatus;
use serde_json::{Value, json};

use crate::support::{Running, beside_kkp, cluster, give_address, install, release};
use crate::until;

/// An API server with everything installed as the manual says, and clients with the operator's rights alone.
async fn seed(name: &str) -> (ApiServer, Client) {
    let api = ApiServer::start(name).unwrap();
    let client = install(api.kubectl(), api.access()).await;
    (api, client)
}

/// The reason of the condition of a Cluster.
fn reason(kubectl: &Kubectl, name: &str) -> Result<String> {
    let cluster = kubectl.get(&["cluster", name])?;
    let reason = cluster.pointer("/status/conditions/PorticoExposed/reason").and_then(Value::as_str);
    Ok(reason.context("no condition")?.to_owned())
}

fn wait_reason(kubectl: &Kubectl, name: &str, expected: &str) {
    until(expected, || {
        let found = reason(kubectl, name)?;
        ensure!(found == expected, "{name} is {found}");
        Ok(())
    });
}

fn work(operator: &Running) -> WorkStatus {
    operator.work("portico-exposure")
}

fn service(kubectl: &Kubectl, cluster: &str, name: &str) -> Result<Value> {
    kubectl.get(&["service", name, "-n", &format!("cluster-{cluster}")])
}

fn node_port(service: &Value) -> u64 {
    service.pointer("/spec/ports/0/nodePort").and_then(Value::as_u64).unwrap_or_default()
}

/// Everything that the operator wrote for clusters, less what differs from run to run.
fn state(kubectl: &Kubectl) -> Vec<Value> {
    let mut all = Vec::new();
    for kind in ["namespaces", "services", "endpointslices", "exposedclusters", "clusters"] {
        let selector =
            if kind == "clusters" || kind == "exposedclusters" { "" } else { "portico.k8c.io/cluster" };
        let found = kubectl.get(&[kind, "-A", "-l", selector]).unwrap();
        for object in found["items"].as_array().unwrap() {
            let spec = object.get("spec").cloned().unwrap_or_default();
            all.push(json!({"kind": kind, "name": object["metadata"]["name"], "spec": stable(spec),
                "labels": object["metadata"]["labels"], "annotations": object["metadata"]["annotations"]}));
        }
    }
    all
}

/// Without addresses and ports that the API server chooses.
pub(crate) fn stable(mut spec: Value) -> Value {
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|key, _| !["clusterIP", "clusterIPs", "address"].contains(&key.as_str()));
        for port in fields.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
            for chosen in ["nodePort", "targetPort", "port", "name"] {
                port.as_object_mut().unwrap().remove(chosen);
            }
        }
    }
    spec
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_object_makes_a_cluster_reachable_under_each_strategy_and_stays_so() {
    let (api, client) = seed("exposure").await;
    let kubectl = api.kubectl();
    let operator = Running::start(&client, "first");
    for (name, strategy) in [("np", "NodePort"), ("lb", "LoadBalancer"), ("tn", "")] {
        kubectl.apply_json(&cluster(name, strategy)).unwrap();
    }
    each_strategy_has_its_services(kubectl, &operator);
    operator.stop().await;
    let faulty = FaultyApi::default();
    let operator = Running::start(&faulty.client(&client), "second");
    nothing_is_written_at_rest(kubectl, &operator);
    what_an_admin_breaks_heals(kubectl);
    a_paused_cluster_follows_the_gateways_pods_and_nothing_else(kubectl);
    a_former_strategy_leaves_nothing(kubectl);
    an_endpoint_elsewhere_has_slices_and_no_others(kubectl, &faulty);
    bad_objects_change_nothing(kubectl);
    beside_kkp_nothing_is_written(kubectl, &operator);
    operator.stop().await;
}

fn each_strategy_has_its_services(kubectl: &Kubectl, operator: &Running) {
    // A Cluster that names no strategy gets it once, and its agents an address.
    until("the strategy to be filled in", || {
        let tunneled = kubectl.get(&["cluster", "tn"])?;
        ensure!(tunneled["spec"]["exposeStrategy"] == "Tunneling", "{:?}", operator.clusters());
        ensure!(tunneled["spec"]["clusterNetwork"]["tunnelingAgentIP"] == "100.64.30.10");
        ensure!(tunneled["spec"]["updateWindow"]["length"] == "2h");
        Ok(())
    });
    wait_reason(kubectl, "tn", "NameNotResolved");
    let tunneled = service(kubectl, "tn", "apiserver-external").unwrap();
    assert_eq!(tunneled["spec"]["type"], "ClusterIP");
    let annotations = &tunneled["metadata"]["annotations"];
    assert_eq!(annotations["nodeport-proxy.k8s.io/expose"], "SNI,Tunneling");
    let mapping = r#"{"secure":"tn.north.kkp.invalid"}"#;
    assert_eq!(annotations["nodeport-proxy.k8s.io/port-mapping"], mapping);
    let address = kubectl.get(&["cluster", "tn"]).unwrap()["status"]["address"].clone();
    assert_eq!(address["url"], "https://tn.north.kkp.invalid:6443");

    wait_reason(kubectl, "np", "NameNotResolved");
    let by_port = service(kubectl, "np", "apiserver-external").unwrap();
    let number = node_port(&by_port);
    assert!(number >= 30_000, "{by_port}");
    assert_eq!(by_port["spec"]["ports"][0]["targetPort"], number, "the API server listens on it itself");
    let address = kubectl.get(&["cluster", "np"]).unwrap()["status"]["address"].clone();
    assert_eq!(address["url"], format!("https://np.north.kkp.invalid:{number}"));

    wait_reason(kubectl, "lb", "LoadBalancerPending");
    give_address(kubectl, "lb", "203.0.113.9");
    wait_reason(kubectl, "lb", "NoEndpoints");
    kubectl.apply_json(&slice("cluster-lb", "apiserver-external", KUBERNETES, &["10.2.0.9"])).unwrap();
    wait_reason(kubectl, "lb", "Exposed");
    let number = node_port(&service(kubectl, "lb", "apiserver-external").unwrap());
    let address = kubectl.get(&["cluster", "lb"]).unwrap()["status"]["address"].clone();
    assert_eq!(address["url"], format!("https://203.0.113.9:{number}"));
    assert_eq!(address["ip"], "203.0.113.9");
    let front = service(kubectl, "lb", "front-loadbalancer").unwrap();
    let ports = front["spec"]["ports"].as_array().unwrap();
    assert!(ports.iter().any(|port| port["port"] == number) && ports.len() == 2, "{front}");
    until("the projection to have the address", || {
        let exposed = kubectl.get(&["exposedcluster", "lb"])?;
        ensure!(exposed["spec"]["address"]["url"] == address["url"], "{exposed}");
        Ok(())
    });
    let table = kubectl.run(&["get", "clusters"]).unwrap();
    assert!(table.contains("EXPOSED") && table.contains("https://203.0.113.9"), "{table}");
    let events = kubectl.run(&["events", "--for=cluster/lb"]).unwrap();
    assert!(events.contains("LoadBalancerPending") && events.contains("Exposed"), "{events}");
}

/// A process that has just started finds everything as it should be.
fn nothing_is_written_at_rest(kubectl: &Kubectl, operator: &Running) {
    let passes = |more: u64| {
        until("passes over all", || {
            let clusters = operator.clusters();
            ensure!(clusters.reports.len() == 3 && work(operator).passes >= more, "{clusters:?}");
            Ok(())
        });
    };
    passes(3);
    let before = work(operator).passes;
    kubectl.run(&["label", "cluster", "np", "lb", "tn", "touched=yes"]).unwrap();
    passes(before + 3);
    assert_eq!(work(operator).writes, BTreeMap::new());
}

fn what_an_admin_breaks_heals(kubectl: &Kubectl) {
    let before = node_port(&service(kubectl, "np", "apiserver-external").unwrap());
    kubectl.run(&["delete", "service", "apiserver-external", "-n", "cluster-np"]).unwrap();
    until("the Service with its number", || {
        let anew = service(kubectl, "np", "apiserver-external")?;
        ensure!(node_port(&anew) == before, "{anew}");
        Ok(())
    });
    let has_event = |cluster: &str, text: &str| {
        until(text, || {
            let events = kubectl.run(&["events", &format!("--for=cluster/{cluster}")])?;
            ensure!(events.contains("PutBack") && events.contains(text), "{events}");
            Ok(())
        });
    };
    has_event("np", "Service cluster-np/apiserver-external was deleted, and is made anew");
    let patch = r#"{"metadata": {"annotations": {"nodeport-proxy.k8s.io/expose": "SNI"}}}"#;
    kubectl
        .run(&["patch", "service", "konnectivity-server", "-n", "cluster-np", "--type=merge", "-p", patch])
        .unwrap();
    until("the annotation", || {
        let anew = service(kubectl, "np", "konnectivity-server")?;
        ensure!(anew["metadata"]["annotations"]["nodeport-proxy.k8s.io/expose"] == "NodePort");
        Ok(())
    });
    has_event(
        "np",
        "Service cluster-np/konnectivity-server was changed by \"kubectl-patch\", and is put back",
    );
    kubectl.run(&["delete", "exposedcluster", "tn"]).unwrap();
    until("the ExposedCluster", || kubectl.get(&["exposedcluster", "tn"]).map(drop));
}

fn a_former_strategy_leaves_nothing(kubectl: &Kubectl) {
    kubectl.run(&["label", "cluster", "lb", "unsafe-expose-strategy-migration="]).unwrap();
    kubectl.apply_json(&cluster("lb", "Tunneling")).unwrap();
    until("the load balancer to go", || {
        let services = kubectl.get(&["services", "-n", "cluster-lb"])?;
        let names: Vec<_> =
            services["items"].as_array().unwrap().iter().map(|s| &s["metadata"]["name"]).collect();
        ensure!(names == ["apiserver-external", "konnectivity-server"], "{names:?}");
        let api = service(kubectl, "lb", "apiserver-external")?;
        ensure!(api["spec"]["type"] == "ClusterIP" && node_port(&api) == 0, "{api}");
        let annotations = &api["metadata"]["annotations"];
        ensure!(annotations.get("nodeport-proxy.k8s.io/expose-namespaced").is_none(), "{annotations}");
        Ok(())
    });
    // Without the label nothing changes, also if the field is emptied and a level above decides.
    kubectl.run(&["label", "cluster", "lb", "unsafe-expose-strategy-migration-"]).unwrap();
    let before = service(kubectl, "np", "apiserver-external").unwrap();
    for strategy in ["", "LoadBalancer"] {
        kubectl.apply_json(&cluster("np", strategy)).unwrap();
        wait_reason(kubectl, "np", "InvalidConfiguration");
        assert_eq!(service(kubectl, "np", "apiserver-external").unwrap(), before);
        kubectl.apply_json(&cluster("np", "NodePort")).unwrap();
        wait_reason(kubectl, "np", "NameNotResolved");
    }
    // A namespace of somebody else is left alone.
    kubectl.run(&["create", "namespace", "cluster-autoscaler"]).unwrap();
    kubectl.apply_json(&cluster("autoscaler", "Tunneling")).unwrap();
    wait_reason(kubectl, "autoscaler", "NamespaceTaken");
    let namespace = kubectl.get(&["namespace", "cluster-autoscaler"]).unwrap();
    assert!(namespace["metadata"].get("ownerReferences").is_none(), "{namespace}");
    kubectl.run(&["label", "namespace", "cluster-autoscaler", "portico.k8c.io/cluster=autoscaler"]).unwrap();
    wait_reason(kubectl, "autoscaler", "NameNotResolved");
}

/// The controller that makes slices of pods.
pub(crate) const KUBERNETES: &str = "endpointslice-controller.k8s.io";

/// A slice, as `controller` would keep it.
pub(crate) fn slice(namespace: &str, service: &str, controller: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<Value> =
        addresses.iter().map(|ip| json!({"addresses": [ip], "conditions": {"ready": true}})).collect();
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": format!("{service}-{}", &controller[..13]), "namespace": namespace, "labels":
            {"kubernetes.io/service-name": service, "endpointslice.kubernetes.io/managed-by": controller}},
        "endpoints": endpoints, "ports": [{"name": "x", "port": 6443}]})
}

fn a_paused_cluster_follows_the_gateways_pods_and_nothing_else(kubectl: &Kubectl) {
    let gateways = |addresses: &[&str]| {
        let of_gateway = slice("portico", "portico", KUBERNETES, addresses);
        kubectl.apply_json(&of_gateway).unwrap();
    };
    let leads_to = |expected: &str| {
        until(expected, || {
            let name = "front-loadbalancer-v4-gateway";
            let slice = kubectl.get(&["endpointslice", name, "-n", "cluster-lb"])?;
            let addresses: Vec<&Value> =
                slice["endpoints"].as_array().unwrap().iter().map(|e| &e["addresses"][0]).collect();
            ensure!(addresses == [expected], "{addresses:?}");
            Ok(())
        });
    };
    gateways(&["192.0.2.21"]);
    leads_to("192.0.2.21");
    let pause = |pause: &str| {
        let patch = format!("{{\"spec\": {{\"pause\": {pause}}}}}");
        kubectl.run(&["patch", "cluster", "lb", "--type=merge", "-p", &patch]).unwrap();
    };
    pause("true");
    until("the pause", || {
        ensure!(reason(kubectl, "lb").is_ok());
        let said = kubectl.run(&["get", "events", "-A", "-o", "jsonpath={.items[*].reason}"])?;
        ensure!(said.contains("Paused"), "{said}");
        Ok(())
    });
    gateways(&["192.0.2.22"]);
    leads_to("192.0.2.22");
    gateways(&[]);
    until("no slice", || {
        let slices = kubectl.get(&["endpointslices", "-n", "cluster-lb", "-l", "portico.k8c.io/cluster"])?;
        ensure!(slices["items"] == json!([]), "{slices}");
        Ok(())
    });
    pause("false");
}

/// What KKP's controllers and Kubernetes' own made while its pods were here is gone.
fn an_endpoint_elsewhere_has_slices_and_no_others(kubectl: &Kubectl, faulty: &FaultyApi) {
    let patch = r#"{"spec": {"selector": {"from-kkp": "yes"}}}"#;
    let service_patch = ["patch", "service", "apiserver-external", "-n", "cluster-tn", "-p", patch];
    kubectl.run(&[&service_patch[..], &["--field-manager=seed-controller-manager"]].concat()).unwrap();
    for controller in [KUBERNETES, "endpointslicemirroring-controller.k8s.io"] {
        let of_pods = slice("cluster-tn", "apiserver-external", controller, &["10.2.0.9"]);
        kubectl.apply_json(&of_pods).unwrap();
    }
    let endpoints = json!({"apiVersion": "v1", "kind": "Endpoints",
        "metadata": {"name": "apiserver-external", "namespace": "cluster-tn"},
        "subsets": [{"addresses": [{"ip": "10.2.0.9"}], "ports": [{"port": 6443}]}]});
    kubectl.apply_json(&endpoints).unwrap();
    an_endpoint_elsewhere_has_slices(kubectl, faulty);
    let slices =
        ["endpointslices", "-n", "cluster-tn", "-l", "kubernetes.io/service-name=apiserver-external"];
    assert_eq!(kubectl.get(&slices).unwrap()["items"], json!([]));
    let endpoints = ["get", "endpoints", "-n", "cluster-tn", "-o", "name"];
    assert!(!kubectl.run(&endpoints).unwrap().contains("apiserver-external"));
}

fn an_endpoint_elsewhere_has_slices(kubectl: &Kubectl, faulty: &FaultyApi) {
    // Also while the Service that comes after it is refused.
    let refused = ("/services/konnectivity-server", Answer::Status(403), usize::MAX);
    faulty.rules(|rules| rules.answers = vec![refused]);
    kubectl.run(&["annotate", "cluster", "tn", "portico.k8c.io/endpoints=192.0.2.7:6443"]).unwrap();
    wait_reason(kubectl, "tn", "WriteRefused");
    until("the EndpointSlice", || {
        let slice = kubectl.get(&["endpointslice", "apiserver-external-v4-6443", "-n", "cluster-tn"])?;
        ensure!(slice["endpoints"][0]["addresses"] == json!(["192.0.2.7"]), "{slice}");
        Ok(())
    });
    faulty.rules(|rules| rules.answers.clear());
    wait_reason(kubectl, "tn", "NameNotResolved");
    until("no selector", || {
        ensure!(service(kubectl, "tn", "apiserver-external")?["spec"].get("selector").is_none());
        Ok(())
    });
    kubectl.run(&["annotate", "cluster", "tn", "portico.k8c.io/endpoints-"]).unwrap();
    until("pods again", || {
        ensure!(service(kubectl, "tn", "apiserver-external")?["spec"]["selector"]["app"] == "apiserver");
        let slices = kubectl.get(&["endpointslices", "-n", "cluster-tn", "-l", "portico.k8c.io/cluster"])?;
        ensure!(slices["items"] == json!([]), "{slices}");
        Ok(())
    });
}

fn bad_objects_change_nothing(kubectl: &Kubectl) {
    let before = service(kubectl, "np", "apiserver-external").unwrap();
    kubectl.run(&["annotate", "cluster", "np", "portico.k8c.io/endpoints=localhost"]).unwrap();
    wait_reason(kubectl, "np", "InvalidConfiguration");
    assert_eq!(service(kubectl, "np", "apiserver-external").unwrap(), before);
    kubectl.run(&["annotate", "cluster", "np", "portico.k8c.io/endpoints-"]).unwrap();
    wait_reason(kubectl, "np", "NameNotResolved");
    // The schema refuses what no controller should have to.
    let mut bad = cluster("np", "NodePort");
    bad["spec"]["clusterNetwork"] = json!({"tunnelingAgentIP": "192.0.2.1"});
    let refused = kubectl.apply_json(&bad).unwrap_err().to_string();
    assert!(refused.contains("tunnelingAgentIP is for the strategy Tunneling"), "{refused}");
    // Nothing removes the content of a namespace here: it stays as it is for ever.
    kubectl.run(&["delete", "namespace", "cluster-np", "--wait=false"]).unwrap();
    kubectl.run(&["label", "cluster", "np", "touched=again", "--overwrite"]).unwrap();
    wait_reason(kubectl, "np", "NamespaceTerminating");
}

fn beside_kkp_nothing_is_written(kubectl: &Kubectl, operator: &Running) {
    let mut writes = BTreeMap::new();
    let observing = || operator.clusters().observing;
    beside_kkp(kubectl, observing, || {
        writes = work(operator).writes;
        kubectl.apply_json(&cluster("later", "Tunneling")).unwrap();
        until("what gateways must know, all the same", || {
            kubectl.get(&["exposedcluster", "later"]).map(drop)
        });
        let external = ["service", "apiserver-external", "-n", "cluster-later"];
        assert!(kubectl.is_gone(&external), "that is KKP's to make");
    });
    until("the cluster to be exposed", || service(kubectl, "later", "apiserver-external").map(drop));
    assert!(work(operator).writes.values().sum::<u64>() > writes.values().sum::<u64>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_write_the_next_one_leaves_the_same_objects() {
    let (api, direct) = seed("exposure-kill").await;
    let kubectl = api.kubectl();
    let names = [("np", "NodePort"), ("lb", "LoadBalancer"), ("tn", "")];
    let mut expected: Option<Vec<Value>> = None;
    for writes in (0..).step_by(long_form(3, 1)) {
        for (name, strategy) in names {
            kubectl.apply_json(&cluster(name, strategy)).unwrap();
        }
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        let killed = Running::start(&faulty.client(&direct), &format!("killed-{writes}"));
        let mut complete = false;
        until("a write that is withheld, or the end", || {
            let reports = killed.clusters().reports;
            let done = ["lb", "np", "tn"].iter().all(|name| reports.contains_key(*name));
            complete = done && check_complete(kubectl).is_ok();
            ensure!(complete || faulty.rules(|rules| rules.withheld), "{reports:?}");
            Ok(())
        });
        killed.kill().await;
        release(kubectl);
        let next = Running::start(&direct, &format!("next-{writes}"));
        until("everything", || check_complete(kubectl));
        let found = state(kubectl);
        match &expected {
            None => expected = Some(found),
            Some(expected) => assert_eq!(*expected, found, "killed after {writes} writes"),
        }
        next.stop().await;
        if complete {
            assert!(writes > 15, "only {writes} writes were withheld");
            return;
        }
        clear(kubectl);
    }
}

/// Whether all three clusters have all that they need.
fn check_complete(kubectl: &Kubectl) -> Result<()> {
    let reasons: BTreeMap<&str, String> = ["lb", "np", "tn"]
        .into_iter()
        .map(|name| Ok((name, reason(kubectl, name)?)))
        .collect::<Result<_>>()?;
    let expected = [("lb", "LoadBalancerPending"), ("np", "NameNotResolved"), ("tn", "NameNotResolved")];
    ensure!(expected.iter().all(|(name, reason)| reasons[name] == *reason), "{reasons:?}");
    Ok(())
}

/// Takes everything away that was made for the clusters, as the garbage collector would.
fn clear(kubectl: &Kubectl) {
    kubectl.run(&["delete", "clusters", "--all"]).unwrap();
    // By its short name.
    kubectl.run(&["delete", "exc", "--all"]).unwrap();
    for kind in ["services", "endpointslices"] {
        kubectl.run(&["delete", kind, "-A", "-l", "portico.k8c.io/cluster"]).unwrap();
    }
}
