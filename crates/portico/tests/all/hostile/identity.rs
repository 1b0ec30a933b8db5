//! What a wrong, half or made-up identity opens: nothing. And what broken files of identities cut: nothing.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;

use portico_lab::frames::{self, RawClient, kind};
use portico_lab::pki::{Authority, Certificate, Identity};
use rustls::ClientConfig;

use super::support::{agent_tls, beside_on, next_of};
use crate::common::{get, wait_until};
use crate::proof::{authority, manifest, report};
use crate::secure::{SecureGateway, SecureSite};

const LISTEN: [&str; 4] = ["--sni-listen", "off", "--tunnel-listen", "127.0.0.1:0"];

const UNAUTHENTICATED: &str = "portico_refusals_total{reason=\"unauthenticated\",side=\"downstream\"}";

/// TLS of a client with this certificate.
fn tls(site: &SecureSite, identity: &Identity) -> Arc<ClientConfig> {
    Arc::new(site.pki.authority().client_config(Some(identity), &[b"h2"]).unwrap())
}

/// A stream to cluster `name`; whether it was opened, and its connection.
fn open(
    gateway: &SecureGateway,
    tls: &Arc<ClientConfig>,
    name: &str,
    token: Option<&str>,
) -> (bool, RawClient) {
    let mut client = gateway.raw(tls);
    client.send(&frames::opening(&[])).unwrap();
    client.send(&frames::connect(1, &authority(name), token)).unwrap();
    let answer = next_of(&mut client, 1);
    assert_eq!(answer.kind, kind::HEADERS);
    // Status 200 is the eighth entry of the static table (RFC 7541 appendix A).
    (answer.payload.first() == Some(&0x88), client)
}

/// `clients` show made-up tokens of 7 KiB to clusters whose API servers hang: `requests` each, at once. They
/// have the certificate of a cluster, or none.
fn show_made_up_tokens(certificate: Option<&str>, clients: u32, requests: u32) {
    const CLUSTERS: u32 = 12;
    let site = SecureSite::new();
    // They take connections and say nothing.
    let hang: Vec<_> = (0..CLUSTERS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let mut annotation = "annotations:\n    portico.k8c.io/api-server-ca: |\n".to_owned();
    for line in site.pki.authority().cert().lines() {
        writeln!(annotation, "      {line}").unwrap();
    }
    for (number, listener) in hang.iter().enumerate() {
        let plain = manifest(&format!("h{number}"), None, listener.local_addr().unwrap());
        let name = format!("h{number}");
        site.manifests.put(&name, &plain.replacen("annotations:\n", &annotation, 1));
    }
    beside_on(&site, &["--tunnel-token-review"], |site, limited| {
        let (before, tls) = (limited.peak(), agent_tls(site, certificate));
        let limit = limited.gateway.metric("portico_limit{of=\"tunnel_reviews_waiting_bytes\"}");
        let mut connections = Vec::new();
        for client in 0..clients {
            let mut connection = limited.opened(&tls, &[]);
            let all = (0..requests).map(|number| {
                let token = format!("made-up-{client}-{number:-<7000}");
                let name = authority(&format!("h{}", (client + number) % CLUSTERS));
                frames::connect(2 * number + 1, &name, Some(&token))
            });
            connection.send(&all.collect::<Vec<_>>().concat()).unwrap();
            connections.push(connection);
            assert!(limited.gateway.metric("portico_tunnel_reviews_waiting_bytes") <= limit);
        }
        let refused = "portico_refusals_total{reason=\"max_reviews_waiting\",side=\"gateway\"}";
        wait_until("what does not fit is refused", || limited.gateway.metric(refused) > 0);
        let grown = limited.peak().saturating_sub(before) >> 20;
        report(format_args!("{grown} MiB more"));
        assert!(grown < 40, "{grown} MiB");
    });
}

#[test]
fn made_up_tokens_of_clients_without_a_certificate_wait_in_little_memory() {
    show_made_up_tokens(None, 200, 16);
}

#[test]
fn made_up_tokens_of_an_authenticated_client_wait_in_little_memory() {
    show_made_up_tokens(Some("a"), 5, 1_000);
}

#[test]
fn a_ca_of_one_cluster_and_an_identity_of_a_namespace_open_no_other() {
    let (site, of_a) = (SecureSite::new(), Authority::new("CA of a").unwrap());
    site.pki.write("a-ca.crt", &of_a.cert());
    let bound = format!("a={}", site.pki.path("a-ca.crt"));
    let any = site.pki.path("ca.crt");
    let gateway = site.gateway(&LISTEN, &["--tunnel-client-ca", &bound, "--tunnel-client-ca", &any]);
    let names = |organisation: &str| Certificate::client("agent").organisation(organisation);
    let own = tls(&site, &of_a.issue(Certificate::cluster("a")).unwrap());
    assert!(open(&gateway, &own, "a", None).0);
    for (ca, certificate) in [
        (&of_a, names("portico:cluster:b")),
        (&of_a, names("portico:namespace:b")),
        (&of_a, names("portico:cluster:a").uri("spiffe://d/cluster/b")),
        (site.pki.authority(), names("portico:namespace:b")),
        (site.pki.authority(), names("portico:namespace:cluster-b")),
        (site.pki.authority(), names("portico:cluster:namespace:b")),
        (site.pki.authority(), names("portico:cluster:cluster-b")),
    ] {
        let of_other = tls(&site, &ca.issue(certificate).unwrap());
        for cluster in ["a", "b"] {
            assert!(!open(&gateway, &of_other, cluster, None).0);
        }
    }
}

#[test]
fn a_list_of_revocations_that_is_older_cut_or_gone_pardons_nobody() {
    let site = SecureSite::new();
    let list = |number: u8, serials: &[&[u8]]| {
        let change =
            |list: &mut rcgen::CertificateRevocationListParams| list.crl_number = vec![number].into();
        site.pki.authority().revocations_with(serials, change).unwrap()
    };
    let pardons = list(1, &[]);
    site.pki.write("crl.pem", &[pardons.clone(), list(2, &[b"a"])].concat());
    let (ca, crl) = (site.pki.path("ca.crt"), site.pki.path("crl.pem"));
    let gateway = site.gateway(&LISTEN, &["--tunnel-client-ca", &ca, "--tunnel-client-crl", &crl]);
    let [revoked, good] = ["a", "b"].map(|name| agent_tls(&site, Some(name)));
    assert!(!open(&gateway, &revoked, "a", None).0, "the newest list counts");
    for (lists, why) in [
        (pardons.as_str(), "is older than the one in force"),
        (&pardons[..pardons.len() / 2], "crl.pem: no X509 CRL"),
        ("", "crl.pem: no X509 CRL"),
    ] {
        site.pki.write("crl.pem", lists);
        wait_until(why, || get(gateway.admin, "/readyz?verbose").1.contains(why));
        assert!(!open(&gateway, &revoked, "a", None).0, "{why}");
        assert!(open(&gateway, &good, "b", None).0, "{why}");
    }
}

#[test]
fn two_cas_of_one_name_are_told_apart_wherever_their_lists_are_shown() {
    let (site, namesake) = (SecureSite::new(), Authority::new("test CA").unwrap());
    let cas = [site.pki.authority(), &namesake];
    site.pki.write("namesake.crt", &namesake.cert());
    site.pki.write("cas.crt", &cas.map(Authority::cert).concat());
    site.pki.write("crl.pem", &cas.map(|ca| ca.revocations(&[]).unwrap()).concat());
    let (files, crl) = (site.pki.path("cas.crt"), site.pki.path("crl.pem"));
    let gateway = site.gateway(&LISTEN, &["--tunnel-client-ca", &files, "--tunnel-client-crl", &crl]);
    let (metrics, readiness) = (get(gateway.admin, "/metrics").1, get(gateway.admin, "/readyz?verbose").1);
    let mut seen = HashSet::new();
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').unwrap();
        assert!(seen.insert(series), "{series} twice");
    }
    for name in ["ca.crt", "namesake.crt"] {
        let key = format!(
            "openssl x509 -in {} -pubkey -noout | openssl pkey -pubin -outform DER | sha256sum",
            site.pki.path(name)
        );
        let output = Command::new("sh").args(["-c", &key]).output().unwrap();
        let key = String::from_utf8(output.stdout).unwrap()[..16].to_owned();
        let labels = format!("_next_update_seconds{{issuer=\"CN=test CA\",ca=\"{key}\"}} ");
        assert!(metrics.contains(&labels), "{labels} {metrics}");
        assert!(readiness.contains(&format!("of CN=test CA ({key}): in force")), "{key} {readiness}");
    }
}

