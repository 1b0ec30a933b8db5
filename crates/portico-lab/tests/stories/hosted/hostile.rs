//! The administrator of a hosted cluster is hostile. Where its API server sends webhooks, requests to
//! kubelets and whole APIs is his to write, so he names an address of the seed.
//!
//! Connections do arrive there: his own machines open them, which could do so anyway. None comes from the pod
//! of his control plane, which reaches what he does not. The lab enforces no NetworkPolicy that would hide
//! one that did.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use portico_lab::{Host, Node, Process, operated, programs, say, wait};
use serde_json::{Value, json};

use super::cluster::{CLUSTER_INFO, Hosted, STARTING};
use crate::support::SOON;

/// The group of the API that leads to the seed.
const GROUP: &str = "evil.example.com";

/// Takes connections on a host of the seed, remembers from where, and says nothing.
struct Trap {
    process: Process,
    address: Ipv4Addr,
    port: u16,
}

impl Trap {
    fn set(host: &Host, name: &str, port: u16) -> Self {
        let socat = programs::find("socat").unwrap();
        let listen = format!("TCP4-LISTEN:{port},reuseaddr,fork");
        let process =
            host.spawn(&format!("trap-{name}"), socat, ["-d", "-d", "-u", &listen, "OPEN:/dev/null"]);
        let trap = Self { process: process.unwrap(), address: host.address(), port };
        trap.process.wait_for_log("listening on", SOON).unwrap();
        trap
    }

    /// Where its connections came from.
    fn sources(&self) -> Result<BTreeSet<Ipv4Addr>> {
        let log = self.process.log();
        let accepted = log.lines().filter_map(|line| line.split_once("accepting connection from AF=2 "));
        let source = |(_, rest): (&str, &str)| {
            let (address, _) = rest.split_once(':').context(rest.to_owned())?;
            Ok(address.parse()?)
        };
        accepted.map(source).collect()
    }

    /// Somebody has come.
    fn check_visited(&self) -> Result<()> {
        ensure!(!self.sources()?.is_empty(), "no connection to {}", self.process.name());
        Ok(())
    }
}

/// The cluster whose administrator was hostile, and is not any more.
pub(super) struct Hostile<'a>(&'a Hosted<'a>);

impl<'a> Hostile<'a> {
    /// The administrator of the first cluster, whose machines are `nodes`: the control planes of the others,
    /// the operator and the seed go on.
    pub(super) fn harms_nobody_else(clusters: &'a [Hosted<'_>], nodes: &[Node]) -> Self {
        let start = Instant::now();
        let (hostile, others) = (&clusters[0], &clusters[1..]);
        let (seed, kubectl) = (hostile.seed, &hostile.kubectl);
        let trap = |name: &str, port| Trap::set(seed.host(), name, port);
        let traps = [trap("api", 9_441), trap("kubelet", 9_442), trap("webhook", 9_443)];
        let [api, kubelet, webhook] = &traps;
        offer_an_api(hostile, api);
        offer_a_kubelet(hostile, kubelet);
        for cluster in clusters {
            cluster.kubectl.run(&[&["delete"][..], &CLUSTER_INFO].concat()).unwrap();
        }
        kubectl.apply_json(&asked_about_everything(webhook)).unwrap();
        wait::until("the webhook to be asked", SOON, || {
            let held_up = kubectl.run(&["create", "configmap", "held-up", "--request-timeout=3s"]);
            ensure!(held_up.is_err(), "nobody was asked");
            webhook.check_visited()
        })
        .unwrap();
        clusters.iter().for_each(|cluster| cluster.have_it_looked_at("hostile"));
        for other in others {
            wait::until("the operator's work in another", SOON, || other.kubectl.get(&CLUSTER_INFO)).unwrap();
        }
        wait::until("the hostile one to be reported", STARTING, || {
            let cluster = seed.kubectl().get(&["cluster", hostile.name])?;
            let condition = &cluster["status"]["conditions"]["PorticoUserClusterReady"];
            ensure!(condition["status"] == "False", "{condition}");
            Ok(())
        })
        .unwrap();
        for other in others {
            other.answers().unwrap();
            operated::wait_condition(seed, other.name, "PorticoUserClusterReady").unwrap();
        }

        let machines: BTreeSet<Ipv4Addr> = nodes.iter().map(|node| node.host().address()).collect();
        for trap in &traps {
            wait::until("a connection", SOON, || trap.check_visited()).unwrap();
            let sources = trap.sources().unwrap();
            assert!(sources.is_subset(&machines), "{}: {sources:?}", trap.process.name());
        }
        a_connection_of_the_control_plane_would_be_seen(hostile, webhook);

        kubectl.run(&["delete", "validatingwebhookconfiguration/evil"]).unwrap();
        kubectl.run(&["delete", &format!("apiservice/v1.{GROUP}")]).unwrap();
        // Until all of the API server knows that the webhook is gone.
        let delete = ["delete", "node/evil", "--ignore-not-found", "--request-timeout=3s"];
        wait::until("the Node to be deleted", SOON, || kubectl.run(&delete)).unwrap();
        hostile.have_it_looked_at("again");
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{}: its administrator was hostile for {seconds:.1} s", hostile.name));
        Self(hostile)
    }

    /// The operator works in it again. A cluster that held it up has to rest first.
    pub(super) fn ends_well(self) {
        let Self(cluster) = self;
        operated::wait_condition(cluster.seed, cluster.name, "PorticoUserClusterReady").unwrap();
        cluster.kubectl.get(&CLUSTER_INFO).unwrap();
    }
}

