//! The controller that makes control planes, beside a real API server with its controllers and without a
//! node. What it makes of one object, with the rights of deploy/operator.yaml alone; what others break; and a
//! kill at every write.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::{ApiServer, Kubectl, long_form, programs};
use portico_operator::{CONTROL_PLANES, HostingSettings, PartsStatus, WorkStatus};
use portico_pki::inventory::{SIGNING_KEY, VERIFYING_KEYS};
use portico_pki::{Authority, KeyKind, Names, Pair, Profile, ServiceAccountKeys, Usage};
use serde_json::{Value, json};

use crate::support::{Running, cluster, install, release, withheld_or};
use crate::until;

const LAYOUT: &str = "portico.k8c.io/layout";

/// Without the one for users: their address is not known before there is a NodePort, or a name.
const SECRETS: usize = 17;

async fn seed(name: &str) -> (ApiServer, Client) {
    let api = ApiServer::start_with_controllers(name, &[]).unwrap();
    let client = install(api.kubectl(), api.access()).await;
    (api, client)
}

fn control_planes(operator: &Running) -> PartsStatus {
    operator.status.get().parts.remove(&CONTROL_PLANES).unwrap_or_default()
}

fn start(client: &Client, identity: &str) -> Running {
    start_at(client, identity, Timestamp::now)
}

fn start_at(client: &Client, identity: &str, clock: fn() -> Timestamp) -> Running {
    start_with(client, identity, clock, SignedDuration::from_mins(2))
}

fn start_with(
    client: &Client,
    identity: &str,
    clock: fn() -> Timestamp,
    deletion_patience: SignedDuration,
) -> Running {
    Running::start_with(client, identity, |operator| {
        operator.with_hosting(HostingSettings {
            plan: portico_hosting::Settings {
                image: "localhost/portico:dev".into(),
                // deploy/operator.yaml gives no right to the second one, which must stop nothing.
                pull_secrets: vec!["dockercfg".into(), "another".into()],
                ..portico_hosting::Settings::default()
            },
            namespace: "portico".into(),
            keys: KeyKind::EcdsaP256,
            clock,
            alarm_period: Duration::from_millis(200),
            deletion_patience,
        })
    })
}

fn hosted(name: &str, layout: &str) -> Value {
    let mut cluster = cluster(name, "Tunneling");
    cluster["metadata"]["annotations"] = json!({LAYOUT: layout});
    cluster
}

fn work(operator: &Running) -> WorkStatus {
    operator.work("portico-hosting")
}

fn condition(kubectl: &Kubectl, name: &str) -> Result<Value> {
    let cluster = kubectl.get(&["cluster", name])?;
    let condition = cluster.pointer("/status/conditions/PorticoControlPlaneReady");
    condition.cloned().context("no condition")
}

fn wait_reason(kubectl: &Kubectl, name: &str, reason: &str) -> String {
    let mut message = String::new();
    until(reason, || {
        let condition = condition(kubectl, name)?;
        ensure!(condition["reason"] == reason, "{condition}");
        message = condition["message"].as_str().unwrap_or_default().to_owned();
        Ok(())
    });
    message
}

fn patch(kubectl: &Kubectl, object: &[&str], change: &Value) {
    try_patch(kubectl, object, change).unwrap();
}

fn try_patch(kubectl: &Kubectl, object: &[&str], change: &Value) -> Result<()> {
    let change = change.to_string();
    kubectl.run(&[&["patch"], object, &["--type=merge", "-p", &change]].concat()).map(drop)
}

/// Has the operator look at these clusters, and waits for as many passes. `mark` has to be another each time.
fn look_at(kubectl: &Kubectl, operator: &Running, names: &[&str], mark: &str) {
    let passes = work(operator).passes;
    for name in names {
        patch(kubectl, &["cluster", name], &json!({"metadata": {"labels": {"looked": mark}}}));
    }
    until("a pass over each", || {
        ensure!(work(operator).passes >= passes + names.len() as u64);
        Ok(())
    });
}

/// Says of the pod of a compact control plane that all of it runs, as a kubelet does. Returns once its
/// StatefulSet counts that pod: one that is on its way out makes room for another.
fn run_pod(kubectl: &Kubectl, name: &str) {
    let namespace = format!("cluster-{name}");
    until("a pod that runs", || {
        say_that_it_runs(kubectl, &namespace)?;
        let set = kubectl.get(&["statefulset", "control-plane", "-n", &namespace])?;
        let status = &set["status"];
        ensure!(status["observedGeneration"] == set["metadata"]["generation"], "{status}");
        ensure!(status["readyReplicas"] == 1 && status["replicas"] == 1, "{status}");
        Ok(())
    });
}

fn say_that_it_runs(kubectl: &Kubectl, namespace: &str) -> Result<()> {
    let pod = ["pod", "control-plane-0", "-n", namespace];
    let found = kubectl.get(&pod)?;
    let ready = |field: &str| -> Vec<Value> {
        let containers = found["spec"][field].as_array().into_iter().flatten();
        let status = |container: &Value| {
            json!({"name": container["name"], "image": "", "imageID": "", "restartCount": 0,
                "ready": true, "started": true})
        };
        containers.map(status).collect()
    };
    let status = json!({"status": {"phase": "Running", "podIP": Etcd::address(),
        "containerStatuses": ready("containers"),
        "initContainerStatuses": ready("initContainers"),
        "conditions": [{"type": "Ready", "status": "True"}]}});
    try_patch(kubectl, &[&pod[..], &["--subresource=status"]].concat(), &status)
}

