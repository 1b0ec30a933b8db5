//! A hosted cluster with two machines goes to another expose strategy, and to a third. All of its load goes
//! by the old door until that is closed by order, and by the new one too as soon as it is published. Others
//! notice nothing. Meanwhile operators are killed, in every state.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use portico_lab::{Authority, Kubectl, Node, Process, programs, say, wait};

use super::away::in_short;
use super::cluster::{Hosted, STARTING};
use super::killing::{Killing, STATES};
use super::load::{Load, Sessions};
use crate::konnectivity::uses;
use crate::support::{Knocking, SOON, Watch, Way, beat_all, given};
use crate::tunnel::client::{self, Client};

/// The Deployment of the agents that are to prove the new door.
const NEXT: &str = "konnectivity-agent-next";

/// Where a cluster goes that has NodePort, how its nodes follow, and names of the ways: all six directions.
pub(super) const DIRECTIONS: [(&str, &str, &str); 6] = [
    ("Tunneling", IN_PLACE, "moved-first"),
    ("LoadBalancer", BY_HAND, "moved-second"),
    ("Tunneling", IN_PLACE, "moved-third"),
    ("NodePort", IN_PLACE, "moved-fourth"),
    ("LoadBalancer", IN_PLACE, "moved-fifth"),
    ("NodePort", BY_HAND, "moved-sixth"),
];

const IN_PLACE: &str = "in-place";
const BY_HAND: &str = "by-hand";

/// Migrates the second of `clusters`, whose machines are `nodes`. The others are in `migrations`.
pub(super) fn to_other_strategies_unnoticed(clusters: &[Hosted<'_>], nodes: &[Node]) {
    let cluster = &clusters[1];
    let others = cluster.others_of(clusters);
    let watches: Vec<Watch<'_>> = others.iter().map(Way::watch).collect();
    let client = cluster.is_used_from_inside(&nodes[0]);
    let killing = Killing::of(cluster.seed);
    let mut in_force = InForce::of(cluster);
    for direction in &DIRECTIONS[..2] {
        let migration = Migration::of(cluster, nodes, &others, &client);
        in_force = killing.during(cluster.name, || migration.goes(*direction, in_force));
        beat_all(&watches);
    }
    in_force.load.ends_well("after all migrations");
    assert_eq!(killing.states().len(), STATES.len(), "operators were killed in {:?}", killing.states());
    let operator = cluster.seed.kubectl().wait_rolled_out("portico", "portico-operator", STARTING);
    operator.unwrap();
}

/// The door that users know, and what goes by it.
pub(super) struct InForce {
    way: Way,
    pub(super) load: Load,
}

impl InForce {
    /// As the administrator's kubeconfig has it.
    pub(super) fn of(cluster: &Hosted<'_>) -> Self {
        let way = cluster.way();
        let load = Load::start(&way);
        Self { way, load }
    }
}

/// A cluster that is to migrate, and clients that must not feel it.
pub(super) struct Migration<'a> {
    pub(super) cluster: &'a Hosted<'a>,
    pub(super) nodes: &'a [Node],
    others: &'a [Way],
    client: Option<&'a Client>,
    /// States that were seen.
    seen: RefCell<BTreeSet<String>>,
}

impl<'a> Migration<'a> {
    pub(super) fn of(
        cluster: &'a Hosted<'a>,
        nodes: &'a [Node],
        others: &'a [Way],
        client: &'a Client,
    ) -> Self {
        Self { nodes, others, client: Some(client), ..Self::alone(cluster) }
    }

    /// The migration of a cluster without machines.
    pub(super) fn alone(cluster: &'a Hosted<'a>) -> Self {
        Self { cluster, nodes: &[], others: &[], client: None, seen: RefCell::default() }
    }

