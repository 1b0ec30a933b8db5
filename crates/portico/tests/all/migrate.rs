//! `portico migrate`: plans from manifests, and orders beside a real API server, where the test writes what
//! the operator would.
//!
//! The second half needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::path::Path;
use std::process::{Command, Output};

use portico_lab::{ApiServer, Kubectl};
use serde_json::{Value, json};

use crate::common::{Process, directory, run, stderr, stdout};

const SITE: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec: {ingress: {domain: kkp.example.com}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: north, namespace: kubermatic}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: hosted, annotations: {portico.k8c.io/layout: compact}}
spec: {exposeStrategy: NodePort}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: elsewhere, annotations: {portico.k8c.io/endpoints: '203.0.113.50:6443'}}
spec: {exposeStrategy: Tunneling}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: pods}
spec: {exposeStrategy: NodePort}
";

/// An object that KKP's controllers made, in a copy of a seed.
const OF_KKP: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: apiserver-external
  namespace: cluster-pods
  uid: 8f6f0a3e-0000-4000-8000-000000000001
  annotations: {nodeport-proxy.k8s.io/expose: NodePort}
spec: {type: NodePort, ports: [{name: secure, port: 443, targetPort: 31234, nodePort: 31234}]}
";

/// Exit code and both outputs of a plan.
fn plan(folder: &Path, cluster: &str, to: &str, more: &[&str]) -> (Option<i32>, String, String) {
    let folder = folder.to_str().unwrap();
    let output = run(&[&["migrate", cluster, "--to", to, "--plan", "--manifests", folder], more].concat());
    (output.status.code(), stdout(&output), stderr(&output))
}

#[test]
fn a_plan_from_manifests_says_what_happens_and_what_is_in_the_way() {
    let folder = directory(&[("site.yaml", SITE)]);
    let (code, text, errors) = plan(folder.path(), "hosted", "Tunneling", &[]);
    assert_eq!(code, Some(0), "{text}{errors}");
    for expected in [
        "Cluster hosted, from NodePort to Tunneling: Portico hosts it, the API server does not restart.",
        "new   Tunneling  https://hosted.north.kkp.example.com:6443",
        "Service apiserver-external   NodePort, expose: NodePort,SNI,Tunneling",
        "6 Closing      operator",
        "portico migrate hosted --finish",
    ] {
        assert!(text.contains(expected), "no {expected} in:\n{text}");
    }
    let (code, text, _) = plan(folder.path(), "elsewhere", "NodePort", &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("its API server runs elsewhere, Portico restarts nothing there"), "{text}");

    let (code, text, _) = plan(folder.path(), "pods", "Tunneling", &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("BLOCKED  the pods of Service apiserver-external would have to listen on"),
        "{text}"
    );
    let (code, text, _) = plan(folder.path(), "hosted", "NodePort", &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("BLOCKED  its strategy is NodePort already; name another strategy"), "{text}");
}

#[test]
fn a_copy_of_a_seed_with_kkp_gets_guidance() {
    let folder = directory(&[("site.yaml", SITE), ("services.yaml", OF_KKP)]);
    let (code, text, _) = plan(folder.path(), "pods", "LoadBalancer", &["-o", "json"]);
    let plan: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &plan["keeper"], &plan["restartsApiServer"]), (Some(0), &json!("kkp"), &json!(true)));
    assert_eq!((&plan["both"], &plan["steps"][2]["who"]), (&Value::Null, &json!("kkp")));
    assert_eq!(plan["from"]["keys"][0], "port 31234", "{text}");
}

