//! Hosted control planes as real pods under Pod Security `restricted`: upstream's programs with the flags,
//! files, probes and volumes of a plan, and the Secrets of its PKI.
//!
//! By the operator, in its story, from one object each: [`LAYOUTS`]. One of `dedicated` with three members of
//! etcd is applied by kubectl as `portico control-plane` prints it. Times and memory are printed, never
//! asserted: this machine does much else.

mod away;
mod bars;
mod cluster;
mod hostile;
mod joined;
mod killing;
mod load;
mod migrated;
mod migrations;
mod monitored;
mod people;
mod replaced;

use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::Instant;

use anyhow::{Context, ensure};
use portico_lab::{Host, Image, Kubectl, Lab, Seed, long_form, operated, programs, say, volumes, wait};
use serde_json::{Value, json};

use self::cluster::{Hosted, STARTING};
use crate::support::SOON;

/// One for each member of etcd of the layout `dedicated`, and one in place of a volume that is lost.
pub(crate) const VOLUMES: usize = 4;

/// The layout of each of [`operated::HOSTED`].
const LAYOUTS: [&str; 3] = ["compact", "dedicated", "compact"];

/// By kubectl: a pod for each program, three of etcd and two of the API server. All are replaced and nobody
/// notices.
pub(crate) fn a_planned_control_plane_of_many_pods_is_replaced_unnoticed(lab: &Lab, seed: &Seed) {
    let client = lab.host("admin-large").unwrap();
    let hosted = Hosted::start("large", "dedicated", 30_006, seed, &client);
    hosted.wait_complete();
    hosted.controllers_work();
    hosted.keep();
    // etcd takes half a minute.
    for workload in long_form(&["deployment/apiserver"][..], &["deployment/apiserver", "statefulset/etcd"]) {
        hosted.answers_while_replacing(workload);
    }
    if long_form(false, true) {
        hosted.answers_while_a_member_loses_its_volume();
    }
    hosted.is_kept().unwrap();
    hosted.controllers_work();
    hosted.end();
}

