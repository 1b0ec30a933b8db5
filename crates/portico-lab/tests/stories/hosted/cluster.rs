//! A hosted cluster, as its administrator has it: made, used, harmed, and looked at.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::seed::Seed as SeedObject;
use portico_expose::doors::Doors;
use portico_expose::inputs::{Inputs, Known, LoadBalancers};
use portico_expose::validate::usable;
use portico_hosting::pki;
use portico_lab::kubectl::condition;
use portico_lab::{Host, Kubectl, Seed, programs, say, wait};
use portico_pki::{KeyKind, Secrets};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::support::SOON;

/// Volumes mounted, four programs started one after the other: ten seconds on an idle machine.
pub(super) const STARTING: Duration = Duration::from_secs(240);

/// API servers of the layout `dedicated` without further ado, each with a Konnectivity server beside it.
pub(super) const API_SERVERS: usize = 2;

/// The Secret with the operator's way into a cluster. It looks into the cluster when this changes.
pub(super) const WAY_IN: &str = "internal-admin-kubeconfig";

/// What the operator makes inside each cluster: it comes back if somebody takes it away.
pub(super) const CLUSTER_INFO: [&str; 4] = ["configmap", "cluster-info", "-n", "kube-public"];

const SEED: &str = "north";
const DOMAIN: &str = "hosted.example.com";

/// A hosted cluster, and its administrator.
pub(super) struct Hosted<'a> {
    pub(super) name: &'static str,
    pub(super) layout: &'static str,
    pub(super) node_port: u16,
    pub(super) seed: &'a Seed,
    pub(super) client: &'a Host,
    pub(super) kubectl: Kubectl,
}

