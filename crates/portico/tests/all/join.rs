//! `portico join` beside a real API server that signs certificates, with a real kubelet: the token, whom the
//! machine trusts, what it writes, and how it leaves.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use portico_hosting::join::trust::CaHash;
use portico_lab::{ApiServer, programs};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Process, run, stderr, stdout, wait_until};

/// The rights of machines, as the operator makes them; its ConfigMap follows, without data.
const RIGHTS: &str = include_str!("../../../portico-hosting/inside/nodes.yaml");

/// A cluster that machines can join.
struct Cluster {
    api: ApiServer,
    /// The kubeconfig of its administrator, with everything in it.
    admin: PathBuf,
    folder: TempDir,
}

/// A machine, as far as files go, on the host of the API server.
struct Machine {
    root: PathBuf,
    config: PathBuf,
    // Stands for containerd, which is only asked for an answer before the node has its certificate.
    _runtime: UnixListener,
}

impl Cluster {
    fn start(name: &str) -> Self {
        let api = ApiServer::start_with_controllers(name, &["--enable-bootstrap-token-auth"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let admin = folder.path().join("admin.kubeconfig");
        fs::write(&admin, api.admin_with_everything().unwrap()).unwrap();
        Self { api, admin, folder }
    }

    /// As the operator leaves it, to the authority of its servers.
    fn host(&self) {
        let (authority, server) = (self.api.access().authority().cert(), self.api.access().server());
        self.api.kubectl().apply(RIGHTS).unwrap();
        let kubelet = json!({"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}},
            "authorization": {"mode": "Webhook"}, "rotateCertificates": true, "serverTLSBootstrap": true});
        let config = |namespace: &str, name: &str, data: Value| {
            json!({"apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"namespace": namespace, "name": name}, "data": data})
        };
        let reader = json!({"namespace": "kube-public", "name": "cluster-info"});
        let role = "rbac.authorization.k8s.io";
        for object in [
            config(
                "kube-system",
                "kubelet-config",
                json!({"kubelet": kubelet.to_string(), "client-ca.crt": authority}),
            ),
            config(
                "kube-public",
                "cluster-info",
                json!({"kubeconfig": portico_pki::cluster_info(server, &authority)}),
            ),
            json!({"apiVersion": format!("{role}/v1"), "kind": "Role", "metadata": reader,
                "rules": [{"apiGroups": [""], "resources": ["configmaps"],
                    "resourceNames": ["cluster-info"], "verbs": ["get"]}]}),
            json!({"apiVersion": format!("{role}/v1"), "kind": "RoleBinding", "metadata": reader,
                "roleRef": {"apiGroup": role, "kind": "Role", "name": "cluster-info"},
                "subjects": [{"apiGroup": role, "kind": "User", "name": "system:anonymous"}]}),
        ] {
            self.api.kubectl().apply_json(&object).unwrap();
        }
    }

    fn machine(&self, name: &str) -> Machine {
        let root = self.folder.path().join(name);
        fs::create_dir(&root).unwrap();
        let socket = root.join("containerd.sock");
        let config = root.join("own.yaml");
        let own = json!({"containerRuntimeEndpoint": format!("unix://{}", socket.display()),
            "failSwapOn": false, "failCgroupV1": false});
        fs::write(&config, own.to_string()).unwrap();
        Machine { root, config, _runtime: UnixListener::bind(&socket).unwrap() }
    }

    /// Has a token made, and returns the words of the command for machines.
    fn command(&self) -> Vec<String> {
        let admin = self.admin.display().to_string();
        let output = run(&["join", "token", "--cluster-kubeconfig", &admin, "--ttl", "2h"]);
        assert!(output.status.success(), "{}", stderr(&output));
        let words = stdout(&output).replace("\\\n", " ");
        let command = words.lines().find(|line| !line.starts_with('#')).unwrap();
        let mut words = command.split_whitespace().map(str::to_owned);
        assert_eq!(words.next().as_deref(), Some("portico"));
        words.collect()
    }

    fn portico(&self, arguments: &[String]) -> std::process::Command {
        let mut command = self.api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        command.args(arguments);
        command
    }
}

impl Machine {
    /// The command, for this machine.
    fn with(&self, command: &[String], further: &[&str]) -> Vec<String> {
        let kubelet = programs::kube().unwrap().join("kubelet");
        let own = [
            format!("--root={}", self.root.display()),
            format!("--kubelet-config={}", self.config.display()),
            format!("--kubelet={}", kubelet.display()),
            "--node-name=worker-1".to_owned(),
        ];
        let further = further.iter().map(|&word| word.to_owned());
        command.iter().cloned().chain(own).chain(further).collect()
    }

    /// A kubelet that never gets to ask for its certificate, and tells by files that it runs and was asked to
    /// end.
    fn slow_kubelet(&self) -> PathBuf {
        let kubelet = programs::kube().unwrap().join("kubelet");
        let (path, kubelet) = (self.root.join("slow-kubelet"), kubelet.display());
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec {kubelet} --version\n\
             trap 'touch \"$0.ended\"; exit 0' TERM\ntouch \"$0.runs\"\n\
             while :; do sleep 1 & wait; done\n"
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Every file below the root that no test put there.
    fn files(&self) -> Vec<String> {
        fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { walk(&path, found) } else { found.push(path) }
            }
        }
        let mut found = Vec::new();
        for top in ["etc", "var/lib/portico", "var/lib/kubelet/config.yaml", "var/lib/kubelet/pki"] {
            let path = self.root.join(top);
            if path.is_dir() { walk(&path, &mut found) } else { found.extend(path.exists().then_some(path)) }
        }
        found.iter().map(|path| path.strip_prefix(&self.root).unwrap().display().to_string()).collect()
    }
}

#[test]
fn a_machine_joins_by_the_printed_command_and_leaves_without_a_trace() {
    let cluster = Cluster::start("join");
    let admin = cluster.admin.display().to_string();

    // Before the operator has made it a cluster that takes machines in.
    let refused = run(&["join", "token", "--cluster-kubeconfig", &admin]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("no ConfigMap kube-system/kubelet-config"), "{}", stderr(&refused));
    cluster.host();

    let command = cluster.command();
    let secrets = cluster.api.kubectl().get(&["secrets", "-n", "kube-system"]).unwrap();
    let items = secrets["items"].as_array().unwrap();
    let tokens: Vec<&Value> =
        items.iter().filter(|secret| secret["type"] == "bootstrap.kubernetes.io/token").collect();
    assert_eq!(tokens.len(), 1, "the refused one made none");
    for key in ["expiration", "usage-bootstrap-authentication", "usage-bootstrap-signing", "token-secret"] {
        assert!(tokens[0]["data"].get(key).is_some(), "{key}");
    }

    // Another authority is pinned: nothing is written, and the token is not sent.
    let machine = cluster.machine("machine");
    let authority = cluster.api.access().authority().cert();
    let hash = CaHash::all(&authority)[0].to_string();
    let wrong: Vec<String> = command.iter().map(|word| word.replace(&hash, &other_hash())).collect();
    let output = cluster.portico(&machine.with(&wrong, &[])).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).contains(&format!("another key ({hash})")), "{}", stdout(&output));
    assert_eq!(machine.files(), Vec::<String>::new());

    let output = cluster.portico(&machine.with(&command, &["--dry-run"])).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let token = &command[command.iter().position(|word| word == "--token").unwrap() + 1];
    assert!(stdout(&output).contains("kubelet.config.k8s.io") && !stdout(&output).contains(&**token));
    assert_eq!(machine.files(), Vec::<String>::new());

    // Ended before there is a certificate: the kubelet is asked to end too, and the next attempt joins.
    let slow = machine.slow_kubelet();
    let mut words = machine.with(&command, &[]);
    *words.iter_mut().find(|word| word.starts_with("--kubelet=")).unwrap() =
        format!("--kubelet={}", slow.display());
    let mut joining = Process::of(&mut cluster.portico(&words));
    wait_until("the kubelet runs", || slow.with_extension("runs").exists());
    joining.signal("TERM");
    assert!(joining.wait().success(), "{}", joining.said());
    assert!(slow.with_extension("ended").exists(), "{}", joining.said());

    let mut joining = Process::of(&mut cluster.portico(&machine.with(&command, &[])));
    joining.wait_for("This machine is node worker-1 of the cluster at https://");
    drop(joining);
    let request = cluster.api.kubectl().get(&["csr"]).unwrap();
    assert!(request.to_string().contains("system:bootstrappers:portico"), "{request}");

    // The machine of another cluster.
    let output = cluster.portico(&machine.with(&wrong, &["--dry-run"])).output().unwrap();
    assert!(stderr(&output).contains("`portico join remove` takes it out"), "{}", stderr(&output));
    // A second run.
    let before = machine.files();
    let output = cluster.portico(&machine.with(&command, &["--dry-run"])).output().unwrap();
    assert!(stdout(&output).contains("is node worker-1 of the cluster at"), "{}", stderr(&output));
    assert_eq!(machine.files(), before);

    let root = machine.root.display().to_string();
    let output = run(&["join", "remove", "--root", &root]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(machine.files(), Vec::<String>::new());
    let output = run(&["join", "remove", "--root", &root]);
    assert!(stdout(&output).contains("nothing to remove"), "a second time is harmless");
}

fn other_hash() -> String {
    format!("sha256:{}", "0".repeat(64))
}
