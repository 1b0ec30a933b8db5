//! `portico gateway` and the identities of its tunnel clients, as an operator meets them. Files that change,
//! what the log, `/readyz` and `/metrics` say, one port for everything, and a successor that takes it over.
//! Clients are curl and openssl.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::UNIX_EPOCH;

use crate::common::{Process, free_port, get, metric, wait_until};
use crate::proof::{authority, host};
use crate::secure::{SecureGateway, SecureSite};

impl SecureSite {
    fn proxy(&self, gateway: &SecureGateway, who: &[&str]) -> Command {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--max-time",
            "90",
            "--noproxy",
            "",
            "--proxytunnel",
            "--proxy-cacert",
            &self.pki.path("ca.crt"),
        ])
        .args(["--proxy", &format!("https://127.0.0.1:{}", gateway.tunnel)])
        .args(who);
        curl
    }

    /// The status of a CONNECT to cluster `name`.
    fn status(&self, gateway: &SecureGateway, who: &[&str], name: &str) -> u16 {
        let mut curl = self.proxy(gateway, who);
        // The API server of these tests sends back what it gets, which is no HTTP answer: curl ends at once,
        // and we were through.
        curl.args(["-o", "/dev/null", "-w", "%{http_connect}"]).arg(format!("http://{}/", authority(name)));
        let output = curl.stdin(Stdio::null()).output().expect("curl runs; apt-get install curl");
        String::from_utf8(output.stdout).unwrap().parse().unwrap()
    }

    /// A tunnel that stays, as curl's standard input and output.
    fn tunnel(&self, gateway: &SecureGateway, who: &[&str], name: &str) -> Child {
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

/// One line there and back.
fn ping(child: &mut Child) {
    use std::io::Write;
    child.stdin.as_mut().unwrap().write_all(b"ping\n").unwrap();
    let mut line = [0; 5];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
    assert_eq!(&line, b"ping\n");
}

/// A server that sends back each line it gets, for as long as the test runs.
fn echo_lines() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
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
    address
}

const SEPARATE: [&str; 4] = ["--sni-listen", "off", "--tunnel-listen", "127.0.0.1:0"];

