//! CONNECT under TLS: which clients are accepted, for which cluster, and which promises of TCP hold there.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use http::StatusCode;
use portico_api::names::Tenant;
use portico_lab::pki::{Authority, Certificate, Identity, Pki};
use portico_tunnel::{ClientCaFile, End, Failure, Request, Settings, Side, Tls, TlsFiles};
use rcgen::{
    CertificateRevocationListParams, CrlDistributionPoint, CrlIssuingDistributionPoint, CrlScope,
    date_time_ymd,
};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The serial number of every client certificate.
const SERIAL: &[u8] = &[10, 11, 12];

/// A CA for both sides, and the certificate of the server.
fn pki() -> Pki {
    let pki = Pki::new();
    renew_server(&pki);
    pki
}

fn renew_server(pki: &Pki) {
    pki.issue("tls", server_certificate());
}

fn server_certificate() -> Certificate {
    Certificate::server(&["gateway.test", "127.0.0.1"])
}

fn files(pki: &Pki) -> TlsFiles {
    TlsFiles {
        certificate: pki.file("tls.crt"),
        key: pki.file("tls.key"),
        client_ca: vec![pki.file("ca.crt").into()],
        client_crl: None,
    }
}

/// Together with `crl.pem`.
fn files_with_list(pki: &Pki) -> TlsFiles {
    TlsFiles { client_crl: Some(pki.file("crl.pem")), ..files(pki) }
}

fn settings(pki: &Pki) -> Settings {
    Settings { tls: Some(Arc::new(Tls::load(files(pki)).unwrap())), ..Settings::default() }
}

/// The settings of a server that asks for no certificate.
fn settings_without_ca(pki: &Pki) -> Settings {
    let files = TlsFiles { client_ca: Vec::new(), ..files(pki) };
    Settings { tls: Some(Arc::new(Tls::load(files).unwrap())), ..Settings::default() }
}

/// A client without a certificate.
fn stranger(pki: &Pki, alpn: &[&[u8]]) -> TlsConnector {
    TlsConnector::from(Arc::new(pki.client_config(None, alpn)))
}

/// A client of cluster a.
fn client(pki: &Pki, alpn: &[&[u8]]) -> TlsConnector {
    client_with(pki, Certificate::cluster("a"), alpn)
}

fn client_with(pki: &Pki, certificate: Certificate, alpn: &[&[u8]]) -> TlsConnector {
    pki.issue("client", certificate.serial(SERIAL));
    TlsConnector::from(Arc::new(pki.client_config(Some("client"), alpn)))
}

async fn connect(server: &Server, connector: &TlsConnector) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(server.address).await.unwrap();
    connector.connect(ServerName::try_from("gateway.test").unwrap(), stream).await
}

async fn status(server: &Server, connector: &TlsConnector) -> StatusCode {
    let mut client = Client::over(connect(server, connector).await.unwrap()).await;
    let (answer, _send) = client.connect(UPSTREAM).await;
    patiently(answer).await.unwrap().status()
}

/// Opens an HTTP/1.1 tunnel under TLS.
async fn http1_tunnel(server: &Server, pki: &Pki, alpn: &[&[u8]]) -> (TlsStream<TcpStream>, TcpStream) {
    let mut stream = connect(server, &client(pki, alpn)).await.unwrap();
    stream.write_all(format!("CONNECT {UPSTREAM} HTTP/1.1\r\n\r\nearly").as_bytes()).await.unwrap();
    let mut upstream = server.upstream().await;
    let mut early = [0; 5];
    patiently(upstream.read_exact(&mut early)).await.unwrap();
    assert_eq!(&early, b"early");
    let mut answer = [0; 39];
    patiently(stream.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer[..], b"HTTP/1.1 200 Connection established\r\n\r\n");
    (stream, upstream)
}

#[tokio::test]
async fn a_certificate_names_the_cluster_to_the_handler() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    assert_eq!(status(&server, &client(&pki, &[b"h2"])).await, StatusCode::OK);
    let requests = server.routes.requests.lock().unwrap();
    assert_eq!(identified(&requests[0]), Ok("a".to_owned()));
    assert!(requests[0].tls);
}

/// What the certificate of a request proves at this moment.
fn identified(request: &Request) -> Result<String, String> {
    let certificate = request.certificate.as_ref().expect("a certificate came");
    certificate.identity().map(|tenant| tenant.to_string()).map_err(|invalid| invalid.to_string())
}