/// A member of etcd where its pod would be.
struct Etcd {
    process: Child,
    folder: tempfile::TempDir,
}

impl Etcd {
    /// An address of this machine that no other test has.
    fn address() -> String {
        let [.., high, low] = std::process::id().to_be_bytes();
        format!("127.88.{high}.{low}")
    }

    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = |port: u16| format!("http://{}:{port}", Self::address());
        // Whatever becomes of a test, no etcd outlives it.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(programs::kube().unwrap().join("etcd"));
        command.arg("--data-dir").arg(folder.path()).args([
            "--log-level=error".to_owned(),
            "--unsafe-no-fsync".to_owned(),
            format!("--listen-client-urls={}", url(2_379)),
            format!("--advertise-client-urls={}", url(2_379)),
            format!("--listen-peer-urls={}", url(2_380)),
            format!("--listen-metrics-urls={}", url(2_378)),
        ]);
        Self { process: command.spawn().unwrap(), folder }
    }

    /// Raises or ends an alarm.
    fn alarm(&self, action: &str, alarm: &str) {
        let url = format!("http://{}:2379/v3/maintenance/alarm", Self::address());
        let body = json!({"action": action, "alarm": alarm}).to_string();
        until("etcd to take it", || {
            let output = Command::new("curl").args(["-sS", "--max-time", "5", "-d", &body, &url]).output()?;
            let said = String::from_utf8_lossy(&output.stdout);
            ensure!(said.contains(alarm), "{said} in {}", self.folder.path().display());
            Ok(())
        });
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// If there are two alarms, the worse one is reported.
fn alarms_of_etcd_are_reported(kubectl: &Kubectl) {
    let etcd = Etcd::start();
    etcd.alarm("ACTIVATE", "NOSPACE");
    let message = wait_reason(kubectl, "a", "EtcdFull");
    assert!(message.contains("etcd refuses every write"), "{message}");
    assert_eq!(condition(kubectl, "a").unwrap()["status"], "False");
    etcd.alarm("ACTIVATE", "CORRUPT");
    wait_reason(kubectl, "a", "EtcdCorrupt");
    etcd.alarm("DEACTIVATE", "CORRUPT");
    wait_reason(kubectl, "a", "EtcdFull");
    etcd.alarm("DEACTIVATE", "NOSPACE");
    wait_reason(kubectl, "a", "Ready");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_control_plane_is_made_of_one_object_kept_and_deleted_with_it() {
    let (api, client) = seed("hosting").await;
    let kubectl = api.kubectl();
    let credentials = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": "dockercfg", "namespace": "portico"},
        "stringData": {".dockerconfigjson": r#"{"auths": {}}"#}});
    kubectl.apply_json(&credentials).unwrap();
    let faulty = FaultyApi::default();
    let operator = start(&faulty.client(&client), "one");
    kubectl.apply_json(&hosted("a", "compact")).unwrap();
    let message = wait_reason(kubectl, "a", "Starting");
    let copied = kubectl.get(&["secret", "dockercfg", "-n", "cluster-a"]).unwrap();
    assert_eq!(copied["data"][".dockerconfigjson"], "eyJhdXRocyI6IHt9fQ==");
    assert_eq!(copied["type"], "kubernetes.io/dockerconfigjson");
    // Each program by itself, or all at once if the scheduler was faster.
    let starts = message.starts_with("Kubernetes 1.35.8, compact: etcd");
    assert!(starts && message.contains(" 0 of 1"), "{message}");
    until("why no node takes it", || {
        let condition = condition(kubectl, "a")?;
        let pods = kubectl.get(&["pods", "-n", "cluster-a"])?;
        ensure!(
            condition["message"].as_str().unwrap_or_default().contains("no node takes it"),
            "{condition} {pods}"
        );
        Ok(())
    });
    let namespace = kubectl.get(&["namespace", "cluster-a"]).unwrap();
    assert_eq!(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "restricted");
    let secrets = || kubectl.get(&["secrets", "-n", "cluster-a", "-l", "cluster=a"]).unwrap();
    assert_eq!(secrets()["items"].as_array().unwrap().len(), SECRETS + 1);
    let cluster = kubectl.get(&["cluster", "a"]).unwrap();
    assert_eq!(cluster["status"]["phase"], "Creating");
    let conditions = &cluster["status"]["conditions"];
    assert_eq!(conditions["SeedResourcesUpToDate"]["status"], "False");
    assert!(conditions.get("ClusterInitialized").is_none(), "{conditions}");
    assert_eq!(cluster["status"]["extendedHealth"]["apiserver"], "HealthStatusProvisioning");

    let pod = ["pod", "control-plane-0", "-n", "cluster-a", "--subresource=status"];
    let waiting = json!({"waiting": {"reason": "ErrImagePull", "message": "no such image"}});
    let waits = json!({"name": "etcd-launcher", "image": "portico:1", "imageID": "", "restartCount": 0,
        "ready": false, "state": waiting});
    patch(kubectl, &pod, &json!({"status": {"initContainerStatuses": [waits]}}));
    until("what its node says of an image", || {
        let condition = condition(kubectl, "a")?;
        let message = condition["message"].as_str().unwrap_or_default();
        let said = "its node does not get the image \"portico:1\", see the Events of its pod";
        ensure!(condition["reason"] == "Starting" && message.contains(said), "{condition}");
        Ok(())
    });
    run_pod(kubectl, "a");
    assert_eq!(wait_reason(kubectl, "a", "Ready"), "Kubernetes 1.35.8, compact");
    let cluster = kubectl.get(&["cluster", "a"]).unwrap();
    assert_eq!(cluster["status"]["phase"], "Running");
    for condition in ["EtcdClusterInitialized", "ClusterInitialized", "SeedResourcesUpToDate"] {
        assert_eq!(cluster["status"]["conditions"][condition]["status"], "True", "{condition}");
    }
    let health = &cluster["status"]["extendedHealth"];
    for program in ["apiserver", "controller", "etcd", "konnectivity", "scheduler"] {
        assert_eq!(health[program], "HealthStatusUp", "{health}");
    }

    let written: u64 = work(&operator).writes.values().sum();
    assert!(written <= 36, "{written}");
    alarms_of_etcd_are_reported(kubectl);

    // At rest a look at everything writes nothing, in the other layout neither. What needs etcd is not made
    // yet there.
    kubectl.apply_json(&hosted("d", "dedicated")).unwrap();
    let etcd = "etcd 0 of 3: no node takes it";
    until(etcd, || {
        let condition = condition(kubectl, "d")?;
        ensure!(condition["message"].as_str().unwrap_or_default().contains(etcd), "{condition}");
        Ok(())
    });
    assert!(kubectl.is_gone(&["deployment", "apiserver", "-n", "cluster-d"]));
    let mut looked = 0;
    until("a look at each that writes nothing", || {
        let before = work(&operator).writes;
        looked += 1;
        look_at(kubectl, &operator, &["a", "d"], &format!("at-{looked}"));
        // What others do for them may come later than what the condition says.
        let written = work(&operator).writes;
        ensure!(written == before, "{before:?} {written:?}");
        Ok(())
    });

    // What is paused stays as it is, also broken.
    patch(kubectl, &["cluster", "a"], &json!({"spec": {"pause": true}}));
    until("the pause to be seen", || {
        let reports = control_planes(&operator).reports;
        ensure!(reports["a"].reason == "Paused");
        Ok(())
    });
    let egress = ["configmap/kube-apiserver-egress", "-n", "cluster-a"];
    kubectl.run(&[&["delete"][..], &egress].concat()).unwrap();
    look_at(kubectl, &operator, &["d"], "again");
    assert!(kubectl.is_gone(&egress));
    patch(kubectl, &["cluster", "a"], &json!({"spec": {"pause": false}}));
    until("what was missing", || kubectl.get(&egress).map(drop));
    wait_reason(kubectl, "a", "Ready");

    // What an operator before this one had is taken away.
    let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "default-deny-all-egress", "namespace": "cluster-a",
            "labels": {"app.kubernetes.io/managed-by": "portico", "cluster": "a"}},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"]}});
    let apply = ["apply", "--server-side", "--field-manager=portico", "-f", "-"];
    kubectl.run_with_input(&apply, &policy.to_string()).unwrap();
    until("an older policy to go", || {
        let left = kubectl.run(&["get", "networkpolicies", "-n", "cluster-a", "--output=name"])?;
        ensure!(!left.contains("default-deny") && left.contains("dns-allow"), "{left}");
        Ok(())
    });
    wait_reason(kubectl, "a", "Ready");

    // What can be made anew comes back. What cannot be is reported, and the pods stay as they are.
    let set = || kubectl.get(&["statefulset", "control-plane", "-n", "cluster-a"]).unwrap();
    let generation = set()["metadata"]["generation"].clone();
    for object in ["configmap/kube-apiserver-egress", "secret/apiserver-tls"] {
        kubectl.run(&["delete", object, "-n", "cluster-a"]).unwrap();
        until(object, || kubectl.get(&[object, "-n", "cluster-a"]).map(drop));
    }
    let keys =
        ["ca", "service-account-key"].map(|name| (name, kubectl.get(&["secret", name, "-n", "cluster-a"])));
    for (name, found) in keys {
        let mut found = found.unwrap();
        kubectl.run(&["delete", "secret", name, "-n", "cluster-a"]).unwrap();
        let message = wait_reason(kubectl, "a", "KeysLost");
        assert!(message.contains(name) && message.contains("restore the Secret from a backup"), "{message}");
        assert!(kubectl.is_gone(&["secret", name, "-n", "cluster-a"]));
        for chosen in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
            found["metadata"].as_object_mut().unwrap().remove(chosen);
        }
        kubectl.apply_json(&found).unwrap();
        wait_reason(kubectl, "a", "Ready");
    }
    assert_eq!(set()["metadata"]["generation"], generation);

    // Another layout would leave the data behind.
    patch(kubectl, &["cluster", "a"], &json!({"metadata": {"annotations": {LAYOUT: "dedicated"}}}));
    let message = wait_reason(kubectl, "a", "LayoutChanged");
    assert!(message.contains("StatefulSet control-plane holds the data"), "{message}");
    assert!(kubectl.is_gone(&["deployment", "apiserver", "-n", "cluster-a"]));
    patch(kubectl, &["cluster", "a"], &json!({"metadata": {"annotations": {LAYOUT: null}}}));
    wait_reason(kubectl, "a", "LayoutRemoved");
    patch(kubectl, &["cluster", "a"], &json!({"metadata": {"annotations": {LAYOUT: "compact"}}}));
    wait_reason(kubectl, "a", "Ready");

    // Replicas of somebody's are put back, and a size that a volume cannot have any more stops nothing.
    kubectl.run(&["scale", "statefulset", "control-plane", "-n", "cluster-a", "--replicas=0"]).unwrap();
    until("one replica", || {
        ensure!(set()["spec"]["replicas"] == 1);
        Ok(())
    });
    let size = json!({"spec": {"componentsOverride": {"etcd": {"diskSize": "1Gi"}}}});
    patch(kubectl, &["cluster", "a"], &size);
    run_pod(kubectl, "a");
    wait_reason(kubectl, "a", "Ready");

    // The volume: an empty one would look well. Nor does a pass make one that began while it was there.
    faulty.rules(|rules| rules.held = Some("/networkpolicies/dns-allow"));
    kubectl.run(&["delete", "networkpolicy", "dns-allow", "-n", "cluster-a"]).unwrap();
    until("a pass that waits", || {
        ensure!(faulty.rules(|rules| rules.withheld));
        Ok(())
    });
    kubectl.run(&["delete", "pvc", "data-etcd-0", "-n", "cluster-a", "--wait=false"]).unwrap();
    kubectl
        .run(&["delete", "pod", "control-plane-0", "-n", "cluster-a", "--grace-period=0", "--force"])
        .unwrap();
    until("the volume to go", || {
        ensure!(kubectl.is_gone(&["pvc", "data-etcd-0", "-n", "cluster-a"]));
        Ok(())
    });
    faulty.rules(|rules| rules.held = None);
    wait_reason(kubectl, "a", "DataLost");
    assert!(kubectl.is_gone(&["pvc", "data-etcd-0", "-n", "cluster-a"]));
    a_restored_volume_without_labels_ends_the_loss(kubectl);

    // The namespace with all that was in it: an empty cluster of the same name would be another one.
    kubectl.run(&["delete", "namespace", "cluster-a", "--wait=false"]).unwrap();
    kubectl.run(&["delete", "pods", "--all", "-n", "cluster-a", "--grace-period=0", "--force"]).unwrap();
    let is_gone = || {
        let set = ["statefulset", "control-plane", "-n", "cluster-a"];
        ensure!(kubectl.is_gone(&set), "it is there");
        Ok(())
    };
    // Kubernetes deletes what is in a namespace in an order of its own.
    until("the StatefulSet to go", is_gone);
    wait_reason(kubectl, "a", "KeysLost");
    look_at(kubectl, &operator, &["a"], "at-nothing");
    is_gone().unwrap();

    kubectl.run(&["delete", "cluster", "a", "--wait=false"]).unwrap();
    until("nothing to be left", || {
        ensure!(kubectl.is_gone(&["cluster", "a"]), "the Cluster");
        ensure!(kubectl.is_gone(&["namespace", "cluster-a"]), "the namespace");
        Ok(())
    });
    operator.stop().await;
}

fn a_restored_volume_without_labels_ends_the_loss(kubectl: &Kubectl) {
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data-etcd-0", "namespace": "cluster-a"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}});
    kubectl.apply_json(&claim).unwrap();
    wait_reason(kubectl, "a", "NotServing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_far_off_issues_nothing_and_what_somebody_else_made_is_left_alone_and_named() {
    let (api, client) = seed("hosting-foreign").await;
    let kubectl = api.kubectl();
    let labels = json!({"app": "theirs"});
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "cluster-b",
            "labels": {"portico.k8c.io/cluster": "b"}}},
        {"apiVersion": "apps/v1", "kind": "StatefulSet",
            "metadata": {"name": "control-plane", "namespace": "cluster-b"},
            "spec": {"replicas": 0, "serviceName": "x", "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels},
                    "spec": {"containers": [{"name": "x", "image": "x"}]}}}}]});
    kubectl.apply_json(&objects).unwrap();
    kubectl.apply_json(&hosted("b", "compact")).unwrap();
    // What a clock issues that is far ahead is good for nobody.
    let ahead = start_at(&client, "ahead", || Timestamp::now() + SignedDuration::from_hours(24 * 300));
    wait_reason(kubectl, "b", "ClockOff");
    assert!(kubectl.is_gone(&["secret", "ca", "-n", "cluster-b"]));
    ahead.stop().await;
    let operator = start(&client, "one");
    let names = |what: &str| {
        until(what, || {
            let condition = condition(kubectl, "b")?;
            let message = condition["message"].as_str().unwrap_or_default();
            ensure!(condition["reason"] == "ForeignObject" && message.starts_with(what), "{condition}");
            Ok(())
        });
    };
    names("StatefulSet cluster-b/control-plane is somebody else's");
    let set = kubectl.get(&["statefulset", "control-plane", "-n", "cluster-b"]).unwrap();
    assert_eq!(set["spec"]["replicas"], 0);
    let theirs = json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "apiserver-tls", "namespace": "cluster-b"},
        "stringData": {"apiserver-tls.crt": "theirs", "apiserver-tls.key": "theirs"}});
    kubectl.run_with_input(&["replace", "-f", "-"], &theirs.to_string()).unwrap();
    names("Secret apiserver-tls is somebody else's");
    let secret = kubectl.get(&["secret", "apiserver-tls", "-n", "cluster-b"]).unwrap();
    assert_eq!(secret["data"]["apiserver-tls.crt"], "dGhlaXJz");
    kubectl.run(&["delete", "secret", "apiserver-tls", "-n", "cluster-b"]).unwrap();
    names("StatefulSet");
    kubectl.run(&["delete", "statefulset", "control-plane", "-n", "cluster-b"]).unwrap();
    wait_reason(kubectl, "b", "Starting");
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_write_the_next_one_makes_the_same_control_plane() {
    let (api, direct) = seed("hosting-kill").await;
    let kubectl = api.kubectl();
    let mut expected: Option<Vec<Value>> = None;
    for writes in (0..).step_by(long_form(10, 1)) {
        // Each time another one: those of before are at rest.
        let name = format!("k{writes:02}");
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        let killed = start(&faulty.client(&direct), &format!("killed-{writes}"));
        kubectl.apply_json(&hosted(&name, "compact")).unwrap();
        let complete = withheld_or(&faulty, || {
            condition(kubectl, &name).is_ok_and(|condition| condition["reason"] == "Starting")
        });
        killed.kill().await;
        release(kubectl);
        let next = start(&direct, &format!("next-{writes}"));
        wait_reason(kubectl, &name, "Starting");
        let found = made(kubectl, &name);
        match &expected {
            None => expected = Some(found),
            Some(expected) => assert_eq!(*expected, found, "killed after {writes} writes"),
        }
        next.stop().await;
        if complete {
            assert!(writes > 20, "only {writes} writes were withheld");
            return;
        }
    }
}

