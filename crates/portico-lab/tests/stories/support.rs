//! What both stories of Portico in front of real API servers do, however Portico is deployed. They go every
//! way into a cluster with the real kubectl, keep streams open, change other clusters, and see that nobody
//! noticed.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use portico_lab::{Access, Host, Kubectl, Node, Process, Seed, wait};
use portico_pki::Kubeconfig;
use serde_json::{Value, json};

/// How long anything may take that takes a second or two on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(90);

/// The domain below which user clusters have their names.
pub(crate) const DOMAIN: &str = "kubermatic.kkp.example.com";

/// Clusters that come, change and go while others are watched.
const OTHERS: usize = 100;
/// How many of those are exposed by NodePort; the rest by SNI and CONNECT.
const OTHERS_BY_PORT: usize = 20;
/// Routes of all those: one by port, or two by host and authority.
const ROUTES_OF_OTHERS: usize = OTHERS_BY_PORT + 2 * (OTHERS - OTHERS_BY_PORT);
/// NodePorts of those start here: in the lowest part of the range, 30000 to 30085, where Kubernetes does not
/// draw at random.
const FIRST_OTHER_PORT: usize = 30_010;
/// One round makes them, each further one but the last changes every one, the last removes them: 500 changes.
pub(crate) const ROUNDS: usize = 5;

/// The body of uploads. Kubernetes takes at most 1 MiB in one ConfigMap or Secret.
const UPLOAD: usize = 1_000_000;
/// ConfigMaps uploaded each way; one Secret comes on top.
const UPLOADS: usize = 3;

/// One way into a cluster, from the host of its user.
pub(crate) struct Way {
    /// Which, for names of objects and logs: a-z and dashes.
    pub(crate) name: &'static str,
    /// Whose requests go this way.
    pub(crate) kubectl: Kubectl,
    /// Where its user is.
    pub(crate) host: Host,
    probe: Vec<String>,
}

impl Way {
    /// The way `access` describes, taken from `host`.
    pub(crate) fn new(name: &'static str, host: &Host, access: &Access) -> Way {
        let kubectl = access.kubectl(host).unwrap();
        let authority = kubectl.kubeconfig().with_file_name("ca.crt");
        let mut probe = probe(access.server(), &authority);
        if let Some(proxy) = access.proxy() {
            probe.extend(["--proxytunnel".to_owned(), "--proxy".to_owned(), proxy.to_owned()]);
        }
        Way { name, kubectl, host: host.clone(), probe }
    }

    /// The way that the kubeconfig of `kubectl` leads, taken from `host`.
    pub(crate) fn of(name: &'static str, host: &Host, kubectl: &Kubectl) -> Way {
        let given = given(kubectl);
        let authority = kubectl.kubeconfig().with_extension("ca.crt");
        fs::write(&authority, given.authority).unwrap();
        Way { name, kubectl: kubectl.clone(), host: host.clone(), probe: probe(&given.server, &authority) }
    }

    /// One new connection with one request.
    pub(crate) fn ask(&self) -> Result<()> {
        let words: Vec<&str> = self.probe.iter().map(String::as_str).collect();
        let answer = self.host.run(&words)?;
        ensure!(answer == "ok", "/livez answered {answer:?}");
        Ok(())
    }

    /// Waits until the API server can be reached this way.
    pub(crate) fn wait_open(&self) {
        wait::until(&format!("an answer by {}", self.name), SOON, || self.ask()).unwrap();
    }

    /// `kubectl get` and uploads of a megabyte, which come back as they went.
    pub(crate) fn serves_large_objects(&self) {
        let services = self.kubectl.get(&["services", "-n", "default"]).unwrap();
        assert_eq!(services["items"][0]["metadata"]["name"], "kubernetes", "by {}", self.name);
        let file = self.host.dir().join(format!("upload-{}", self.name));
        let from = format!("--from-file=blob={}", file.display());
        for upload in 0..=UPLOADS {
            let body = noise(upload, UPLOAD);
            std::fs::write(&file, &body).unwrap();
            let name = format!("big-{}-{upload}", self.name);
            let (create, template): (&[&str], _) = match upload {
                UPLOADS => (&["secret", "generic"], "{{.data.blob | base64decode}}"),
                _ => (&["configmap"], "{{.data.blob}}"),
            };
            self.kubectl.run(&[&["create"], create, &[&name, &from]].concat()).unwrap();
            let template = format!("--output=go-template={template}");
            let back = self.kubectl.run(&["get", create[0], &name, &template]).unwrap();
            assert!(back == body, "{name} came back with {} of {UPLOAD} bytes, or others", back.len());
        }
    }