#[tokio::test]
async fn a_handshake_holds_no_more_than_the_longest_chain() {
    let pki = pki();
    let patient = Settings { hello_timeout: Duration::from_secs(600), ..settings(&pki) };
    let mut server = Server::start(patient).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    // A hello of 65,000 bytes, in records of 4,000.
    let hello = [&[1, 0, 0xfd, 0xe8][..], &[0; 65_000]].concat();
    for part in hello.chunks(4_000) {
        let length = u16::try_from(part.len()).unwrap().to_be_bytes();
        // Fails once the server has closed.
        let _ = stream.write_all(&[&[22, 3, 1][..], &length, part].concat()).await;
    }
    let Err(Failure::Tls(error)) = server.result().await else { panic!("the handshake fails") };
    assert_eq!(error.to_string(), "the peer sends too much");
}

#[tokio::test]
async fn what_a_certificate_lacks_is_a_sentence_and_no_alert() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    let a = Certificate::cluster("a");
    let foreign = Authority::new("test CA").unwrap().issue(a.clone()).unwrap();
    let foreign = pki.authority().client_config(Some(&foreign), &[b"h2"]).unwrap();
    let server_only = Certificate::server(&["a.test"]).organisation("portico:cluster:a");
    for (client, sentence) in [
        (
            client_with(&pki, a.clone().not_after(2001, 2, 3), &[b"h2"]),
            "the client certificate expired on 2001-02-03T00:00:00Z",
        ),
        (
            client_with(&pki, a.not_before(4000, 2, 3), &[b"h2"]),
            "the client certificate is not valid before 4000-02-03T00:00:00Z",
        ),
        (
            TlsConnector::from(Arc::new(foreign)),
            "the client certificate was issued by CN=test CA, which is none of this gateway's client CAs",
        ),
        (
            client_with(&pki, server_only, &[b"h2"]),
            "the client certificate is not meant for TLS clients; it needs the extended key usage clientAuth",
        ),
        (
            client_with(&pki, Certificate::client("admin").organisation("system:masters"), &[b"h2"]),
            "the client certificate names no cluster; it needs organisation portico:cluster:NAME or URI \
             spiffe://DOMAIN/cluster/NAME",
        ),
    ] {
        assert_eq!(status(&server, &client).await, StatusCode::OK, "it is the handler's to decide");
        let requests = std::mem::take(&mut *server.routes.requests.lock().unwrap());
        assert_eq!(identified(&requests[0]), Err(sentence.to_owned()));
        drop(server.upstream().await);
    }
}

#[tokio::test]
async fn a_client_without_a_certificate_gets_as_far_as_its_request() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    assert_eq!(status(&server, &stranger(&pki, &[b"h2"])).await, StatusCode::OK);
    assert!(server.routes.requests.lock().unwrap()[0].certificate.is_none());
}

#[tokio::test]
async fn a_certificate_without_its_key_is_turned_away_by_tls() {
    let pki = pki();
    let mut server = Server::start(settings(&pki)).await;
    let [own, other] = ["own", "other"].map(|name| pki.issue(name, Certificate::cluster("a")));
    let mut roots = RootCertStore::empty();
    roots.add(pki.authority().identity().certificate().unwrap()).unwrap();
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let signer = provider.key_provider.load_private_key(other.private_key().unwrap()).unwrap();
    let pair = rustls::sign::CertifiedKey::new(vec![own.certificate().unwrap()], signer);
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(pair)));
    // TLS 1.3 clients believe they are in before the server has judged them.
    let _ = connect(&server, &TlsConnector::from(Arc::new(config))).await;
    assert!(matches!(server.result().await, Err(Failure::Untrusted(_))));
}