/// Each operator gets one write done, and is killed before its second: while the control plane is made, and
/// while it is found to be ready. While it is deleted, each gets two: until its workload is gone, a pod that
/// ended is made anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_every_write_of_one_life_the_control_plane_is_the_same() {
    let (api, direct) = seed("hosting-each").await;
    let kubectl = api.kubectl();
    kubectl.apply_json(&hosted("k0", "compact")).unwrap();
    let undisturbed = start(&direct, "undisturbed");
    wait_reason(kubectl, "k0", "Starting");
    let expected = made(kubectl, "k0");
    undisturbed.stop().await;

    kubectl.apply_json(&hosted("k1", "compact")).unwrap();
    let reason = || condition(kubectl, "k1").ok().map(|condition| condition["reason"].clone());
    let killed = killed_after(1, kubectl, &direct, || reason() == Some("Starting".into())).await;
    assert!(killed > 20, "only {killed} operators were killed");
    assert_eq!(made(kubectl, "k1"), expected);
    run_pod(kubectl, "k1");
    killed_after(1, kubectl, &direct, || is_running(kubectl, "k1")).await;
    assert_eq!(made(kubectl, "k1"), expected);

    kubectl.run(&["delete", "cluster", "k1", "--wait=false"]).unwrap();
    let killed = killed_after(2, kubectl, &direct, || kubectl.is_gone(&["cluster", "k1"])).await;
    assert!(killed > 1, "only {killed} operators were killed");
    assert!(kubectl.is_gone(&["namespace", "cluster-k1"]) && kubectl.is_gone(&["exposedcluster", "k1"]));
    assert_eq!(made(kubectl, "k0"), expected);
}

