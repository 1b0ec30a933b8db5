//! A hosted cluster with a machine goes to another expose strategy. Until the old door is closed by order, it
//! is used by it all the time, and by the new one as soon as that is told; others feel nothing. Meanwhile
//! operators are killed.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use portico_lab::{Kubectl, Node, long_form, say, wait};

use super::away::in_short;
use super::{Hosted, STARTING};
use crate::support::{Knocking, SOON, Watch, Way, beat_all, given};

/// The Deployment of the agents that are to prove the new door.
const NEXT: &str = "konnectivity-agent-next";

/// States in which a migration stays until somebody does something: operators are killed there.
const HELD: [&str; 2] = ["Proving", "MovingNodes"];

/// Where a cluster goes that has NodePort, and names of the ways. The long form has all six directions.
const DIRECTIONS: [(&str, &str); 6] = [
    ("Tunneling", "moved-first"),
    ("NodePort", "moved-second"),
    ("LoadBalancer", "moved-third"),
    ("Tunneling", "moved-fourth"),
    ("LoadBalancer", "moved-fifth"),
    ("NodePort", "moved-sixth"),
];

/// Of `clusters` the second, whose machine is `node`.
pub(super) fn to_other_strategies_unnoticed(clusters: &[Hosted<'_>], node: &Node) {
    let cluster = &clusters[1];
    let others: Vec<Way> = clusters.iter().filter(|one| one.name != cluster.name).map(Hosted::way).collect();
    let watches: Vec<Watch<'_>> = others.iter().map(Way::watch).collect();
    let mut old = cluster.way();
    for &(strategy, name) in long_form(&DIRECTIONS[..1], &DIRECTIONS) {
        let before = cluster.pods().unwrap();
        old = cluster.goes_to(strategy, name, old, node, &others);
        assert_eq!(cluster.pods().unwrap(), before, "no program of a control plane starts again");
        beat_all(&watches);
    }
}

impl Hosted<'_> {
    /// Its way is `old` until then. Returns the new one.
    fn goes_to(&self, strategy: &str, name: &'static str, old: Way, node: &Node, others: &[Way]) -> Way {
        let (start, watch) = (Instant::now(), old.watch());
        let migration = Migration { cluster: self, seen: RefCell::default() };
        let knocking = Knocking::start(others.iter().chain([&old]));
        migration.order(&["--to", strategy]);
        if strategy == "LoadBalancer" {
            let give = || self.seed.give_address(&self.namespace(), "front-loadbalancer");
            wait::until("a load balancer", SOON, give).unwrap();
        }
        migration.reaches(HELD[0]);
        wait::until("the next agents", STARTING, || self.tell_agents(NEXT)).unwrap();
        migration.reaches(HELD[1]);
        knocking.all_were_answered("all are told of the new door");
        watch.beat();

        let moved = self.issued(name).unwrap();
        let new = Way::of(name, self.client, &moved);
        let said = node.move_to(&given(&moved).server).unwrap();
        say(format_args!("{}: {}", self.name, said.trim()));
        let knocking = Knocking::start(others.iter().chain([&old, &new]));
        let new_watch = new.watch();
        self.reaches_its_pod(&old.kubectl, node);
        self.reaches_its_pod(&new.kubectl, node);
        watch.beat();
        knocking.all_were_answered("a node is moved");
        // It ends with the old door.
        drop(watch);

        let knocking = Knocking::start(others.iter().chain([&new]));
        migration.order(&["--finish"]);
        migration.reaches("Settled");
        knocking.all_were_answered("the old door is closed");
        new_watch.beat();
        wait::until("the old door to be closed", SOON, || {
            ensure!(old.ask().is_err(), "it still answers");
            Ok(())
        })
        .unwrap();
        // As its administrator does it: the file has the new address from here on.
        fs::copy(moved.kubeconfig(), self.kubectl.kubeconfig()).unwrap();
        self.reaches_its_pod(&self.kubectl, node);
        self.kubectl.wait_node_ready(node.host().name(), SOON).unwrap();
        let (seconds, seen) = (start.elapsed().as_secs_f64(), migration.seen.into_inner());
        say(format_args!("{}: to {strategy} in {seconds:.1} s, by {seen:?}", self.name));
        drop(new_watch);
        new
    }
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

    /// kubectl with the kubeconfig that `portico kubeconfig` gives now, in a file of this name.
    fn issued(&self, name: &str) -> Result<Kubectl> {
        let file = self.client.dir().join(format!("{name}.kubeconfig"));
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
