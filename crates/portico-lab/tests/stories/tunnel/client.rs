//! A pod with nothing but its service account, and what it asks of `https://kubernetes.default.svc`.
//!
//! The pod itself runs the real kubectl with a watch, begun anew whenever it ends. What has to be counted or
//! timed is asked by `curl` in the pod's network, with the pod's token and authority. A kubectl takes a tenth
//! of a second to start.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use portico_lab::{Host, Image, Kubectl, Node, Process, programs, say, wait};
use serde_json::json;

use super::SOON;

/// The first address of the cluster's Services: `kubernetes`. The lab has no name server, so clients get it.
const KUBERNETES: &str = "10.240.16.1";

/// Where a pod finds its service account.
const ACCOUNT: &str = "var/run/secrets/kubernetes.io/serviceaccount";

/// Between two connections of one that knocks: enough to see every gap, and a tenth of a core.
const BETWEEN_KNOCKS: Duration = Duration::from_millis(100);

/// Connections one after the other when the first was answered: some by either tunnel.
const NEXT: usize = 6;

/// What the clients' pods run: kubectl and a shell.
pub(crate) fn image() -> Image {
    let kubectl = programs::kube().unwrap().join("kube");
    let mut image = Image::new("lab/client:1").file("bin/kubectl", &kubectl);
    image = image.file("bin/busybox", &programs::find("busybox").unwrap());
    for applet in ["sh", "sleep"] {
        image = image.link(&format!("bin/{applet}"), "busybox");
    }
    image.entrypoint(&["/bin/sh", "-c"])
}

/// Lets the service account `default` of namespace `default` see what it is to see.
pub(crate) fn grant(kubectl: &Kubectl) {
    let args = ["create", "rolebinding", "clients", "--clusterrole=view", "--serviceaccount=default:default"];
    kubectl.run(&args).unwrap();
}

/// A pod on a worker.
#[derive(Clone)]
pub(crate) struct Client {
    worker: Host,
    log: PathBuf,
    /// curl in its network as its service account.
    curl: Vec<String>,
}

impl Client {
    /// Runs the pod on this worker, and waits until its watch has begun.
    pub(crate) fn start(kubectl: &Kubectl, worker: &Node) -> Client {
        let name = format!("client-{}", worker.host().name());
        let script = "while true; do kubectl get configmaps --watch --output=name; echo ended; sleep 1; done";
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                // Both workers get one, whatever a scheduler would find best.
                "nodeName": worker.host().name(),
                "containers": [{
                    "name": "client",
                    "image": image().name(),
                    "imagePullPolicy": "Never",
                    "args": [script],
                }],
                "terminationGracePeriodSeconds": 0,
            },
        });
        // Pods are refused until the controller manager has made the namespace's service account.
        wait::until("the pod to be accepted", SOON, || kubectl.apply_json(&pod)).unwrap();
        kubectl.wait_pod_ready("default", &name, SOON).unwrap();
        let pod = kubectl.get(&["pod", &name]).unwrap();
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let pods = worker.host().dir().join("node/pods");
        let log = pods.join(format!("default_{name}_{uid}/client/0.log"));
        let process = worker.pod_processes(uid, "sh").unwrap()[0].as_raw_nonzero();
        let account = format!("/proc/{process}/root/{ACCOUNT}");
        let header = worker.host().dir().join("authorization");
        let token = fs::read_to_string(format!("{account}/token")).unwrap();
        fs::write(&header, format!("Authorization: Bearer {token}")).unwrap();
        let curl = [
            "nsenter",
            &format!("--net=/proc/{process}/ns/net"),
            "curl",
            "-sS",
            "--fail-with-body",
            "--no-buffer",
            "--resolve",
            &format!("kubernetes.default.svc:443:{KUBERNETES}"),
            "--cacert",
            &format!("{account}/ca.crt"),
            "-H",
            &format!("@{}", header.display()),
        ]
        .map(str::to_owned)
        .to_vec();
        let client = Client { worker: worker.host().clone(), log, curl };
        client.wait_log("configmap/kube-root-ca.crt");
        client
    }

    /// One new connection with one request, as the pod.
    pub(crate) fn ask(&self) -> Result<()> {
        let url = "https://kubernetes.default.svc/api/v1/namespaces/default/configmaps/kube-root-ca.crt";
        let mut words: Vec<&str> = self.curl.iter().map(String::as_str).collect();
        words.extend(["--max-time", "10", url]);
        let answer = self.worker.run(&words)?;
        ensure!(answer.contains("BEGIN CERTIFICATE"), "the API server answered {answer}");
        Ok(())
    }

    /// Begins a watch that stays.
    fn watch(&self, name: &str) -> Process {
        let url = "https://kubernetes.default.svc/api/v1/namespaces/default/configmaps\
                   ?watch=true&resourceVersion=0";
        let mut command = self.worker.command(&self.curl[0]).unwrap();
        command.args(&self.curl[1..]).arg(url);
        let watch = self.worker.spawn_command(name, command).unwrap();
        watch.wait_for_log("kube-root-ca.crt", SOON).unwrap();
        watch
    }

    /// Waits until the pod's own kubectl has logged this.
    pub(crate) fn wait_log(&self, text: &str) {
        wait::until(&format!("{text:?} in the pod on {}", self.worker.name()), SOON, || {
            let log = fs::read_to_string(&self.log)?;
            ensure!(log.contains(text), "it said:\n{log}");
            Ok(())
        })
        .unwrap();
    }

    /// Whether the watch of the pod's own kubectl never had to be begun anew.
    pub(crate) fn watch_is_the_first(&self) -> bool {
        !fs::read_to_string(&self.log).unwrap().lines().any(|line| line.ends_with(" ended"))
    }

    /// New connections, one every tenth of a second without waiting for those before, until one is answered.
    /// How long that took.
    fn time_to_answer(&self) -> Duration {
        let start = Instant::now();
        let (answered, answer) = mpsc::channel();
        while start.elapsed() < SOON {
            let (client, answered) = (self.clone(), answered.clone());
            std::thread::spawn(move || {
                if client.ask().is_ok() {
                    // Later ones have no receiver.
                    let _ = answered.send(start.elapsed());
                }
            });
            if let Ok(time) = answer.recv_timeout(BETWEEN_KNOCKS) {
                return time;
            }
        }
        panic!("no new connection from the pod on {} was answered", self.worker.name());
    }
}

