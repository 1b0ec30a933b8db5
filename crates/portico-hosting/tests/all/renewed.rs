//! Real programs with the Secrets of a cluster, RSA throughout: they serve, and take renewed certificates
//! while they run. `portico konnectivity server` has its client from `portico-kube`, which has a test of its
//! own.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use jiff::{SignedDuration, Timestamp};
use portico_api::hosting::Layout;
use portico_hosting::{ControlPlane, Digests};
use portico_lab::{Etcd, Host, Kubectl, Lab, Process, programs, wait};
use portico_pki::{ClusterPki, KeyKind, Secrets};
use serde_json::{Value, json};
use x509_parser::pem::parse_x509_pem;

use crate::properties::{kept, pki_of};
use crate::*;

/// Longer than anything takes when all is well.
const LIMIT: Duration = Duration::from_secs(120);

/// The programs that have a kubeconfig, with its Secret and their user.
const CLIENTS: [(&str, &str, &str); 2] = [
    ("scheduler", "scheduler-kubeconfig", "system:kube-scheduler"),
    ("controller-manager", "controllermanager-kubeconfig", "system:kube-controller-manager"),
];

/// The pod of `compact`, as processes on a host; etcd and Konnectivity aside.
struct Pod<'a> {
    host: &'a Host,
    etcd: &'a Etcd,
    plane: &'a ControlPlane,
    folder: &'a Path,
}

impl Pod<'_> {
    /// Writes what its volumes hold.
    fn mount(&self, secrets: &Secrets) {
        let (_, template) = templates(self.plane)[0];
        let volumes = template["spec"]["volumes"].as_array().unwrap().iter();
        for source in volumes.filter_map(|volume| volume["projected"]["sources"].as_array()).flatten() {
            let (kind, source) = source.as_object().unwrap().iter().next().unwrap();
            let name = source["name"].as_str().unwrap();
            for item in source["items"].as_array().unwrap() {
                let key = item["key"].as_str().unwrap();
                let text = if kind == "secret" { &secrets[name][key] } else { self.config(name, key) };
                let path = self.folder.join(item["path"].as_str().unwrap());
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        }
    }

    fn config(&self, name: &str, key: &str) -> &str {
        let mut maps = self.plane.objects.iter().filter(|object| object["kind"] == "ConfigMap");
        maps.find(|map| map["metadata"]["name"] == name).unwrap()["data"][key].as_str().unwrap()
    }

    /// Starts a program with the arguments of its container.
    fn start(&self, name: &str) -> Process {
        let (_, template) = templates(self.plane)[0];
        let container = containers(template).find(|one| one["name"] == name).unwrap();
        let program = container["command"][0].as_str().unwrap().trim_start_matches("/usr/local/bin/");
        let folder = self.folder.display().to_string();
        let args = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
        let args = args.filter(|arg| !arg.starts_with("--etcd-"));
        let mut args: Vec<String> = args.map(|arg| arg.replace("/etc/kubernetes", &folder)).collect();
        if name == "apiserver" {
            args.push(format!("--etcd-servers={}", self.etcd.url()));
            args.push(format!("--audit-log-path={}", self.audit().display()));
        }
        self.host.spawn(name, programs::kube().unwrap().join(program), args).unwrap()
    }

    fn audit(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    /// Starts the API server and waits until it is ready.
    fn serve(&self, kubectl: &Kubectl) -> Process {
        let server = self.start("apiserver");
        wait::until("the API server to be ready", LIMIT, || {
            server.check()?;
            kubectl.run(&["get", "--raw", "/readyz"]).map(drop)
        })
        .unwrap();
        server
    }

    /// Waits until the API server has seen this certificate of a user, by its audit log.
    fn shown(&self, process: &Process, user: &str, certificate: &str) {
        let (_, pem) = parse_x509_pem(certificate.as_bytes()).unwrap();
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &pem.contents);
        let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let (user, id) = (format!("\"username\":\"{user}\""), format!("\"X509SHA256={digest}\""));
        wait::until(&format!("{user} with its certificate"), LIMIT, || {
            process.check()?;
            let log = fs::read_to_string(self.audit())?;
            let shown = log.lines().any(|line| line.contains(&user) && line.contains(&id));
            ensure!(shown, "the audit log does not have {id}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn programs_work_with_rsa_and_take_renewed_certificates_while_they_run() {
    let host = Lab::start("hosting-renewed").unwrap().host("seed").unwrap();
    let etcd = Etcd::start(&host).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let audited = json!({"auditLogging": {"enabled": true, "policyPreset": "metadata"}});
    let plane = planned_with(&cluster("compact", &audited), &settings(), &Digests::new());
    let pod = Pod { host: &host, etcd: &etcd, plane: &plane, folder: folder.path() };
    let url = format!("https://{}:6443", host.address());
    let mut pki = ClusterPki { keys: KeyKind::Rsa2048, external_url: Some(url), ..pki_of(Layout::Compact) };
    pki.api_server.ips.insert(host.address().into());

    // Less than a month before their end.
    let now = Timestamp::now();
    let mut secrets = Secrets::new();
    kept(&pki, &mut secrets, now.checked_sub(SignedDuration::from_hours(340 * 24)).unwrap());
    pod.mount(&secrets);
    let admin = folder.path().join("admin.kubeconfig");
    fs::write(&admin, &secrets["admin-kubeconfig"]["kubeconfig"]).unwrap();
    let kubectl = Kubectl::new(&host, &admin).unwrap();
    let server = pod.serve(&kubectl);
    let programs = CLIENTS.map(|(name, secret, user)| (pod.start(name), secret, user));
    for (process, secret, user) in &programs {
        pod.shown(process, user, &secrets[*secret]["client.crt"]);
    }
    a_service_account_has_a_token_by_rsa(&kubectl);

    // Another kind of key takes no other way, and no time to make.
    pki.keys = KeyKind::default();
    assert_eq!(kept(&pki, &mut secrets, now), 12);
    pod.mount(&secrets);
    let plain = |text: &str| text.split_whitespace().collect::<String>();
    wait::until("the API server to serve with its new certificate", LIMIT, || {
        server.check()?;
        let shown = host.run(&["openssl", "s_client", "-connect", "127.0.0.1:6443"])?;
        ensure!(plain(&shown).contains(&plain(&secrets["apiserver-tls"]["apiserver-tls.crt"])), "{shown}");
        Ok(())
    })
    .unwrap();
    // They look every five minutes, and with each connection: now.
    server.kill();
    let _server = pod.serve(&kubectl);
    for (process, secret, user) in &programs {
        pod.shown(process, user, &secrets[*secret]["client.crt"]);
    }
}

fn a_service_account_has_a_token_by_rsa(kubectl: &Kubectl) {
    let token = wait::until("the service account that the controller manager makes", LIMIT, || {
        kubectl.run(&["create", "token", "default"])
    });
    let token = token.unwrap();
    // {"alg":"RS256",
    assert!(token.starts_with("eyJhbGciOiJSUzI1NiIs"), "{token}");
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "spec": {"token": token.trim()}});
    let answer = kubectl.run_with_input(&["create", "-o", "json", "-f", "-"], &review.to_string()).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["status"]["user"]["username"], "system:serviceaccount:default:default", "{answer}");
}
