//! Plans of control planes, held against each other, against the PKI, and against real programs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod inside;
mod objects;
mod programs;
mod properties;
mod renewed;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::seed::Seed;
use portico_expose::validate::usable;
use portico_hosting::{ControlPlane, Digests, Settings, plan};
use serde_json::{Value, json};

/// A Cluster of this layout, with these fields.
fn cluster(layout: &str, spec: &Value) -> Cluster {
    let mut object = json!({
        "metadata": {"name": "a", "uid": "7f0c7c5e-0000-4000-8000-000000000001",
            "annotations": {"portico.k8c.io/layout": layout}},
        "spec": {"version": "1.34.4"}});
    object["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(object).unwrap()
}

fn seeds() -> [Box<Seed>; 1] {
    [Box::new(
        serde_json::from_value(json!({"metadata": {"name": "north", "namespace": "kubermatic"}})).unwrap(),
    )]
}

fn configuration() -> KubermaticConfiguration {
    serde_json::from_value(json!({"metadata": {"name": "kubermatic"},
        "spec": {"ingress": {"domain": "example.com"}}}))
    .unwrap()
}

fn settings() -> Settings {
    Settings { image: "registry.example.com/portico:1".to_owned(), ..Settings::default() }
}

fn planned_with(cluster: &Cluster, settings: &Settings, digests: &Digests) -> ControlPlane {
    let (seeds, configuration) = (seeds(), configuration());
    let scope = usable(cluster, &seeds, Some(&configuration)).unwrap();
    plan(&scope, settings, digests).unwrap()
}

fn planned(layout: &str, spec: &Value) -> ControlPlane {
    planned_with(&cluster(layout, spec), &settings(), &Digests::new())
}

/// Every field of a Cluster that hosting reads, as far as the layout has it.
fn everything(layout: &str) -> Value {
    let mut spec = json!({
        "clusterNetwork": {"pods": {"cidrBlocks": ["172.30.0.0/16", "fd01::/48"]},
            "services": {"cidrBlocks": ["10.240.0.0/20", "fd02::/108"]}},
        "componentsOverride": {
            "apiserver": {"replicas": 3, "hostAntiAffinity": "required", "nodePortRange": "30000-31000",
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "resources": {"requests": {"cpu": "200m"}, "limits": {"cpu": 2, "memory": "4Gi"}}},
            "controllerManager": {"replicas": 2, "leaderElection": {"leaseDurationSeconds": 30}},
            "etcd": {"clusterSize": 1, "diskSize": "10Gi", "quotaBackendGb": 4, "storageClass": "fast",
                "nodeSelector": {"disk": "nvme"}},
            "konnectivityProxy": {"keepaliveTime": "1m30s"}},
        "serviceAccount": {"issuer": "https://tokens.example.com"},
        "oidc": {"issuerURL": "https://login.example.com/realms/a", "clientID": "kubernetes",
            "groupsClaim": "groups", "requiredClaim": "hd=example.com"},
        "admissionPlugins": ["AlwaysPullImages"],
        "usePodNodeSelectorAdmissionPlugin": true,
        "podNodeSelectorAdmissionPluginConfig": {"clusterDefaultNodeSelector": "role=worker"},
        "useEventRateLimitAdmissionPlugin": true,
        "eventRateLimitConfig": {"server": {"qps": 10, "burst": 20},
            "sourceAndObject": {"qps": 1, "burst": 2}},
        "auditLogging": {"enabled": true, "policyPreset": "recommended"},
        "cniPlugin": {"type": "none"}});
    if layout == "compact" {
        for component in ["apiserver", "controllerManager"] {
            spec["componentsOverride"][component].as_object_mut().unwrap().remove("replicas");
        }
    }
    spec
}

/// Pod templates, by the name of the object that has them.
fn templates(plane: &ControlPlane) -> Vec<(&str, &Value)> {
    let all = plane.objects.iter().filter(|object| object["spec"]["template"].is_object());
    all.map(|object| (object["metadata"]["name"].as_str().unwrap(), &object["spec"]["template"])).collect()
}

/// Containers and sidecars of a pod template.
fn containers(template: &Value) -> impl Iterator<Item = &Value> {
    let listed = |field: &str| template["spec"][field].as_array().into_iter().flatten();
    listed("initContainers").filter(|one| one["restartPolicy"] == "Always").chain(listed("containers"))
}
