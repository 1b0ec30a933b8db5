//! A seed without KKP, on which the operator is installed as the README says, and everything else by it
//! ([`Operated`]): kubectl from outside, a pod's requests, `logs` and `exec`. Three more clusters are hosted.
//!
//! Then the operator is killed, the gateway replaced, objects are deleted, and API servers stand still. What
//! a step says about times is printed and never asserted: this machine does much else.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use portico_lab::operated::{CLUSTERS, SEED, service, wait_condition};
use portico_lab::process::freeze;
use portico_lab::{Image, Node, Operated, Seed, Steps, UserCluster, say, wait};
use rustix::process::{Signal, kill_process};
use serde_json::json;

use crate::hosted;
use crate::support::{Knocking, SOON, Watch, Way, beat_all, former_gateways_drain};
use crate::tunnel::client::{self, Client};
use crate::tunnel::seed::{api_server, kubectl_inside};

/// Images imported, probes passed, seconds of `minReadySeconds`: half a minute on an idle machine.
const ROLLING_OUT: Duration = Duration::from_secs(240);

#[test]
fn one_object_each_makes_clusters_that_users_nodes_and_pods_reach() {
    let (_turn, _lab, seed) = crate::seeded_by("operator-story", Seed::start_with_names);
    let operated = Operated::start(seed, &Steps::new(), true).unwrap();
    let ways: Vec<Way> = CLUSTERS
        .iter()
        .zip(&operated.hosted)
        .map(|((name, _), cluster)| Way::new(name, &operated.client, &operated.access(cluster).unwrap()))
        .collect();
    let Operated { workers, hosted, seed, client } = operated;
    let clients: Vec<Client> =
        ways.iter().zip(&workers).map(|(way, worker)| client_pod(way, worker)).collect();
    clients.iter().for_each(|client| wait::until("a pod's request", SOON, || client.ask()).unwrap());
    let story = Story { workers, clients, ways, hosted, seed };
    story.nodes_are_reached_by_konnectivity();
    say("pods reach their API servers, and these their nodes");

    hosted::one_object_each_becomes_a_cluster_with_nodes(&story.seed, &client);
    let watches: Vec<Watch<'_>> = story.ways.iter().map(Way::watch).collect();
    story.a_killed_operator_is_not_felt(&watches);
    story.an_upgrade_of_the_gateway_is_not_felt(&watches);
    story.an_upgrade_of_the_operator_changes_nothing_but_its_images(&watches);
    story.what_an_admin_deletes_comes_back(&watches);
    story.an_api_server_that_stands_still_holds_up_no_other_cluster();
    story.the_seeds_api_server_away_is_not_felt(&watches);
}

struct Story {
    // Dropped in this order: workers before what they talk to.
    workers: Vec<Node>,
    clients: Vec<Client>,
    ways: Vec<Way>,
    hosted: Vec<UserCluster>,
    seed: Seed,
}

fn client_pod(way: &Way, worker: &Node) -> Client {
    worker.import(&client::image()).unwrap();
    client::grant(&way.kubectl);
    Client::start(&way.kubectl, worker)
}

/// The processes of a Deployment's pods.
fn kill_pods(seed: &Seed, deployment: &str) -> Result<usize> {
    let label = format!("app.kubernetes.io/name={deployment}");
    let pods = seed.kubectl().get(&["pods", "-n", "portico", "-l", &label])?;
    let mut killed = 0;
    for pod in pods["items"].as_array().context("a list")? {
        let uid = pod["metadata"]["uid"].as_str().context("a pod has a UID")?;
        for process in seed.node().pod_processes(uid, "portico")? {
            kill_process(process, Signal::KILL)?;
            killed += 1;
        }
    }
    Ok(killed)
}

impl Story {
    /// `kubectl logs` and `exec`, which a kubelet answers that only an agent reaches.
    fn nodes_are_reached_by_konnectivity(&self) {
        for way in &self.ways {
            let pod = format!("client-worker-{}", way.name);
            wait::until("the log", SOON, || {
                let log = way.kubectl.run(&["logs", &pod])?;
                ensure!(log.contains("configmap/kube-root-ca.crt"), "{log}");
                Ok(())
            })
            .unwrap();
            let said = way.kubectl.run(&["exec", &pod, "--", "sh", "-c", "echo it works"]).unwrap();
            assert_eq!(said.trim(), "it works", "by {}", way.name);
        }
    }