#[test]
fn programs_read_a_plan() {
    let folder = directory(&[("site.yaml", SITE)]);
    let (code, text, _) = plan(folder.path(), "hosted", "LoadBalancer", &["-o", "json"]);
    let plan: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &plan["keeper"], &plan["blockers"]), (Some(0), &json!("hosted"), &json!([])));
    let services = plan["both"]["services"].as_array().unwrap();
    assert!(services.iter().any(|service| service["metadata"]["name"] == "front-loadbalancer"), "{text}");
    let states: Vec<&str> =
        plan["steps"].as_array().unwrap().iter().map(|step| step["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["Opening", "Proving", "Moving", "MovingNodes", "Quieting", "Closing"]);
}

#[test]
fn wrong_usage_of_a_migration_is_reported() {
    let folder = directory(&[("site.yaml", SITE)]);
    let (code, text, errors) = plan(folder.path(), "nobody", "Tunneling", &[]);
    assert_eq!((code, &*text), (Some(2), ""));
    assert!(errors.contains("there is no Cluster nobody"), "{errors}");
    let (code, _, errors) = plan(folder.path(), "hosted", "Tunnelling", &[]);
    assert!(code == Some(2) && errors.contains("none of NodePort, LoadBalancer, Tunneling"), "{errors}");
    for (words, hint) in [
        (&["a"][..], "--to <STRATEGY>|--rollback|--finish"),
        (&["a", "--to", "Tunneling", "--rollback"], "cannot be used with"),
        (&["a", "--rollback", "--plan"], "cannot be used with"),
        (&["a", "--finish", "--quiet", "1m"], "cannot be used with"),
        (&["a", "--rollback", "--manifests", "."], "cannot be used with"),
        (&["a", "--rollback", "-o", "json"], "cannot be used with"),
        (&["a", "--to", "Tunneling", "--manifests", "."], "--plan"),
        (&["a", "--to", "Tunneling", "--plan", "--wait"], "cannot be used with"),
        (&["a", "--to", "Tunneling", "--quiet", "10"], "a unit is missing"),
        (&["a", "--to", "Tunneling", "--quiet", "1m,close=NodePort"], "--quiet"),
        (&["a/b", "--rollback"], "give the name of one object"),
        (&["--rollback"], "<CLUSTER|--selector <LABELS>>"),
        (&["a", "--selector", "team=a", "--rollback"], "cannot be used with"),
        (&["--selector", "", "--rollback"], "give labels of Clusters"),
        (&["a", "--to", "Tunneling", "--max-parallel", "2"], "cannot be used with"),
        (&["-l", "team=a", "--to", "Tunneling", "--max-parallel", "0"], "--max-parallel"),
        (&["-l", "team=a", "--finish", "--max-parallel", "2"], "cannot be used with"),
        (&["-l", "team=a", "--to", "Tunneling", "--plan", "--manifests", "."], "cannot be used with"),
    ] {
        let output = run(&[&["migrate"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(stderr(&output).contains(hint), "{words:?}: {}", stderr(&output));
    }
}

// === Beside a real API server ===

/// A seed without an operator: the test writes what that would.
pub(crate) struct Seed {
    pub(crate) api: ApiServer,
    kubeconfig: String,
}

impl Seed {
    pub(crate) fn start(name: &str) -> Self {
        let api = ApiServer::start(name).unwrap();
        let kubeconfig = api.admin().unwrap().display().to_string();
        let kubectl = api.kubectl();
        for definitions in [
            include_str!("../../../../deploy/crds-kubermatic.yaml"),
            include_str!("../../../../deploy/crds.yaml"),
        ] {
            kubectl.apply(definitions).unwrap();
        }
        for kind in ["clusters", "seeds", "kubermaticconfigurations"] {
            kubectl.wait_served(&format!("{kind}.kubermatic.k8c.io")).unwrap();
        }
        kubectl.wait_served("exposedclusters.portico.k8c.io").unwrap();
        for namespace in ["kubermatic", "portico", "cluster-hosted", "cluster-elsewhere", "cluster-pods"] {
            kubectl.run(&["create", "namespace", namespace]).unwrap();
        }
        kubectl.apply(SITE).unwrap();
        let seed = Self { api, kubeconfig };
        seed.has_address("hosted");
        seed
    }

    /// Gives a cluster the address that users know.
    pub(crate) fn has_address(&self, name: &str) {
        let host = format!("{name}.north.kkp.example.com");
        let address = json!({"url": format!("https://{host}:31234"), "port": 31234, "externalName": host,
            "ip": "203.0.113.1"});
        self.status(name, &json!({ "address": address }));
    }

    pub(crate) fn kubectl(&self) -> &Kubectl {
        self.api.kubectl()
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        command.args(words).args(["--kubeconfig", &self.kubeconfig]);
        command
    }

    pub(crate) fn portico(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// What an order returns: its exit code and what it said.
    fn migrate(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = self.portico(&[&["migrate", "hosted"], words].concat());
        (output.status.code(), stdout(&output) + &stderr(&output))
    }

    fn cluster(&self) -> Value {
        self.kubectl().get(&["cluster", "hosted"]).unwrap()
    }

    fn status(&self, name: &str, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let words = ["patch", "cluster", name, "--subresource=status", "--type=merge", "-p", &patch];
        self.kubectl().run(&words).unwrap();
    }

    /// Writes the record, and what the operator says of it.
    fn is(&self, first: &str, second: Option<(&str, &str)>, message: &str) {
        self.one_is("hosted", first, second, message);
    }

    pub(crate) fn one_is(&self, name: &str, first: &str, second: Option<(&str, &str)>, message: &str) {
        let door = |strategy: &str| {
            let tunnel = json!({"agentIP": "100.64.30.99"});
            let mut door = json!({"exposeStrategy": strategy, "tunnel": tunnel});
            if strategy != "Tunneling" {
                door = json!({"exposeStrategy": strategy});
            }
            door
        };
        let mut spec = door(first);
        spec["seed"] = "north".into();
        let (mut reason, mut status) = ("Settled", "True");
        if let Some((second, state)) = second {
            spec["migration"] =
                json!({"state": state, "since": "2026-01-02T03:04:05Z", "second": door(second)});
            (reason, status) = (state, "False");
        }
        let cluster = self.kubectl().get(&["cluster", name]).unwrap();
        let uid = cluster["metadata"]["uid"].clone();
        let owner =
            json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "name": name, "uid": uid});
        let exposed = json!({"apiVersion": "portico.k8c.io/v1alpha1", "kind": "ExposedCluster",
            "metadata": {"name": name, "ownerReferences": [owner]}, "spec": spec});
        self.kubectl().apply_json(&exposed).unwrap();
        self.status(
            name,
            &json!({"conditions": {"PorticoMigration":
            {"status": status, "reason": reason, "message": message}}}),
        );
    }
}

/// How many writes of an object there were, as its managers tell: one entry each.
fn written_by(object: &Value, manager: &str) -> usize {
    let managers = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    managers.filter(|entry| entry["manager"] == manager).count()
}

#[test]
fn an_order_is_one_write_and_what_cannot_be_done_writes_nothing() {
    let seed = Seed::start("migrate-orders");
    let generation = |object: &Value| object["metadata"]["generation"].as_i64();
    let (code, said) = seed.migrate(&["--to", "Tunneling"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("there is no ExposedCluster of it"), "{said}");
    seed.is("NodePort", None, "NodePort is the one way in");
    for (order, why) in [
        (&["--rollback"][..], "there is nothing to roll back: NodePort is the one way in"),
        (&["--finish"], "there is no second door to close"),
        (&["--to", "NodePort"], "its strategy is NodePort already"),
    ] {
        let (code, said) = seed.migrate(order);
        assert!(code == Some(1) && said.contains(why), "{order:?}: {said}");
    }
    let before = seed.cluster();
    assert_eq!(written_by(&before, "portico-migrate"), 0);

    let (code, said) = seed.migrate(&["--to", "Tunneling", "--quiet", "5m"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("from NodePort to Tunneling") && said.contains("NodePort closes once nobody uses it"),
        "{said}"
    );
    let started = seed.cluster();
    assert_eq!(generation(&started), generation(&before).map(|before| before + 1), "one write of the spec");
    assert_eq!(started["spec"]["exposeStrategy"], "Tunneling");
    assert_eq!(started["metadata"]["labels"], json!({"unsafe-expose-strategy-migration": "portico"}));
    assert_eq!(started["metadata"]["annotations"]["portico.k8c.io/migration"], "quiet=5m");
    let (code, said) = seed.migrate(&["--to", "Tunneling"]);
    assert_eq!((code, &seed.cluster()), (Some(0), &started), "nothing is to be written: {said}");

    seed.is("NodePort", Some(("Tunneling", "Opening")), "waits for its address");
    let (code, said) = seed.migrate(&["--finish"]);
    assert!(code == Some(1) && said.contains("not in force yet (Opening)"), "{said}");
    let (code, said) = seed.migrate(&["--rollback"]);
    assert!(code == Some(0) && said.contains("nobody was told of Tunneling"), "{said}");
    assert_eq!(seed.cluster()["spec"]["exposeStrategy"], "NodePort");
    let (code, said) = seed.migrate(&["--to", "LoadBalancer"]);
    assert!(code == Some(0) && said.contains("Tunneling closes first"), "{said}");
    let (_, said) = seed.migrate(&["--rollback"]);
    assert!(said.contains("NodePort stays"), "{said}");

    // After the flip, back to what was left.
    seed.is("Tunneling", Some(("NodePort", "MovingNodes")), "waits for nodes: a");
    let agents = || seed.cluster()["spec"]["clusterNetwork"]["tunnelingAgentIP"].clone();
    let (code, said) = seed.migrate(&["--to", "Tunneling"]);
    assert_eq!((code, agents()), (Some(0), json!("100.64.30.99")), "{said}");
    let (code, said) = seed.migrate(&["--rollback"]);
    assert!(code == Some(0) && said.contains("back from Tunneling to NodePort"), "{said}");
    let back = seed.cluster();
    assert_eq!((&back["spec"]["exposeStrategy"], agents()), (&json!("NodePort"), Value::Null));
    let (code, said) = seed.migrate(&["--rollback"]);
    assert_eq!((code, &seed.cluster()), (Some(0), &back), "the same again: {said}");

    seed.kubectl().patch("", "cluster/hosted", "merge", &json!({"spec": {"pause": true}})).unwrap();
    for order in [&["--rollback"][..], &["--finish"], &["--to", "Tunneling"]] {
        let (code, said) = seed.migrate(order);
        assert!(code == Some(1) && said.contains("paused"), "{order:?}: {said}");
    }
    let output = seed.portico(&["migrate", "nobody", "--rollback"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no Cluster nobody"), "{}", stderr(&output));
}

#[test]
fn where_nothing_can_be_proven_nothing_is_begun_and_the_way_back_is_open() {
    let seed = Seed::start("migrate-unproven");
    seed.is("NodePort", None, "NodePort is the one way in");
    let inside = |status: &str, reason: &str| {
        let says = json!({"status": status, "reason": reason, "message": "there is no Secret x"});
        seed.status("hosted", &json!({"conditions": {"PorticoUserClusterReady": says}}));
    };
    let refused = |why: &str| {
        let (code, said) = seed.migrate(&["--to", "Tunneling"]);
        assert!(code == Some(1) && said.contains("nothing was changed") && said.contains(why), "{said}");
        assert_eq!(seed.cluster()["spec"]["exposeStrategy"], "NodePort");
    };
    inside("False", "NoKubeconfig");
    refused("nothing inside the cluster can be looked at: there is no Secret x");
    inside("True", "Ready");
    let labels = json!({"app.kubernetes.io/name": "portico-operator"});
    let deployment = |args: &[&str]| {
        let container = json!({"name": "operator", "image": "any", "args": args});
        let template = json!({"metadata": {"labels": labels}, "spec": {"containers": [container]}});
        let meta = json!({"name": "portico-operator", "namespace": "portico", "labels": labels});
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta,
            "spec": {"selector": {"matchLabels": labels}, "template": template}});
        seed.kubectl().apply_json(&deployment).unwrap();
    };
    deployment(&["operator"]);
    refused("the operator was started without --image");

    // Somebody began it all the same.
    let wanted = json!({"metadata": {"labels": {"unsafe-expose-strategy-migration": ""}},
        "spec": {"exposeStrategy": "Tunneling"}});
    seed.kubectl().patch("", "cluster/hosted", "merge", &wanted).unwrap();
    seed.is("NodePort", Some(("Tunneling", "Opening")), "waits for a certificate with its names");
    inside("False", "NoKubeconfig");
    let (code, said) = seed.migrate(&["--to", "NodePort"]);
    assert!(code == Some(0) && said.contains("nobody was told of Tunneling"), "{said}");
    seed.kubectl().patch("", "cluster/hosted", "merge", &wanted).unwrap();
    let (code, said) = seed.migrate(&["--rollback"]);
    assert!(code == Some(0) && said.contains("nobody was told of Tunneling"), "{said}");
    seed.is("NodePort", None, "NodePort is the one way in");
    deployment(&["operator", "--image=any"]);
    inside("True", "Ready");
    let (code, said) = seed.migrate(&["--to", "Tunneling"]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_wait_tells_each_change_and_ends_with_the_condition_or_the_time() {
    let seed = Seed::start("migrate-wait");
    seed.is("NodePort", None, "NodePort is the one way in");
    let mut waiting = Process::of(&mut seed.command(&["migrate", "hosted", "--to", "Tunneling", "--wait"]));
    waiting.wait_for("from NodePort to Tunneling");
    seed.is("NodePort", Some(("Tunneling", "Opening")), "waits for its address");
    waiting.wait_for("hosted  Opening      waits for its address");
    seed.is("Tunneling", Some(("NodePort", "MovingNodes")), "waits for nodes: worker-3");
    waiting.wait_for("hosted  MovingNodes  waits for nodes: worker-3");

    // Status and the chain name both doors, and what is waited for.
    let table = stdout(&seed.portico(&["status"]));
    let line = table.lines().find(|line| line.starts_with("hosted ")).unwrap();
    assert!(line.contains("NodePort -> Tunneling"), "{table}");
    assert!(line.ends_with("(MovingNodes: waits for nodes: worker-3)"), "{table}");
    let json: Value = serde_json::from_slice(&seed.portico(&["status", "-o", "json"]).stdout).unwrap();
    let rows = json["clusters"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == "hosted").unwrap();
    assert_eq!((&row["strategy"], &row["migration"]["from"]), (&json!("Tunneling"), &json!("NodePort")));
    let why = stdout(&seed.portico(&["why", "hosted"]));
    assert!(why.contains("NodePort -> Tunneling, MovingNodes: waits for nodes: worker-3"), "{why}");

    let (code, said) = seed.migrate(&["--to", "Tunneling", "--wait=100ms"]);
    assert_eq!(code, Some(1), "{said}");
    let expected =
        "not done within 100ms: MovingNodes  waits for nodes: worker-3; portico migrate hosted --finish";
    assert!(said.contains(expected), "{said}");

    let mut finishing = Process::of(&mut seed.command(&["migrate", "hosted", "--finish"]));
    finishing.wait_for("NodePort closes, whoever still uses it; Tunneling stays");
    let annotations = seed.cluster()["metadata"]["annotations"].clone();
    assert_eq!(annotations["portico.k8c.io/migration"], "close=NodePort");
    seed.is("Tunneling", Some(("NodePort", "Closing")), "is being closed");
    finishing.wait_for("hosted  Closing      is being closed");
    seed.is("Tunneling", None, "Tunneling is the one way in");
    finishing.wait_for("hosted  Settled      Tunneling is the one way in");
    assert!(finishing.wait().success(), "{}", finishing.said());
    waiting.wait_for("hosted  Settled      Tunneling is the one way in");
    assert!(waiting.wait().success(), "{}", waiting.said());

    // Another strategy, written by somebody else, ends the wait.
    let mut waiting = Process::of(&mut seed.command(&["migrate", "hosted", "--to", "NodePort", "--wait"]));
    waiting.wait_for("from Tunneling to NodePort");
    let other = json!({"spec": {"exposeStrategy": "LoadBalancer"}});
    seed.kubectl().patch("", "cluster/hosted", "merge", &other).unwrap();
    waiting.wait_for("somebody else has written LoadBalancer");
    assert_eq!(waiting.wait().code(), Some(1));
}

#[test]
fn who_keeps_a_cluster_decides_and_a_right_that_is_missing_is_reported() {
    let seed = Seed::start("migrate-keeper");
    seed.is("NodePort", None, "NodePort is the one way in");
    let owner = || {
        let output = seed.portico(&["migrate", "hosted", "--to", "Tunneling", "--plan", "-o", "json"]);
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["keeper"].as_str().unwrap().to_owned()
    };
    assert_eq!(owner(), "hosted");
    let name = "kubermatic-seed-controller-manager";
    let labels = json!({"app.kubernetes.io/name": name});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": "kubermatic"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [{"name": "manager", "image": "any"}]}}}});
    seed.kubectl().apply_json(&deployment).unwrap();
    assert_eq!(owner(), "kkp");
    let (code, said) = seed.migrate(&["--to", "Tunneling"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("3 Change       KKP") && said.contains("the steps above are yours"), "{said}");
    assert_eq!(seed.cluster()["spec"]["exposeStrategy"], "NodePort");
    seed.kubectl().run(&["delete", "deployment", name, "-n", "kubermatic"]).unwrap();
    assert_eq!(owner(), "hosted");

    // Everything but Deployments.
    let verbs = json!(["get", "list"]);
    let rule = |group: &str| json!({"apiGroups": [group], "resources": ["*"], "verbs": verbs});
    let rules = ["", "discovery.k8s.io", "kubermatic.k8c.io", "portico.k8c.io"].map(rule);
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "reader"}, "rules": rules});
    seed.kubectl().apply_json(&role).unwrap();
    let bind = ["create", "clusterrolebinding", "reader", "--clusterrole=reader", "--user=reader"];
    seed.kubectl().run(&bind).unwrap();
    let reader = seed.api.access().kubeconfig("reader", None).unwrap().display().to_string();
    let mut command = seed.api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
    command.args(["migrate", "hosted", "--to", "Tunneling", "--plan", "--kubeconfig", &reader]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("Portico hosts it"), "{}", stdout(&output));
    assert!(
        stderr(&output).contains("whether KKP's controllers are on this seed is not known"),
        "{output:?}"
    );
}