#[test]
fn files_that_change_revoke_what_is_open_and_broken_ones_change_nothing() {
    let site = SecureSite::new();
    site.pki.revoke(&[]);
    site.pki.write("tokens", "secret-of-a,a\nsecret-of-b,b\n");
    let (ca, crl, tokens) = (site.pki.path("ca.crt"), site.pki.path("crl.pem"), site.pki.path("tokens"));
    let flags = ["--tunnel-client-ca", &ca, "--tunnel-client-crl", &crl, "--tunnel-tokens", &tokens];
    let mut gateway = site.gateway(&SEPARATE, &flags);
    let (cert, key) = (site.pki.path("a.crt"), site.pki.path("a.key"));
    let certificate = ["--proxy-cert", &cert, "--proxy-key", &key];
    let token = |token: &str| ["--proxy-header".to_owned(), format!("Proxy-Authorization: Bearer {token}")];
    let (token_a, token_b) = (token("secret-of-a"), token("secret-of-b"));
    let token_a: Vec<&str> = token_a.iter().map(String::as_str).collect();
    let token_b: Vec<&str> = token_b.iter().map(String::as_str).collect();
    assert_eq!(metric(gateway.admin, "portico_tunnel_open_to_anyone"), 0);
    let now = UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(metric(gateway.admin, "portico_tunnel_certificate_end_seconds") > now);
    assert_eq!(site.status(&gateway, &[], "a"), 401);
    assert_eq!(site.status(&gateway, &certificate, "b"), 403);
    gateway.process.wait_for("neither a client certificate nor a bearer token was shown");

    let mut by_certificate = site.tunnel(&gateway, &certificate, "a");
    let mut by_token = site.tunnel(&gateway, &token_a, "a");
    let mut other = site.tunnel(&gateway, &token_b, "b");

    site.pki.write("tokens", "secret-of-a\n");
    site.pki.write("crl.pem", "no list");
    let failed =
        |file: &str| metric(gateway.admin, &format!("portico_tunnel_files_failed{{file=\"{file}\"}}"));
    wait_until("the broken files are noticed", || failed("tokens") == 1 && failed("client_ca") == 1);
    let (status, text) = get(gateway.admin, "/readyz?verbose");
    assert_eq!(status, 200, "a broken file is no reason to send clients elsewhere");
    assert!(text.contains("tokens:1: there is no comma"), "{text}");
    assert!(text.contains("crl.pem: no X509 CRL"), "{text}");
    for tunnel in [&mut by_certificate, &mut by_token, &mut other] {
        ping(tunnel);
    }

    site.pki.revoke(&["a"]);
    site.pki.write("tokens", "secret-of-b,b\n");
    assert!(!by_certificate.wait().unwrap().success(), "it was reset");
    assert!(!by_token.wait().unwrap().success(), "it was reset");
    ping(&mut other);
    wait_until("the files are in force", || failed("tokens") == 0 && failed("client_ca") == 0);
    assert_eq!(site.status(&gateway, &certificate, "a"), 401);
    assert_eq!(site.status(&gateway, &token_a, "a"), 401);
    let ended = "portico_ended_connections_total{reason=\"revoked\",side=\"gateway\"}";
    wait_until("both are counted", || metric(gateway.admin, ended) == 2);
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn what_is_revoked_while_a_gateway_drains_is_cut() {
    let site = SecureSite::new();
    site.pki.write("tokens", "secret-of-a,a\nsecret-of-b,b\n");
    let mut gateway =
        site.gateway(&SEPARATE, &["--tunnel-tokens", &site.pki.path("tokens"), "--drain-timeout", "50s"]);
    let bearer = |token| format!("Proxy-Authorization: Bearer {token}");
    let mut revoked = site.tunnel(&gateway, &["--proxy-header", &bearer("secret-of-a")], "a");
    let mut other = site.tunnel(&gateway, &["--proxy-header", &bearer("secret-of-b")], "b");
    gateway.process.signal("TERM");
    gateway.process.wait_for("draining");
    site.pki.write("tokens", "secret-of-b,b\n");
    assert!(!revoked.wait().unwrap().success(), "it was reset");
    ping(&mut other);
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(gateway.process.wait().success());
}

#[test]
fn a_tunnel_that_is_open_to_anyone_says_so_in_the_log_and_in_a_metric() {
    let site = SecureSite::new();
    let gateway = site.gateway(&SEPARATE, &["--tunnel-plaintext"]);
    assert!(gateway.process.said().contains("the tunnel is open to anyone: with --tunnel-plaintext alone"));
    assert_eq!(metric(gateway.admin, "portico_tunnel_open_to_anyone"), 1);
    assert_eq!(metric(gateway.admin, "portico_tunnel_plaintext"), 1);
    gateway.process.signal("TERM");
    let gateway = site.gateway(&SEPARATE, &[]);
    assert!(gateway.process.said().contains("the tunnel is open to anyone: with --tunnel-tls-cert alone"));
    assert_eq!(metric(gateway.admin, "portico_tunnel_open_to_anyone"), 1);
    assert_eq!(metric(gateway.admin, "portico_tunnel_plaintext"), 0);
}

#[test]
fn one_port_serves_server_names_and_tunnels_and_a_successor_takes_it_over() {
    let site = SecureSite::without_clusters();
    site.put("a", echo_lines());
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let socket = site.pki.path("take-over.sock");
    let (state, ca) = (site.pki.path("state"), site.pki.path("ca.crt"));
    let listen = ["--sni-listen", &address, "--tunnel-listen", &address, "--take-over", &socket];
    let flags = ["--tunnel-client-ca", &ca, "--state-dir", &state, "--drain-timeout", "50s"];
    let mut old = site.gateway(&listen, &flags);
    assert_eq!(old.tunnel, port);
    let (cert, key) = (site.pki.path("a.crt"), site.pki.path("a.key"));
    let certificate = ["--proxy-cert", cert.as_str(), "--proxy-key", key.as_str()];
    let by_name = |name: &str, seconds: &str| {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--max-time",
            seconds,
            "--noproxy",
            "*",
            "--resolve",
            &format!("{name}:{port}:127.0.0.1"),
        ]);
        let output =
            curl.arg(format!("https://{name}:{port}/")).output().expect("curl runs; apt-get install curl");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    // The server behind is no TLS server and waits for a line: silence shows that the hello went through.
    let error = by_name(&host("a"), "1");
    assert!(error.contains("timed out"), "{error}");
    let error = by_name(&host("nobody"), "20");
    assert!(error.contains("unrecognized name"), "{error}");
    let mut early = site.tunnel(&old, &certificate, "a");
    assert_eq!(site.status(&old, &[], "a"), 401);

    wait_until("the listeners are offered", || site.pki.file("take-over.sock").exists());
    let mut new = Process::start(
        &[
            &[
                "gateway",
                "--manifests",
                &site.manifests.manifests(),
                "--admin-listen",
                "off",
                "--workers",
                "1",
            ][..],
            &[
                "--tunnel-tls-cert",
                &site.pki.path("gateway.crt"),
                "--tunnel-tls-key",
                &site.pki.path("gateway.key"),
            ],
            &listen,
            &flags,
        ]
        .concat(),
    );
    old.process.wait_for("a successor has taken the listeners over");
    new.wait_for("listener=tunnel");
    ping(&mut early);
    let successor = SecureGateway { process: new, admin: 0, tunnel: port };
    let mut late = site.tunnel(&successor, &certificate, "a");
    ping(&mut late);
    for mut tunnel in [early, late] {
        tunnel.kill().unwrap();
        tunnel.wait().unwrap();
    }
    assert!(old.process.wait().success(), "{}", old.process.said());
}
