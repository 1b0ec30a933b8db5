//! CONNECT under TLS: which clients are accepted, for which cluster, and which promises of TCP hold there.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use http::StatusCode;
use portico_tunnel::{End, Failure, Request, Settings, Side, Tls, TlsFiles};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CrlDistributionPoint,
    CrlIssuingDistributionPoint, CrlScope, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Of every client certificate.
const SERIAL: &[u8] = &[10, 11, 12];

/// One CA for both sides, and the files of the server.
struct Pki {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
    ca: CertificateDer<'static>,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // OpenSSL takes a certificate whose issuer has its own name for self-signed.
        params.distinguished_name.push(DnType::CommonName, "test CA");
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("ca.crt"), certificate.pem()).unwrap();
        let pki = Self { folder, ca: certificate.der().clone(), issuer: Issuer::new(params, key) };
        pki.renew_server();
        pki
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        Path::new(self.folder.path()).join(name)
    }

    fn renew_server(&self) {
        let mut params = CertificateParams::new(vec!["gateway.test".into(), "127.0.0.1".into()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file("tls.crt"), certificate.pem()).unwrap();
        fs::write(self.file("tls.key"), key.serialize_pem()).unwrap();
    }

    fn tls(&self, with_ca: bool) -> Arc<Tls> {
        let client_ca = with_ca.then(|| self.file("ca.crt"));
        let files = TlsFiles {
            certificate: self.file("tls.crt"),
            key: self.file("tls.key"),
            client_ca,
            client_crl: None,
        };
        Arc::new(Tls::load(files).unwrap())
    }

    /// What the CA has revoked, in PEM.
    fn revocations(&self, serials: &[&[u8]]) -> String {
        self.revocations_of(serials, None)
    }

    fn revocations_of(&self, serials: &[&[u8]], of: Option<CrlIssuingDistributionPoint>) -> String {
        let (then, later) = (rcgen::date_time_ymd(2020, 1, 1), rcgen::date_time_ymd(4000, 1, 1));
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: serial.to_vec().into(),
            revocation_time: then,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: then,
            next_update: later,
            crl_number: vec![1].into(),
            issuing_distribution_point: of,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }

    fn settings(&self, with_ca: bool) -> Settings {
        Settings { tls: Some(self.tls(with_ca)), ..Settings::default() }
    }

    fn client(&self, organisation: Option<&str>, alpn: &[&[u8]]) -> TlsConnector {
        self.client_with(organisation, alpn, |_| ())
    }

    /// A client whose certificate is not as it should be.
    fn client_with(
        &self,
        organisation: Option<&str>,
        alpn: &[&[u8]],
        change: impl FnOnce(&mut CertificateParams),
    ) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.clone()).unwrap();
        let builder =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots);
        let mut config = match organisation {
            None => builder.with_no_client_auth(),
            Some(organisation) => {
                let (certificate, key) = self.client_certificate_with(organisation, change);
                let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
                builder.with_client_auth_cert(vec![certificate.der().clone()], key).unwrap()
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }

    fn client_certificate(&self, organisation: &str) -> (rcgen::Certificate, KeyPair) {
        self.client_certificate_with(organisation, |_| ())
    }

    fn client_certificate_with(
        &self,
        organisation: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (rcgen::Certificate, KeyPair) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::OrganizationName, organisation);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = Some(SERIAL.to_vec().into());
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }
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
    let mut stream = connect(server, &pki.client(Some("portico:cluster:a"), alpn)).await.unwrap();
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
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
    assert_eq!(status(&server, &pki.client(Some("portico:cluster:a"), &[b"h2"])).await, StatusCode::OK);
    let requests = server.routes.requests.lock().unwrap();
    assert_eq!(proof(&requests[0]), Ok("a".to_owned()));
    assert!(requests[0].tls);
}

/// What the certificate of a request proves at this moment.
fn proof(request: &Request) -> Result<String, String> {
    let certificate = request.certificate.as_ref().expect("a certificate came");
    certificate
        .identity()
        .map(|identity| identity.cluster().to_owned())
        .map_err(|invalid| invalid.to_string())
}

