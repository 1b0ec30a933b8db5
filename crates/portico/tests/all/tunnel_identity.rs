//! `portico gateway` and the identities of its tunnel clients, as an operator meets them: files that change,
//! what the log, `/readyz` and `/metrics` say, one port for everything, and a successor that takes it over.
//! Clients are curl and openssl.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Process, get};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams,
};

/// Certificates, tokens and manifests of one gateway, and the gateway.
struct Site {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

struct Gateway {
    process: Process,
    admin: u16,
    tunnel: u16,
}

impl Site {
    /// Clusters a and b, whose API servers answer each line with itself.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, "test CA");
        let key = KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap().pem();
        let site = Self { folder, issuer: Issuer::new(params, key) };
        fs::write(site.file("ca.crt"), ca).unwrap();
        site.issue("gateway", &["127.0.0.1", "gateway.test"]);
        site.issue("a", &[]);
        site.revoke(&[]);
        fs::create_dir(site.file("manifests")).unwrap();
        for cluster in ["a", "b"] {
            let path = format!("manifests/{cluster}.yaml");
            fs::write(site.file(&path), service(cluster, echo())).unwrap();
        }
        site
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }

    fn issue(&self, name: &str, names: &[&str]) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::OrganizationName, format!("portico:cluster:{name}"));
        params.serial_number = Some(name.as_bytes().to_vec().into());
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{name}.crt")), certificate.pem()).unwrap();
        fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    fn revoke(&self, names: &[&str]) {
        let (then, later) = (rcgen::date_time_ymd(2020, 1, 1), rcgen::date_time_ymd(4000, 1, 1));
        let revoked = names.iter().map(|name| RevokedCertParams {
            serial_number: name.as_bytes().to_vec().into(),
            revocation_time: then,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: then,
            next_update: later,
            crl_number: vec![1].into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        fs::write(self.file("crl.pem"), list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
    }

    /// A gateway with TLS on its tunnel, ready. `listen` are its listeners.
    fn gateway(&self, listen: &[&str], more: &[&str]) -> Gateway {
        let (manifests, cert, key) =
            (self.path("manifests"), self.path("gateway.crt"), self.path("gateway.key"));
        let arguments =
            ["gateway", "--manifests", &manifests, "--admin-listen", "127.0.0.1:0", "--workers", "1"];
        let tls = ["--tunnel-tls-cert", &cert, "--tunnel-tls-key", &key, "--access-log", "text"];
        let mut process = Process::start(&[&arguments[..], listen, &tls, more].concat());
        let port = |line: &str| line.rsplit(':').next().and_then(|port| port.trim().parse().ok()).unwrap();
        let admin = port(&process.wait_for("listener=admin"));
        let tunnel = port(&process.wait_for("listener=tunnel"));
        Gateway { process, admin, tunnel }
    }

    fn proxy(&self, gateway: &Gateway, who: &[&str]) -> Command {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--max-time",
            "90",
            "--noproxy",
            "",
            "--proxytunnel",
            "--proxy-cacert",
            &self.path("ca.crt"),
        ])
        .args(["--proxy", &format!("https://127.0.0.1:{}", gateway.tunnel)])
        .args(who);
        curl
    }

    /// The status of a CONNECT to cluster `name`.
    fn status(&self, gateway: &Gateway, who: &[&str], name: &str) -> u16 {
        let mut curl = self.proxy(gateway, who);
        // The API server of these tests sends back what it gets, which is no HTTP answer: curl ends at once,
        // and we were through.
        curl.args(["-o", "/dev/null", "-w", "%{http_connect}"]).arg(format!("http://{}/", authority(name)));
        let output = curl.stdin(Stdio::null()).output().expect("curl runs; apt-get install curl");
        String::from_utf8(output.stdout).unwrap().parse().unwrap()
    }

    /// A tunnel that stays, as curl's standard input and output.
    fn tunnel(&self, gateway: &Gateway, who: &[&str], name: &str) -> Child {
        let mut curl = self.proxy(gateway, who);
        curl.args(["-N"]).arg(format!("telnet://{}", authority(name)));
        let mut child = curl
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("curl runs; apt-get install curl");
        ping(&mut child);
        child
    }
}

