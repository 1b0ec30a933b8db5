//! The long forms of [`migrated`](super::migrated), each on a seed of its own with a hosted cluster and two
//! machines. They are all directions, the way back from each state, a machine that is away, and a client that
//! stays. `scripts/prove migration` runs them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use portico_lab::{Image, Lab, Node, Seed, operated, say, volumes, wait};

use super::cluster::{Hosted, STARTING};
use super::killing::{Killing, STATES};
use super::load::Load;
use super::migrated::{DIRECTIONS, InForce, Migration};
use super::{apply, joined, made};
use crate::support::{Knocking, SOON, given};

/// The cluster that migrates, and two without machines beside it.
const CLUSTERS: [(&str, &str); 3] = [operated::HOSTED[1], operated::HOSTED[0], operated::HOSTED[2]];

/// The old door closes after so long without use.
const QUIET: Duration = Duration::from_secs(20);

#[test]
#[ignore = "takes half an hour: scripts/prove migration"]
fn clusters_migrate_in_all_directions_unnoticed() {
    with_clusters("directions", |clusters, nodes| {
        let (cluster, others) = (&clusters[0], clusters[0].others_of(clusters));
        let client = cluster.is_used_from_inside(&nodes[0]);
        let killing = Killing::of(cluster.seed);
        let mut in_force = InForce::of(cluster);
        for direction in DIRECTIONS {
            let migration = Migration::of(cluster, nodes, &others, &client);
            in_force = killing.during(cluster.name, || migration.goes(direction, in_force));
        }
        in_force.load.ends_well("after all migrations");
        assert_eq!(killing.states().len(), STATES.len(), "{:?}", killing.states());
    });
}

#[test]
#[ignore = "takes a quarter of an hour: scripts/prove migration"]
fn a_migration_is_rolled_back_unnoticed_from_every_state() {
    with_clusters("rollbacks", |clusters, nodes| {
        let (cluster, others) = (&clusters[0], clusters[0].others_of(clusters));
        let client = cluster.is_used_from_inside(&nodes[0]);
        let migration = Migration::of(cluster, nodes, &others, &client);
        for (state, name) in STATES.into_iter().zip(BACK_FROM) {
            let (start, knocking) = (Instant::now(), Knocking::start(&others));
            migration.is_rolled_back_from(state, name);
            knocking.all_were_answered(&format!("others until a rollback from {state}"));
            say(format_args!(
                "{}: back from {state} in {:.1} s",
                cluster.name,
                start.elapsed().as_secs_f64()
            ));
        }
    });
}

/// Names of ways.
const BACK_FROM: [&str; 6] =
    ["back-opening", "back-proving", "back-moving", "back-nodes", "back-quieting", "back-closing"];

#[test]
#[ignore = "takes ten minutes: scripts/prove migration"]
fn a_machine_that_is_away_holds_no_migration_up_and_is_moved_later() {
    with_clusters("away", |clusters, nodes| {
        let (cluster, others) = (&clusters[0], clusters[0].others_of(clusters));
        let name = nodes[1].host().name();
        // Neither the webhook nor all agents on the way to it are to be there.
        cluster.kubectl.run(&["cordon", name]).unwrap();
        let agents = "deployment/konnectivity-agent";
        cluster.kubectl.run(&["-n", "kube-system", "rollout", "restart", agents]).unwrap();
        cluster.kubectl.wait_rolled_out("kube-system", "konnectivity-agent", STARTING).unwrap();
        let client = cluster.is_used_from_inside(&nodes[0]);
        cluster.kubectl.run(&["uncordon", name]).unwrap();
        let migration = Migration::of(cluster, nodes, &others, &client);
        let uid = || cluster.kubectl.get(&["node", name]).unwrap()["metadata"]["uid"].clone();
        let before = uid();
        nodes[1].host().unplug().unwrap();
        wait::until("the Node not to be ready", STARTING, || {
            ensure!(cluster.kubectl.wait_node_ready(name, Duration::ZERO).is_err(), "it is");
            Ok(())
        })
        .unwrap();
        let old = InForce::of(cluster);
        migration.order(&["--to", "Tunneling"]);
        migration.tells_the_next_agents("Tunneling");
        migration.reaches("Quieting");
        wait::until("the machine to be named", SOON, || {
            let message = migration.message()?;
            ensure!(message.contains(name), "{message}");
            Ok(())
        })
        .unwrap();
        let (way, moved) = migration.way_of("away-moved");
        let said = nodes[0].move_to(&given(&moved).server).unwrap();
        assert!(said.contains("already"), "{said}");
        old.load.ends_well("until the old door is closed");
        migration.finish();
        migration.takes_over(&moved);

        nodes[1].host().plug().unwrap();
        let said = nodes[1].move_to(&given(&moved).server).unwrap();
        say(format_args!("{}: {}", cluster.name, said.trim()));
        for node in nodes {
            way.kubectl.wait_node_ready(node.host().name(), STARTING).unwrap();
            cluster.reaches_its_pod(&way.kubectl, node);
        }
        assert_eq!(uid(), before, "it is the same Node");
    });
}