#[tokio::test]
async fn a_revocation_reaches_a_connection_that_is_open_and_expiry_does_not() {
    let pki = pki();
    let list = |serials: &[&[u8]]| pki.authority().revocations(serials).unwrap();
    pki.write("crl.pem", &list(&[]));
    let tls = Arc::new(Tls::load(files_with_list(&pki)).unwrap());
    let server = Server::start(Settings { tls: Some(Arc::clone(&tls)), ..Settings::default() }).await;
    let expired = Certificate::cluster("a").not_after(2001, 2, 3);
    for client in [client(&pki, &[b"h2"]), client_with(&pki, expired, &[b"h2"])] {
        assert_eq!(status(&server, &client).await, StatusCode::OK);
    }
    let requests = std::mem::take(&mut *server.routes.requests.lock().unwrap());
    let verdicts = || {
        let certificates = requests.iter().map(|request| request.certificate.as_ref().unwrap());
        certificates
            .map(|certificate| {
                certificate.still_identifies(&Tenant::of_text("a")).map_err(|why| why.to_string())
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(verdicts(), [Ok(()), Ok(())], "one of them has expired, which cuts nothing");
    assert!(!tls.reload_trust().unwrap(), "nothing changed yet");

    pki.write("crl.pem", "");
    assert!(tls.reload_trust().is_err(), "an empty file pardons nobody: it is an error");
    pki.write("crl.pem", &list(&[SERIAL]));
    assert!(tls.reload_trust().unwrap());
    let why = "the client certificate with serial 0a:0b:0c of CN=test CA was revoked";
    let revoked = Err(why.to_owned());
    assert_eq!(verdicts(), [revoked.clone(), revoked.clone()]);
    assert_eq!(identified(&requests[0]), Err(why.to_owned()));

    pki.write("crl.pem", &list(&[]));
    assert!(tls.reload_trust().unwrap());
    assert_eq!(verdicts(), [Ok(()), Ok(())]);
    pki.write("ca.crt", &Authority::new("test CA").unwrap().cert());
    assert!(tls.reload_trust().unwrap());
    for verdict in verdicts() {
        assert!(verdict.unwrap_err().contains("issued by CN=test CA, which is none of"));
    }
}

#[test]
fn a_list_of_some_certificates_only_is_an_error() {
    let pki = pki();
    let of_users = CrlIssuingDistributionPoint {
        distribution_point: CrlDistributionPoint { uris: vec!["http://ca.example.com/users.crl".into()] },
        scope: Some(CrlScope::UserCertsOnly),
    };
    let list = pki.authority().revocations_with(&[SERIAL], |list| {
        list.issuing_distribution_point = Some(of_users);
    });
    pki.write("crl.pem", &list.unwrap());
    let error = Tls::load(files_with_list(&pki)).unwrap_err().to_string();
    assert!(error.contains("the list of CN=test CA is not complete"), "{error}");
}

#[test]
fn a_list_of_a_ca_that_signs_no_clients_is_an_error_and_keeps_the_last_good_one() {
    // A CA of the same name with another key is another CA.
    let (pki, other) = (pki(), Authority::new("test CA").unwrap());
    let files = files_with_list(&pki);
    let good = pki.authority().revocations(&[SERIAL]).unwrap();
    let foreign = other.revocations(&[]).unwrap();
    pki.write("crl.pem", &foreign);
    let error = Tls::load(files.clone()).unwrap_err().to_string();
    assert!(error.contains("the list of CN=test CA is signed by none of the client CAs"), "{error}");
    assert!(error.contains("--tunnel-client-ca"), "{error}");

    pki.write("crl.pem", &good);
    let tls = Tls::load(files).unwrap();
    pki.write("crl.pem", &foreign);
    assert!(tls.reload_trust().is_err());
    assert!(tls.reload_trust().is_err(), "as long as it lasts");
    let more = pki.authority().revocations(&[SERIAL, &[4, 5, 6]]).unwrap();
    pki.write("crl.pem", &[foreign.clone(), more].concat());
    assert!(tls.reload_trust().unwrap(), "what is good is taken");
    assert!(tls.reload_trust().is_err(), "and the other complained about");
    assert!(tls.reload_trust().is_err(), "as long as it lasts");
    let both = [pki.authority().cert(), other.cert()];
    pki.write("ca.crt", &both.concat());
    assert!(tls.reload_trust().unwrap(), "now it is one of theirs");

    pki.write("ca.crt", &both[0]);
    assert!(tls.reload_trust().unwrap(), "a CA that was taken out is gone, whatever lists are left");
    assert!(tls.reload_trust().is_err(), "its list is complained about");
    pki.write("crl.pem", &good);
    assert!(tls.reload_trust().unwrap());
    assert!(!tls.reload_trust().unwrap());
}

/// A gateway with these CAs and lists, without a server: what it makes of a certificate.
struct Judge {
    tls: Arc<Tls>,
}

impl Judge {
    fn new(pki: &Pki, client_ca: Vec<ClientCaFile>) -> Self {
        Self { tls: Arc::new(Tls::load(TlsFiles { client_ca, ..files_with_list(pki) }).unwrap()) }
    }

    /// The tenant of this certificate, with what follows it in its PEM, or why there is none.
    async fn verdict(&self, pki: &Pki, identity: &Identity) -> Result<String, String> {
        let (server, connector) = self.start(pki, identity).await;
        assert_eq!(status(&server, &connector).await, StatusCode::OK);
        identified(&server.routes.requests.lock().unwrap()[0])
    }

    /// Whether the handshake of this certificate fails.
    async fn ends_handshake(&self, pki: &Pki, identity: &Identity) -> bool {
        let (server, connector) = self.start(pki, identity).await;
        // Under TLS 1.3 a client has its half done before the server judges.
        let mut stream = connect(&server, &connector).await.unwrap();
        patiently(stream.read_u8()).await.is_err_and(|error| error.kind() == ErrorKind::InvalidData)
    }

    /// A server, and TLS of a client with this certificate.
    async fn start(&self, pki: &Pki, identity: &Identity) -> (Server, TlsConnector) {
        let settings = Settings { tls: Some(Arc::clone(&self.tls)), ..Settings::default() };
        let server = Server::start(settings).await;
        let mut roots = RootCertStore::empty();
        roots.add(pki.authority().identity().certificate().unwrap()).unwrap();
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let builder = ClientConfig::builder_with_provider(Arc::new(provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let key = identity.private_key().unwrap();
        let mut client = builder.with_client_auth_cert(identity.chain().unwrap(), key).unwrap();
        client.alpn_protocols = vec![b"h2".to_vec()];
        (server, TlsConnector::from(Arc::new(client)))
    }
}

/// The list of a CA with this number, which has revoked these.
fn numbered(ca: &Authority, number: u8, serials: &[&[u8]]) -> String {
    ca.revocations_with(serials, |list| list.crl_number = vec![number].into()).unwrap()
}

#[tokio::test]
async fn the_newest_list_of_a_ca_counts_wherever_it_stands_in_the_file() {
    let pki = pki();
    let revoked = pki.authority().issue(Certificate::cluster("a").serial(SERIAL)).unwrap();
    let [pardons, revokes] = [(1, &[][..]), (2, &[SERIAL])].map(|(n, s)| numbered(pki.authority(), n, s));
    for lists in [[&*pardons, &revokes], [&revokes, &pardons]] {
        pki.write("crl.pem", &lists.concat());
        let verdict = Judge::new(&pki, files(&pki).client_ca).verdict(&pki, &revoked).await;
        assert!(verdict.unwrap_err().contains("was revoked"));
    }
}

#[tokio::test]
async fn a_serial_number_is_revoked_however_its_first_byte_is() {
    let pki = pki();
    for serial in [&[0x00, 5, 6][..], &[0x80, 5], &[0x00, 0x80, 5], &[0x7f, 5], &[0xff]] {
        pki.write("crl.pem", &numbered(pki.authority(), 1, &[serial]));
        let revoked = pki.authority().issue(Certificate::cluster("a").serial(serial)).unwrap();
        let verdict = Judge::new(&pki, files(&pki).client_ca).verdict(&pki, &revoked).await;
        assert!(verdict.is_err_and(|why| why.contains("was revoked")), "{serial:x?}");
    }
}

#[tokio::test]
async fn a_list_in_force_is_replaced_by_none_that_is_older_and_by_no_gap() {
    let (pki, other) = (pki(), Authority::new("other CA").unwrap());
    pki.write("other.crt", &other.cert());
    let revoked = pki.authority().issue(Certificate::cluster("a").serial(SERIAL)).unwrap();
    let of_other = numbered(&other, 1, &[]);
    pki.write("crl.pem", &[numbered(pki.authority(), 7, &[SERIAL]), of_other.clone()].concat());
    let judge = Judge::new(&pki, vec![pki.file("ca.crt").into(), pki.file("other.crt").into()]);
    let half_written = of_other.clone();
    let older = [numbered(pki.authority(), 6, &[]), of_other.clone()].concat();
    for (lists, why) in [
        (half_written, "the list of CN=test CA is gone"),
        (older, "the list of CN=test CA is older than the one in force"),
    ] {
        pki.write("crl.pem", &lists);
        for _ in 0..2 {
            let error = judge.tls.reload_trust().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("crl.pem"), "{error}");
        }
        assert!(judge.verdict(&pki, &revoked).await.unwrap_err().contains("was revoked"));
    }
    pki.write("crl.pem", &[numbered(pki.authority(), 8, &[]), of_other].concat());
    assert!(judge.tls.reload_trust().unwrap());
    assert_eq!(judge.verdict(&pki, &revoked).await.as_deref(), Ok("a"), "a newer list may pardon");
}

#[test]
fn of_each_ca_one_list_is_shown_also_where_two_have_one_name() {
    let (pki, namesake) = (pki(), Authority::new("test CA").unwrap());
    pki.write("namesake.crt", &namesake.cert());
    let until = |year, serials: &[&[u8]]| {
        let list = |list: &mut CertificateRevocationListParams| list.next_update = date_time_ymd(year, 1, 1);
        pki.authority().revocations_with(serials, list).unwrap()
    };
    let lists = [until(3002, &[]), until(3001, &[SERIAL]), until(3002, &[]), numbered(&namesake, 1, &[])];
    pki.write("crl.pem", &lists.concat());
    let judge = Judge::new(&pki, vec![pki.file("ca.crt").into(), pki.file("namesake.crt").into()]);
    let shown = judge.tls.revocation_lists();
    let keys: HashSet<_> = shown.iter().map(|list| &list.public_key).collect();
    let mut until: Vec<_> = shown.iter().map(|list| (&*list.issuer, list.next_update.to_string())).collect();
    until.sort_unstable();
    let expected = ["3001-01-01T00:00:00Z", "4000-01-01T00:00:00Z"];
    assert_eq!(
        until,
        expected.map(|time| ("CN=test CA", time.to_owned())),
        "of one age, the first to be late"
    );
    assert_eq!(keys.len(), 2);
}

#[tokio::test]
async fn a_list_of_the_root_revokes_an_intermediate_that_is_trusted_beside_it() {
    let pki = pki();
    let between = Certificate::authority("between").serial(SERIAL);
    let between = pki.authority().intermediate(between).unwrap();
    pki.write("between.crt", &between.cert());
    let leaf = between.issue(Certificate::cluster("a")).unwrap();
    let with_chain = Identity { cert: [leaf.cert.clone(), between.cert()].concat(), ..leaf.clone() };
    let cas = || vec![pki.file("ca.crt").into(), pki.file("between.crt").into()];
    pki.write("crl.pem", &numbered(pki.authority(), 1, &[]));
    assert_eq!(Judge::new(&pki, cas()).verdict(&pki, &leaf).await.as_deref(), Ok("a"));
    pki.write("crl.pem", &numbered(pki.authority(), 2, &[SERIAL]));
    let judge = Judge::new(&pki, cas());
    assert!(judge.verdict(&pki, &leaf).await.unwrap_err().contains("which is none of"));
    let revoked = "the client certificate with serial 0a:0b:0c of CN=test CA was revoked";
    assert_eq!(judge.verdict(&pki, &with_chain).await.unwrap_err(), revoked);
}

#[tokio::test]
async fn a_chain_with_more_than_five_cas_is_not_even_searched() {
    let pki = pki();
    let judge = Judge { tls: Arc::new(Tls::load(files(&pki)).unwrap()) };
    let (mut below, mut cas) = (None::<Authority>, String::new());
    for count in 1..=6 {
        let above = below.as_ref().unwrap_or(pki.authority());
        let ca = above.intermediate(Certificate::authority(&format!("CA {count}"))).unwrap();
        cas.insert_str(0, &ca.cert());
        let leaf = ca.issue(Certificate::cluster("a")).unwrap();
        let identity = Identity { cert: leaf.cert + &cas, key: leaf.key };
        if count <= 5 {
            assert_eq!(judge.verdict(&pki, &identity).await.as_deref(), Ok("a"), "{count}");
        } else {
            assert!(judge.ends_handshake(&pki, &identity).await);
        }
        below = Some(ca);
    }
}

#[tokio::test]
async fn a_chain_of_made_up_cas_of_one_name_is_not_even_searched() {
    let pki = pki();
    let judge = Judge { tls: Arc::new(Tls::load(files(&pki)).unwrap()) };
    let forged: Vec<_> = (0..5).map(|_| Authority::new("test CA").unwrap()).collect();
    let leaf = forged[0].issue(Certificate::cluster("a")).unwrap();
    let chain = |length| {
        let cas: String = forged[..length].iter().map(Authority::cert).collect();
        Identity { cert: leaf.cert.clone() + &cas, key: leaf.key.clone() }
    };
    assert!(judge.verdict(&pki, &chain(2)).await.unwrap_err().contains("which is none of"));
    for length in 3..=5 {
        assert!(judge.ends_handshake(&pki, &chain(length)).await, "{length}");
    }
}

#[test]
fn a_list_with_a_critical_extension_that_is_not_known_is_an_error() {
    let pki = pki();
    pki.write("ca.key", &pki.authority().identity().key);
    pki.write("index", "");
    pki.write(
        "openssl.cnf",
        "[ca]\ndefault_ca = d\n[d]\ndatabase = index\ndefault_md = sha256\ndefault_crl_days = 30\n\
         crl_extensions = x\n[x]\n1.2.3.4 = critical, ASN1:UTF8String:read me\n",
    );
    let output = std::process::Command::new("openssl")
        .args("ca -gencrl -config openssl.cnf -cert ca.crt -keyfile ca.key -out crl.pem".split(' '))
        .current_dir(pki.file("index").parent().unwrap())
        .output()
        .expect("openssl is installed (Debian package openssl)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let error = Tls::load(files_with_list(&pki)).unwrap_err().to_string();
    assert!(error.contains("the list of CN=test CA cannot be used: UnsupportedCriticalExtension"), "{error}");
}

#[tokio::test]
async fn a_ca_that_is_bound_names_its_own_tenants_only() {
    let (pki, bound) = (pki(), Authority::new("CA of a").unwrap());
    pki.write("crl.pem", &numbered(pki.authority(), 1, &[]));
    pki.write("bound.crt", &bound.cert());
    let bind = |tenant: &str| format!("{tenant}={}", pki.path("bound.crt")).parse().unwrap();
    let judge = Judge::new(&pki, vec![pki.file("ca.crt").into(), bind("a"), bind("dev-*")]);
    let issue = |ca: &Authority, tenant: &str| ca.issue(Certificate::cluster(tenant)).unwrap();
    for tenant in ["a", "dev-1", "b"] {
        let identity = issue(pki.authority(), tenant);
        assert_eq!(judge.verdict(&pki, &identity).await.as_deref(), Ok(tenant));
    }
    for tenant in ["a", "dev-1"] {
        assert_eq!(judge.verdict(&pki, &issue(&bound, tenant)).await.as_deref(), Ok(tenant));
    }
    let of_another = "the client certificate was issued by CN=CA of a, which may not name this cluster here";
    for tenant in ["b", "a-dev"] {
        assert_eq!(judge.verdict(&pki, &issue(&bound, tenant)).await.unwrap_err(), of_another, "{tenant}");
    }
    let of_namespace = bound.issue(Certificate::client("x").organisation("portico:namespace:a")).unwrap();
    assert_eq!(judge.verdict(&pki, &of_namespace).await.unwrap_err(), of_another);
    // A CA below it is bound as it is.
    let between = bound.intermediate(Certificate::authority("between")).unwrap();
    let below = issue(&between, "b");
    let below = Identity { cert: [below.cert, between.cert()].concat(), key: below.key };
    assert!(judge.verdict(&pki, &below).await.unwrap_err().contains("may not name this cluster"));
}

#[test]
fn a_ca_that_is_bound_in_one_file_and_not_in_another_is_an_error() {
    let pki = pki();
    pki.write("crl.pem", &numbered(pki.authority(), 1, &[]));
    pki.write("copy.crt", &pki.authority().cert());
    let bound = format!("a={}", pki.path("copy.crt")).parse().unwrap();
    let client_ca = vec![pki.file("ca.crt").into(), bound];
    let error = Tls::load(TlsFiles { client_ca, ..files_with_list(&pki) }).unwrap_err().to_string();
    assert!(error.contains("ca.crt") && error.contains("copy.crt, which is bound to a"), "{error}");
}

#[tokio::test]
async fn a_ca_that_is_taken_out_is_gone_although_another_file_cannot_be_used() {
    let pki = pki();
    let [stays, leaves] = ["stays", "leaves"].map(|name| Authority::new(name).unwrap());
    let both = [stays.cert(), leaves.cert()].concat();
    let client_ca = ["one.crt", "two.crt"].map(|name| pki.file(name).into()).into();
    pki.write("one.crt", &both);
    pki.write("two.crt", &pki.authority().cert());
    let tls = Arc::new(Tls::load(TlsFiles { client_ca, ..files(&pki) }).unwrap());
    let judge = Judge { tls: Arc::clone(&tls) };
    let agents = [&stays, &leaves, pki.authority()].map(|ca| ca.issue(Certificate::cluster("a")).unwrap());
    let accepted = async || {
        let mut accepted = Vec::new();
        for agent in &agents {
            accepted.push(judge.verdict(&pki, agent).await.is_ok());
        }
        accepted
    };
    for broken in [None, Some(""), Some("-----BEGIN CERTIFICATE-----\nhalf")] {
        assert_eq!(accepted().await, [true, true, true]);
        match broken {
            None => std::fs::remove_file(pki.file("two.crt")).unwrap(),
            Some(text) => drop(pki.write("two.crt", text)),
        }
        pki.write("one.crt", &stays.cert());
        assert!(tls.reload_trust().unwrap());
        assert_eq!(accepted().await, [true, false, true], "{broken:?}: the broken file is as it was");
        let error = tls.reload_trust().unwrap_err().to_string();
        assert!(error.contains("two.crt"), "{error}");
        pki.write("one.crt", &both);
        assert!(tls.reload_trust().is_err());
        assert_eq!(accepted().await, [true, false, true], "{broken:?}: nothing is added meanwhile");
        pki.write("two.crt", &pki.authority().cert());
        assert!(tls.reload_trust().unwrap());
    }
}

#[tokio::test]
async fn a_refresh_answers_no_content_and_opens_nothing() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    let stream = connect(&server, &client(&pki, &[portico_tunnel::ALPN])).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(portico_tunnel::ALPN));
    let mut client = Client::over(stream).await;
    let answer = client.refresh(UPSTREAM, Some("Bearer secret")).await;
    assert_eq!(answer.status(), StatusCode::NO_CONTENT);
    let answer = client.refresh("401.test:443", None).await;
    assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(answer.headers()["www-authenticate"], "Bearer");
    let verified = server.routes.verified.lock().unwrap();
    assert_eq!(&*verified[0].authority, UPSTREAM);
    assert_eq!(verified[0].token.as_ref().map(portico_tunnel::Token::secret), Some("secret"));
    assert!(server.routes.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn the_names_of_the_certificate_are_known() {
    let pki = pki();
    pki.issue("tls", Certificate::server(&["Gateway.test", "*.tunnel.test"]));
    let tls = Tls::load(TlsFiles { client_ca: Vec::new(), ..files(&pki) }).unwrap();
    for own in ["gateway.test", "a.tunnel.test", "b.tunnel.test"] {
        assert!(tls.is_named(own), "{own}");
    }
    for other in ["tunnel.test", "a.b.tunnel.test", "test", "", "a.example.com"] {
        assert!(!tls.is_named(other), "{other}");
    }
}

#[tokio::test]
async fn without_a_ca_nobody_is_asked() {
    let pki = pki();
    let server = Server::start(settings_without_ca(&pki)).await;
    assert_eq!(status(&server, &stranger(&pki, &[b"h2"])).await, StatusCode::OK);
    assert!(server.routes.requests.lock().unwrap()[0].certificate.is_none());
}

#[tokio::test]
async fn without_alpn_the_first_bytes_inside_tell_the_protocol() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    assert_eq!(status(&server, &client(&pki, &[])).await, StatusCode::OK);
    drop(server.upstream().await);
    http1_tunnel(&server, &pki, &[]).await;
}

#[tokio::test]
async fn a_renewed_certificate_is_used_without_cutting_a_stream() {
    let pki = pki();
    let settings = settings(&pki);
    let tls = settings.tls.clone().unwrap();
    let server = Server::start(settings).await;
    let connector = client(&pki, &[b"h2"]);
    let served = |stream: &TlsStream<TcpStream>| stream.get_ref().1.peer_certificates().unwrap()[0].clone();

    let stream = connect(&server, &connector).await.unwrap();
    let before = served(&stream);
    let mut client = Client::over(stream).await;
    let (mut ends, mut upstream) = server.tunnel_of(&mut client).await;
    assert!(!tls.reload_certificate().unwrap(), "nothing changed yet");

    let key = pki.read("tls.key");
    pki.issue("tls", server_certificate().not_after(2090, 1, 2));
    let new_key = pki.read("tls.key");
    pki.write("tls.key", &key);
    assert!(tls.reload_certificate().is_err(), "a certificate without its key is not used");
    let end = || tls.certificate_validity().map(|validity| *validity.end());
    let renewed = "2090-01-02T00:00:00Z".parse().ok();
    assert_ne!(end(), renewed);
    assert_eq!(served(&connect(&server, &connector).await.unwrap()), before);

    pki.write("tls.key", &new_key);
    assert!(tls.reload_certificate().unwrap());
    assert_eq!(end(), renewed);
    assert_ne!(served(&connect(&server, &connector).await.unwrap()), before);
    upstream.write_all(b"still here").await.unwrap();
    assert_eq!(ends.read().await.unwrap(), "still here");
}

#[tokio::test]
async fn files_that_make_no_configuration_are_named() {
    let pki = pki();
    let files = |certificate: &str, key: &str, ca: &str| TlsFiles {
        certificate: pki.file(certificate),
        key: pki.file(key),
        client_ca: vec![pki.file(ca).into()],
        client_crl: None,
    };
    pki.write("empty", "");
    for (files, culprit) in [
        (files("missing", "tls.key", "ca.crt"), "missing"),
        (files("empty", "tls.key", "ca.crt"), "empty"),
        (files("tls.crt", "empty", "ca.crt"), "empty"),
        (files("tls.crt", "tls.key", "empty"), "empty"),
        (files("ca.crt", "tls.key", "ca.crt"), "tls.key"),
    ] {
        let error = Tls::load(files).unwrap_err().to_string();
        assert!(error.contains(culprit), "{error}");
    }
}

#[tokio::test]
async fn http1_under_tls_half_closes_in_both_orders() {
    let pki = pki();
    let mut server = Server::start(settings(&pki)).await;
    for client_first in [true, false] {
        let (mut stream, mut upstream) = http1_tunnel(&server, &pki, &[b"http/1.1"]).await;
        let mut answer = Vec::new();
        if client_first {
            stream.write_all(b"question").await.unwrap();
            stream.shutdown().await.unwrap();
            assert_eq!(read_to_end(&mut upstream).await.0, b"question");
            upstream.write_all(b"answer").await.unwrap();
            drop(upstream);
            patiently(stream.read_to_end(&mut answer)).await.unwrap();
        } else {
            upstream.write_all(b"answer").await.unwrap();
            upstream.shutdown().await.unwrap();
            patiently(stream.read_to_end(&mut answer)).await.unwrap();
            stream.write_all(b"question").await.unwrap();
            stream.shutdown().await.unwrap();
            assert_eq!(read_to_end(&mut upstream).await.0, b"question");
        }
        assert_eq!(answer, b"answer");
        let first = if client_first { Side::Downstream } else { Side::Upstream };
        assert_eq!(server.report().await, Report { up: 13, down: 6, end: Some(End::Closed { first }) });
    }
}

#[tokio::test]
async fn http1_under_tls_passes_resets_on() {
    let pki = pki();
    let mut server = Server::start(settings(&pki)).await;
    let (mut stream, mut upstream) = http1_tunnel(&server, &pki, &[b"http/1.1"]).await;
    stream.write_all(b"last words").await.unwrap();
    stream.flush().await.unwrap();
    let mut words = [0; 10];
    patiently(upstream.read_exact(&mut words)).await.unwrap();
    stream.get_ref().0.set_zero_linger().unwrap();
    drop(stream);
    assert!(is_reset(&read_to_end(&mut upstream).await.1));
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));

    let (mut stream, mut upstream) = http1_tunnel(&server, &pki, &[b"http/1.1"]).await;
    upstream.write_all(b"last words").await.unwrap();
    patiently(stream.read_exact(&mut words)).await.unwrap();
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    let error = patiently(stream.read(&mut words)).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Upstream }));
}

