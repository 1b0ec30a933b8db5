//! `portico etcd run` with the etcd of hosted control planes, on loopback.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use base64::Engine;
use portico_lab::pki::{Authority, Certificate};
use portico_lab::programs;
use rcgen::ExtendedKeyUsagePurpose;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Process, free_port, get, portico, run, wait_until};

/// Members of a ring, their ports and folders. Those that run end with their launchers.
struct Ring {
    folder: TempDir,
    /// For clients, members, probes.
    ports: Vec<[u16; 3]>,
    quota: u64,
    /// Whether members and clients show each other certificates, as in a control plane.
    tls: bool,
}

impl Ring {
    fn of(members: usize) -> Self {
        let ports = (0..members).map(|_| [free_port(), free_port(), free_port()]).collect();
        Self { folder: tempfile::tempdir().unwrap(), ports, quota: 64 << 20, tls: false }
    }

    /// One certificate for every place, as the plan has it for members of etcd.
    fn with_tls(self) -> Self {
        let authority = Authority::new("etcd-ca").unwrap();
        let both = Certificate::server(&["127.0.0.1"])
            .with(|params| params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth));
        authority.issue(both).unwrap().write(self.folder.path(), "etcd").unwrap();
        fs::write(self.file("ca.crt"), authority.cert()).unwrap();
        Self { tls: true, ..self }
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn url(&self, port: u16) -> String {
        format!("{}://127.0.0.1:{port}", if self.tls { "https" } else { "http" })
    }

    fn data(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("etcd-{member}"))
    }

    fn start(&self, member: usize, initialized: bool) -> Process {
        let [client, peer, probe] = self.ports[member];
        let [client, peer, probe] = [self.url(client), self.url(peer), format!("http://127.0.0.1:{probe}")];
        let all = |index: usize| self.ports.iter().map(move |ports| self.url(ports[index]));
        let ring: Vec<String> =
            all(1).enumerate().map(|(number, url)| format!("etcd-{number}={url}")).collect();
        let mut command = portico();
        command.args(["etcd", "run", "--look-every=200ms", &format!("--initialized={initialized}")]);
        command.arg(format!("--endpoints={}", all(0).collect::<Vec<_>>().join(",")));
        // Whatever becomes of a test, no etcd outlives it.
        command.args(["--", "setpriv", "--pdeathsig", "KILL", "--"]);
        command.arg(programs::kube().unwrap().join("etcd"));
        command.arg(format!("--name=etcd-{member}"));
        command.arg(format!("--data-dir={}", self.data(member).display()));
        command.args(["--heartbeat-interval=10", "--election-timeout=200", "--unsafe-no-fsync"]);
        command.args([
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--listen-metrics-urls={probe}"),
            format!("--initial-cluster={}", ring.join(",")),
            format!("--quota-backend-bytes={}", self.quota),
        ]);
        if self.tls {
            let files = ["etcd.crt", "etcd.key", "ca.crt"].map(|name| self.file(name));
            for (flag, file) in ["cert-file", "key-file", "trusted-ca-file"].into_iter().zip(files) {
                command.args([format!("--{flag}={file}"), format!("--peer-{flag}={file}")]);
            }
            command.args(["--client-cert-auth", "--peer-client-cert-auth"]);
        }
        Process::of(&mut command)
    }

    /// A call of a member's JSON gateway.
    fn call(&self, member: usize, path: &str, body: &Value) -> Value {
        let url = format!("{}/v3/{path}", self.url(self.ports[member][0]));
        let file = tempfile::NamedTempFile::new_in(self.folder.path()).unwrap();
        fs::write(file.path(), body.to_string()).unwrap();
        let body = format!("@{}", file.path().display());
        let mut curl = Command::new("curl");
        curl.args(["-s", "--max-time", "5", "-d", &body, &url]);
        if self.tls {
            let [certificate, key, ca] = ["etcd.crt", "etcd.key", "ca.crt"].map(|name| self.file(name));
            curl.args(["--cert", &certificate, "--key", &key, "--cacert", &ca]);
        }
        let output = curl.output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    fn put(&self, member: usize, key: &str, value: &[u8]) -> Value {
        let [key, value] = [key.as_bytes(), value].map(text);
        self.call(member, "kv/put", &json!({"key": key, "value": value}))
    }

    /// Writes until the database is full. Returns how many keys those are.
    fn fill(&self, member: usize) -> usize {
        let large = vec![7; 1 << 20];
        let mut keys = 0;
        wait_until("it is full", || {
            let answer = self.put(member, &format!("large-{keys}"), &large);
            let message = answer["message"].as_str();
            let full = message.is_some_and(|said| said.contains("database space exceeded"));
            keys += usize::from(!full);
            full
        });
        keys
    }

    /// Deletes these keys.
    fn empty(&self, member: usize, keys: usize) {
        for key in 0..keys {
            let key = text(format!("large-{key}").as_bytes());
            self.call(member, "kv/deleterange", &json!({"key": key}));
        }
    }

    /// Whether a member has the key, by its own data.
    fn has(&self, member: usize, key: &str) -> bool {
        let range = json!({"key": text(key.as_bytes()), "serializable": true});
        self.call(member, "kv/range", &range)["count"] == "1"
    }

    fn wait_ready(&self, member: usize) {
        let probe = self.ports[member][2];
        wait_until("a member is ready", || {
            std::net::TcpStream::connect(("127.0.0.1", probe)).is_ok() && get(probe, "/readyz").0 == 200
        });
    }

    fn health(&self, member: usize) -> String {
        get(self.ports[member][2], "/health?serializable=true").1
    }
}

