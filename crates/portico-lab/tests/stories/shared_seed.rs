//! One seed for every story that leaves it whole: a start costs half a minute.
//!
//! Every story runs, also after one that failed, so that one run tells everything. Each has namespaces and
//! hosts of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use portico_lab::{Image, Lab, Seed, lab, say, volumes};

use crate::{deployed, hosted, kubernetes, seeded_by};

/// A story: its name, and what it does with the seed.
type Story = (&'static str, fn(&Lab, &Seed));

const STORIES: [Story; 4] = [
    (
        "a seed runs pods with logs, exec and Services",
        kubernetes::a_seed_runs_pods_with_logs_exec_and_services,
    ),
    (
        "a worker joins a user cluster hosted in the seed",
        kubernetes::a_worker_joins_a_user_cluster_hosted_in_the_seed,
    ),
    (
        "a planned control plane of many pods is replaced unnoticed",
        hosted::a_planned_control_plane_of_many_pods_is_replaced_unnoticed,
    ),
    (
        "clusters of every strategy are reached through a deployed gateway and do not feel each other",
        deployed::clusters_of_every_strategy_are_reached_through_a_deployed_gateway,
    ),
];

#[test]
fn stories_on_one_seed_hold_and_leave_nothing() {
    let (_turn, lab, seed) = seeded_by("shared-seed", Seed::start_with_names);
    seed.import(&Image::busybox().unwrap()).unwrap();
    seed.import(&Image::api_server().unwrap()).unwrap();
    volumes::offer(&seed, hosted::VOLUMES, "5Gi").unwrap();
    let mut failed = Vec::new();
    for (name, story) in STORIES {
        say(format_args!("story: {name}"));
        // The panic hook has printed what failed and where.
        if catch_unwind(AssertUnwindSafe(|| story(&lab, &seed))).is_err() {
            failed.push(name);
        }
    }
    assert_eq!(failed, [""; 0], "these stories failed; their messages stand above");
    let number = lab.number();
    drop((seed, lab));
    assert_eq!(lab::remains_of(number).unwrap(), [""; 0], "pods, shims, mounts and groups are gone");
}