    /// From the old door to another one, which is returned.
    pub(super) fn goes(&self, (strategy, how, name): (&str, &str, &'static str), old: InForce) -> InForce {
        let (cluster, nodes, start) = (self.cluster, self.nodes, Instant::now());
        let before = cluster.pods().unwrap();
        let pods = self.client.map(|client| client::Knocking::start(std::slice::from_ref(client)));
        let knocking = Knocking::start(self.others);
        let sessions = Sessions::open(&old.way, &nodes[0]);
        self.order(&["--to", strategy, "--nodes", how]);
        if strategy == "LoadBalancer" {
            self.reaches("Opening");
            let give = || cluster.seed.give_address(&cluster.namespace(), "front-loadbalancer");
            wait::until("a load balancer", SOON, give).unwrap();
        }
        self.reaches("Proving");
        // The agents that carry them start again in the next state.
        sessions.were_held("until the new door is proven");
        old.load.is_served("until the new door is proven");
        self.tells_the_next_agents(strategy);
        self.reaches("MovingNodes");
        old.load.is_served("until all are told of the new door");

        let (way, moved) = self.way_of(name);
        let load = Load::start(&way);
        if how == BY_HAND {
            for (node, other) in [(&nodes[0], &nodes[1]), (&nodes[1], &nodes[0])] {
                let sessions = Sessions::open(&old.way, other);
                let said = node.move_to(&given(&moved).server).unwrap();
                say(format_args!("{}: {}", cluster.name, said.trim()));
                sessions.were_held("while the other is moved");
            }
        }
        self.reaches("Quieting");
        self.nodes_are_at(&moved);
        for node in nodes {
            cluster.reaches_its_pod(&old.way.kubectl, node);
            cluster.reaches_its_pod(&way.kubectl, node);
        }
        knocking.all_were_answered("others until all nodes are moved");
        let unbroken = self.client.is_none_or(Client::watch_is_the_first);
        assert!(unbroken, "the watch of a pod has ended");
        // It ends with the old door.
        old.load.ends_well("until the old door is closed");

        let knocking = Knocking::start(self.others);
        let sessions = Sessions::open(&way, &nodes[0]);
        self.finish();
        knocking.all_were_answered("others until the old door is closed");
        sessions.were_held("while the old door is closed");
        load.is_served("while the old door is closed");
        wait::until("the old door to be closed", SOON, || {
            ensure!(old.way.ask().is_err(), "it still answers");
            Ok(())
        })
        .unwrap();
        self.takes_over(&moved);
        for node in nodes {
            cluster.reaches_its_pod(&cluster.kubectl, node);
            cluster.kubectl.wait_node_ready(node.host().name(), SOON).unwrap();
        }
        if let Some(pods) = pods {
            pods.all_were_answered("from a pod, before and after the old door is closed");
        }
        let (seconds, seen) = (start.elapsed().as_secs_f64(), self.seen.borrow());
        say(format_args!("{}: to {strategy} in {seconds:.1} s, by {seen:?}", cluster.name));
        assert_eq!(cluster.pods().unwrap(), before, "no program of a control plane starts again");
        InForce { way, load }
    }

    /// Each kubelet reaches the API server as this kubeconfig does.
    pub(super) fn nodes_are_at(&self, moved: &Kubectl) {
        for node in self.nodes {
            let said = node.move_to(&given(moved).server).unwrap();
            assert!(said.contains("already"), "{said}");
        }
    }

    /// The lab's network has no DNS for them: without this nothing is proven.
    pub(super) fn tells_the_next_agents(&self, strategy: &str) {
        let kubectl = self.cluster.seed.kubectl();
        wait::until(&format!("the door by {strategy} to be proven"), STARTING, || {
            // The condition may still be that of the way there.
            let exposed = kubectl.get(&["exposedcluster", self.cluster.name])?;
            let (spec, migration) = (&exposed["spec"], &exposed["spec"]["migration"]);
            if migration["state"] == "Proving" && migration["second"]["exposeStrategy"] == strategy {
                // As often as that Deployment is made.
                self.cluster.tell_agents(NEXT)?;
            }
            ensure!(spec["exposeStrategy"] == strategy, "{spec}");
            Ok(())
        })
        .unwrap();
    }

    /// The way that is published now.
    pub(super) fn way_of(&self, name: &'static str) -> (Way, Kubectl) {
        let moved = self.cluster.issued(name).unwrap();
        (Way::of(name, self.cluster.client, &moved), moved)
    }

    /// As its administrator does it: the file has the new address from here on.
    pub(super) fn takes_over(&self, moved: &Kubectl) {
        fs::copy(moved.kubeconfig(), self.cluster.kubectl.kubeconfig()).unwrap();
    }

    pub(super) fn order(&self, words: &[&str]) {
        let words = self.words(words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        say(self.cluster.portico(&words).unwrap().trim());
    }

    /// The order to close the old door, which waits until that is done: longer than a command may.
    pub(super) fn finish(&self) {
        let process = self.begins_to_finish();
        let status = process.wait(STARTING).unwrap();
        assert!(status.success(), "{status}: {}", process.log());
        say(process.log().lines().last().unwrap_or_default());
        self.reaches("Settled");
    }

    pub(super) fn begins_to_finish(&self) -> Process {
        let (client, portico) = (self.cluster.client, programs::portico().unwrap());
        client.spawn("migrate-finish", portico, self.words(&["--finish"])).unwrap()
    }

    fn words(&self, words: &[&str]) -> Vec<String> {
        let seed = self.cluster.seed.kubectl().kubeconfig().display().to_string();
        let all = [&["migrate", self.cluster.name], words, &["--kubeconfig", &seed]].concat();
        all.into_iter().map(str::to_owned).collect()
    }

    /// Waits for this state.
    pub(super) fn reaches(&self, state: &str) {
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
    }
}

impl Hosted<'_> {
    pub(super) fn way(&self) -> Way {
        Way::of(self.name, self.client, &self.kubectl)
    }

    /// The ways into the others of these clusters.
    pub(super) fn others_of(&self, clusters: &[Hosted<'_>]) -> Vec<Way> {
        clusters.iter().filter(|one| one.name != self.name).map(Hosted::way).collect()
    }

    /// By a pod on this node, and by a webhook that judges what is written.
    pub(super) fn is_used_from_inside(&self, node: &Node) -> Client {
        client::grant(&self.kubectl);
        node.import(&client::image()).unwrap();
        let authority = Authority::new("webhook authority").unwrap();
        uses::deploy_webhook(&self.kubectl, self.client, &authority);
        uses::admits(&self.kubectl);
        Client::start(&self.kubectl, node)
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

    pub(super) fn reaches_its_pod(&self, kubectl: &Kubectl, node: &Node) {
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