impl<'a> Hosted<'a> {
    /// Applies what is planned for a new Cluster, and waits for the first answer to its administrator.
    pub(super) fn start(
        name: &'static str,
        layout: &'static str,
        node_port: u16,
        seed: &'a Seed,
        client: &'a Host,
    ) -> Hosted<'a> {
        let site = site(name, layout);
        let host = format!("{name}.{SEED}.{DOMAIN}");
        seed.host().lab().name_resolves(&host, seed.host().address()).unwrap();
        let secrets = secrets(&site, node_port);
        let file = client.dir().join(format!("{name}.kubeconfig"));
        fs::write(&file, &secrets["admin-kubeconfig"]["kubeconfig"]).unwrap();
        let kubectl = Kubectl::new(client, &file).unwrap();
        let hosted = Hosted { name, layout, node_port, seed, client, kubectl };
        let objects = hosted.planned(&site);
        let start = Instant::now();
        hosted.apply(&objects, &secrets).unwrap();
        wait::until(&format!("the first answer of {name}"), STARTING, || hosted.answers()).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{name}, {layout}: its administrator is answered {seconds:.1} s after the objects"));
        hosted
    }

    /// Has the operator look into the cluster, by a label with this value.
    pub(super) fn have_it_looked_at(&self, why: &str) {
        let (label, namespace) = (format!("looked={why}"), self.namespace());
        let look = ["label", "secret", WAY_IN, "-n", &namespace, &label, "--overwrite"];
        self.seed.kubectl().run(&look).unwrap();
    }

    pub(super) fn namespace(&self) -> String {
        format!("cluster-{}", self.name)
    }

    /// What the program prints, as people apply it.
    fn planned(&self, site: &[Value; 3]) -> String {
        let folder = self.client.dir().join(format!("{}-site", self.name));
        fs::create_dir_all(&folder).unwrap();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": site});
        fs::write(folder.join("site.yaml"), list.to_string()).unwrap();
        let folder = folder.display().to_string();
        self.portico(&["control-plane", self.name, "--manifests", &folder, "-o", "yaml"]).unwrap()
    }

    /// Runs `portico` on the administrator's host.
    pub(super) fn portico(&self, words: &[&str]) -> Result<String> {
        let portico = programs::portico()?.display().to_string();
        self.client.run(&[&[&*portico], words].concat())
    }

    /// Secrets first: the kubelet looks again only later for one that a pod misses.
    fn apply(&self, objects: &str, secrets: &Secrets) -> Result<()> {
        let (kubectl, namespace) = (self.seed.kubectl(), self.namespace());
        kubectl.run(&["create", "namespace", &namespace])?;
        let items: Vec<Value> = secrets
            .iter()
            .map(|(name, data)| {
                json!({"apiVersion": "v1", "kind": "Secret", "stringData": data,
                    "metadata": {"name": name, "namespace": namespace}})
            })
            .collect();
        kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items}))?;
        kubectl.apply(objects)?;
        // What the exposure makes, as far as this story needs it.
        kubectl.apply_json(&json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "apiserver-external", "namespace": namespace},
            "spec": {
                "type": "NodePort",
                "selector": {"app": "apiserver"},
                "ports": [{"port": 443, "targetPort": 6443, "nodePort": self.node_port}],
            },
        }))?;
        let made = kubectl.get(&["namespace", &namespace])?;
        let enforced = &made["metadata"]["labels"]["pod-security.kubernetes.io/enforce"];
        ensure!(enforced == "restricted", "{made}");
        Ok(())
    }

    /// An answer that takes an identity, its rights, and etcd.
    pub(super) fn answers(&self) -> Result<()> {
        self.kubectl.run(&["get", "namespace", "kube-system", "--request-timeout=20s"]).map(drop)
    }

    /// Every program of the layout `dedicated` runs as often as it should.
    pub(super) fn wait_complete(&self) {
        let start = Instant::now();
        let kubectl = self.seed.kubectl();
        for deployment in ["apiserver", "controller-manager", "scheduler"] {
            kubectl.wait_rolled_out(&self.namespace(), deployment, STARTING).unwrap();
        }
        let limit = format!("--timeout={}s", STARTING.as_secs());
        kubectl.run(&["rollout", "status", "statefulset/etcd", "-n", &self.namespace(), &limit]).unwrap();
        say(format_args!("{}: complete {:.1} s later", self.name, start.elapsed().as_secs_f64()));
        self.tell_restarts();
    }

    /// Programs that ended and were started again, before anybody did them harm.
    fn tell_restarts(&self) {
        let pods = self.seed.kubectl().get(&["pods", "-n", &self.namespace()]).unwrap();
        let pods = pods["items"].as_array().unwrap().iter();
        let statuses = pods.flat_map(|pod| {
            ["initContainerStatuses", "containerStatuses"]
                .into_iter()
                .flat_map(|field| pod["status"][field].as_array().into_iter().flatten())
        });
        let restarted: Vec<String> = statuses
            .filter(|status| status["restartCount"] != 0)
            .map(|status| format!("{} {}", status["name"], status["restartCount"]))
            .collect();
        say(format_args!("{}: restarts {restarted:?}", self.name));
    }

    /// Other pods for all of a workload. Meanwhile every single request is answered.
    pub(super) fn answers_while_replacing(&self, workload: &str) {
        let (kubectl, namespace) = (self.seed.kubectl(), self.namespace());
        let limit = format!("--timeout={}s", STARTING.as_secs());
        self.answers_while(&format!("{workload} was replaced"), || {
            kubectl.run(&["rollout", "restart", workload, "-n", &namespace])?;
            kubectl.run(&["rollout", "status", workload, "-n", &namespace, &limit]).map(drop)
        });
    }

    /// As the manual says it to people. The member comes back with all data, from the others.
    pub(super) fn answers_while_a_member_loses_its_volume(&self) {
        let (kubectl, namespace) = (self.seed.kubectl(), self.namespace());
        let pod = || kubectl.get(&["pod", "etcd-2", "-n", &namespace]);
        let before = pod().unwrap()["metadata"]["uid"].clone();
        self.answers_while("a member got its data from the others", || {
            kubectl.run(&["delete", "pvc", "data-etcd-2", "-n", &namespace, "--wait=false"])?;
            kubectl.run(&["delete", "pod", "etcd-2", "-n", &namespace])?;
            wait::until("the member", STARTING, || {
                let now = pod()?;
                ensure!(now["metadata"]["uid"] != before && condition(&now, "Ready"), "{}", now["status"]);
                Ok(())
            })
        });
        let log = kubectl.run(&["logs", "etcd-2", "-n", &namespace]).unwrap();
        assert!(log.contains("letting this member vote: done"), "{log}");
    }

    /// Every single request is answered while `work` is done.
    fn answers_while(&self, what: &str, work: impl FnOnce() -> Result<()> + Send) {
        let start = Instant::now();
        let answers = thread::scope(|scope| {
            let working = scope.spawn(work);
            let mut answers = 0;
            while !working.is_finished() {
                self.answers().unwrap();
                answers += 1;
            }
            working.join().unwrap().unwrap();
            answers
        });
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{}: {answers} answers in {seconds:.1} s, while {what}", self.name));
    }

    pub(super) fn keep(&self) {
        wait::until("an object to be kept", SOON, || {
            self.kubectl.run(&["create", "configmap", "kept", "--from-literal=by=etcd"])
        })
        .unwrap();
    }

    pub(super) fn is_kept(&self) -> Result<()> {
        let kept = self.kubectl.get(&["configmap", "kept", "--request-timeout=20s"])?;
        ensure!(kept["data"]["by"] == "etcd", "{kept}");
        Ok(())
    }

    /// The UID of the pod of this name.
    pub(super) fn uid_of(&self, pod: &str) -> String {
        let pod = self.seed.kubectl().get(&["pod", pod, "-n", &self.namespace()]).unwrap();
        pod["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// The UID of the only pod with this label, once it is ready.
    pub(super) fn ready_pod(&self, label: &str) -> Result<String> {
        wait::until("one pod", STARTING, || {
            let pods = self.seed.kubectl().get(&["pods", "-n", &self.namespace(), "-l", label])?;
            let pods = pods["items"].as_array().context("a list")?;
            ensure!(pods.len() == 1 && condition(&pods[0], "Ready"), "{pods:?}");
            Ok(pods[0]["metadata"]["uid"].as_str().context("a pod has a UID")?.to_owned())
        })
    }

    /// The controller manager makes service accounts; the scheduler judges a pod, for which there is no node.
    pub(super) fn controllers_work(&self) {
        let kubectl = &self.kubectl;
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "waits"},
            "spec": {"containers": [{"name": "any", "image": "any"}]}});
        wait::until("a service account", SOON, || kubectl.apply_json(&pod)).unwrap();
        wait::until("the scheduler", SOON, || {
            let pod = kubectl.get(&["pod", "waits"])?;
            ensure!(pod["status"].to_string().contains("Unschedulable"), "{}", pod["status"]);
            Ok(())
        })
        .unwrap();
        kubectl.run(&["delete", "pod", "waits", "--force", "--grace-period=0"]).unwrap();
    }

    /// One pod with everything: whatever in it is killed comes back, and what users made is still there, also
    /// after the pod was deleted.
    pub(super) fn heals_and_keeps_its_data(&self) {
        let pod = self.ready_pod("app=apiserver").unwrap();
        self.tell_memory(&pod);
        self.tell_restarts();
        self.keep();
        for program in ["kube-apiserver", "etcd"] {
            self.kill(&pod, program);
            wait::until("an answer after that", STARTING, || self.is_kept()).unwrap();
        }
        assert_eq!(self.ready_pod("app=apiserver").unwrap(), pod, "containers are started again, not pods");

        let start = Instant::now();
        let namespace = self.namespace();
        self.seed.kubectl().run(&["delete", "pod", "-n", &namespace, "-l=app=apiserver"]).unwrap();
        let gone = start.elapsed().as_secs_f64();
        wait::until("an answer of the next pod", STARTING, || self.is_kept()).unwrap();
        let next = start.elapsed().as_secs_f64();
        say(format_args!(
            "{}: a deleted pod is gone after {gone:.1} s, the next answers after {next:.1} s",
            self.name
        ));
        assert_ne!(self.ready_pod("app=apiserver").unwrap(), pod);
    }

    /// SIGKILL for a program of the pod.
    fn kill(&self, pod: &str, program: &str) {
        let processes = self.seed.node().pod_processes(pod, program).unwrap();
        assert_eq!(processes.len(), 1, "{program}");
        kill_process(processes[0], Signal::KILL).unwrap();
        wait::until(&format!("another {program}"), STARTING, || {
            let now = self.seed.node().pod_processes(pod, program)?;
            ensure!(!now.is_empty() && now != processes, "{now:?}");
            Ok(())
        })
        .unwrap();
    }

    pub(super) fn tell_memory(&self, pod: &str) {
        let mut programs: BTreeMap<String, u64> = BTreeMap::new();
        for (program, bytes) in self.seed.node().private_memory(pod).unwrap() {
            *programs.entry(program).or_default() += bytes >> 20;
        }
        let sum: u64 = programs.values().sum();
        say(format_args!("{}: private memory {sum} MiB, of these {programs:?}", self.name));
    }

    /// Workloads and volumes before the namespace: while pods end, the namespace controller looks again only
    /// after half of their grace period, and after eight seconds while something has a finalizer.
    pub(super) fn end(self) {
        let (start, kubectl, namespace) = (Instant::now(), self.seed.kubectl(), self.namespace());
        let first = "statefulsets,deployments,persistentvolumeclaims";
        kubectl.run(&["delete", first, "--all", "-n", &namespace]).unwrap();
        wait::until("the pods to end", STARTING, || {
            let pods = kubectl.run(&["get", "pods", "-n", &namespace, "--output=name"])?;
            ensure!(pods.is_empty(), "{pods}");
            Ok(())
        })
        .unwrap();
        let pods = start.elapsed().as_secs_f64();
        kubectl.run(&["delete", "namespace", &namespace]).unwrap();
        let all = start.elapsed().as_secs_f64();
        say(format_args!("{}: pods are gone after {pods:.1} s, all of it after {all:.1} s", self.name));
    }
}

