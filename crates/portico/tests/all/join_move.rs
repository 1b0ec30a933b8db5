//! `portico join move` beside a real API server that is reached at several addresses. What changes, what is
//! put back, and what a second run makes of one that was killed.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portico_hosting::join::trust::CaHash;
use portico_lab::{ApiServer, Image, Node};
use serde_json::json;
use tempfile::TempDir;

use crate::common::{Process, run, stderr, stdout, wait_until};
use crate::join::{AS_ROOT, Cluster, put_program, skeleton};

/// What stands for a kubelet.
const KUBELET: &str = include_str!("join_move/kubelet.py");

/// What may be there of a machine that names its server. The last is there while a move is unfinished.
const NAMING: [&str; 4] = [
    "etc/kubernetes/kubelet.conf",
    "etc/kubernetes/bootstrap-kubelet.conf",
    "var/lib/portico/join.json",
    BEFORE,
];
const BEFORE: &str = "etc/kubernetes/kubelet.conf.before-move";

/// Ends the kubelet and starts it again, and logs that. It may be set to fail, or to kill its caller before.
const SYSTEMCTL: &str = "\
#!/bin/sh
echo \"$*\" >>/systemctl.log
[ -e /kill ] && rm /kill && kill -9 $PPID && exit 1
[ -e /fail ] && echo 'the unit is masked' >&2 && exit 1
kill $(cat /kubelet.pid) 2>/dev/null
while kill -0 $(cat /kubelet.pid) 2>/dev/null; do sleep 0.05; done
setsid /kubelet --kubeconfig=/etc/kubernetes/kubelet.conf >/kubelet.err 2>&1 </dev/null &
echo $! >/kubelet.pid
";

/// A machine that is a node of a cluster, as far as files go, on the host of the API server.
struct Machine {
    api: ApiServer,
    root: PathBuf,
    _folder: TempDir,
}

