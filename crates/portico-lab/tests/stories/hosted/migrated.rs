//! A hosted cluster with a machine goes from NodePort to Tunneling. Until the old door is closed by order, it
//! is used by it all the time, and by the new one as soon as that is told; others feel nothing. Meanwhile
//! operators are killed.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use portico_lab::{Kubectl, Node, say, wait};

use super::away::in_short;
use super::{Hosted, STARTING};
use crate::support::{Knocking, SOON, Watch, Way, beat_all, given};

/// The Deployment of the agents that are to prove the new door.
const NEXT: &str = "konnectivity-agent-next";

/// States in which a migration stays until somebody does something: operators are killed there.
const HELD: [&str; 2] = ["Proving", "MovingNodes"];

/// Of `clusters` the second, whose machine is `node`; back to where it was it does not go.
pub(super) fn to_another_strategy_unnoticed(clusters: &[Hosted<'_>], node: &Node) {
    let (start, cluster) = (Instant::now(), &clusters[1]);
    let others: Vec<Way> = clusters.iter().filter(|one| one.name != cluster.name).map(Hosted::way).collect();
    let old = cluster.way();
    let mut watches: Vec<Watch<'_>> = others.iter().chain([&old]).map(Way::watch).collect();
    let before = cluster.pods().unwrap();
    let migration = Migration { cluster, seen: RefCell::default() };

    let knocking = Knocking::start(others.iter().chain([&old]));
    migration.order(&["--to", "Tunneling"]);
    migration.reaches(HELD[0]);
    wait::until("the next agents", STARTING, || cluster.tell_agents(NEXT)).unwrap();
    migration.reaches(HELD[1]);
    knocking.all_were_answered("all are told of the new door");
    beat_all(&watches);
    assert_eq!(cluster.pods().unwrap(), before, "no program of a control plane starts again");

    // As its administrator does it: the file has the new address from here on.
    let moved = cluster.issued().unwrap();
    let new = Way::of("moved", cluster.client, &moved);
    let said = node.move_to(&given(&moved).server).unwrap();
    say(format_args!("{}: {}", cluster.name, said.trim()));
    let knocking = Knocking::start(others.iter().chain([&old, &new]));
    watches.push(new.watch());
    for kubectl in [&cluster.kubectl, &moved] {
        cluster.reaches_its_pod(kubectl, node);
    }
    beat_all(&watches);
    knocking.all_were_answered("a node is moved");

    // The watch by the old door ends with it.
    watches.remove(others.len());
    let knocking = Knocking::start(others.iter().chain([&new]));
    migration.order(&["--finish"]);
    migration.reaches("Settled");
    knocking.all_were_answered("the old door is closed");
    beat_all(&watches);
    wait::until("the old door to be closed", SOON, || {
        ensure!(old.ask().is_err(), "it still answers");
        Ok(())
    })
    .unwrap();
    fs::copy(moved.kubeconfig(), cluster.kubectl.kubeconfig()).unwrap();
    cluster.reaches_its_pod(&cluster.kubectl, node);
    cluster.kubectl.wait_node_ready(node.host().name(), SOON).unwrap();
    assert_eq!(cluster.pods().unwrap(), before, "no program of a control plane starts again");
    let (seconds, seen) = (start.elapsed().as_secs_f64(), migration.seen.into_inner());
    say(format_args!("{}: NodePort to Tunneling in {seconds:.1} s, by {seen:?}", cluster.name));
}

struct Migration<'a> {
    cluster: &'a Hosted<'a>,
    /// States that were seen.
    seen: RefCell<BTreeSet<String>>,
}

impl Migration<'_> {
    fn order(&self, words: &[&str]) {
        let seed = self.cluster.seed.kubectl().kubeconfig().display().to_string();
        let all = [&["migrate", self.cluster.name], words, &["--kubeconfig", &seed]].concat();
        say(self.cluster.portico(&all).unwrap().trim());
    }

    /// Waits for this state. Operators are killed there if the migration stays in it.
    fn reaches(&self, state: &str) {
        let kubectl = self.cluster.seed.kubectl();
        wait::until(&format!("the state {state}"), STARTING, || {
            let cluster = kubectl.get(&["cluster", self.cluster.name])?;
            let condition = &cluster["status"]["conditions"]["PorticoMigration"];
            let reason = condition["reason"].as_str().context("no migration yet")?;
            self.seen.borrow_mut().insert(reason.to_owned());
            ensure!(reason == state, "{condition}");
            Ok(())
        })
        .unwrap();
        if HELD.contains(&state) {
            let operators = ["-n", "portico", "-l", "app.kubernetes.io/name=portico-operator"];
            let kill = ["delete", "pods", "--force", "--grace-period=0"];
            kubectl.run(&[&kill[..], &operators].concat()).unwrap();
        }
    }
}

impl Hosted<'_> {
    fn way(&self) -> Way {
        Way::of(self.name, self.client, &self.kubectl)
    }

    /// Pods of its control plane, with the restarts of their containers.
    fn pods(&self) -> Result<Vec<String>> {
        let pods = self.seed.kubectl().get(&["pods", "-n", &self.namespace()])?;
        let mut lines: Vec<String> =
            pods["items"].as_array().context("a list")?.iter().map(in_short).collect();
        lines.sort();
        Ok(lines)
    }

    /// kubectl with the kubeconfig that `portico kubeconfig` gives now.
    fn issued(&self) -> Result<Kubectl> {
        let file = self.client.dir().join(format!("{}-moved.kubeconfig", self.name));
        let seed = self.seed.kubectl().kubeconfig().display().to_string();
        let output = file.display().to_string();
        self.portico(&["kubeconfig", self.name, "--kubeconfig", &seed, "--output", &output])?;
        Kubectl::new(self.client, &file)
    }

    fn reaches_its_pod(&self, kubectl: &Kubectl, node: &Node) {
        wait::until("logs and exec", SOON, || {
            let log = kubectl.run(&["logs", node.host().name()])?;
            ensure!(log.trim() == "it runs", "{log}");
            let said = kubectl.run(&["exec", node.host().name(), "--", "echo", "it works"])?;
            ensure!(said.trim() == "it works", "{said}");
            Ok(())
        })
        .unwrap();
    }
}
