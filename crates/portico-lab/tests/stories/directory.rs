//! Portico on a plain host, from a directory of manifests. There are three user clusters planned from their
//! `Cluster` objects, real API servers on a host of their own, and a worker that joined through the gateway.
//!
//! Checks the promises of `deployed.rs`, with files in place of a Kubernetes API, and a take-over by a second
//! process in place of a rolling update.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{
    DOMAIN, Knocking, PodStreams, ROUNDS, SOON, Watch, Way, beat_all, carried_by_gateways, others,
    wait_routed,
};
use anyhow::{Context, ensure};
use portico_lab::control_plane::Options;
use portico_lab::{Access, ControlPlane, Etcd, Host, Image, Lab, Node, Process, programs, say, wait};
use serde_json::{Value, json};

#[test]
fn clusters_of_every_strategy_are_reached_by_manifests_and_do_not_feel_each_other() {
    let _turn = crate::turn();
    let lab = Lab::start("directory-story").unwrap();
    let [planes, door, client, worker] =
        ["planes", "door", "client", "worker-1"].map(|name| lab.host(name).unwrap());
    let etcd = Etcd::start(&planes).unwrap();
    let mut node_port = control_plane(&planes, &etcd, "nodeport", 7001);
    let load_balancer = control_plane(&planes, &etcd, "balanced", 7002);
    let tunneled = control_plane(&planes, &etcd, "tunneled", 6443);
    for name in ["nodeport", "balanced", "tunneled"] {
        lab.name_resolves(&format!("{name}.{DOMAIN}"), door.address()).unwrap();
    }

    let site = Site::write(&door, planes.address().to_string());
    let first = site.gateway("first");
    let by_port = |cluster: &str, plane: &ControlPlane| -> Access {
        plane.access().through(&format!("https://{cluster}.{DOMAIN}:{}", site.node_port_of(cluster)))
    };
    let authority = "https://apiserver-external.cluster-tunneled.svc.cluster.local:443";
    let by_authority =
        tunneled.access().through(authority).by_proxy(&format!("http://{}:8088", door.address()));
    let by_name = tunneled.access().through(&format!("https://tunneled.{DOMAIN}:6443"));
    let ways = [
        Way::new("node-port", &client, &by_port("nodeport", &node_port)),
        Way::new("load-balancer", &client, &by_port("balanced", &load_balancer)),
        Way::new("sni", &client, &by_name),
        Way::new("connect", &client, &by_authority),
    ];
    ways.iter().for_each(Way::wait_open);

    let worker = Node::join(&worker, &by_name, "172.25.1.0/24").unwrap();
    worker.import(&Image::busybox().unwrap()).unwrap();
    say("a worker joined; large objects, watches, logs, exec and port-forward");
    ways.iter().for_each(Way::serves_large_objects);
    let mut watches: Vec<Watch> = ways.iter().map(Way::watch).collect();
    let mut streams = PodStreams::open(&ways[2], &worker);

    let [by_port, balanced_by_port] =
        ["nodeport", "balanced"].map(|cluster| format!("node_port:{}", site.node_port_of(cluster)));
    let carried = [
        (by_port.as_str(), "nodeport"),
        (balanced_by_port.as_str(), "balanced"),
        ("sni", "tunneled"),
        ("tunnel", "tunneled"),
    ];
    carried_by_gateways(&door, std::slice::from_ref(&site.admin), &client, &carried);

    changes_of_other_clusters_are_not_felt(&site, &watches);
    streams.beat();
    say("500 changes of other clusters were not felt");

    let knocking = Knocking::start(&ways);
    let second = a_take_over_is_not_felt(&site, &first, &watches);
    knocking.all_were_answered("a take-over");
    streams.beat();
    first.check().expect("what the watches came by");

    // The cluster by NodePort is the other one now: its watch ends with its API server.
    drop(watches.remove(0));
    let knocking = Knocking::start(&ways[1..]);
    node_port.kill_api_server();
    ways[0].ask().expect_err("nobody is there to answer");
    beat_all(&watches);
    node_port.start_again().unwrap();
    ways[0].wait_open();
    beat_all(&watches);
    knocking.all_were_answered("a restart of another cluster's API server");
    streams.beat();
    ways[0].watch();
    second.check().unwrap();
}

/// An API server as processes; only the cluster with the worker needs controllers.
fn control_plane(host: &Host, etcd: &Etcd, name: &str, port: u16) -> ControlPlane {
    let options = Options {
        secure_port: port,
        names: vec![
            format!("{name}.{DOMAIN}"),
            format!("apiserver-external.cluster-{name}.svc.cluster.local"),
        ],
        controllers: name == "tunneled",
        ..Options::new(name)
    };
    ControlPlane::start(host, etcd, &options).unwrap()
}

/// The host of the gateway, with its manifests.
struct Site {
    host: Host,
    manifests: PathBuf,
    admin: String,
    portico: PathBuf,
}