/// A configuration, a Seed, and a Cluster that Portico hosts.
fn site(name: &str, layout: &str) -> [Value; 3] {
    let version = programs::kube_version().unwrap();
    let version = version.trim_start_matches('v');
    [
        json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
            "metadata": {"name": "kkp", "namespace": "portico"}, "spec": {"ingress": {"domain": DOMAIN}}}),
        json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
            "metadata": {"name": SEED, "namespace": "portico"}, "spec": {}}),
        json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
            "metadata": {"name": name, "annotations": {"portico.k8c.io/layout": layout}},
            "spec": {"version": version, "exposeStrategy": "NodePort"}}),
    ]
}

/// What the Secrets of the cluster hold, made by `portico-pki` as `portico-hosting` asks for it.
fn secrets([configuration, seed, cluster]: &[Value; 3], node_port: u16) -> Secrets {
    let configuration: KubermaticConfiguration = serde_json::from_value(configuration.clone()).unwrap();
    let seeds: [Box<SeedObject>; 1] = [Box::new(serde_json::from_value(seed.clone()).unwrap())];
    let cluster: Cluster = serde_json::from_value(cluster.clone()).unwrap();
    let scope = usable(&cluster, &seeds, Some(&configuration)).unwrap();
    let inputs = Inputs {
        scope,
        node_ports: &|_, _| Some(node_port),
        known: &Known::default(),
        load_balancers: LoadBalancers::CloudAndGateway,
        sni_port: 6_443,
    };
    let planned = portico_expose::plan::plan(&inputs);
    let doors = Doors { first: planned.address, ..Doors::new(&cluster, planned.decision.strategy) };
    let layout = cluster.metadata.annotation("portico.k8c.io/layout").unwrap().parse().unwrap();
    let pki = pki(&inputs, &doors, layout, KeyKind::default());
    let review = pki.review(&Secrets::new(), false, Timestamp::now()).unwrap();
    let text =
        |data: BTreeMap<&str, String>| data.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    review.due.into_iter().map(|due| (due.secret.to_owned(), text(due.data))).collect()
}
