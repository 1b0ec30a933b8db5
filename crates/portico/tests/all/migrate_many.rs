//! `portico migrate --selector` beside a real API server, where the test writes what the operator would.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use serde_json::{Value, json};

use crate::common::{Process, stderr, stdout};
use crate::migrate::Seed;

const TO_TUNNELING: &[&str] = &["migrate", "--selector", "team=a", "--to", "Tunneling"];

/// A seed with these clusters of one team, each with one way in, by NodePort.
fn seed_with(name: &str, clusters: &[&str]) -> Seed {
    let seed = Seed::start(name);
    for cluster in clusters {
        let object = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
            "metadata": {"name": cluster, "labels": {"team": "a"},
                "annotations": {"portico.k8c.io/layout": "compact"}},
            "spec": {"exposeStrategy": "NodePort"}});
        seed.kubectl().apply_json(&object).unwrap();
        seed.has_address(cluster);
        seed.one_is(cluster, "NodePort", None, "NodePort is the one way in");
    }
    seed
}

impl Seed {
    /// What a cluster asks for.
    fn wanted(&self, name: &str) -> Value {
        self.kubectl().get(&["cluster", name]).unwrap()["spec"]["exposeStrategy"].clone()
    }

    fn settles(&self, name: &str) {
        self.one_is(name, "Tunneling", None, "Tunneling is the one way in");
    }

    fn begin(&self, more: &[&str]) -> Process {
        Process::of(&mut self.command(&[TO_TUNNELING, more].concat()))
    }

    fn answers(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = self.portico(words);
        (output.status.code(), stdout(&output) + &stderr(&output))
    }

    /// Somebody else asks for another strategy.
    fn write(&self, name: &str, strategy: &str) {
        let spec = json!({"metadata": {"labels": {"unsafe-expose-strategy-migration": ""}},
            "spec": {"exposeStrategy": strategy}});
        self.kubectl().patch("", &format!("cluster/{name}"), "merge", &spec).unwrap();
    }
}

/// Whether a line of a table begins so, whatever the widths of its columns.
fn has_row(text: &str, cells: &str) -> bool {
    let joined = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().any(|line| joined(line).starts_with(cells))
}

#[test]
fn many_clusters_migrate_two_at_a_time_and_a_run_that_was_killed_goes_on() {
    let seed = seed_with("migrate-many", &["a", "b", "c", "d"]);
    let (code, said) = seed.answers(&["migrate", "-l", "team=b", "--to", "Tunneling"]);
    assert!(code == Some(1) && said.contains("no Cluster has the labels team=b"), "{said}");
    let (code, said) =
        seed.answers(&["migrate", "-l", "team=b", "--to", "Tunneling", "--plan", "-o", "json"]);
    assert!(code == Some(1) && said.starts_with("[]\n"), "{said}");
    let (code, said) = seed.answers(&["migrate", "-l", "team in a", "--to", "Tunneling"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("reading the Clusters with the labels team in a: the API server answered 400"));

    let (code, said) = seed.answers(&[TO_TUNNELING, &["--plan"]].concat());
    assert!(code == Some(0) && said.contains("4 Clusters, 0 of them cannot"), "{said}");
    let row = "d NodePort -> Tunneling https://d.north.kkp.example.com:6443 can";
    assert!(has_row(&said, row), "{said}");
    let (_, said) = seed.answers(&[TO_TUNNELING, &["--plan", "-o", "json"]].concat());
    let plans: Value = serde_json::from_str(&said).unwrap();
    let names: Vec<_> = plans.as_array().unwrap().iter().map(|plan| plan["cluster"].as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "d"].map(Some));

    let mut run = seed.begin(&["--max-parallel", "2"]);
    run.wait_for("4 Clusters to Tunneling, 2 at a time: 0 settled, 0 under way, 4 to begin");
    run.wait_for("a  from NodePort to Tunneling");
    run.wait_for("b  from NodePort to Tunneling");
    seed.one_is("a", "NodePort", Some(("Tunneling", "Opening")), "waits for its address");
    run.wait_for("a  Opening      waits for its address");
    assert_eq!(seed.wanted("c"), "NodePort", "there is no slot for a third");
    seed.settles("a");
    run.wait_for("a  Settled      Tunneling is the one way in");
    run.wait_for("1 of 4 settled");
    run.wait_for("c  from NodePort to Tunneling");
    run.signal("KILL");
    run.wait();

    seed.one_is("b", "Tunneling", Some(("NodePort", "Closing")), "is being closed");
    let bind = ["create", "clusterrolebinding", "mover", "--clusterrole=cluster-admin", "--user=mover"];
    seed.kubectl().run(&bind).unwrap();
    let mover = seed.api.access().kubeconfig("mover", None).unwrap().display().to_string();
    let mut command = seed.api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
    command.args(TO_TUNNELING).args(["--max-parallel", "2", "--kubeconfig", &mover]);
    let mut run = Process::of(&mut command);
    run.wait_for("1 settled, 2 under way, 1 to begin");
    run.wait_for("b  Closing      is being closed");
    seed.kubectl().run(&["delete", "clusterrolebinding", "mover"]).unwrap();
    run.wait_for("the seed  cannot be read, and is tried again: ");
    seed.kubectl().run(&bind).unwrap();
    assert_eq!(seed.wanted("d"), "NodePort", "both slots are taken by those of before");
    let (_, said) = seed.answers(&[TO_TUNNELING, &["--plan"]].concat());
    assert!(has_row(&said, "a Tunneling https://a.north.kkp.example.com:31234 is there"), "{said}");
    assert!(said.contains("is under way  Closing"), "{said}");
    seed.settles("b");
    run.wait_for("2 of 4 settled");
    run.wait_for("d  from NodePort to Tunneling");
    seed.settles("d");
    seed.settles("c");
    assert!(run.wait().success(), "{}", run.said());
    let said = run.said();
    assert!(said.contains("4 of 4 settled"), "{said}");
    assert!(["a", "b", "c", "d"].iter().all(|name| has_row(&said, &format!("{name} settled"))), "{said}");
    let (code, said) = seed.answers(TO_TUNNELING);
    assert!(code == Some(0) && said.contains("4 settled, 0 under way, 0 to begin"), "{said}");
}