    /// Starts a watch that stays. kubectl does not renew a broken watch: it ends.
    pub(crate) fn watch(&self) -> Watch<'_> {
        let args = ["get", "configmaps", "--watch", "--output=name"];
        let process = self.kubectl.spawn(&format!("watch-{}", self.name), &args).unwrap();
        let watch = Watch { way: self, process };
        // The first may come with the list the watch begins with.
        watch.beat();
        watch.beat();
        watch
    }
}

/// What the kubeconfig of `kubectl` holds.
pub(crate) fn given(kubectl: &Kubectl) -> Kubeconfig {
    Kubeconfig::parse(&fs::read_to_string(kubectl.kubeconfig()).unwrap()).unwrap()
}

/// One request. Everybody may ask an API server whether it is alive, so curl needs no certificate.
fn probe(server: &str, authority: &Path) -> Vec<String> {
    let (authority, url) = (authority.display().to_string(), format!("{server}/livez"));
    ["curl", "-sS", "--max-time", "20", "--cacert", &authority, &url].map(str::to_owned).to_vec()
}

/// A `kubectl get --watch` and what it must see.
pub(crate) struct Watch<'a> {
    way: &'a Way,
    process: Process,
}

impl Watch<'_> {
    /// Makes an object by a new connection and waits until the watch, the same process all along, reports it.
    pub(crate) fn beat(&self) {
        static BEATS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("beat-{}-{:04}", self.way.name, BEATS.fetch_add(1, Ordering::Relaxed));
        self.way.kubectl.run(&["create", "configmap", &name]).unwrap();
        self.process.wait_for_log(&format!("configmap/{name}\n"), SOON).unwrap();
    }
}

/// One beat of every watch.
pub(crate) fn beat_all(watches: &[Watch<'_>]) {
    watches.iter().for_each(Watch::beat);
}

/// What reaches through the API server to a pod on a worker, each for as long as this lives.
pub(crate) struct PodStreams {
    logs: Process,
    forward: Process,
    host: Host,
    exec: Child,
    to_pod: ChildStdin,
    from_pod: BufReader<ChildStdout>,
    ticks: usize,
    words: usize,
}

impl PodStreams {
    /// Runs a pod on the worker, and opens `logs -f`, `exec -i` and `port-forward` to it.
    pub(crate) fn open(way: &Way, worker: &Node) -> PodStreams {
        let kubectl = &way.kubectl;
        // Pods are refused until the controller manager has made the namespace's service account.
        wait::until("the pod to be accepted", SOON, || kubectl.apply_json(&ticking_pod())).unwrap();
        kubectl.wait_pod_ready("default", "web", SOON).unwrap();
        assert_eq!(kubectl.get(&["pod", "web"]).unwrap()["spec"]["nodeName"], worker.host().name());

        let body = noise(0, UPLOAD);
        let back =
            kubectl.run_with_input(&["exec", "-i", "web", "--", "head", "-c", "1000000"], &body).unwrap();
        assert!(back == body, "exec gave back {} of {UPLOAD} bytes, or others", back.len());

        let logs = kubectl.spawn("logs", &["logs", "-f", "web"]).unwrap();
        let forward = kubectl.spawn("port-forward", &["port-forward", "pod/web", "18080:8080"]).unwrap();
        forward.wait_for_log("Forwarding from 127.0.0.1:18080", SOON).unwrap();
        let mut command = kubectl.command(&["exec", "-i", "web", "--", "cat"]).unwrap();
        let mut exec = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let to_pod = exec.stdin.take().unwrap();
        let from_pod = BufReader::new(exec.stdout.take().unwrap());
        let host = way.host.clone();
        let mut streams = PodStreams { logs, forward, host, exec, to_pod, from_pod, ticks: 0, words: 0 };
        streams.beat();
        streams
    }

    /// All three still move bytes: the next lines of the log arrive, a line goes to the pod and back, a page
    /// is fetched.
    pub(crate) fn beat(&mut self) {
        let seen = self.logs.log().lines().count();
        self.ticks = self.ticks.max(seen) + 2;
        self.logs.wait_for_log(&format!("tick {}\n", self.ticks), SOON).unwrap();

        self.words += 1;
        let word = format!("word {}\n", self.words);
        self.to_pod.write_all(word.as_bytes()).unwrap();
        let mut back = String::new();
        self.from_pod.read_line(&mut back).unwrap();
        assert_eq!(back, word, "exec");

        self.forward.check().unwrap();
        let page = self.host.run(&["curl", "-sS", "--max-time", "20", "http://127.0.0.1:18080/"]).unwrap();
        assert_eq!(page, "web\n", "port-forward");
    }
}

impl Drop for PodStreams {
    fn drop(&mut self) {
        // It may have ended, which is just as well.
        let _ = self.exec.kill();
        let _ = self.exec.wait();
    }
}

/// A pod that counts in its log and serves its name over HTTP.
pub(crate) fn ticking_pod() -> Value {
    let script = "mkdir /www; echo web >/www/index.html; httpd -p 8080 -h /www; i=0; while true; do \
                  i=$((i+1)); echo tick $i; sleep 1; done";
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web"},
        "spec": {
            "containers": [{
                "name": "web",
                "image": "lab/busybox:1",
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", script],
            }],
            "terminationGracePeriodSeconds": 0,
        },
    })
}

