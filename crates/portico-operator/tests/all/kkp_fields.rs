//! KKP's own definitions of Cluster, Seed and KubermaticConfiguration: ours say the same of each field. With
//! KKP's the operator works, and every field that is not its own stays as it was written.

use anyhow::ensure;
use portico_lab::{ApiServer, Kubectl};
use serde_json::{Value, json};

use crate::support::{Running, install_with};
use crate::until;

/// Manager of the fields that KKP writes.
const KKP: &str = "--field-manager=seed-controller-manager";

/// The definitions of KKP's kinds, as objects, in the order of their names.
fn definitions(kubectl: &Kubectl, file: &str) -> Vec<Value> {
    let printed = kubectl.run(&["create", "--dry-run=client", "-o", "json", "-f", file]).unwrap();
    let documents = serde_json::Deserializer::from_str(&printed).into_iter::<Value>();
    let mut all: Vec<Value> = documents.map(Result::unwrap).collect();
    all.sort_by_key(|definition| definition["metadata"]["name"].to_string());
    all
}

/// What `ours` says of a field and `kkp` does not, below `path`.
fn disagreements(path: &str, ours: &Value, kkp: &Value, found: &mut Vec<String>) {
    if ours["type"] != kkp["type"] {
        found.push(format!("{path} is {}, KKP's is {}", ours["type"], kkp["type"]));
    }
    let values = |schema: &Value| schema["enum"].as_array().cloned();
    // One without an enum takes every value.
    if let Some(ours) = values(ours) {
        let missing = values(kkp).unwrap_or_default().into_iter().find(|value| !ours.contains(value));
        found.extend(missing.map(|value| format!("{path} refuses {value}, which KKP takes")));
    }
    for (name, ours) in ours["properties"].as_object().into_iter().flatten() {
        match kkp["properties"].get(name) {
            Some(kkp) => disagreements(&format!("{path}.{name}"), ours, kkp, found),
            None if kkp["x-kubernetes-preserve-unknown-fields"] == true => {}
            None => found.push(format!("{path}.{name} is no field of KKP's")),
        }
    }
    for below in ["items", "additionalProperties"] {
        match (ours[below].is_object(), kkp[below].is_object()) {
            (true, true) => disagreements(&format!("{path}[]"), &ours[below], &kkp[below], found),
            (false, false) => {}
            _ => found.push(format!("{path} has {below} on one side")),
        }
    }
    // A field of KKP's that ours does not name must not be lost.
    let known = |name: &String| ours["properties"].get(name).is_some();
    let keeps = ours["x-kubernetes-preserve-unknown-fields"] == true || path.ends_with("metadata");
    let all = kkp["properties"].as_object().into_iter().flatten().map(|(name, _)| name);
    found.extend(all.filter(|name| !keeps && !known(name)).map(|name| format!("{path}.{name} is lost")));
}

fn schema(definition: &Value) -> &Value {
    &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
}

fn ours_say_what_kkps_say(kubectl: &Kubectl, kkp: &str) {
    let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds-kubermatic.yaml");
    let (ours, kkp) = (definitions(kubectl, ours), definitions(kubectl, kkp));
    assert_eq!((ours.len(), kkp.len()), (3, 3));
    let mut found = Vec::new();
    for (ours, kkp) in ours.iter().zip(&kkp) {
        for same in
            ["/metadata/name", "/spec/group", "/spec/scope", "/spec/names/kind", "/spec/versions/0/name"]
        {
            assert_eq!(ours.pointer(same), kkp.pointer(same), "{same}");
        }
        disagreements(ours["spec"]["names"]["kind"].as_str().unwrap(), schema(ours), schema(kkp), &mut found);
    }
    assert_eq!(found, Vec::<String>::new());
}