fn authority(cluster: &str) -> String {
    format!("apiserver-external.cluster-{cluster}.svc.cluster.local:443")
}

/// One line there and back.
fn ping(child: &mut Child) {
    use std::io::Write;
    child.stdin.as_mut().unwrap().write_all(b"ping\n").unwrap();
    let mut line = [0; 5];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
    assert_eq!(&line, b"ping\n");
}

/// A server that sends back what it gets, for as long as the test runs.
fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut writer = stream.try_clone().unwrap();
                let mut reader = BufReader::new(stream);
                let mut line = Vec::new();
                while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                    let _ = std::io::Write::write_all(&mut writer, &line);
                    line.clear();
                }
            });
        }
    });
    port
}

fn service(cluster: &str, upstream: u16) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata:
  name: apiserver-external
  namespace: cluster-{cluster}
  annotations:
    nodeport-proxy.k8s.io/expose: SNI,Tunneling
    nodeport-proxy.k8s.io/port-mapping: '{{\"secure\": \"{cluster}.example.com\"}}'
spec:
  ports: [{{name: secure, port: 443}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: api-1
  namespace: cluster-{cluster}
  labels: {{kubernetes.io/service-name: apiserver-external}}
addressType: IPv4
endpoints:
- addresses: [127.0.0.1]
  conditions: {{ready: true}}
ports: [{{name: secure, port: {upstream}}}]
"
    )
}

/// Asks again until the answer is yes. There is no event to wait for in another process.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        // Between two questions, so that the answer has a core to be found on.
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

fn metric(gateway: &Gateway, name: &str) -> u64 {
    let (_, page) = get(gateway.admin, "/metrics");
    let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {page}"))
}

const SEPARATE: [&str; 4] = ["--sni-listen", "off", "--tunnel-listen", "127.0.0.1:0"];