#[test]
fn a_cluster_that_cannot_is_skipped_and_after_one_that_goes_wrong_no_other_begins() {
    let seed = seed_with("migrate-stop", &["a", "b", "c"]);
    // A user that may read and not write begins nothing, and tries it once.
    let rule = json!({"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]});
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "reader"}, "rules": [rule]});
    seed.kubectl().apply_json(&role).unwrap();
    let bind = ["create", "clusterrolebinding", "reader", "--clusterrole=reader", "--user=reader"];
    seed.kubectl().run(&bind).unwrap();
    let reader = seed.api.access().kubeconfig("reader", None).unwrap().display().to_string();
    let read_only = |words: &[&str]| {
        let mut command = seed.api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        let output = command.args(words).args(["--kubeconfig", &reader]).output().unwrap();
        (output.status.code(), stdout(&output))
    };
    let (code, said) = read_only(TO_TUNNELING);
    assert_eq!(code, Some(1), "{said}");
    assert!(has_row(&said, "a failed writing Cluster a: the API server answered 403"), "{said}");
    assert!(has_row(&said, "b not begun one before it went wrong"), "{said}");

    seed.kubectl().patch("", "cluster/a", "merge", &json!({"spec": {"pause": true}})).unwrap();
    let (code, said) = seed.answers(&[TO_TUNNELING, &["--plan"]].concat());
    assert!(code == Some(1) && said.contains("3 Clusters, 1 of them cannot"), "{said}");
    assert!(said.contains("cannot  the Cluster is paused"), "{said}");
    let mut run = seed.begin(&["--max-parallel", "1"]);
    run.wait_for("a  is skipped: the Cluster is paused");
    run.wait_for("b  from NodePort to Tunneling");
    seed.write("b", "NodePort");
    run.wait_for("b  went back: no other one begins after it");
    assert_eq!(run.wait().code(), Some(1));
    let said = run.said();
    assert!(has_row(&said, "a skipped the Cluster is paused"), "{said}");
    assert!(has_row(&said, "b went back somebody else has written NodePort"), "{said}");
    assert!(has_row(&said, "c not begun one before it went wrong"), "{said}");
    assert_eq!(seed.wanted("c"), "NodePort");

    // Time ends a run whose slots are all taken, and the answer says by which.
    seed.write("b", "Tunneling");
    seed.one_is("b", "Tunneling", Some(("NodePort", "MovingNodes")), "waits for nodes: n");
    let (code, said) = seed.answers(&[TO_TUNNELING, &["--max-parallel=1", "--wait=100ms"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(has_row(&said, "b waiting MovingNodes waits for nodes: n"), "{said}");
    assert!(has_row(&said, "c not begun its turn had not come when time was over"), "{said}");
    for expected in [
        "not done within 100ms: the same command goes on from here",
        "portico migrate --selector team=a --finish waits for no node and no user",
    ] {
        assert!(said.contains(expected), "{said}");
    }

    let mut finishing = Process::of(&mut seed.command(&["migrate", "-l", "team=a", "--finish"]));
    finishing.wait_for("1 of 3 Clusters are under way; the others are left alone");
    finishing.wait_for("b  NodePort closes, whoever still uses it");
    seed.settles("b");
    finishing.wait_for("1 of 1 settled");
    assert!(finishing.wait().success(), "{}", finishing.said());

    seed.write("c", "Tunneling");
    seed.write("b", "NodePort");
    seed.one_is("b", "Tunneling", Some(("NodePort", "Opening")), "waits for its address");
    let (code, said) = read_only(&["migrate", "-l", "team=a", "--rollback"]);
    assert!(code == Some(1) && has_row(&said, "b failed writing Cluster b:"), "{said}");
    assert!(has_row(&said, "c not ordered one before it went wrong"), "{said}");
    for said_of_b in ["Tunneling stays", "goes back to Tunneling already"] {
        let (code, said) = seed.answers(&["migrate", "-l", "team=a", "--rollback"]);
        assert!(code == Some(0) && has_row(&said, "b ordered") && said.contains(said_of_b), "{said}");
        assert_eq!((seed.wanted("b"), seed.wanted("c")), (json!("Tunneling"), json!("NodePort")));
    }
}