#[test]
#[ignore = "takes five minutes: scripts/prove migration"]
fn a_client_that_never_leaves_the_old_door_holds_it_open_until_the_order() {
    with_clusters("stays", |clusters, _| {
        let cluster = &clusters[1];
        let old = InForce::of(cluster);
        let lab = cluster.client.lab();
        let client = lab.machine_address().to_string();
        let migration = Migration::alone(cluster);
        let quiet = format!("{}s", QUIET.as_secs());
        migration.order(&["--to", "NodePort", "--quiet", &quiet]);
        migration.reaches("Quieting");
        let named = || {
            let message = migration.message()?;
            ensure!(message.contains(&client), "{client} is not in: {message}");
            Ok(())
        };
        wait::until("the client to be named", SOON, named).unwrap();
        let start = Instant::now();
        while start.elapsed() < 4 * QUIET {
            // It is the time that matters.
            migration.reaches("Quieting");
            old.load.is_unbroken("while it is waited for quiet");
        }
        named().unwrap();
        let (way, moved) = migration.way_of("stays-moved");
        let load = Load::start(&way);
        old.load.ends_well("until the old door is closed");
        migration.finish();
        migration.takes_over(&moved);
        load.ends_well("while the old door is closed");
    });
}

/// A seed with three clusters, and two machines of the first.
fn with_clusters(name: &str, story: impl FnOnce(&[Hosted<'_>], &[Node])) {
    let (_turn, lab, seed) = crate::seeded_by(&format!("migration-{name}"), Seed::start_with_names);
    let client = lab.host("client").unwrap();
    install(&lab, &seed).unwrap();
    let start = apply(&seed, CLUSTERS.into_iter().map(|cluster| (cluster, "compact")));
    let clusters = CLUSTERS.map(|(name, _)| made(name, "compact", &seed, &client, start));
    let nodes = joined::two_machines_join(&clusters[0]);
    story(&clusters, &nodes);
    joined::machines_leave(&clusters[..1], vec![nodes]);
}

fn install(lab: &Lab, seed: &Seed) -> Result<()> {
    seed.import(&Image::api_server()?)?;
    volumes::offer(seed, CLUSTERS.len(), "5Gi")?;
    let front = lab.free_address()?;
    for (name, _) in CLUSTERS {
        for prefix in ["", "konnectivity-server."] {
            lab.name_resolves(&format!("{prefix}{}", operated::external_name(name)), front)?;
        }
    }
    operated::install(seed, front)?;
    wait::until("the front Service", SOON, || seed.give_this_address("portico", "portico", front))?;
    let rolled_out = |name| seed.kubectl().wait_rolled_out("portico", name, STARTING);
    ["portico-operator", "portico-gateway"].into_iter().try_for_each(rolled_out)
}

impl Migration<'_> {
    /// From NodePort towards Tunneling until this state, and back.
    fn is_rolled_back_from(&self, state: &str, name: &'static str) {
        let (cluster, killing) = (self.cluster, Killing::of(self.cluster.seed));
        let reached = |other: &str| {
            STATES.iter().position(|one| *one == state) >= STATES.iter().position(|one| *one == other)
        };
        let mut first = Some(Load::start(&cluster.way()));
        let rollback = || self.order(&["--rollback"]);
        let to = || self.order(&["--to", "Tunneling"]);
        let mut second = None;
        if reached("Quieting") {
            to();
            self.tells_the_next_agents("Tunneling");
            self.reaches("Quieting");
            second = Some(Load::start(&self.way_of(name).0));
            let closes = reached("Closing");
            if closes {
                // Nobody is promised anything by this door until it is open again.
                first.take().unwrap().ends_well("until the first door closes");
            }
            killing.stopped_in(cluster.name, state, || closes.then(|| self.begins_to_finish()), rollback);
            if closes {
                self.tells_the_next_agents("NodePort");
                first = Some(Load::start(&cluster.way()));
            }
        } else {
            let begins = || {
                to();
                if reached("Moving") {
                    self.tells_the_next_agents("Tunneling");
                }
            };
            killing.stopped_in(cluster.name, state, begins, rollback);
        }
        if reached("Moving") && !reached("Closing") {
            self.tells_the_next_agents("NodePort");
        }
        wait::until("the first door to be in force again", STARTING, || {
            let exposed = cluster.seed.kubectl().get(&["exposedcluster", cluster.name])?;
            let (spec, state) = (&exposed["spec"], &exposed["spec"]["migration"]["state"]);
            ensure!(spec["exposeStrategy"] == "NodePort" && *state == "Quieting", "{spec}");
            Ok(())
        })
        .unwrap();
        self.nodes_are_at(&cluster.kubectl);
        if let Some(second) = second {
            second.ends_well(&format!("until the second door is closed, from {state}"));
        }
        self.finish();
        for node in self.nodes {
            cluster.kubectl.wait_node_ready(node.host().name(), SOON).unwrap();
            cluster.reaches_its_pod(&cluster.kubectl, node);
        }
        first.unwrap().ends_well(&format!("after a rollback from {state}"));
    }

    /// What the condition says.
    fn message(&self) -> Result<String> {
        let cluster = self.cluster.seed.kubectl().get(&["cluster", self.cluster.name])?;
        let message = cluster["status"]["conditions"]["PorticoMigration"]["message"].as_str();
        message.map(str::to_owned).context("no migration yet")
    }
}