impl Machine {
    /// As `portico join` and its kubelet leave it.
    fn joined(name: &str, systemd: bool) -> Self {
        let api = ApiServer::start(name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let (access, certificate) = (api.access(), "var/lib/kubelet/pki/kubelet-client-current.pem");
        let (server, authority) = (access.server(), access.authority().cert());
        let path = if systemd { Path::new("/").join(certificate) } else { root.join(certificate) };
        let (path, data) = (path.display(), STANDARD.encode(&authority));
        let cluster = format!(
            "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: {data}\n    \
             server: {server}\n  name: default\ncontexts:\n- context:\n    cluster: default\n    user: \
             default\n  name: default\ncurrent-context: default\nkind: Config\nusers:\n- name: default\n"
        );
        let identity = access.authority().client("system:node:worker-1", Some("system:nodes")).unwrap();
        let record = json!({"server": server, "authority": [CaHash::all(&authority)[0].to_string()],
            "node": "worker-1", "files": [], "systemd": systemd});
        for (name, content) in [
            (
                NAMING[0],
                format!("{cluster}  user:\n    client-certificate: {path}\n    client-key: {path}\n"),
            ),
            (NAMING[1], format!("{cluster}  user:\n    token: abcdef.0123456789abcdef\n")),
            (NAMING[2], format!("{record:#}\n")),
            ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\n".to_owned()),
            (certificate, format!("{}{}", identity.cert, identity.key)),
        ] {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        put_program(&root.join("kubelet"), KUBELET);
        Self { api, root, _folder: folder }
    }

    /// The address at which it joined.
    fn old(&self) -> String {
        self.api.access().server().to_owned()
    }

    /// The URL of the same API server by this name.
    fn at(&self, name: &str) -> String {
        let port = self.api.access().server().rsplit_once(':').unwrap().1;
        format!("https://{name}:{port}")
    }

    /// `portico` with these arguments, where it reaches the API server.
    fn portico(&self, arguments: &[&str]) -> Command {
        let mut command = self.api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        command.args(arguments);
        command
    }

    /// The kubelet, and what stays with it.
    fn kept(&self) -> Process {
        let authority = self.api.access().authority().cert();
        let (hash, root) = (CaHash::all(&authority)[0].to_string(), self.root.display().to_string());
        let (kubelet, token) = (format!("{root}/kubelet"), "abcdef.0123456789abcdef");
        let join = ["join", "--server", &self.old(), "--token", token, "--ca-hash", &hash, "--root", &root];
        let join = [&join[..], &["--node-name=worker-1", "--kubelet", &kubelet]].concat();
        let mut joined = Process::of(&mut self.portico(&join));
        joined.wait_for("This machine is node worker-1 of the cluster at");
        let lease = ["leases", "worker-1", "-n", "kube-node-lease"];
        wait_until("the kubelet has a lease", || self.api.kubectl().get(&lease).is_ok());
        joined
    }

    fn moving(&self, server: &str, further: &[&str]) -> Command {
        let root = self.root.display().to_string();
        self.portico(&[&["join", "move", "--server", server, "--root", &root], further].concat())
    }

    /// Moves, which has to end with this code, and returns what it says.
    fn moves(&self, server: &str, further: &[&str], code: i32) -> String {
        said(&self.moving(server, further).output().unwrap(), code)
    }

    /// Like [`Self::moves`], on a machine that has `self.root` as its root directory.
    fn moves_as_root(&self, server: &str, code: Option<i32>) -> String {
        let mut command = self.api.host().command("unshare").unwrap();
        command.args(["--mount", "--propagation=private", "sh", "-ec", AS_ROOT, "sh"]).arg(&self.root);
        command.arg(env!("CARGO_BIN_EXE_portico")).args(["/portico", "join", "move", "--server", server]);
        let output = command.output().unwrap();
        match code {
            Some(code) => said(&output, code),
            None => stdout(&output),
        }
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.root.join(name)).ok()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.root.join(name), text).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.root.join(name)).unwrap();
    }

    /// What names its server.
    fn files(&self) -> [Option<String>; 4] {
        NAMING.map(|name| self.read(name))
    }

    /// What [`Self::files`] returns after a finished move to this server, if it was `before` the move.
    fn files_at(&self, server: &str, before: &[Option<String>; 4]) -> [Option<String>; 4] {
        let mut files = before.clone().map(|text| text.map(|text| text.replace(&self.old(), server)));
        files[3] = None;
        files
    }

    /// Waits until kubelets were started with these servers since the last time, and with no others.
    fn has_started(&self, servers: &[&str]) {
        let lines = || self.read("kubelet.log").unwrap_or_default();
        wait_until("each kubelet is started", || lines().lines().count() >= servers.len());
        assert_eq!(lines().lines().collect::<Vec<_>>(), servers);
        self.write("kubelet.log", "");
    }

    fn asked(&self) -> String {
        let asked = self.read("systemctl.log").unwrap_or_default();
        self.write("systemctl.log", "");
        asked
    }
}