#[tokio::test]
async fn what_a_certificate_lacks_is_a_sentence_and_no_alert() {
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
    let mut stranger = Pki::new();
    stranger.ca = pki.ca.clone();
    let a = Some("portico:cluster:a");
    let old = |params: &mut CertificateParams| params.not_after = rcgen::date_time_ymd(2001, 2, 3);
    let young = |params: &mut CertificateParams| params.not_before = rcgen::date_time_ymd(4000, 2, 3);
    let other = |params: &mut CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    };
    for (client, sentence) in [
        (pki.client_with(a, &[b"h2"], old), "the client certificate expired on 2001-02-03T00:00:00Z"),
        (
            pki.client_with(a, &[b"h2"], young),
            "the client certificate is not valid before 4000-02-03T00:00:00Z",
        ),
        (
            stranger.client(a, &[b"h2"]),
            "the client certificate was issued by CN=test CA, which is none of this gateway's client CAs",
        ),
        (
            pki.client_with(a, &[b"h2"], other),
            "the client certificate is not meant for TLS clients; it needs the extended key usage clientAuth",
        ),
        (
            pki.client(Some("system:masters"), &[b"h2"]),
            "the client certificate names no cluster; it needs organisation portico:cluster:NAME or URI \
             spiffe://DOMAIN/cluster/NAME",
        ),
    ] {
        assert_eq!(status(&server, &client).await, StatusCode::OK, "it is the handler's to decide");
        let requests = std::mem::take(&mut *server.routes.requests.lock().unwrap());
        assert_eq!(proof(&requests[0]), Err(sentence.to_owned()));
        drop(server.upstream().await);
    }
}

#[tokio::test]
async fn a_client_without_a_certificate_gets_as_far_as_its_request() {
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
    assert_eq!(status(&server, &pki.client(None, &[b"h2"])).await, StatusCode::OK);
    assert!(server.routes.requests.lock().unwrap()[0].certificate.is_none());
}

#[tokio::test]
async fn a_certificate_without_its_key_is_turned_away_by_tls() {
    let pki = Pki::new();
    let mut server = Server::start(pki.settings(true)).await;
    let (certificate, _) = pki.client_certificate("portico:cluster:a");
    let (_, other_key) = pki.client_certificate("portico:cluster:a");
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca.clone()).unwrap();
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(other_key.serialize_der()));
    let signer = provider.key_provider.load_private_key(key).unwrap();
    let pair = rustls::sign::CertifiedKey::new(vec![certificate.der().clone()], signer);
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
    let pki = Pki::new();
    fs::write(pki.file("crl.pem"), pki.revocations(&[])).unwrap();
    let files = TlsFiles {
        certificate: pki.file("tls.crt"),
        key: pki.file("tls.key"),
        client_ca: Some(pki.file("ca.crt")),
        client_crl: Some(pki.file("crl.pem")),
    };
    let tls = Arc::new(Tls::load(files).unwrap());
    let server = Server::start(Settings { tls: Some(Arc::clone(&tls)), ..Settings::default() }).await;
    let a = Some("portico:cluster:a");
    let soon = rcgen::date_time_ymd(2001, 2, 3);
    for client in [pki.client(a, &[b"h2"]), pki.client_with(a, &[b"h2"], |params| params.not_after = soon)] {
        assert_eq!(status(&server, &client).await, StatusCode::OK);
    }
    let requests = std::mem::take(&mut *server.routes.requests.lock().unwrap());
    let standing = || {
        let certificates = requests.iter().map(|request| request.certificate.as_ref().unwrap());
        certificates
            .map(|certificate| certificate.still_identifies("a").map_err(|why| why.to_string()))
            .collect::<Vec<_>>()
    };
    assert_eq!(standing(), [Ok(()), Ok(())], "one of them has expired, which cuts nothing");
    assert!(!tls.reload_trust().unwrap(), "nothing changed yet");

    fs::write(pki.file("crl.pem"), "").unwrap();
    assert!(tls.reload_trust().is_err(), "an empty file pardons nobody: it is an error");
    fs::write(pki.file("crl.pem"), pki.revocations(&[SERIAL])).unwrap();
    assert!(tls.reload_trust().unwrap());
    let told = "the client certificate with serial 0a:0b:0c of CN=test CA was revoked";
    let revoked = Err(told.to_owned());
    assert_eq!(standing(), [revoked.clone(), revoked.clone()]);
    assert_eq!(proof(&requests[0]), Err(told.to_owned()));

    fs::write(pki.file("crl.pem"), pki.revocations(&[])).unwrap();
    assert!(tls.reload_trust().unwrap());
    assert_eq!(standing(), [Ok(()), Ok(())]);
    let mut next = Pki::new();
    next.ca = pki.ca.clone();
    fs::copy(next.file("ca.crt"), pki.file("ca.crt")).unwrap();
    assert!(tls.reload_trust().unwrap());
    for standing in standing() {
        assert!(standing.unwrap_err().contains("issued by CN=test CA, which is none of"));
    }
}