#[test]
fn files_that_change_revoke_what_is_open_and_broken_ones_change_nothing() {
    let site = Site::new();
    fs::write(site.file("tokens"), "secret-of-a,a\nsecret-of-b,b\n").unwrap();
    let (ca, crl, tokens) = (site.path("ca.crt"), site.path("crl.pem"), site.path("tokens"));
    let flags = ["--tunnel-client-ca", &ca, "--tunnel-client-crl", &crl, "--tunnel-tokens", &tokens];
    let mut gateway = site.gateway(&SEPARATE, &flags);
    let (cert, key) = (site.path("a.crt"), site.path("a.key"));
    let certificate = ["--proxy-cert", &cert, "--proxy-key", &key];
    let token = |token: &str| ["--proxy-header".to_owned(), format!("Proxy-Authorization: Bearer {token}")];
    let (token_a, token_b) = (token("secret-of-a"), token("secret-of-b"));
    let token_a: Vec<&str> = token_a.iter().map(String::as_str).collect();
    let token_b: Vec<&str> = token_b.iter().map(String::as_str).collect();
    assert_eq!(metric(&gateway, "portico_tunnel_open_to_anyone"), 0);
    assert_eq!(site.status(&gateway, &[], "a"), 401);
    assert_eq!(site.status(&gateway, &certificate, "b"), 403);
    gateway.process.wait_for("neither a client certificate nor a bearer token was shown");

    let mut by_certificate = site.tunnel(&gateway, &certificate, "a");
    let mut by_token = site.tunnel(&gateway, &token_a, "a");
    let mut other = site.tunnel(&gateway, &token_b, "b");

    fs::write(site.file("tokens"), "secret-of-a\n").unwrap();
    fs::write(site.file("crl.pem"), "no list").unwrap();
    let failed = |file: &str| metric(&gateway, &format!("portico_tunnel_files_failed{{file=\"{file}\"}}"));
    wait_until("the broken files are noticed", || failed("tokens") == 1 && failed("client_ca") == 1);
    let (status, text) = get(gateway.admin, "/readyz?verbose");
    assert_eq!(status, 200, "a broken file is no reason to send clients elsewhere");
    assert!(text.contains("tokens:1: there is no comma"), "{text}");
    assert!(text.contains("crl.pem: no X509 CRL"), "{text}");
    for tunnel in [&mut by_certificate, &mut by_token, &mut other] {
        ping(tunnel);
    }

    site.revoke(&["a"]);
    fs::write(site.file("tokens"), "secret-of-b,b\n").unwrap();
    assert!(!by_certificate.wait().unwrap().success(), "it was reset");
    assert!(!by_token.wait().unwrap().success(), "it was reset");
    ping(&mut other);
    wait_until("the files are in force", || failed("tokens") == 0 && failed("client_ca") == 0);
    assert_eq!(site.status(&gateway, &certificate, "a"), 401);
    assert_eq!(site.status(&gateway, &token_a, "a"), 401);
    let ended = "portico_ended_connections_total{reason=\"revoked\",side=\"gateway\"}";
    wait_until("both are counted", || metric(&gateway, ended) == 2);
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn a_tunnel_that_is_open_to_anyone_says_so_in_the_log_and_in_a_metric() {
    let site = Site::new();
    let gateway = site.gateway(&SEPARATE, &["--tunnel-plaintext"]);
    assert!(gateway.process.said().contains("the tunnel is open to anyone: with --tunnel-plaintext alone"));
    assert_eq!(metric(&gateway, "portico_tunnel_open_to_anyone"), 1);
    assert_eq!(metric(&gateway, "portico_tunnel_plaintext"), 1);
    gateway.process.signal("TERM");
    let gateway = site.gateway(&SEPARATE, &[]);
    assert!(gateway.process.said().contains("the tunnel is open to anyone: with --tunnel-tls-cert alone"));
    assert_eq!(metric(&gateway, "portico_tunnel_open_to_anyone"), 1);
    assert_eq!(metric(&gateway, "portico_tunnel_plaintext"), 0);
}

#[test]
fn one_port_serves_server_names_and_tunnels_and_a_successor_takes_it_over() {
    let site = Site::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let socket = site.path("take-over.sock");
    let (state, ca) = (site.path("state"), site.path("ca.crt"));
    let listen = ["--sni-listen", &address, "--tunnel-listen", &address, "--take-over", &socket];
    let flags = ["--tunnel-client-ca", &ca, "--state-dir", &state, "--drain-timeout", "50s"];
    let mut old = site.gateway(&listen, &flags);
    assert_eq!(old.tunnel, port);
    let (cert, key) = (site.path("a.crt"), site.path("a.key"));
    let certificate = ["--proxy-cert", cert.as_str(), "--proxy-key", key.as_str()];
    let by_name = |name: &str| {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--max-time",
            "1",
            "--noproxy",
            "*",
            "--resolve",
            &format!("{name}:{port}:127.0.0.1"),
        ]);
        let output =
            curl.arg(format!("https://{name}:{port}/")).output().expect("curl runs; apt-get install curl");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    // The server behind is no TLS server: silence shows that the hello went through.
    assert!(by_name("a.example.com").contains("timed out"), "{}", by_name("a.example.com"));
    assert!(by_name("nobody.example.com").contains("unrecognized name"), "{}", by_name("nobody.example.com"));
    let mut early = site.tunnel(&old, &certificate, "a");
    assert_eq!(site.status(&old, &[], "a"), 401);

    wait_until("the listeners are offered", || site.file("take-over.sock").exists());
    let mut new =
        Process::start(
            &[
                &[
                    "gateway",
                    "--manifests",
                    &site.path("manifests"),
                    "--admin-listen",
                    "off",
                    "--workers",
                    "1",
                ][..],
                &[
                    "--tunnel-tls-cert",
                    &site.path("gateway.crt"),
                    "--tunnel-tls-key",
                    &site.path("gateway.key"),
                ],
                &listen,
                &flags,
            ]
            .concat(),
        );
    old.process.wait_for("a successor has taken the listeners over");
    new.wait_for("listener=tunnel");
    ping(&mut early);
    let successor = Gateway { process: new, admin: 0, tunnel: port };
    let mut late = site.tunnel(&successor, &certificate, "a");
    ping(&mut late);
    for mut tunnel in [early, late] {
        tunnel.kill().unwrap();
        tunnel.wait().unwrap();
    }
    assert!(old.process.wait().success(), "{}", old.process.said());
}
