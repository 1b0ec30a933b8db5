//! TLS towards a gateway: what is accepted, what is not, and what the operator reads then.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

use std::net::SocketAddr;
use std::path::PathBuf;

use super::echo::Echo;
use portico_dial::{
    ClientTls, ClientTlsError, ClientTlsFiles, Dialer, HandshakeError, HandshakeProblem, ProxyFiles,
    ProxySetting, Socket, Target,
};
use portico_lab::pki::{Authority, Certificate, Identity, Pki};
use portico_net::ReadAhead;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio_rustls::client::TlsStream;

async fn socket(address: SocketAddr) -> Socket {
    let dialer = Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None).unwrap();
    let target = Target { host: address.ip().to_string().into(), port: address.port() };
    dialer.connect(&target, address).await.unwrap()
}

fn trusting(pki: &Pki) -> ClientTls {
    let ca = Some(pki.file("ca.crt"));
    ClientTls::load(ClientTlsFiles { ca, ..ClientTlsFiles::default() }).unwrap()
}

/// A gateway whose certificate another CA than the test's has issued.
fn gateway_of(authority: &Authority) -> Identity {
    authority.issue(Certificate::server(&["gateway.test"])).unwrap()
}

async fn connect(tls: &ClientTls, gateway: &Echo) -> Result<TlsStream<ReadAhead<Socket>>, HandshakeError> {
    tls.connect("gateway.test", socket(gateway.address).await).await
}

/// What the operator reads, without the port, which is another in each run.
async fn complaint(tls: &ClientTls, gateway: &Echo) -> String {
    let error = connect(tls, gateway).await.unwrap_err().to_string();
    error.replace(&gateway.address.to_string(), "GATEWAY")
}

#[tokio::test]
async fn our_own_protocol_is_preferred_and_a_server_without_alpn_is_accepted() {
    let pki = Pki::new();
    let tls = trusting(&pki);
    let identity = pki.issue("tls", Certificate::server(&["gateway.test", "127.0.0.1"]));
    for (served, agreed) in [
        (&[&b"h2"[..], b"portico-tunnel"][..], Some(&b"h2"[..])),
        (&[b"portico-tunnel", b"h2"], Some(b"portico-tunnel")),
        (&[], None),
    ] {
        let gateway = Echo::start(&identity, served).await;
        let stream = connect(&tls, &gateway).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), agreed);
        // By address, and by a name that ends where all names do.
        for name in ["127.0.0.1", "gateway.test."] {
            tls.connect(name, socket(gateway.address).await).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_named_with_its_issuer() {
    let pki = Pki::new();
    let gateway = Echo::start(&gateway_of(&Authority::new("wrong CA").unwrap()), &[b"h2"]).await;
    assert_eq!(
        complaint(&trusting(&pki), &gateway).await,
        format!(
            "TLS to GATEWAY: --tls-ca {} does not sign the certificate that came: its issuer is CN=wrong CA, \
             its subject \
             CN=gateway.test; give the CA that issued it, if it is the right one",
            pki.path("ca.crt")
        )
    );
}

#[tokio::test]
async fn a_certificate_for_other_names_is_refused_with_its_names() {
    let pki = Pki::new();
    let tls = trusting(&pki);
    let others = pki.issue("tls", Certificate::server(&["other.test", "*.example.com", "192.0.2.1"]));
    let gateway = Echo::start(&others, &[]).await;
    assert_eq!(
        complaint(&tls, &gateway).await,
        "TLS to GATEWAY: the certificate is not for gateway.test, but for other.test, *.example.com, \
         192.0.2.1"
    );
    let error = tls.connect("not a name", socket(gateway.address).await).await.unwrap_err();
    assert!(matches!(error.problem, HandshakeProblem::ServerName { .. }), "{error}");
}

#[tokio::test]
async fn a_certificate_out_of_its_time_says_which() {
    let pki = Pki::new();
    let tls = trusting(&pki);
    let server = Certificate::server(&["gateway.test"]);
    let expired = pki.issue("expired", server.clone().not_before(2000, 1, 1).not_after(2001, 2, 3));
    assert_eq!(
        complaint(&tls, &Echo::start(&expired, &[]).await).await,
        "TLS to GATEWAY: the certificate of CN=gateway.test expired on Sat, 03 Feb 2001 00:00:00 +0000, by \
         this machine's clock"
    );
    let early = pki.issue("early", server.not_before(2990, 1, 1));
    assert_eq!(
        complaint(&tls, &Echo::start(&early, &[]).await).await,
        "TLS to GATEWAY: the certificate of CN=gateway.test is not valid before Fri, 01 Jan 2990 00:00:00 \
         +0000, by this \
         machine's clock"
    );
}

#[tokio::test]
async fn a_gateway_without_tls_and_one_that_hangs_up_are_told_apart() {
    let tls = trusting(&Pki::new());
    for (answer, expected) in [
        (
            &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..],
            "what answers does not speak TLS; if this gateway serves no TLS, write h2c://",
        ),
        (b"", "the connection was closed during the handshake"),
        // handshake_failure.
        (
            b"\x15\x03\x03\x00\x02\x02\x28",
            "the other side ended the handshake: received fatal alert: HandshakeFailure",
        ),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            // Read first, for closing over unread bytes is a reset.
            stream.readable().await.unwrap();
            while matches!(stream.try_read(&mut [0; 4096]), Ok(1..)) {}
            stream.write_all(answer).await.unwrap();
        };
        let (result, ()) = tokio::join!(tls.connect("gateway.test", socket(address).await), server);
        let error = result.unwrap_err().to_string();
        assert_eq!(error, format!("TLS to {address}: {expected}"));
    }
}