/// Connects again and again, by each way in turn, until asked how that went.
pub(crate) struct Knocking {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(usize, Vec<String>)>,
}

impl Knocking {
    /// Begins to knock.
    pub(crate) fn start<'a>(ways: impl IntoIterator<Item = &'a Way>) -> Knocking {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let ways: Vec<(Host, Vec<String>)> =
            ways.into_iter().map(|way| (way.host.clone(), way.probe.clone())).collect();
        let thread = std::thread::spawn(move || {
            let (mut answered, mut failures) = (0, Vec::new());
            for (host, probe) in ways.iter().cycle() {
                // More failures say nothing more.
                if stopped.load(Ordering::Relaxed) || failures.len() >= 20 {
                    break;
                }
                let words: Vec<&str> = probe.iter().map(String::as_str).collect();
                match host.run(&words) {
                    Ok(answer) if answer == "ok" => answered += 1,
                    Ok(answer) => failures.push(answer),
                    Err(error) => failures.push(format!("{error:#}")),
                }
            }
            (answered, failures)
        });
        Knocking { stop, thread }
    }

    /// Ends it. Every single one must have been answered.
    pub(crate) fn all_were_answered(self, meanwhile: &str) {
        self.stop.store(true, Ordering::Relaxed);
        let (answered, failures) = self.thread.join().unwrap();
        assert!(
            failures.is_empty(),
            "{meanwhile}: {} of {} failed: {failures:#?}",
            failures.len(),
            failures.len() + answered
        );
        assert!(answered > 0, "{meanwhile}: nobody knocked");
        portico_lab::say(format_args!("{meanwhile}: {answered} new connections, each of them served"));
    }
}