/// Has operators, each of which gets so many writes done, until that is so. Returns how many were killed.
async fn killed_after(writes: usize, kubectl: &Kubectl, direct: &Client, is_so: impl Fn() -> bool) -> usize {
    for killed in 0..100 {
        release(kubectl);
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        let operator = start(&faulty.client(direct), &format!("life-{killed}"));
        let complete = withheld_or(&faulty, &is_so);
        operator.kill().await;
        if complete {
            return killed;
        }
    }
    panic!("each of a hundred operators got its writes done, and that was not enough");
}

/// Whether everything about a new control plane is reported.
fn is_running(kubectl: &Kubectl, name: &str) -> bool {
    let Ok(cluster) = kubectl.get(&["cluster", name]) else { return false };
    let conditions = &cluster["status"]["conditions"];
    let holds = |name: &str| conditions[name]["status"] == "True";
    cluster["status"]["phase"] == "Running"
        && holds("PorticoControlPlaneReady")
        && holds("ClusterInitialized")
}

/// Everything of a cluster, less what differs from one to the next.
fn made(kubectl: &Kubectl, name: &str) -> Vec<Value> {
    const KINDS: &str = "secrets,configmaps,networkpolicies,poddisruptionbudgets,services,\
                         persistentvolumeclaims,statefulsets,deployments";
    let all = kubectl.get(&[KINDS, "-n", &format!("cluster-{name}")]).unwrap()["items"].take();
    let stable = |object: Value| {
        let keys = object["data"].as_object().map(|data| data.keys().cloned().collect::<Vec<_>>());
        let template = &object["spec"]["template"]["spec"];
        let text =
            json!([object["kind"], object["metadata"]["name"], object["metadata"]["labels"], keys, template]);
        serde_json::from_str(&text.to_string().replace(name, "NAME")).unwrap()
    };
    let by_name = |object: &Value| (object[0].to_string(), object[1].to_string());
    let all: BTreeMap<_, Value> = all
        .as_array()
        .unwrap()
        .iter()
        // Comes from the controller manager, when that gets to it.
        .filter(|object| object["metadata"]["name"] != "kube-root-ca.crt")
        .cloned()
        .map(stable)
        .map(|object| (by_name(&object), object))
        .collect();
    all.into_values().collect()
}