impl Site {
    /// Writes what makes the three clusters, whose API servers are at `planes`.
    fn write(host: &Host, planes: String) -> Site {
        let manifests = host.dir().join("manifests");
        fs::create_dir(&manifests).unwrap();
        let kind = |kind: &str, name: &str, spec: Value| {
            json!({
                "apiVersion": "kubermatic.k8c.io/v1",
                "kind": kind,
                "metadata": {"name": name, "namespace": "kubermatic"},
                "spec": spec,
            })
        };
        let mut objects = vec![
            kind(
                "KubermaticConfiguration",
                "kubermatic",
                // The numbers below are taken by the other clusters of the story, which fix theirs.
                json!({
                    "ingress": {"domain": "kkp.example.com"},
                    "userCluster": {"nodePortRange": "31000-32767"},
                }),
            ),
            kind("Seed", "kubermatic", json!({})),
            // No strategy of its own: the default.
            kind("Cluster", "nodeport", json!({})),
            kind("Cluster", "balanced", json!({"exposeStrategy": "LoadBalancer"})),
            kind("Cluster", "tunneled", json!({"exposeStrategy": "Tunneling"})),
        ];
        for (cluster, port) in [("nodeport", 7001), ("balanced", 7002), ("tunneled", 6443)] {
            objects.push(json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "apiserver-external-1",
                    "namespace": format!("cluster-{cluster}"),
                    "labels": {"kubernetes.io/service-name": "apiserver-external"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [planes], "conditions": {"ready": true}}],
                "ports": [{"name": "secure", "port": port, "protocol": "TCP"}],
            }));
        }
        fs::write(manifests.join("site.yaml"), documents(&objects)).unwrap();
        let admin = format!("{}:8002", host.address());
        Site { host: host.clone(), manifests, admin, portico: programs::portico().unwrap() }
    }

    /// Starts a gateway, which takes over from the one before, and waits until it serves.
    fn gateway(&self, name: &str) -> Process {
        let socket = self.host.dir().join("take-over.sock").display().to_string();
        let manifests = self.manifests.display().to_string();
        let args = ["gateway", "--manifests", &manifests, "--take-over", &socket, "--tunnel-plaintext"];
        let args = [&args[..], &["--admin-listen", &self.admin]].concat();
        let process = self.host.spawn(name, &self.portico, args).unwrap();
        process.wait_for_log("listener=sni", SOON).unwrap();
        process
    }

    /// The NodePort that was drawn for a cluster's API server.
    fn node_port_of(&self, cluster: &str) -> u64 {
        let backend = format!("cluster-{cluster}/apiserver-external-secure");
        let url = format!("http://{}/routes", self.admin);
        wait::until(&format!("the NodePort of {cluster}"), SOON, || {
            let routes: Value =
                serde_json::from_str(&self.host.run(&["curl", "-sS", "--max-time", "20", &url])?)?;
            let row =
                routes["routes"].as_array().into_iter().flatten().find(|row| row["backend"] == *backend);
            row.and_then(|row| row["key"]["port"].as_u64())
                .with_context(|| format!("the routes are {routes}"))
        })
        .unwrap()
    }
}

/// Objects as documents of one file.
fn documents(objects: &[Value]) -> String {
    objects.iter().map(|object| format!("---\n{object}\n")).collect()
}

/// Five rounds over 100 files: written, replaced by rename, truncated and written, replaced again, removed.
fn changes_of_other_clusters_are_not_felt(site: &Site, watches: &[Watch]) {
    let file = |other: usize| site.manifests.join(format!("other-{other}.yaml"));
    let mut files = 0;
    for round in 0..ROUNDS {
        let others = others(round);
        for (other, objects) in others.iter().enumerate() {
            write_as_editors_do(&file(other), &documents(objects), round % 2 == 1);
        }
        if others.is_empty() {
            (0..files).for_each(|other| fs::remove_file(file(other)).unwrap());
        }
        files = others.len();
        wait_routed(&site.host, &site.admin, round);
        beat_all(watches);
    }
}

fn write_as_editors_do(path: &Path, text: &str, by_rename: bool) {
    if by_rename {
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(&new, path).unwrap();
    } else {
        fs::write(path, text).unwrap();
    }
}

/// A second process serves new connections, while the first lets the watches it carries go on.
fn a_take_over_is_not_felt(site: &Site, first: &Process, watches: &[Watch]) -> Process {
    let second = site.gateway("second");
    first.wait_for_log("a successor has taken the listeners over", SOON).unwrap();
    beat_all(watches);
    // Asked of the second: the first has no admin listener any more.
    let url = format!("http://{}/readyz", site.admin);
    wait::until("the second gateway to answer for itself", SOON, || {
        let answer = site.host.run(&["curl", "-sS", "--max-time", "20", &url])?;
        ensure!(answer.trim() == "ready", "it says {answer:?}");
        Ok(())
    })
    .unwrap();
    beat_all(watches);
    second
}