/// Registers an aggregated API in the hostile cluster whose Service leads to the trap.
fn offer_an_api(hostile: &Hosted<'_>, trap: &Trap) {
    let port = json!([{"name": "https", "port": 443, "targetPort": trap.port}]);
    let subset =
        json!({"addresses": [{"ip": trap.address}], "ports": [{"name": "https", "port": trap.port}]});
    let service = json!({"name": "evil", "namespace": "default"});
    for object in [
        json!({"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": {"ports": port}}),
        json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": service, "subsets": [subset]}),
        json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": format!("v1.{GROUP}")},
            "spec": {"group": GROUP, "version": "v1", "service": service, "insecureSkipTLSVerify": true,
                "groupPriorityMinimum": 100, "versionPriority": 100}}),
    ] {
        hostile.kubectl.apply_json(&object).unwrap();
    }
}

/// A Node that claims to have its kubelet at the trap.
fn offer_a_kubelet(hostile: &Hosted<'_>, trap: &Trap) {
    let kubectl = &hostile.kubectl;
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "evil"}})).unwrap();
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": trap.address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": trap.port}}}});
    let patch = ["patch", "node", "evil", "--subresource=status", "--type=merge", "-p", &status.to_string()];
    kubectl.run(&patch).unwrap();
    wait::until("the kubelet to be asked", SOON, || {
        let asked = kubectl.run(&["get", "--raw", "/api/v1/nodes/evil/proxy/", "--request-timeout=3s"]);
        ensure!(asked.is_err(), "it answered");
        trap.check_visited()
    })
    .unwrap();
}

/// A webhook at the trap, which never answers, for all that the operator and users write.
fn asked_about_everything(trap: &Trap) -> Value {
    let hook = json!({
        "name": "evil.example.com",
        "clientConfig": {"url": format!("https://{}:{}/", trap.address, trap.port)},
        // Not Leases: with those he would harm himself alone, and all the more.
        "rules": [{"apiGroups": ["", "apps", "rbac.authorization.k8s.io"], "apiVersions": ["*"],
            "operations": ["*"], "resources": ["*"]}],
        "failurePolicy": "Fail",
        "timeoutSeconds": 30,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    });
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "evil"}, "webhooks": [hook]})
}

/// From its network, as its API server would open one.
fn a_connection_of_the_control_plane_would_be_seen(hostile: &Hosted<'_>, trap: &Trap) {
    let seed = hostile.seed;
    let pod = hostile.ready_pod("app=apiserver").unwrap();
    let process = seed.node().pod_processes(&pod, "kube-apiserver").unwrap()[0];
    let pid = process.as_raw_nonzero().to_string();
    let way = format!("TCP4:{}:{}", trap.address, trap.port);
    seed.host().run(&["nsenter", "-t", &pid, "-n", "socat", "-u", "OPEN:/dev/null", &way]).unwrap();
    let pods = seed.kubectl().get(&["pods", "-n", &hostile.namespace(), "-l", "app=apiserver"]).unwrap();
    let own: Ipv4Addr = pods["items"][0]["status"]["podIP"].as_str().unwrap().parse().unwrap();
    wait::until("the connection of the control plane", SOON, || {
        let sources = trap.sources()?;
        ensure!(sources.contains(&own), "{own} is not among {sources:?}");
        Ok(())
    })
    .unwrap();
}