/// From now on new connections work from every pod. Says when the first was answered, and how long the
/// slowest of the next waited: two seconds are promised, but a machine may be busy.
pub(crate) fn new_connections_work(clients: &[Client], after: &str) {
    std::thread::scope(|scope| {
        for client in clients {
            scope.spawn(move || {
                let first = client.time_to_answer().as_secs_f32();
                let next = (0..NEXT).map(|_| {
                    let start = Instant::now();
                    client.ask().unwrap();
                    start.elapsed().as_secs_f32()
                });
                let (from, slowest) = (client.worker.name(), next.fold(0.0, f32::max));
                say(format_args!(
                    "{after}: answered on {from} after {first:.2} s, the next within {slowest:.2} s"
                ));
            });
        }
    });
}

/// Watches that must not end, some in each pod.
pub(crate) struct Watches {
    running: Vec<(usize, Process)>,
    clients: Vec<Client>,
    each: usize,
    kubectl: Kubectl,
}

impl Watches {
    /// Begins this many watches in each pod. `kubectl` makes what they are to see.
    pub(crate) fn begin(clients: &[Client], each: usize, kubectl: &Kubectl) -> Watches {
        let mut watches =
            Watches { running: Vec::new(), clients: clients.to_vec(), each, kubectl: kubectl.clone() };
        watches.complete();
        watches.beat();
        watches
    }

    /// Watches that have ended are begun anew.
    pub(crate) fn complete(&mut self) {
        static NAMES: AtomicUsize = AtomicUsize::new(0);
        self.running.retain(|(_, watch)| watch.check().is_ok());
        for (of, client) in self.clients.iter().enumerate() {
            let missing = self.each - self.running.iter().filter(|(client, _)| *client == of).count();
            for _ in 0..missing {
                let name = format!("watch-{}", NAMES.fetch_add(1, Ordering::Relaxed));
                self.running.push((of, client.watch(&name)));
            }
        }
    }

    /// How many of the client with this index have not ended.
    pub(crate) fn alive(&self, client: usize) -> usize {
        self.running.iter().filter(|(of, watch)| *of == client && watch.check().is_ok()).count()
    }

    /// Something happens, and all of them see it. None has ended.
    pub(crate) fn beat(&self) {
        let event = self.event();
        self.running.iter().for_each(|(_, watch)| watch.wait_for_log(&event, SOON).unwrap());
    }

    /// Something happens, and the pods' own kubectl see it too, however often they had to begin anew.
    pub(crate) fn beat_in_pods(&self) {
        let name = self.make();
        self.clients.iter().for_each(|client| client.wait_log(&format!("configmap/{name}")));
    }

    /// The watches of the client with this index that have not ended see what happens.
    pub(crate) fn beat_of(&self, client: usize) {
        let event = self.event();
        let of_client = self.running.iter().filter(|(of, watch)| *of == client && watch.check().is_ok());
        of_client.for_each(|(_, watch)| watch.wait_for_log(&event, SOON).unwrap());
    }

    fn event(&self) -> String {
        format!("\"name\":\"{}\"", self.make())
    }

    fn make(&self) -> String {
        static BEATS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("beat-{:04}", BEATS.fetch_add(1, Ordering::Relaxed));
        self.kubectl.run(&["create", "configmap", &name]).unwrap();
        name
    }
}

/// Pods that connect again and again, until asked how that went.
pub(crate) struct Knocking {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<(usize, Vec<String>)>>,
}

impl Knocking {
    /// Begins to knock, from every pod.
    pub(crate) fn start(clients: &[Client]) -> Knocking {
        let stop = Arc::new(AtomicBool::new(false));
        let knock = |client: Client| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let (mut answered, mut failures) = (0, Vec::new());
                // More failures say nothing more.
                while !stop.load(Ordering::Relaxed) && failures.len() < 20 {
                    match client.ask() {
                        Ok(()) => answered += 1,
                        Err(error) => failures.push(format!("{}: {error:#}", client.worker.name())),
                    }
                    // A pace, not a wait for anything.
                    std::thread::sleep(BETWEEN_KNOCKS);
                }
                (answered, failures)
            })
        };
        let threads = clients.iter().cloned().map(knock).collect();
        Knocking { stop, threads }
    }

    /// Ends it. Every single one must have been answered.
    pub(crate) fn all_were_answered(mut self, meanwhile: &str) {
        self.stop.store(true, Ordering::Relaxed);
        let (mut answered, mut failures) = (0, Vec::new());
        for thread in self.threads.drain(..) {
            let (more, failed) = thread.join().unwrap();
            answered += more;
            failures.extend(failed);
        }
        let all = answered + failures.len();
        assert!(failures.is_empty(), "{meanwhile}: {} of {all} failed: {failures:#?}", failures.len());
        assert!(answered > 0, "{meanwhile}: nobody knocked");
        say(format_args!("{meanwhile}: {answered} new connections, each of them served"));
    }
}

impl Drop for Knocking {
    fn drop(&mut self) {
        // The story failed elsewhere. Its lab goes with the last of those that use it.
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