fn text(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn stop(mut etcd: Process) {
    etcd.signal("TERM");
    let status = etcd.wait();
    assert_eq!(status.code(), Some(0), "{}", etcd.said());
}

#[test]
fn a_single_member_starts_starts_again_and_is_not_begun_anew_without_its_data() {
    let ring = Ring::of(1);
    let mut first = ring.start(0, false);
    first.wait_for("starting etcd as a member of a new ring");
    ring.wait_ready(0);
    ring.put(0, "kept", b"x");
    stop(first);

    let mut second = ring.start(0, true);
    second.wait_for("starting etcd with the data that is there");
    ring.wait_ready(0);
    assert!(ring.has(0, "kept"));
    stop(second);

    fs::remove_dir_all(ring.data(0)).unwrap();
    let mut third = ring.start(0, true);
    third.wait_for("restore the volume");
    assert_eq!(third.wait().code(), Some(1));
    assert!(!ring.data(0).exists());
}

#[test]
fn a_member_of_three_that_lost_its_folder_gets_its_data_from_the_others_and_votes_again() {
    let ring = Ring::of(3).with_tls();
    let mut running: Vec<Process> = (0..3).map(|member| ring.start(member, false)).collect();
    (0..3).for_each(|member| ring.wait_ready(member));
    ring.put(0, "kept", b"x");
    let members = || ring.call(0, "cluster/member/list", &json!({"linearizable": true}))["members"].take();
    let before = members();
    // By this alarm all of them refuse everything, until the member of that data has left.
    let own = before.as_array().unwrap().iter().find(|member| member["name"] == "etcd-2").unwrap();
    let corrupt = json!({"action": "ACTIVATE", "memberID": own["ID"], "alarm": "CORRUPT"});
    assert_eq!(ring.call(0, "maintenance/alarm", &corrupt)["alarms"][0]["alarm"], "CORRUPT");
    assert!(ring.health(1).contains("ALARM CORRUPT"));

    stop(running.remove(2));
    fs::remove_dir_all(ring.data(2)).unwrap();
    let mut again = ring.start(2, true);
    again.wait_for("is gone: removing it from its ring");
    again.wait_for("adding this member to its ring, as a learner");
    again.wait_for("starting etcd as a member of the ring");
    again.wait_for("letting this member vote: done");
    // A learner is never ready, and neither is a member beside that alarm.
    ring.wait_ready(2);
    wait_until("another one knows it too", || !ring.health(1).contains("CORRUPT"));
    assert!(ring.has(2, "kept"));
    let after = members();
    assert_eq!(after.as_array().unwrap().len(), 3);
    let id = |members: &Value| {
        let own = members.as_array().unwrap().iter().find(|member| member["name"] == "etcd-2");
        own.unwrap()["ID"].as_str().unwrap().to_owned()
    };
    assert_ne!(id(&before), id(&after));

    // Two of three without data are no majority: nothing is begun anew, whatever waits.
    stop(again);
    stop(running.remove(1));
    for member in [1, 2] {
        fs::remove_dir_all(ring.data(member)).unwrap();
    }
    let mut waits = ring.start(2, true);
    waits.wait_for("no other member knows a leader: waiting");
    assert!(!ring.data(2).exists());
    waits.signal("TERM");
    assert_eq!(waits.wait().code(), Some(0));
}

#[test]
fn a_full_database_is_reported_and_takes_writes_again_once_objects_are_deleted() {
    let ring = Ring { quota: 8 << 20, ..Ring::of(1) }.with_tls();
    let mut etcd = ring.start(0, false);
    ring.wait_ready(0);
    let keys = ring.fill(0);
    assert!(ring.health(0).contains("ALARM NOSPACE"));
    etcd.wait_for("NOSPACE: the database is full");

    ring.empty(0, keys);
    etcd.wait_for("defragmenting the member at");
    etcd.wait_for("no alarm any more");
    assert!(ring.put(0, "after", b"x")["header"].is_object());
    assert!(!ring.health(0).contains("NOSPACE"));
    stop(etcd);
}

#[test]
fn a_defragmentation_that_fails_is_reported_each_time_and_tried_again_until_it_works() {
    let ring = Ring { quota: 8 << 20, ..Ring::of(1) };
    let mut etcd = ring.start(0, false);
    ring.wait_ready(0);
    let keys = ring.fill(0);
    // The copy is made in this folder. The file that is open needs none.
    let folder = ring.data(0).join("member/snap");
    let away = ring.folder.path().join("away");
    fs::rename(&folder, &away).unwrap();
    ring.empty(0, keys);
    for _ in 0..3 {
        let line = etcd.wait_for("defragmenting the member at");
        assert!(line.contains("WARN") && line.contains("no such file or directory"), "{line}");
    }
    fs::rename(&away, &folder).unwrap();
    etcd.wait_for("no alarm any more");
    stop(etcd);
}

#[test]
fn the_program_is_copied_for_a_container_of_another_image() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("portico");
    assert!(run(&["etcd", "install", copy.to_str().unwrap()]).status.success());
    assert!(Command::new(&copy).arg("--version").output().unwrap().status.success());
}

#[test]
fn the_exit_code_of_etcd_is_the_launchers() {
    let folder = tempfile::tempdir().unwrap();
    let data = format!("--data-dir={}", folder.path().display());
    let output = run(&["etcd", "run", "--", "sh", "-c", "exit 7", &data]);
    assert_eq!(output.status.code(), Some(7));
}