fn said(output: &Output, code: i32) -> String {
    let said = format!("{}{}", stdout(output), stderr(output));
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

#[test]
fn a_kubelet_that_a_process_stays_with_is_moved_or_put_back() {
    let machine = Machine::joined("join-move", false);
    let (old, new, next) = (machine.old(), machine.at("127.0.0.1"), machine.at("localhost"));
    let first = machine.files();
    let kubeconfig = machine.root.join(NAMING[0]);
    chown(&kubeconfig, Some(1234), Some(1235)).unwrap();
    let mut kept = machine.kept();
    machine.has_started(&[&old]);

    // Nothing is there, or what has no such name.
    let port_1 = "https://127.0.0.1:1";
    for (wrong, why) in [(port_1, "127.0.0.1:1"), (&machine.at("127.0.0.2"), "certificate")] {
        let said = machine.moves(wrong, &[], 1);
        assert!(said.starts_with("FAIL") && said.contains(why), "{said}");
        assert!(said.contains("GET /readyz") && said.contains("`portico firewall`"), "{said}");
        assert!(said.contains("Nothing was changed"), "{said}");
    }
    assert_eq!(machine.files(), first);

    let said = machine.moves(&new, &[], 0);
    assert!(said.contains("open exec, logs -f and port-forward of this node end"), "{said}");
    assert!(said.contains(&format!("portico join move --server {old}")), "{said}");
    kept.wait_for("the kubelet starts anew");
    machine.has_started(&[&new]);
    assert_eq!(machine.files(), machine.files_at(&new, &first));

    // It is there.
    let there = machine.files();
    let said = machine.moves(&format!("{new}/"), &[], 0);
    assert!(said.contains(&format!("Node worker-1 is at {new} already")), "{said}");
    assert_eq!(machine.files(), there);

    // The address answers, and still the kubelet is not at work there.
    machine.write("mute", "localhost");
    let said = machine.moves(&next, &["--wait", "5s"], 1);
    assert!(said.contains("its lease was renewed at") && said.contains("Everything was put back"), "{said}");
    assert_eq!(machine.files(), there);
    machine.has_started(&[&next, &new]);

    // Somebody does not wait for that.
    let mut moving = Process::of(&mut machine.moving(&next, &[]));
    wait_until("the kubelet is started with it", || machine.read("kubelet.log").unwrap().contains(&next));
    let said = machine.moves(&old, &[], 2);
    assert!(said.contains("another `portico join move`"), "{said}");
    moving.signal("TERM");
    assert_eq!(moving.wait().code(), Some(1), "{}", moving.said());
    assert!(moving.said().contains("SIGTERM asked to stop. Everything was put back"), "{}", moving.said());
    assert_eq!(machine.files(), there);
    machine.has_started(&[&next, &new]);

    // Or somebody kills it. Then the move is finished, or undone, as the next one asks.
    for (then, mute) in [(&new, "localhost"), (&next, "nothing")] {
        machine.write("mute", "localhost");
        let mut moving = Process::of(&mut machine.moving(&next, &[]));
        wait_until("the kubelet is started with it", || machine.read("kubelet.log").unwrap().contains(&next));
        moving.signal("KILL");
        moving.wait();
        assert_eq!(machine.files()[3], there[0], "what it was");
        assert_eq!(machine.files()[1..3], there[1..3]);
        machine.write("mute", mute);
        machine.moves(then, &[], 0);
        assert_eq!(machine.files(), machine.files_at(then, &first));
        machine.write("kubelet.log", "");
    }

    // A process that starts again does so with the former command, and the present address.
    kept.signal("TERM");
    assert!(kept.wait().success(), "{}", kept.said());
    let said = machine.moves(&old, &["--wait", "1s"], 1);
    assert!(said.contains("has ended, or is of a version"), "{said}");
    let _kept = machine.kept();
    machine.remove("mute");
    machine.moves(&old, &[], 0);
    assert_eq!(machine.files(), first);
    let owned = fs::metadata(kubeconfig).unwrap();
    assert_eq!((owned.uid(), owned.gid()), (1234, 1235));
    let root = machine.root.display().to_string();
    assert!(run(&["join", "remove", "--root", &root]).status.success());
    assert!(!machine.root.join("var/lib/portico/kubelet.json").exists());
}

#[test]
fn a_kubelet_of_systemd_is_moved_or_put_back() {
    let machine = Machine::joined("join-move-systemd", true);
    let (old, new) = (machine.old(), machine.at("127.0.0.1"));
    skeleton(&machine.root);
    put_program(&machine.root.join("stubs/systemctl"), SYSTEMCTL);
    machine.write("portico", "");
    machine.write("kubelet.pid", "");
    let first = machine.files();

    let said = machine.moves(&new, &[], 2);
    assert!(said.contains("--root goes with --kubelet"), "{said}");
    machine.moves_as_root(&new, Some(0));
    assert_eq!(machine.files(), machine.files_at(&new, &first));
    assert_eq!(machine.asked(), "restart kubelet.service\n");
    machine.has_started(&[&new]);
    let said = machine.moves_as_root(&new, Some(0));
    assert!(said.contains("already"), "{said}");
    assert_eq!(machine.asked(), "");

    // Killed when the files are written, and the kubelet is not restarted yet: undone, or finished.
    for server in [&new, &old] {
        machine.write("kill", "");
        machine.moves_as_root(&old, None);
        assert_eq!(machine.files()[3], machine.files_at(&new, &first)[0], "what it was");
        machine.has_started(&[]);
        machine.moves_as_root(server, Some(0));
        assert_eq!(machine.files(), machine.files_at(server, &first));
        // It may have run with another.
        machine.has_started(&[server]);
    }

    // The unit cannot be restarted: once it can, the same address is gone on with.
    machine.write("fail", "");
    let said = machine.moves_as_root(&new, Some(1));
    assert!(said.contains("the unit is masked") && said.contains("not everything could be put"), "{said}");
    assert!(said.contains(&format!("`portico join move --server {old}` goes on")), "{said}");
    assert_eq!(machine.files()[..3], first[..3]);
    machine.remove("fail");
    machine.moves_as_root(&old, Some(0));
    assert_eq!(machine.files(), first);
}

/// With a real kubelet and containerd.
#[test]
fn containers_of_a_node_that_is_moved_run_on_and_it_stays_ready() {
    let cluster = Cluster::start("join-move-node");
    cluster.host("");
    let (host, kubectl, command) = (cluster.api.host(), cluster.api.kubectl(), cluster.command());
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let node = Node::join_by(host, &words, kubectl, "172.25.9.0/24").unwrap();
    node.import(&Image::busybox().unwrap()).unwrap();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stays"}, "spec": {
        "nodeName": host.name(), "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "any", "image": "lab/busybox:1", "imagePullPolicy": "Never",
            "command": ["sh", "-c", "sleep 3600"]}]}});
    // Until its ServiceAccount is there.
    wait_until("the pod is taken", || kubectl.apply_json(&pod).is_ok());
    let container = || kubectl.get(&["pod", "stays"]).unwrap()["status"]["containerStatuses"][0].clone();
    wait_until("its container runs", || container()["state"]["running"].is_object());
    let ready = || {
        let node = kubectl.get(&["node", host.name()]).unwrap();
        let conditions = node["status"]["conditions"].as_array().unwrap().clone();
        let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready").unwrap();
        (ready["status"].clone(), ready["lastTransitionTime"].clone())
    };
    let before = (container(), ready());
    assert_eq!(before.1.0, "True");

    let pid = || fs::read_to_string(format!("/proc/{}/task/{0}/children", node.kubelet().unwrap().pid()));
    let kubelet = pid().unwrap();
    for server in ["https://127.0.0.1:6443", cluster.api.access().server()] {
        let portico = env!("CARGO_BIN_EXE_portico");
        host.run(&[portico, "join", "move", "--server", server]).unwrap();
        let conf = host.run(&["cat", &format!("/{}", NAMING[0])]).unwrap();
        assert!(conf.contains(&format!("server: {server}\n")), "{conf}");
    }
    assert_ne!(pid().unwrap(), kubelet, "another kubelet runs");
    assert_eq!((container(), ready()), before);
    let events =
        || kubectl.get(&["events", "--field-selector=reason=KubeletMoves"]).unwrap()["items"].clone();
    let said = events()[0]["message"].as_str().unwrap().to_owned();
    assert!(said.contains("open exec, logs -f and port-forward of this node end"), "{said}");
    a_node_is_emptied_before_if_that_is_asked_for(&cluster, host.name());
}