/// As a Cluster is once it was edited by definitions that know less.
fn unreadable(kubectl: &Kubectl, name: &str) {
    let spec = json!([{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec",
        "value": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}]);
    let definition = ["crd", "clusters.kubermatic.k8c.io", "--type=json", "-p", &spec.to_string()];
    kubectl.run(&[&["patch"][..], &definition].concat()).unwrap();
    let change = json!({"spec": {"pause": "no"}}).to_string();
    until("what does not fit to be taken", || {
        kubectl.run(&["patch", "cluster", name, "--type=merge", "-p", &change]).map(drop)
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_cannot_be_read_any_more_keeps_what_it_has_and_goes_when_it_is_deleted() {
    let (api, client) = seed("hosting-unread").await;
    let kubectl = api.kubectl();
    let operator = start(&client, "one");
    kubectl.apply_json(&hosted("a", "compact")).unwrap();
    wait_reason(kubectl, "a", "Starting");
    unreadable(kubectl, "a");
    let wait_report = |operator: &Running, what: &str| {
        until(what, || {
            let reports = control_planes(operator).reports;
            let report = reports.get("a").context("no report")?;
            ensure!(report.reason == what && report.message.contains("spec.pause"), "{report:?}");
            Ok(())
        });
    };
    wait_report(&operator, "Unreadable");
    // By what was read last.
    kubectl.run(&["delete", "configmap", "kube-apiserver-egress", "-n", "cluster-a"]).unwrap();
    until("what is missing", || {
        kubectl.get(&["configmap", "kube-apiserver-egress", "-n", "cluster-a"]).map(drop)
    });
    operator.stop().await;

    // One that has never read it.
    let operator = start(&client, "two");
    wait_report(&operator, "Unreadable");
    what_ends_soon_is_renewed(kubectl);
    kubectl.run(&["delete", "cluster", "a", "--wait=false"]).unwrap();
    until("nothing to be left", || {
        kubectl.run(&["delete", "pods", "--all", "-n", "cluster-a", "--grace-period=0", "--force"])?;
        ensure!(kubectl.is_gone(&["cluster", "a"]), "the Cluster");
        ensure!(kubectl.is_gone(&["namespace", "cluster-a"]), "the namespace");
        Ok(())
    });
    operator.stop().await;
}

/// The certificate of the API server of cluster a.
const CERTIFICATE: [&str; 4] = ["secret", "apiserver-tls", "-n", "cluster-a"];

/// One that ends in twenty days, with a name that no plan has; and its Secret's data.
fn short_lived(kubectl: &Kubectl) -> (String, Value) {
    let found = kubectl.get(&["secret", "ca", "-n", "cluster-a"]).unwrap();
    let data = serde_json::from_value::<Secret>(found).unwrap().data.unwrap();
    let [certificate, key] = ["ca.crt", "ca.key"].map(|key| String::from_utf8(data[key].0.clone()).unwrap());
    let authority = Authority::read(&Pair { certificate, key }, Timestamp::now()).unwrap();
    let profile = Profile {
        common_name: "kube-apiserver".to_owned(),
        organisation: None,
        names: Names { dns: ["kept.example.com".to_owned()].into(), ..Names::default() },
        usage: Usage::Server,
        lifetime: SignedDuration::from_hours(20 * 24),
    };
    let pair = authority.issue(&profile, KeyKind::EcdsaP256, Timestamp::now()).unwrap();
    let data = json!({"apiserver-tls.crt": pair.certificate, "apiserver-tls.key": pair.key});
    (pair.certificate, data)
}

/// Whether the API server of cluster a has another certificate.
fn is_renewed(kubectl: &Kubectl, before: &str) -> Result<()> {
    let secret: Secret = serde_json::from_value(kubectl.get(&CERTIFICATE)?)?;
    let found = secret.data.context("no data")?["apiserver-tls.crt"].0.clone();
    ensure!(found != before.as_bytes(), "it is the same");
    Ok(())
}

fn what_ends_soon_is_renewed(kubectl: &Kubectl) {
    let (short, data) = short_lived(kubectl);
    patch(kubectl, &CERTIFICATE, &json!({"stringData": data}));
    until("another certificate", || is_renewed(kubectl, &short));
}

/// Gives cluster a another `ca`, which is old.
fn an_authority_of_seventy_days(kubectl: &Kubectl) {
    let made = Timestamp::now() - SignedDuration::from_hours(24 * 3_580);
    let pair = Authority::create("root-ca", KeyKind::EcdsaP256, made).unwrap();
    let data = json!({"stringData": {"ca.crt": pair.certificate, "ca.key": pair.key}});
    patch(kubectl, &["secret", "ca", "-n", "cluster-a"], &data);
}

/// The pause promises that nothing is written.
fn what_ends_soon_during_a_pause_is_told(kubectl: &Kubectl, operator: &Running) {
    let pause = |pause: bool| patch(kubectl, &["cluster", "a"], &json!({"spec": {"pause": pause}}));
    let wait_report = |reason: &str| {
        let mut message = String::new();
        until(reason, || {
            let reports = control_planes(operator).reports;
            let report = reports.get("a").context("no report")?;
            ensure!(report.reason == reason, "{report:?}");
            message.clone_from(&report.message);
            Ok(())
        });
        message
    };
    pause(true);
    wait_report("Paused");
    an_authority_of_seventy_days(kubectl);
    let message = wait_report("AuthoritiesEnd");
    assert!(message.contains("Secret ca on "), "{message}");
    let ends = control_planes(operator).authority_ends["a"];
    let left = ends - Timestamp::now().as_second();
    assert!((69 * 86_400..71 * 86_400).contains(&left), "{left} s");
    let (short, data) = short_lived(kubectl);
    patch(kubectl, &CERTIFICATE, &json!({"stringData": data}));
    let message = wait_report("CertificatesEnd");
    assert!(message.contains("Secret apiserver-tls: it ends on "), "{message}");
    until("the Event", || {
        let events = kubectl.run(&["events", "--for=cluster/a", "--types=Warning"])?;
        ensure!(events.contains("CertificatesEnd") && events.contains("AuthoritiesEnd"), "{events}");
        Ok(())
    });
    assert!(is_renewed(kubectl, &short).is_err());
    pause(false);
    until("another certificate", || is_renewed(kubectl, &short));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_must_not_be_used_as_written_has_its_certificates_renewed() {
    let (api, client) = seed("hosting-refused").await;
    let kubectl = api.kubectl();
    let operator = start(&client, "one");
    kubectl.apply_json(&hosted("a", "compact")).unwrap();
    wait_reason(kubectl, "a", "Starting");
    let layout = |layout: Option<&str>| {
        patch(kubectl, &["cluster", "a"], &json!({"metadata": {"annotations": {LAYOUT: layout}}}));
    };
    for (wrong, reason) in [(Some("round"), "InvalidConfiguration"), (None, "LayoutRemoved")] {
        layout(wrong);
        wait_reason(kubectl, "a", reason);
        what_ends_soon_is_renewed(kubectl);
    }
    layout(Some("compact"));
    wait_reason(kubectl, "a", "Starting");
    what_ends_soon_during_a_pause_is_told(kubectl, &operator);
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_that_is_refused_for_ever_keeps_no_other_from_being_written() {
    let (api, client) = seed("hosting-immutable").await;
    let kubectl = api.kubectl();
    let operator = start(&client, "one");
    kubectl.apply_json(&hosted("a", "compact")).unwrap();
    wait_reason(kubectl, "a", "Starting");
    let (_, data) = short_lived(kubectl);
    patch(kubectl, &CERTIFICATE, &json!({"stringData": data, "immutable": true}));
    let message = wait_reason(kubectl, "a", "WriteRefused");
    assert!(message.contains("apiserver-tls") && message.contains("immutable"), "{message}");
    let later = ["secret", "kubelet-client-certificates", "-n", "cluster-a"];
    kubectl.run(&[&["delete"][..], &later].concat()).unwrap();
    until("one that comes after it", || kubectl.get(&later).map(drop));
    wait_reason(kubectl, "a", "WriteRefused");
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_that_another_leader_has_just_made_is_used_and_not_written_over() {
    let (api, direct) = seed("hosting-once").await;
    let kubectl = api.kubectl();
    let keys = ServiceAccountKeys::create(KeyKind::EcdsaP256).unwrap();
    let metadata = json!({"name": "service-account-key", "namespace": "cluster-c"});
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "cluster-c",
            "labels": {"portico.k8c.io/cluster": "c"}}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata,
            "data": {SIGNING_KEY: bytes(&keys.signing), VERIFYING_KEYS: bytes(&keys.verifying)}}]});
    // As the API server takes what a leader applies.
    let manager = ["apply", "--server-side", "--field-manager=portico", "-f", "-"];
    kubectl.run_with_input(&manager, &objects.to_string()).unwrap();
    let faulty = FaultyApi::default();
    // The view of one that has been frozen since before.
    faulty.rules(|rules| rules.answers = vec![("/secrets/service-account-key", Answer::Status(404), 1)]);
    let operator = start(&faulty.client(&direct), "frozen");
    kubectl.apply_json(&hosted("c", "compact")).unwrap();
    wait_reason(kubectl, "c", "Starting");
    assert!(faulty.rules(|rules| rules.answers.iter().all(|answer| answer.2 == 0)), "it was not asked for");
    let found = kubectl.get(&["secret", "service-account-key", "-n", "cluster-c"]).unwrap();
    let found: Secret = serde_json::from_value(found).unwrap();
    assert!(found.data.unwrap()[SIGNING_KEY].0 == keys.signing.as_bytes(), "another key is there");
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_is_late_by_the_clock_of_the_api_server_and_names_what_is_left() {
    let (api, client) = seed("hosting-late").await;
    let kubectl = api.kubectl();
    let operator = start_at(&client, "ahead", || Timestamp::now() + SignedDuration::from_mins(90));
    kubectl.apply_json(&hosted("a", "compact")).unwrap();
    wait_reason(kubectl, "a", "Starting");
    let egress = ["configmap", "kube-apiserver-egress", "-n", "cluster-a"];
    patch(kubectl, &egress, &json!({"metadata": {"finalizers": ["example.com/stays"]}}));
    kubectl.run(&["delete", "cluster", "a", "--wait=false"]).unwrap();
    let mut reasons = BTreeSet::new();
    until("a look at it", || {
        let reports = control_planes(&operator).reports;
        reasons.extend(reports.get("a").map(|report| report.reason));
        ensure!(["Terminating", "DeletionHangs"].iter().any(|reason| reasons.contains(reason)));
        Ok(())
    });
    assert!(!reasons.contains("DeletionHangs"), "{reasons:?}");
    operator.stop().await;

    let operator = start_with(&client, "impatient", Timestamp::now, SignedDuration::ZERO);
    until("what is left to be named", || {
        let condition = condition(kubectl, "a")?;
        ensure!(condition["reason"] == "DeletionHangs", "{condition}");
        let message = condition["message"].as_str().unwrap_or_default();
        ensure!(message.contains("example.com/stays"), "{message}");
        Ok(())
    });
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_hosts_as_many_clusters_as_it_is_told_and_the_next_waits_for_room() {
    let (api, client) = seed("hosting-quota").await;
    let kubectl = api.kubectl();
    let quota = |value: &str| {
        let annotation = format!("portico.k8c.io/max-hosted-clusters={value}");
        kubectl.run(&["annotate", "seed", "north", "-n", "portico", "--overwrite", &annotation]).unwrap();
    };
    quota("few");
    let operator = start(&client, "quota");
    // One that can never be hosted is older than the others, and takes no room.
    let mut never = hosted("a", "compact");
    never["spec"]["version"] = json!("1.2.3");
    kubectl.apply_json(&never).unwrap();
    wait_reason(kubectl, "a", "InvalidConfiguration");
    kubectl.apply_json(&hosted("b", "compact")).unwrap();
    let message = wait_reason(kubectl, "b", "InvalidConfiguration");
    assert!(message.contains("\"few\" is no number of clusters"), "{message}");
    kubectl.apply_json(&hosted("c", "compact")).unwrap();
    wait_reason(kubectl, "c", "InvalidConfiguration");
    // Both are judged at the same moment.
    quota("1");
    wait_reason(kubectl, "b", "Starting");
    let message = wait_reason(kubectl, "c", "QuotaExceeded");
    assert!(
        message.starts_with("Seed north hosts as many clusters") && message.contains("allows, 1;"),
        "{message}"
    );
    let made = ["get", "secrets,statefulsets", "-n", "cluster-c", "--output=name"];
    assert_eq!(kubectl.run(&made).unwrap(), "");
    // Less than there are: what is there stays.
    quota("0");
    patch(
        kubectl,
        &["cluster", "b"],
        &json!({"metadata": {"annotations": {"kubermatic.k8c.io/last-restart": "1"}}}),
    );
    until("a change of what is hosted", || {
        let set = kubectl.get(&["statefulset", "control-plane", "-n", "cluster-b"])?;
        ensure!(set["spec"]["template"].to_string().contains("last-restart"), "{set}");
        Ok(())
    });
    patch(kubectl, &["cluster", "b"], &json!({"metadata": {"finalizers": []}}));
    until("the mark of what is hosted to be back", || {
        let cluster = kubectl.get(&["cluster", "b"])?;
        ensure!(cluster["metadata"]["finalizers"] == json!(["portico.k8c.io/control-plane"]), "{cluster}");
        Ok(())
    });
    quota("1");
    // What cannot be read counts, also for an operator that has never read it.
    unreadable(kubectl, "b");
    operator.stop().await;
    let operator = start(&client, "later");
    until("the operator to know of both", || {
        let reports = control_planes(&operator).reports;
        let reason = |name: &str| reports.get(name).map(|report| report.reason);
        ensure!(reason("b") == Some("Unreadable") && reason("c") == Some("QuotaExceeded"), "{reports:?}");
        Ok(())
    });
    kubectl.run(&["delete", "cluster", "b"]).unwrap();
    wait_reason(kubectl, "c", "Starting");
    operator.stop().await;
}