#[tokio::test]
async fn http1_under_tls_sees_resets_while_the_other_side_is_blocked() {
    let pki = pki();
    let mut server = Server::start(settings(&pki)).await;
    let bytes = pattern(64 * 1024);

    let (mut stream, _upstream) = http1_tunnel(&server, &pki, &[b"http/1.1"]).await;
    let write = async { while stream.write_all(&bytes).await.is_ok() {} };
    assert!(
        tokio::time::timeout(std::time::Duration::from_secs(1), write).await.is_err(),
        "the upstream reads nothing"
    );
    stream.get_ref().0.set_zero_linger().unwrap();
    drop(stream);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));

    let (_stream, mut upstream) = http1_tunnel(&server, &pki, &[b"http/1.1"]).await;
    let write = async { while upstream.write_all(&bytes).await.is_ok() {} };
    assert!(
        tokio::time::timeout(std::time::Duration::from_secs(1), write).await.is_err(),
        "the client reads nothing"
    );
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Upstream }));
}

#[tokio::test]
async fn twenty_megabytes_arrive_unharmed_each_way_under_tls() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    let (stream, mut upstream) = http1_tunnel(&server, &pki, &[b"http/1.1"]).await;
    let bytes = pattern(20_000_000);
    let (mut from_server, mut to_server) = tokio::io::split(stream);
    let echo = async {
        let (mut from, mut to) = upstream.split();
        tokio::io::copy(&mut from, &mut to).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let write = async {
        to_server.write_all(&bytes).await.unwrap();
        to_server.shutdown().await.unwrap();
    };
    let mut echoed = Vec::new();
    let (_, (), read) = tokio::join!(echo, write, from_server.read_to_end(&mut echoed));
    read.unwrap();
    assert!(echoed == bytes, "{} of {} bytes", echoed.len(), bytes.len());
}

#[tokio::test]
async fn curl_comes_in_with_its_certificate() {
    let pki = pki();
    let server = Server::start(settings(&pki)).await;
    pki.issue("client", Certificate::cluster("a"));
    let mut curl = tokio::process::Command::new("curl");
    curl.args(["-sS", "--max-time", "20", "--noproxy", "", "--proxytunnel"])
        .args(["--proxy", &format!("https://{}", server.address), "--proxy-cacert"])
        .arg(pki.file("ca.crt"))
        .arg("--proxy-cert")
        .arg(pki.file("client.crt"))
        .arg("--proxy-key")
        .arg(pki.file("client.key"))
        .arg(format!("http://{UPSTREAM}/version"));
    let serve = async {
        let mut upstream = server.upstream().await;
        let mut request = vec![0; 1024];
        let _ = upstream.read(&mut request).await.unwrap();
        upstream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nv1")
            .await
            .unwrap();
    };
    let curl = async {
        let output = curl.output().await.expect("curl runs; apt-get install curl");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let (output, ()) = tokio::join!(curl, serve);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "v1");
}