fn a_node_is_emptied_before_if_that_is_asked_for(cluster: &Cluster, node: &str) {
    let kubectl = cluster.api.kubectl();
    let drained = |in_time: &str| {
        let portico = env!("CARGO_BIN_EXE_portico");
        let drain = format!("--drain={in_time}");
        let moves = [portico, "join", "move", "--server", "https://127.0.0.1:6443", &drain];
        cluster.api.host().output(&moves, "").unwrap()
    };
    let is_open = || {
        let node = kubectl.get(&["node", node]).unwrap();
        let closed = node["metadata"]["annotations"].get("portico.k8c.io/closed-for-move");
        closed.is_none() && node["spec"].get("unschedulable").is_none()
    };
    // Nothing would start it elsewhere.
    let said = said(&drained("1m"), 1);
    assert!(said.contains("nothing starts these pods elsewhere: default/stays"), "{said}");
    assert!(is_open(), "nothing was changed");
    // In a pod that would begin again and again.
    let portico = env!("CARGO_BIN_EXE_portico");
    let mut in_pod = cluster.api.host().command(portico).unwrap();
    let moves = ["join", "move", "--server", "https://127.0.0.1:6443", "--drain", "--in-pod"];
    let mut in_pod = Process::of(in_pod.args(moves));
    in_pod.wait_for("The next attempt begins in 600s");
    in_pod.signal("TERM");
    assert_eq!(in_pod.wait().code(), Some(1), "{}", in_pod.said());
    kubectl.run(&["delete", "pod", "stays"]).unwrap();

    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "shop"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "shop"}}, "template": {
            "metadata": {"labels": {"app": "shop"}}, "spec": {"terminationGracePeriodSeconds": 0,
                "containers": [{"name": "any", "image": "lab/busybox:1", "imagePullPolicy": "Never",
                    "command": ["sh", "-c", "sleep 3600"]}]}}}});
    let budget = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": {"name": "shop"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "shop"}}}});
    for object in [&deployment, &budget] {
        kubectl.apply_json(object).unwrap();
    }
    let pods = || kubectl.get(&["pods", "--selector=app=shop"]).unwrap()["items"].clone();
    wait_until("its pod is ready", || pods()[0]["status"]["containerStatuses"][0]["ready"] == true);
    let pod = pods()[0]["metadata"]["name"].clone();
    wait_until("its budget counts", || {
        kubectl.get(&["pdb", "shop"]).is_ok_and(|it| it["status"]["currentHealthy"] == 1)
    });
    let said = self::said(&drained("3s"), 1);
    assert!(said.contains("there still are default/shop-") && said.contains("budget"), "{said}");
    assert!(is_open(), "nothing was changed");
    kubectl.run(&["delete", "pdb", "shop"]).unwrap();
    let said = self::said(&drained("1m"), 0);
    assert!(said.contains("is at https://127.0.0.1:6443, where its kubelet renews its lease"), "{said}");
    assert_ne!(pods()[0]["metadata"]["name"], pod);
    assert!(is_open(), "pods may come again");
}

#[test]
fn a_machine_that_never_joined_is_told_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().display().to_string();
    let moves = || run(&["join", "move", "--server", "https://192.0.2.1:6443", "--root", &root]);
    let output = moves();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("never joined by `portico join`"), "{}", stderr(&output));
    fs::create_dir_all(folder.path().join("etc/kubernetes")).unwrap();
    fs::write(folder.path().join(NAMING[0]), "kubeadm's").unwrap();
    let output = moves();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("did not make this machine a node"), "{}", stderr(&output));
    assert_eq!(fs::read_to_string(folder.path().join(NAMING[0])).unwrap(), "kubeadm's");
}

#[test]
fn help_has_an_example() {
    let output = run(&["join", "move", "--help"]);
    let text = stdout(&output);
    assert!(output.status.success() && text.contains("portico join move --server https://"), "{text}");
    assert_eq!(run(&["join", "move", "--server", "http://a"]).status.code(), Some(2));
}