    /// SIGKILL for both replicas: what they have made stands, and a new leader goes on.
    fn a_killed_operator_is_not_felt(&self, watches: &[Watch<'_>]) {
        assert!(kill_pods(&self.seed, "portico-operator").unwrap() > 0);
        beat_all(watches);
        let patch = r#"{"spec": {"apiServerAllowedIPRanges": {"cidrBlocks": ["0.0.0.0/0"]}}}"#;
        self.seed.kubectl().run(&["patch", "cluster", "by-balancer", "--type=merge", "-p", patch]).unwrap();
        wait::until("a change that the new leader writes", ROLLING_OUT, || {
            let exposed = self.seed.kubectl().get(&["exposedcluster", "by-balancer"])?;
            ensure!(exposed.to_string().contains("0.0.0.0/0"), "{exposed}");
            Ok(())
        })
        .unwrap();
        self.seed.kubectl().wait_rolled_out("portico", "portico-operator", ROLLING_OUT).unwrap();
        beat_all(watches);
    }

    /// A setting of the Seed that replaces the gateway's pods.
    fn an_upgrade_of_the_gateway_is_not_felt(&self, watches: &[Watch<'_>]) {
        let kubectl = self.seed.kubectl();
        let generation = || -> Result<u64> {
            let gateway = kubectl.get(&["deployment", "portico-gateway", "-n", "portico"])?;
            gateway["metadata"]["generation"].as_u64().context("a Deployment has a generation")
        };
        let (before, knocking) = (generation().unwrap(), Knocking::start(&self.ways));
        let patch = r#"{"spec": {"nodeportProxy": {"envoy":
            {"connectionSettings": {"downstreamTCPKeepaliveTime": "90s"}}}}}"#;
        kubectl.run(&["patch", "seed", SEED, "-n", "portico", "--type=merge", "-p", patch]).unwrap();
        wait::until("the gateway to be changed", SOON, || {
            ensure!(generation()? > before, "it is as it was");
            Ok(())
        })
        .unwrap();
        kubectl.wait_rolled_out("portico", "portico-gateway", ROLLING_OUT).unwrap();
        former_gateways_drain(&self.seed, "portico-gateway");
        knocking.all_were_answered("an upgrade of the gateway");
        beat_all(watches);
        self.clients.iter().for_each(|client| wait::until("a request", SOON, || client.ask()).unwrap());
    }

    /// The next version of the operator, which brings the next ones of gateway and agents.
    fn an_upgrade_of_the_operator_changes_nothing_but_its_images(&self, watches: &[Watch<'_>]) {
        const NEXT: &str = "localhost/portico:next";
        let next = Image::portico().unwrap().named(NEXT);
        [self.seed.node()].into_iter().chain(&self.workers).for_each(|node| node.import(&next).unwrap());
        let kubectl = self.seed.kubectl();
        let versions = || {
            let kinds = "services,exposedclusters,namespaces";
            let versions = "-o=custom-columns=:kind,:metadata.name,:metadata.uid,:metadata.resourceVersion";
            kubectl.run(&["get", kinds, "-A", versions]).unwrap()
        };
        let before = versions();
        let knocking = Knocking::start(&self.ways);
        let operator = kubectl.get(&["deployment", "portico-operator", "-n", "portico"]).unwrap();
        let pod = &operator["spec"]["template"]["spec"]["containers"][0];
        let args: Vec<String> = serde_json::from_value(pod["args"].clone()).unwrap();
        let args: Vec<String> = args.iter().map(|arg| arg.replace("localhost/portico:dev", NEXT)).collect();
        let container = json!({"name": pod["name"], "image": NEXT, "args": args});
        let patch = json!({"spec": {"template": {"spec": {"containers": [container]}}}});
        kubectl.patch("portico", "deployment/portico-operator", "strategic", &patch).unwrap();
        kubectl.wait_rolled_out("portico", "portico-operator", ROLLING_OUT).unwrap();
        wait::until("the next gateway", SOON, || {
            let gateway = kubectl.get(&["deployment", "portico-gateway", "-n", "portico"])?;
            ensure!(gateway["spec"]["template"]["spec"]["containers"][0]["image"] == NEXT, "{gateway}");
            Ok(())
        })
        .unwrap();
        kubectl.wait_rolled_out("portico", "portico-gateway", ROLLING_OUT).unwrap();
        for way in &self.ways {
            wait::until("the next agents", SOON, || {
                let agents = way.kubectl.get(&["daemonsets,deployments", "-n", "kube-system"])?.to_string();
                ensure!(agents.contains(NEXT) && !agents.contains("localhost/portico:dev"), "{agents}");
                Ok(())
            })
            .unwrap();
        }
        assert_eq!(versions(), before);
        knocking.all_were_answered("an upgrade of the operator");
        beat_all(watches);
        let client = &self.clients[2];
        wait::until("a pod's request by the next agent", ROLLING_OUT, || client.ask()).unwrap();
        self.nodes_are_reached_by_konnectivity();
    }

    /// Services with the numbers that users know, agents on the next look inside.
    fn what_an_admin_deletes_comes_back(&self, watches: &[Watch<'_>]) {
        let (kubectl, inside) = (self.seed.kubectl(), &self.ways[2].kubectl);
        let before = service(&self.seed, "by-port", "apiserver-external").unwrap();
        kubectl.run(&["delete", "service", "apiserver-external", "-n", "cluster-by-port"]).unwrap();
        wait::until("the Service to come back", SOON, || {
            let now = service(&self.seed, "by-port", "apiserver-external")?;
            ensure!(now["metadata"]["uid"] != before["metadata"]["uid"], "it is the old one");
            ensure!(now["spec"]["ports"][0]["nodePort"] == before["spec"]["ports"][0]["nodePort"], "{now}");
            Ok(())
        })
        .unwrap();
        self.ways[0].wait_open();
        beat_all(&watches[1..]);
        let agents = ["get", "daemonsets", "-n", "kube-system", "--output=name"];
        let found = inside.run(&agents).unwrap();
        let agent = found.lines().find(|line| line.contains("portico-agent")).expect("an agent runs");
        inside.run(&["delete", agent, "-n", "kube-system"]).unwrap();
        let look = ["label", "secret", "internal-admin-kubeconfig", "-n", "cluster-by-name", "looked=now"];
        kubectl.run(&look).unwrap();
        wait::until("the agent to come back", SOON, || {
            let found = inside.run(&agents)?;
            ensure!(found.contains(agent), "{found}");
            Ok(())
        })
        .unwrap();
        wait_condition(&self.seed, "by-name", "PorticoUserClusterReady").unwrap();
        wait::until("a pod's request", ROLLING_OUT, || self.clients[2].ask()).unwrap();
    }

    /// SIGSTOP for one of them: a change of another cluster is done, inside and out.
    fn an_api_server_that_stands_still_holds_up_no_other_cluster(&self) {
        let frozen = api_server(&self.seed, &self.hosted[1]);
        freeze(frozen).unwrap();
        let kubectl = self.seed.kubectl();
        for name in ["by-balancer", "by-name"] {
            let namespace = format!("cluster-{name}");
            let look = ["label", "secret", "internal-admin-kubeconfig", "-n", &namespace];
            kubectl.run(&[&look[..], &["looked=frozen", "--overwrite"]].concat()).unwrap();
        }
        let inside = kubectl_inside(&self.seed, &self.hosted[2]);
        inside.run(&["delete", "configmap", "cluster-info", "-n", "kube-public"]).unwrap();
        let look = ["label", "secret", "internal-admin-kubeconfig", "-n", "cluster-by-name", "looked=again"];
        kubectl.run(&[&look[..], &["--overwrite"]].concat()).unwrap();
        wait::until("cluster-info of the other cluster", SOON, || {
            inside.get(&["configmap", "cluster-info", "-n", "kube-public"]).map(drop)
        })
        .unwrap();
        wait::until("what hangs to be reported", ROLLING_OUT, || {
            let cluster = kubectl.get(&["cluster", "by-balancer"])?;
            let condition = &cluster["status"]["conditions"]["PorticoUserClusterReady"];
            ensure!(condition["status"] == "False", "{condition}");
            Ok(())
        })
        .unwrap();
        kill_process(frozen, Signal::CONT).unwrap();
        self.ways[1].wait_open();
        wait_condition(&self.seed, "by-balancer", "PorticoUserClusterReady").unwrap();
    }

    /// The control plane of the seed stands still: clusters are reached as before.
    fn the_seeds_api_server_away_is_not_felt(&self, watches: &[Watch<'_>]) {
        let api_server = self.seed.control_plane().api_server();
        api_server.freeze().unwrap();
        for way in &self.ways {
            way.ask().unwrap();
        }
        beat_all(&watches[1..]);
        api_server.signal(Signal::CONT).unwrap();
        self.seed.kubectl().run(&["annotate", "cluster", "by-name", "story=over"]).unwrap();
        assert_eq!(self.workers.len(), CLUSTERS.len());
    }
}