/// By the operator: a Cluster for each strategy gets a control plane, which its administrator reaches through
/// the gateway; machines join; and all of it goes with the Cluster.
pub(crate) fn one_object_each_becomes_a_cluster_with_nodes(seed: &Seed, client: &Host) {
    seed.import(&Image::api_server().unwrap()).unwrap();
    volumes::offer(seed, operated::HOSTED.len(), "5Gi").unwrap();
    let kubectl = seed.kubectl();
    let start = apply(seed, operated::HOSTED.into_iter().zip(LAYOUTS));
    let clusters = thread::scope(|scope| {
        let made: Vec<_> = operated::HOSTED
            .iter()
            .zip(LAYOUTS)
            .map(|(&(name, _), layout)| scope.spawn(move || made(name, layout, seed, client, start)))
            .collect();
        made.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    clusters[0].controllers_work();
    let prometheus = monitored::Prometheus::of(&clusters[0]);
    clusters[0].heals_and_keeps_its_data();
    clusters[0].is_known_by_its_certificate(&clusters[1]);
    clusters[0].knows_its_people();
    let nodes = joined::machines_join_by_one_command(&clusters);
    replaced::an_api_server_goes_with_its_konnectivity_server(&clusters[1], &nodes[1][0]);
    away::the_seeds_api_server_is_not_missed(&clusters, &nodes);
    migrated::to_other_strategies_unnoticed(&clusters, &nodes[1]);
    let hostile = hostile::Hostile::harms_nobody_else(&clusters, &nodes[0]);
    monitored::every_program_is_scraped(&clusters);
    prometheus.knows_its_cluster_and_goes();
    hostile.ends_well();
    joined::machines_leave(&clusters, nodes);

    let start = Instant::now();
    let names = operated::HOSTED.map(|(name, _)| name);
    kubectl.run(&[&["delete", "cluster", "--wait=false"], &names[..]].concat()).unwrap();
    // A pod that is deleted while it starts may use up the minute that it has to end.
    wait::until("the Clusters to be gone", 2 * SOON, || {
        let all = kubectl.get(&["clusters"])?;
        let all = all["items"].as_array().into_iter().flatten();
        let left: Vec<_> = all.filter_map(|it| it["metadata"]["name"].as_str()).collect();
        let left: Vec<_> = left.into_iter().filter(|name| names.contains(name)).collect();
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
    .unwrap();
    say(format_args!("hosted: the Clusters are gone after {:.1} s", start.elapsed().as_secs_f64()));
    nothing_is_left_but_volumes(seed, client, &names);
}

/// The volumes of etcd are kept, as their class has it, and `portico status` lists them.
fn nothing_is_left_but_volumes(seed: &Seed, client: &Host, names: &[&str]) {
    let kubectl = seed.kubectl();
    let of_them = |kind: &str, place: &str, prefix: &str| -> Vec<Value> {
        let mut found = kubectl.get(&[kind, "--all-namespaces"]).unwrap();
        let Value::Array(mut found) = found["items"].take() else { panic!("{found}") };
        let theirs = |text: &str| text.strip_prefix(prefix).is_some_and(|name| names.contains(&name));
        found.retain(|object| object.pointer(place).and_then(Value::as_str).is_some_and(theirs));
        found
    };
    for (kind, place, prefix) in [
        ("exposedclusters", "/metadata/name", ""),
        ("namespaces", "/metadata/name", "cluster-"),
        ("persistentvolumeclaims", "/metadata/namespace", "cluster-"),
    ] {
        assert_eq!(of_them(kind, place, prefix), Vec::<Value>::new(), "{kind}");
    }
    let kept = of_them("persistentvolumes", "/spec/claimRef/namespace", "cluster-");
    let kept: BTreeSet<&str> = kept.iter().filter_map(|volume| volume["metadata"]["name"].as_str()).collect();
    assert_eq!(kept.len(), names.len(), "one of each cluster: {kept:?}");
    let (portico, way) = (programs::portico().unwrap(), kubectl.kubeconfig().display().to_string());
    let ask = [&portico.display().to_string(), "status", "--kubeconfig", &way, "--output=json"];
    wait::until("volumes to be released", SOON, || {
        // Its exit code says whether all other clusters are reached.
        let output = client.output(&ask, "")?;
        let status: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let orphans = status["orphans"].as_array().context("orphans are a list")?;
        let listed: BTreeSet<&str> = orphans.iter().filter_map(|orphan| orphan["name"].as_str()).collect();
        let volumes = orphans.iter().all(|orphan| orphan["kind"] == "PersistentVolume");
        ensure!(volumes && listed == kept, "{orphans:?} instead of volumes {kept:?}");
        Ok(())
    })
    .unwrap();
}

/// A Cluster that Portico hosts.
fn hosted_object(cluster: (&str, &str), layout: &str) -> Value {
    let version = programs::kube_version().unwrap();
    let mut object = operated::cluster_object(cluster, version.trim_start_matches('v'));
    object["metadata"]["annotations"] = json!({"portico.k8c.io/layout": layout});
    object["spec"]["clusterNetwork"] = json!({"proxyMode": "nftables"});
    // One etcd is what this machine has volumes and room for.
    object["spec"]["componentsOverride"] = json!({"etcd": {"clusterSize": 1}});
    object
}

/// One Cluster for each of [`operated::HOSTED`], at once, and what a cloud would give to the load balancer.
fn apply(
    seed: &Seed,
    clusters: impl Iterator<Item = ((&'static str, &'static str), &'static str)>,
) -> Instant {
    let items = clusters.map(|(cluster, layout)| hosted_object(cluster, layout));
    let (items, start) = (Value::from_iter(items), Instant::now());
    seed.kubectl().apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).unwrap();
    wait::until("a load balancer", SOON, || {
        seed.give_address("cluster-hosted-balancer", "front-loadbalancer")
    })
    .unwrap();
    start
}

/// The cluster of this name, once all of it is ready.
fn made<'a>(
    name: &'static str,
    layout: &'static str,
    seed: &'a Seed,
    client: &'a Host,
    start: Instant,
) -> Hosted<'a> {
    let (kubectl, namespace) = (seed.kubectl(), format!("cluster-{name}"));
    let file = client.dir().join(format!("{name}.kubeconfig"));
    wait::until("the administrator's kubeconfig", STARTING, || {
        let template = "--output=go-template={{.data.kubeconfig | base64decode}}";
        let kubeconfig = kubectl.run(&["get", "secret", "admin-kubeconfig", "-n", &namespace, template])?;
        Ok(fs::write(&file, kubeconfig)?)
    })
    .unwrap();
    let kubectl = Kubectl::new(client, &file).unwrap();
    let hosted = Hosted { name, layout, node_port: 0, seed, client, kubectl };
    wait::until("the first answer", STARTING, || hosted.answers()).unwrap();
    say(format_args!("{name}: the first answer after {:.1} s", start.elapsed().as_secs_f64()));
    for condition in ["PorticoControlPlaneReady", "PorticoUserClusterReady"] {
        operated::wait_condition(seed, name, condition).unwrap();
        say(format_args!("{name}: {condition} after {:.1} s", start.elapsed().as_secs_f64()));
    }
    hosted
}