#[test]
fn a_list_of_tokens_that_is_read_half_written_cuts_no_stream_and_opens_none() {
    let site = SecureSite::new();
    let text = "secret-of-a,a\nsecret-of-b,b\n";
    site.pki.write("tokens", text);
    let gateway = site.gateway(&LISTEN, &["--tunnel-tokens", &site.pki.path("tokens")]);
    let nobody = agent_tls(&site, None);
    let (opened, mut stays) = open(&gateway, &nobody, "b", Some("secret-of-b"));
    assert!(opened);
    // Each half for longer than the gateway takes to see it, and shorter than it waits.
    for end in [0, 7, 14, 20, 26, 27] {
        site.pki.write("tokens", &text[..end]);
        let before = gateway.metric(UNAUTHENTICATED);
        assert!(!open(&gateway, &nobody, "b", Some("secret-of")).0);
        assert_eq!(gateway.metric(UNAUTHENTICATED), before + 1);
        site.pki.write("tokens", text);
    }
    stays.send(&frames::frame(kind::DATA, 0, 1, b"ping")).unwrap();
    assert_eq!(next_of(&mut stays, 1).payload, b"ping");
    assert!(open(&gateway, &nobody, "b", Some("secret-of-b")).0);
}

#[test]
fn an_agent_shows_the_token_of_one_cluster_to_no_other() {
    let site = SecureSite::new();
    site.pki.write("token", "secret-of-a");
    let forwards = format!("1={},2={}", authority("a"), authority("b"));
    let output = Command::new(env!("CARGO_BIN_EXE_portico"))
        .args(["agent", "--gateway", "127.0.0.1:1", "--tls-ca", &site.pki.path("ca.crt")])
        .args(["--forward", &forwards, "--token-file", &site.pki.path("token")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("run an agent for each"), "{said}");
}