/// A Cluster with everything that KKP's definition has.
fn cluster(name: &str, strategy: &str) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "metadata": {"name": name, "labels": {"project-id": "p1", "worker-name": ""},
            "annotations": {"presetName": "small", "kubermatic.k8c.io/last-restart": "2026-01-01"}},
        "spec": {"humanReadableName": "first of all", "version": "1.34.4", "exposeStrategy": strategy,
            "pause": false, "pauseReason": "",
            "cloud": {"dc": "lab-1", "providerName": "bringyourown", "bringyourown": {}},
            "clusterNetwork": {"ipFamily": "IPv4", "pods": {"cidrBlocks": ["172.25.0.0/16"]},
                "services": {"cidrBlocks": ["10.240.16.0/20"]}, "dnsDomain": "cluster.local",
                "proxyMode": "ipvs", "ipvs": {"strictArp": true}, "nodeCidrMaskSizeIPv4": 24,
                "nodeLocalDNSCacheEnabled": true, "konnectivityEnabled": true, "coreDNSReplicas": 2},
            "machineNetworks": [
                {"cidr": "192.0.2.0/24", "gateway": "192.0.2.1", "dnsServers": ["192.0.2.2"]}],
            "componentsOverride": {
                "apiserver": {"replicas": 2, "resources": {"requests": {"cpu": "100m"}},
                    "endpointReconcilingDisabled": true, "nodePortRange": "30000-32767"},
                "etcd": {"clusterSize": 3, "diskSize": "5Gi", "storageClass": "kubermatic-fast"},
                "konnectivityProxy": {"keepaliveTime": "1m", "args": ["--v=4"]}},
            "cniPlugin": {"type": "cilium", "version": "1.18.6"},
            "mla": {"monitoringEnabled": false, "loggingEnabled": false},
            "features": {"apiserverNetworkPolicy": true, "etcdLauncher": true},
            "serviceAccount": {"tokenVolumeProjectionEnabled": true, "issuer": "https://issuer.invalid",
                "apiAudiences": ["https://issuer.invalid"]},
            "containerRuntime": "containerd", "enableUserSSHKeyAgent": true,
            "updateWindow": {"start": "Thu 10:00", "length": "2h"}}})
}

/// What KKP's controllers write there.
fn status() -> Value {
    let at = "2026-01-01T00:00:00Z";
    json!({"status": {"namespaceName": "cluster-np", "userEmail": "a@example.com", "phase": "Running",
        "address": {"adminToken": "bcdfgh.bcdfghjklmnpqrst", "url": "https://before.invalid:30001",
            "port": 30001},
        "inheritedLabels": {"team": "a"}, "lastProviderReconciliation": at,
        "extendedHealth": {"apiserver": "HealthStatusUp", "etcd": "HealthStatusDown"},
        "versions": {"controlPlane": "1.34.4", "apiserver": "1.34.4"},
        "conditions": {"SeedResourcesUpToDate": {"status": "True", "kubermaticVersion": "v2.30.0",
            "lastHeartbeatTime": at, "lastTransitionTime": at, "reason": "", "message": "all well"}}}})
}

/// A Cluster less what the manual says that the operator writes.
fn without_ours(mut cluster: Value) -> Value {
    let status = cluster["status"].as_object_mut().unwrap();
    status.remove("namespaceName");
    for ours in ["url", "port", "externalName", "internalURL", "ip", "apiServerExternalAddress"] {
        status["address"].as_object_mut().unwrap().remove(ours);
    }
    status["conditions"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("Portico"));
    let (network, metadata) = (cluster["spec"]["clusterNetwork"].take(), cluster["metadata"].take());
    cluster["network"] = network;
    cluster["network"].as_object_mut().unwrap().remove("tunnelingAgentIP");
    cluster["metadata"] = json!({"labels": metadata["labels"], "annotations": metadata["annotations"]});
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kkps_definitions_serve_as_well_and_kkps_fields_stay_as_they_are() {
    let kkp = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/kkp-crds.yaml");
    let api = ApiServer::start("kkp-fields").unwrap();
    let kubectl = api.kubectl();
    ours_say_what_kkps_say(kubectl, kkp);
    let client = install_with(kubectl, api.access(), &std::fs::read_to_string(kkp).unwrap()).await;
    let seed = kubectl.get(&["seed", "north", "-n", "portico"]).unwrap();
    for (name, strategy) in [("np", "NodePort"), ("tn", "Tunneling")] {
        kubectl.apply_json(&cluster(name, strategy)).unwrap();
        let patch = status().to_string();
        let written = ["patch", "cluster", name, "--subresource=status", "--type=merge", "-p", &patch, KKP];
        kubectl.run(&written).unwrap();
    }
    let read = |name: &str| kubectl.get(&["cluster", name]).unwrap();
    let before = [read("np"), read("tn")];
    let operator = Running::start(&client, "beside-kkps-definitions");
    for (name, before) in ["np", "tn"].into_iter().zip(before) {
        until("the cluster to be exposed", || {
            let after = kubectl.get(&["cluster", name])?;
            let condition = &after["status"]["conditions"]["PorticoExposed"];
            ensure!(condition["reason"] == "NameNotResolved", "{condition} {:?}", operator.clusters());
            ensure!(after["status"]["address"]["externalName"] == format!("{name}.north.kkp.invalid"));
            Ok(())
        });
        let after = read(name);
        assert_eq!(after["status"]["address"]["adminToken"], "bcdfgh.bcdfghjklmnpqrst");
        assert_eq!(without_ours(after), without_ours(before));
    }
    assert_eq!(kubectl.get(&["seed", "north", "-n", "portico"]).unwrap()["spec"], seed["spec"]);
    operator.stop().await;
}