/// Waits until the replicas that a rollout has replaced accept no more: what is said about a rollout is only
/// true once their pause before SIGTERM is over.
pub(crate) fn former_gateways_drain(seed: &Seed, deployment: &str) {
    let prefix = format!("{deployment}-");
    wait::until(&format!("the former replicas of {deployment} to drain"), SOON, || {
        let pods = seed.kubectl().get(&["pods", "-n", "portico"])?;
        for pod in pods["items"].as_array().context("a list")? {
            let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
            if name.starts_with(&prefix) && pod["metadata"]["deletionTimestamp"].is_string() {
                let address = pod["status"]["podIP"].as_str().context("a replica has an address")?;
                let ready = format!("http://{address}:8002/readyz");
                let ask = ["curl", "-sS", "--max-time", "5", "-o", "/dev/null", "-w", "%{http_code}", &ready];
                let status = seed.host().run(&ask)?;
                ensure!(status == "503", "{name} says {status}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Checks that the gateways at `admins` carry a connection of each of these listeners and clusters right now,
/// and that they know `client` as its source.
pub(crate) fn carried_by_gateways(from: &Host, admins: &[String], client: &Host, ways: &[(&str, &str)]) {
    let address = format!("{}:", client.address());
    let mut carried: Vec<(String, String)> = Vec::new();
    for admin in admins {
        let connections =
            from.run(&["curl", "-sS", "--max-time", "20", &format!("http://{admin}/connections")]);
        let connections: Vec<Value> = serde_json::from_str(&connections.unwrap()).unwrap();
        let text = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let rows = connections.iter().filter(|row| text(row, "client").starts_with(&address));
        carried.extend(rows.map(|row| (text(row, "listener"), text(row, "cluster"))));
    }
    for &(listener, cluster) in ways {
        let found = carried.iter().any(|(by, of)| by == listener && of == cluster);
        assert!(found, "no connection of {address} to {cluster} by {listener}, but {carried:?}");
    }
}

/// The other clusters as they are in this round: for each its Service and its EndpointSlice. None in the
/// last.
pub(crate) fn others(round: usize) -> Vec<Vec<Value>> {
    let number = if round + 1 == ROUNDS { 0 } else { OTHERS };
    (0..number)
        .map(|other| {
            let name = format!("other-{other}");
            let by_port = other < OTHERS_BY_PORT;
            let mut port = json!({"name": "secure", "port": 443, "protocol": "TCP"});
            let mut annotations = json!({"nodeport-proxy.k8s.io/expose": "NodePort"});
            if by_port {
                port["nodePort"] = json!(FIRST_OTHER_PORT + other);
            } else {
                let mapping = json!({"secure": format!("{name}-{round}.{DOMAIN}")}).to_string();
                annotations = json!({
                    "nodeport-proxy.k8s.io/expose": "SNI,Tunneling",
                    "nodeport-proxy.k8s.io/port-mapping": mapping,
                });
            }
            let service = json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": "others", "annotations": annotations},
                "spec": {"type": if by_port { "NodePort" } else { "ClusterIP" }, "ports": [port]},
            });
            let slice = json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": name,
                    "namespace": "others",
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [address_of_others(round)], "conditions": {"ready": true}}],
                "ports": [{"name": "secure", "port": 6443, "protocol": "TCP"}],
            });
            vec![service, slice]
        })
        .collect()
}

/// Waits until a gateway routes the other clusters as they are in this round, and not as in an earlier one.
pub(crate) fn wait_routed(from: &Host, admin: &str, round: usize) {
    let url = format!("http://{admin}/routes");
    wait::until(&format!("{admin} to have the routes of round {round}"), SOON, || {
        let routes = from.run(&["curl", "-sS", "--max-time", "20", &url])?;
        let routes: Value = serde_json::from_str(&routes)?;
        let others: Vec<&Value> = routes["routes"]
            .as_array()
            .map(|rows| rows.iter().filter(|row| is_other(row)).collect())
            .unwrap_or_default();
        let wanted = if round + 1 == ROUNDS { 0 } else { ROUTES_OF_OTHERS };
        let endpoint = json!([format!("{}:6443", address_of_others(round))]);
        let current = others.iter().filter(|row| row["endpoints"] == endpoint).count();
        ensure!(
            others.len() == wanted && current == wanted,
            "{} routes, {current} of them new, instead of {wanted}",
            others.len()
        );
        Ok(())
    })
    .unwrap();
}

fn is_other(row: &Value) -> bool {
    row["backend"].as_str().is_some_and(|backend| backend.starts_with("others/"))
}

/// Where the other clusters are in this round: documentation addresses, where no host is (RFC 5737).
fn address_of_others(round: usize) -> String {
    format!("192.0.2.{}", 10 + round)
}

/// Text that no compression shortens much, the same for the same seed.
fn noise(seed: usize, length: usize) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    // xorshift64; zero would stay zero.
    let mut state = seed as u64 + 0x9E37_79B9_7F4A_7C15;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(LETTERS[(state >> 59) as usize])
        })
        .collect()
}