#[test]
fn a_list_of_some_certificates_only_is_an_error() {
    let pki = Pki::new();
    let of_users = CrlIssuingDistributionPoint {
        distribution_point: CrlDistributionPoint { uris: vec!["http://ca.example.com/users.crl".into()] },
        scope: Some(CrlScope::UserCertsOnly),
    };
    fs::write(pki.file("crl.pem"), pki.revocations_of(&[SERIAL], Some(of_users))).unwrap();
    let files = TlsFiles {
        certificate: pki.file("tls.crt"),
        key: pki.file("tls.key"),
        client_ca: Some(pki.file("ca.crt")),
        client_crl: Some(pki.file("crl.pem")),
    };
    let error = Tls::load(files).unwrap_err().to_string();
    assert!(error.contains("the list of CN=test CA is not complete"), "{error}");
}

#[test]
fn a_list_of_a_ca_that_signs_no_clients_is_an_error_and_keeps_the_last_good_one() {
    let (pki, other) = (Pki::new(), Pki::new());
    let files = TlsFiles {
        certificate: pki.file("tls.crt"),
        key: pki.file("tls.key"),
        client_ca: Some(pki.file("ca.crt")),
        client_crl: Some(pki.file("crl.pem")),
    };
    // A CA of the same name with another key is another CA.
    let (good, foreign) = (pki.revocations(&[SERIAL]), other.revocations(&[]));
    fs::write(pki.file("crl.pem"), &foreign).unwrap();
    let told = Tls::load(files.clone()).unwrap_err().to_string();
    assert!(told.contains("the list of CN=test CA is signed by none of the client CAs"), "{told}");
    assert!(told.contains("--tunnel-client-ca"), "{told}");

    fs::write(pki.file("crl.pem"), &good).unwrap();
    let tls = Tls::load(files).unwrap();
    fs::write(pki.file("crl.pem"), &foreign).unwrap();
    assert!(tls.reload_trust().is_err());
    assert!(tls.reload_trust().is_err(), "as long as it lasts");
    let more = pki.revocations(&[SERIAL, &[4, 5, 6]]);
    fs::write(pki.file("crl.pem"), [foreign.clone(), more].concat()).unwrap();
    assert!(tls.reload_trust().unwrap(), "what is good is taken");
    assert!(tls.reload_trust().is_err(), "and the other complained about");
    assert!(tls.reload_trust().is_err(), "as long as it lasts");
    let both = [pki.file("ca.crt"), other.file("ca.crt")].map(|file| fs::read_to_string(file).unwrap());
    fs::write(pki.file("ca.crt"), both.concat()).unwrap();
    assert!(tls.reload_trust().unwrap(), "now it is one of theirs");

    fs::write(pki.file("ca.crt"), &both[0]).unwrap();
    assert!(tls.reload_trust().unwrap(), "a CA that was taken out is gone, whatever lists are left");
    assert!(tls.reload_trust().is_err(), "its list is complained about");
    fs::write(pki.file("crl.pem"), &good).unwrap();
    assert!(tls.reload_trust().unwrap());
    assert!(!tls.reload_trust().unwrap());
}