#[tokio::test]
async fn a_new_ca_is_in_force_after_reload_and_a_broken_one_is_not() {
    let pki = Pki::new();
    let new = Authority::new("new CA").unwrap();
    let tls = trusting(&pki);
    let gateway = Echo::start(&gateway_of(&new), &[b"h2"]).await;
    assert!(connect(&tls, &gateway).await.is_err());
    assert!(!tls.reload().unwrap());
    // Both, as one does while a CA is replaced.
    pki.write("ca.crt", &(pki.authority().cert() + &new.cert()));
    assert!(tls.reload().unwrap());
    connect(&tls, &gateway).await.unwrap();
    for broken in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        pki.write("ca.crt", broken);
        assert!(tls.reload().is_err(), "{broken:?}");
        connect(&tls, &gateway).await.unwrap();
    }
}

#[test]
fn certificate_and_key_go_together() {
    let pki = Pki::new();
    pki.issue("tls", Certificate::server(&["a"]));
    pki.issue("other", Certificate::server(&["b"]));
    let [ca, certificate, key, other] =
        ["ca.crt", "tls.crt", "tls.key", "other.key"].map(|name| pki.file(name));
    let load = |certificate: Option<&PathBuf>, key: Option<&PathBuf>| {
        let (certificate, key) = (certificate.cloned(), key.cloned());
        ClientTls::load(ClientTlsFiles { ca: Some(ca.clone()), certificate, key })
    };
    assert!(load(Some(&certificate), Some(&key)).is_ok());
    assert!(load(None, None).is_ok());
    assert!(matches!(load(Some(&certificate), None), Err(ClientTlsError::Half)));
    assert!(matches!(load(None, Some(&key)), Err(ClientTlsError::Half)));
    assert!(matches!(load(Some(&certificate), Some(&other)), Err(ClientTlsError::Pair { .. })));
    let no_key = load(Some(&ca), Some(&certificate)).unwrap_err().to_string();
    assert!(no_key.contains("tls.crt: no private key"), "{no_key}");
}

#[test]
fn without_a_ca_file_the_systems_roots_count() {
    // scripts/setup build installs ca-certificates.
    ClientTls::load(ClientTlsFiles::default()).unwrap();
}
