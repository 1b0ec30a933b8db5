//! The API server of the seed is away: users of hosted clusters must not miss it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use portico_lab::{Node, long_form, operated, say, wait};
use rustix::process::Signal;
use serde_json::Value;

use super::cluster::{CLUSTER_INFO, Hosted, STARTING, WAY_IN};

/// How long it is away.
fn away() -> Duration {
    long_form(Duration::from_secs(20), Duration::from_secs(600))
}

/// A look at the seed after it: what could not reach it waits for minutes until it tries again.
const RETURNING: Duration = Duration::from_secs(420);

/// What the operator makes for each control plane on the seed: it comes back too.
const ON_THE_SEED: &str = "kube-apiserver-egress";

/// Each cluster is used all the time, the nodes' logs and shells included. Nothing of a control plane is
/// started or written anew because of it, and the operator goes on with what was to be done meanwhile.
pub(super) fn the_seeds_api_server_is_not_missed(clusters: &[Hosted<'_>], nodes: &[Vec<Node>]) {
    let seed = clusters[0].seed;
    let before: Vec<Vec<String>> = clusters.iter().map(|cluster| cluster.what_runs().unwrap()).collect();
    let (api_server, start) = (seed.control_plane().api_server(), Instant::now());
    api_server.freeze().unwrap();
    clusters.iter().for_each(|cluster| drop(cluster.run_inside("delete").unwrap()));
    let mut rounds = 0;
    while rounds == 0 || start.elapsed() < away() {
        for (cluster, nodes) in clusters.iter().zip(nodes) {
            cluster.is_used(rounds, &nodes[0]).unwrap();
        }
        rounds += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    api_server.signal(Signal::CONT).unwrap();
    let (kubectl, back) = (seed.kubectl(), Instant::now());
    for cluster in clusters {
        kubectl.run(&["delete", "configmap", ON_THE_SEED, "-n", &cluster.namespace()]).unwrap();
        cluster.have_it_looked_at("back");
    }
    for cluster in clusters {
        wait::until("the operator's work inside", RETURNING, || cluster.run_inside("get")).unwrap();
        wait::until("its work on the seed", RETURNING, || {
            kubectl.get(&["configmap", ON_THE_SEED, "-n", &cluster.namespace()])
        })
        .unwrap();
    }
    kubectl.wait_node_ready(seed.host().name(), STARTING).unwrap();
    for (cluster, before) in clusters.iter().zip(before) {
        for condition in ["PorticoControlPlaneReady", "PorticoUserClusterReady"] {
            operated::wait_condition(seed, cluster.name, condition).unwrap();
        }
        assert_eq!(cluster.what_runs().unwrap(), before);
    }
    say(format_args!(
        "hosted: each cluster was used {rounds} times in {seconds:.1} s without the seed's API server; the \
         operator was back after {:.1} s",
        back.elapsed().as_secs_f64()
    ));
}

impl Hosted<'_> {
    /// What people do with a cluster, by new connections.
    fn is_used(&self, round: usize, node: &Node) -> Result<()> {
        let (kubectl, pod) = (&self.kubectl, node.host().name());
        let name = format!("used-{round}");
        kubectl.run(&["create", "configmap", &name, "--request-timeout=20s"])?;
        kubectl.run(&["get", "configmap", &name, "--request-timeout=20s"])?;
        let log = kubectl.run(&["logs", pod, "--request-timeout=20s"])?;
        ensure!(log.trim() == "it runs", "{log}");
        let said = kubectl.run(&["exec", pod, "--", "echo", "it works"])?;
        ensure!(said.trim() == "it works", "{said}");
        Ok(())
    }

    /// Does this with an object that the operator makes inside the cluster.
    fn run_inside(&self, verb: &str) -> Result<String> {
        self.kubectl.run(&[&[verb][..], &CLUSTER_INFO].concat())
    }

    /// Containers with their restarts, workloads with their generation, and the versions of what else of the
    /// control plane nothing writes but the operator.
    fn what_runs(&self) -> Result<Vec<String>> {
        let (kubectl, namespace) = (self.seed.kubectl(), self.namespace());
        let kinds = "pods,statefulsets,deployments,configmaps,secrets,services";
        let found = kubectl.get(&[kinds, "-n", &namespace])?;
        let all = found["items"].as_array().into_iter().flatten();
        let theirs = all.filter(|object| {
            let name = &object["metadata"]["name"];
            *name != WAY_IN && *name != ON_THE_SEED
        });
        let mut lines: Vec<String> = theirs.map(in_short).collect();
        ensure!(lines.len() > 20, "a control plane is more than {lines:?}");
        lines.sort();
        Ok(lines)
    }
}

pub(super) fn in_short(object: &Value) -> String {
    let (kind, metadata) = (&object["kind"], &object["metadata"]);
    let what = match kind.as_str() {
        Some("Pod") => {
            let containers = ["initContainerStatuses", "containerStatuses"].map(|field| {
                let statuses = object["status"][field].as_array().into_iter().flatten();
                statuses.map(|one| format!("{} {}", one["name"], one["restartCount"])).collect::<Vec<_>>()
            });
            format!("{containers:?}")
        }
        Some("StatefulSet" | "Deployment") => metadata["generation"].to_string(),
        _ => metadata["resourceVersion"].to_string(),
    };
    format!("{kind} {} {} {what}", metadata["name"], metadata["uid"])
}