#[tokio::test]
async fn a_refresh_answers_no_content_and_opens_nothing() {
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
    let stream =
        connect(&server, &pki.client(Some("portico:cluster:a"), &[portico_tunnel::ALPN])).await.unwrap();
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
    let pki = Pki::new();
    let mut params = CertificateParams::new(vec!["Gateway.test".into(), "*.tunnel.test".into()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().unwrap();
    fs::write(pki.file("tls.crt"), params.signed_by(&key, &pki.issuer).unwrap().pem()).unwrap();
    fs::write(pki.file("tls.key"), key.serialize_pem()).unwrap();
    let tls = pki.tls(false);
    for own in ["gateway.test", "a.tunnel.test", "b.tunnel.test"] {
        assert!(tls.is_named(own), "{own}");
    }
    for other in ["tunnel.test", "a.b.tunnel.test", "test", "", "a.example.com"] {
        assert!(!tls.is_named(other), "{other}");
    }
}

#[tokio::test]
async fn without_a_ca_nobody_is_asked() {
    let pki = Pki::new();
    let server = Server::start(pki.settings(false)).await;
    assert_eq!(status(&server, &pki.client(None, &[b"h2"])).await, StatusCode::OK);
    assert!(server.routes.requests.lock().unwrap()[0].certificate.is_none());
}

#[tokio::test]
async fn without_alpn_the_first_bytes_inside_tell_the_protocol() {
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
    assert_eq!(status(&server, &pki.client(Some("portico:cluster:a"), &[])).await, StatusCode::OK);
    drop(server.upstream().await);
    http1_tunnel(&server, &pki, &[]).await;
}

#[tokio::test]
async fn a_renewed_certificate_is_used_without_cutting_a_stream() {
    let pki = Pki::new();
    let settings = pki.settings(true);
    let tls = settings.tls.clone().unwrap();
    let server = Server::start(settings).await;
    let connector = pki.client(Some("portico:cluster:a"), &[b"h2"]);
    let served = |stream: &TlsStream<TcpStream>| stream.get_ref().1.peer_certificates().unwrap()[0].clone();

    let stream = connect(&server, &connector).await.unwrap();
    let before = served(&stream);
    let mut client = Client::over(stream).await;
    let (mut ends, mut upstream) = server.tunnel_of(&mut client).await;
    assert!(!tls.reload_certificate().unwrap(), "nothing changed yet");

    let key = fs::read(pki.file("tls.key")).unwrap();
    pki.renew_server();
    let new_key = fs::read(pki.file("tls.key")).unwrap();
    fs::write(pki.file("tls.key"), key).unwrap();
    assert!(tls.reload_certificate().is_err(), "a certificate without its key is not used");
    assert_eq!(served(&connect(&server, &connector).await.unwrap()), before);

    fs::write(pki.file("tls.key"), new_key).unwrap();
    assert!(tls.reload_certificate().unwrap());
    assert_ne!(served(&connect(&server, &connector).await.unwrap()), before);
    upstream.write_all(b"still here").await.unwrap();
    assert_eq!(ends.read().await.unwrap(), "still here");
}

#[tokio::test]
async fn files_that_make_no_configuration_are_named() {
    let pki = Pki::new();
    let files = |certificate: &str, key: &str, ca: &str| TlsFiles {
        certificate: pki.file(certificate),
        key: pki.file(key),
        client_ca: Some(pki.file(ca)),
        client_crl: None,
    };
    fs::write(pki.file("empty"), "").unwrap();
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
    let pki = Pki::new();
    let mut server = Server::start(pki.settings(true)).await;
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
    let pki = Pki::new();
    let mut server = Server::start(pki.settings(true)).await;
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
    let pki = Pki::new();
    let mut server = Server::start(pki.settings(true)).await;
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
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
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
    let pki = Pki::new();
    let server = Server::start(pki.settings(true)).await;
    let (certificate, key) = pki.client_certificate("portico:cluster:a");
    fs::write(pki.file("client.crt"), certificate.pem()).unwrap();
    fs::write(pki.file("client.key"), key.serialize_pem()).unwrap();
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
