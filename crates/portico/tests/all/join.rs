//! `portico join` beside a real API server that signs certificates, with a real kubelet: the token, what the
//! machine trusts, what it writes, and how it leaves.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Output;

use portico_hosting::join::trust::CaHash;
use portico_lab::pki::Certificate;
use portico_lab::{ApiServer, programs};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Process, run, stderr, stdout, wait_until};

/// The rights of machines, as the operator makes them; its ConfigMap follows, without data.
const RIGHTS: &str = include_str!("../../../portico-hosting/inside/nodes.yaml");

/// A cluster that machines can join.
pub(crate) struct Cluster {
    pub(crate) api: ApiServer,
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

/// A machine with a root of its own, on which systemd seems to run, and where each call of it is recorded.
struct SystemdMachine {
    root: PathBuf,
    _runtime: UnixListener,
}

/// As those of a hosted cluster.
const FLAGS: [&str; 2] = ["--enable-bootstrap-token-auth", "--enable-admission-plugins=NodeRestriction"];

/// What takes the machine's files for those of `/`. Nothing can get to those of this machine then.
pub(crate) const AS_ROOT: &str = "\
    root=$1; shift; for place in usr proc sys dev; do mount --rbind /$place $root/$place; done
    mount -t tmpfs stubs $root/usr/local/bin && cp $root/stubs/* $root/usr/local/bin/
    mount --bind \"$1\" $root/portico && shift
    PATH=/usr/local/bin:/usr/bin:/usr/sbin exec chroot $root \"$@\"";

/// Logs the arguments of each call, with the files of units that there are. If it is called to restart a
/// kubelet, the kubelet gets its certificate at once.
const SYSTEMCTL: &str = "\
#!/bin/sh
cd /etc/systemd/system
echo \"$*:\" $(find . -type f | sort) >>/systemctl.log
[ \"$1\" = restart ] || exit 0
mkdir -p /var/lib/kubelet/pki
cp /node.pem /var/lib/kubelet/pki/kubelet-client-current.pem
touch /etc/kubernetes/kubelet.conf
";

impl Cluster {
    pub(crate) fn start(name: &str) -> Self {
        let api = ApiServer::start_with_controllers(name, &FLAGS).unwrap();
        Self::of(api)
    }

    /// Without anything that signs certificates.
    fn start_alone(name: &str) -> Self {
        Self::of(ApiServer::start_with(name, &FLAGS).unwrap())
    }

    fn of(api: ApiServer) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let admin = folder.path().join("admin.kubeconfig");
        fs::write(&admin, api.admin_with_everything().unwrap()).unwrap();
        Self { api, admin, folder }
    }

    /// As the operator leaves it, to the authority of its servers, with these ways of agents.
    pub(crate) fn host(&self, reach: &str) {
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
                json!({"kubelet": kubelet.to_string(), "client-ca.crt": authority, "reach": reach}),
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

    fn systemd_machine(&self) -> SystemdMachine {
        let root = self.folder.path().join("systemd");
        skeleton(&root);
        let version = programs::kube_version().unwrap();
        let kubelet = format!("#!/bin/sh\necho Kubernetes {version}\n");
        for (name, script) in [("systemctl", SYSTEMCTL), ("kubelet", &kubelet)] {
            put_program(&root.join("stubs").join(name), script);
        }
        let node = Certificate::client("system:node:worker-1").self_signed().unwrap();
        let server = self.api.access().server();
        let address = server.trim_start_matches("https://").rsplit_once(':').unwrap().0;
        for (name, content) in [
            ("portico", String::new()),
            ("own.yaml", json!({"failSwapOn": false, "failCgroupV1": false}).to_string()),
            ("node.pem", node.cert),
            ("etc/hosts", format!("{address} gateway.example.com\n")),
        ] {
            fs::write(root.join(name), content).unwrap();
        }
        let runtime = UnixListener::bind(root.join("run/containerd/containerd.sock")).unwrap();
        SystemdMachine { root, _runtime: runtime }
    }

    /// Runs a program on that machine.
    fn run_on(&self, machine: &SystemdMachine, words: &[String]) -> Output {
        let mut command = self.api.host().command("unshare").unwrap();
        command.args(["--mount", "--propagation=private", "sh", "-ec", AS_ROOT, "sh"]);
        command.arg(&machine.root).arg(env!("CARGO_BIN_EXE_portico")).args(words);
        command.output().unwrap()
    }

    /// Has a token made, and returns the words of the command for machines.
    pub(crate) fn command(&self) -> Vec<String> {
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
        put_program(&path, &script);
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

impl SystemdMachine {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// What systemctl was asked for since the last time, beside the units at that moment.
    fn asked(&self) -> Vec<String> {
        let log = self.path("systemctl.log");
        let text = fs::read_to_string(&log).unwrap_or_default();
        fs::write(&log, "").unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

/// The folders of a machine for [`AS_ROOT`], which systemd seems to run.
pub(crate) fn skeleton(root: &Path) {
    let places = ["usr", "proc", "sys", "dev", "tmp", "stubs"];
    let further = ["etc/systemd/system", "run/systemd/system", "run/containerd"];
    for folder in places.iter().chain(&further) {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    for link in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{link}"), root.join(link)).unwrap();
    }
}

pub(crate) fn put_program(path: &Path, script: &str) {
    fs::write(path, script).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[test]
fn a_machine_joins_by_the_printed_command_and_leaves_without_a_trace() {
    let cluster = Cluster::start("join");
    let admin = cluster.admin.display().to_string();

    // Before the operator has made it a cluster that takes machines in.
    let refused = run(&["join", "token", "--cluster-kubeconfig", &admin]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("no ConfigMap kube-system/kubelet-config"), "{}", stderr(&refused));
    cluster.host("");

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

    let (at, file) = (command.iter().position(|word| word == "--token").unwrap(), machine.root.join("token"));
    let token = &command[at + 1];
    fs::write(&file, format!("{token}\n")).unwrap();
    let mut by_file = command.clone();
    by_file.splice(at..at + 2, [format!("--token-file={}", file.display())]);
    let output = cluster.portico(&machine.with(&by_file, &["--dry-run"])).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    fs::remove_file(file).unwrap();
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

    // Not asked to end, but gone from one moment to the next: so is the kubelet.
    fs::remove_file(slow.with_extension("runs")).unwrap();
    fs::remove_file(slow.with_extension("ended")).unwrap();
    let joining = Process::of(&mut cluster.portico(&words));
    wait_until("the kubelet runs", || slow.with_extension("runs").exists());
    joining.signal("KILL");
    wait_until("the kubelet ends too", || slow.with_extension("ended").exists());
    drop(joining);

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

#[test]
fn a_machine_that_reaches_what_its_agents_need_is_run_by_systemd() {
    let cluster = Cluster::start_alone("join-systemd");
    let port = cluster.api.access().server().rsplit_once(':').unwrap().1.to_owned();
    let machine = cluster.systemd_machine();
    cluster.host("konnectivity gateway.example.com:1\ntunnel gateway.example.com:2\n");
    let join = words(&["/portico", "--kubelet-config=/own.yaml", "--node-name=worker-1"]);
    let join: Vec<String> = [&join[..1], &cluster.command(), &join[1..]].concat();

    // A firewall, as it were. Nothing is written.
    let output = cluster.run_on(&machine, &join);
    let printed = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}{}", stderr(&output));
    let line =
        |word: &str| printed.lines().find(|line| line.starts_with(word) && line.contains("gateway.ex"));
    let (Some(fails), Some(warns)) = (line("FAIL"), line("WARN")) else { panic!("{printed}") };
    assert!(fails.contains("gateway.example.com:2, a gateway") && fails.contains("tcp/2 is"), "{printed}");
    assert!(
        warns.contains("gateway.example.com:1, the Konnectivity") && warns.contains("tcp/1 is"),
        "{printed}"
    );
    assert!(!machine.path("etc/kubernetes").exists() && !machine.path("var").exists());
    assert_eq!(machine.asked(), Vec::<String>::new());

    let way = format!("gateway.example.com:{port}");
    cluster.host(&format!("konnectivity {way}\ntunnel {way}\n"));
    let output = cluster.run_on(&machine, &join);
    let printed = stdout(&output);
    assert!(output.status.success(), "{printed}{}", stderr(&output));
    assert!(
        printed.contains("This machine is node worker-1") && !printed.contains("gateway.example.com"),
        "{printed}"
    );
    let unit = "./kubelet.service";
    let started = |unit: &str| {
        ["daemon-reload", "enable kubelet.service", "restart kubelet.service"]
            .map(|one| format!("{one}: {unit}"))
    };
    assert_eq!(machine.asked(), started(unit), "the unit is there before");
    let written = fs::read_to_string(machine.path("etc/systemd/system/kubelet.service")).unwrap();
    assert!(
        written.contains("ExecStart=/usr/local/bin/kubelet \\\n  --bootstrap-kubeconfig=/etc/"),
        "{written}"
    );
    if programs::find("systemd-analyze").is_ok() {
        let verify = words(&["systemd-analyze", "verify", "/etc/systemd/system/kubelet.service"]);
        let output = cluster.run_on(&machine, &verify);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!stderr(&output).contains("kubelet.service:"), "{}", stderr(&output));
    }

    // A second time there is nothing to do.
    let output = cluster.run_on(&machine, &join);
    assert!(stdout(&output).contains("worker-1 of the cluster") && output.status.success(), "{output:?}");
    assert!(stdout(&output).contains("--kubelet-config: only when a machine joins"), "{output:?}");
    let output = cluster.run_on(&machine, &[&join[..], &words(&["--kubelet=/any"])].concat());
    assert!(stderr(&output).contains("leave --kubelet out") && !output.status.success(), "{output:?}");
    assert_eq!(machine.asked(), Vec::<String>::new());

    let remove = words(&["/portico", "join", "remove"]);
    let left = |output: &Output| {
        assert!(output.status.success(), "{}", stderr(output));
        let gone =
            ["etc/kubernetes/kubelet.conf", "var/lib/kubelet/config.yaml", "var/lib/portico/join.json"];
        assert!(!gone.iter().any(|path| machine.path(path).exists()));
    };
    left(&cluster.run_on(&machine, &remove));
    assert_eq!(
        machine.asked(),
        [format!("disable --now kubelet.service: {unit}"), "daemon-reload:".to_owned()],
        "it is stopped while its unit is there"
    );

    // The unit of a package is changed, and stays when the machine leaves.
    let package = "[Service]\nExecStart=/usr/local/bin/kubelet\n";
    fs::write(machine.path("etc/systemd/system/kubelet.service"), package).unwrap();
    let output = cluster.run_on(&machine, &join);
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let both = format!("{unit} ./kubelet.service.d/50-portico.conf");
    assert_eq!(machine.asked(), started(&both));
    left(&cluster.run_on(&machine, &remove));
    assert_eq!(
        machine.asked(),
        [format!("disable --now kubelet.service: {both}"), format!("daemon-reload: {unit}")]
    );
    let kept = fs::read_to_string(machine.path("etc/systemd/system/kubelet.service")).unwrap();
    assert_eq!(kept, package);
}

#[test]
fn another_root_is_for_kubelets_that_systemd_does_not_run() {
    let hash = other_hash();
    let join =
        ["join", "--server", "https://192.0.2.1:6443", "--token", "abcdef.0123456789abcdef", "--ca-hash"];
    let output = run(&[&join[..], &[&hash, "--root", "/no/such/root"]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--root goes with --kubelet"), "{}", stderr(&output));
}

fn other_hash() -> String {
    format!("sha256:{}", "0".repeat(64))
}
