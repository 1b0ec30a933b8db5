//! TLS: what a certificate says about the path.

use std::sync::Arc;

use portico_dial::{Dialer, ProxyFiles, ProxySetting};
use portico_lab::Authority;
use portico_lab::pki::Certificate;
use portico_preflight::Observation;
use portico_preflight::check::tls::{Handshake, Server, Trust, check};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::{HERE, LIMITS};

/// Serves one certificate, and an answer with a date ten seconds before 2000.
async fn server(identity: &portico_lab::pki::Identity, alpn: &[&[u8]]) -> Server {
    let acceptor = TlsAcceptor::from(Arc::new(identity.server_config(alpn).unwrap()));
    let listener = TcpListener::bind((HERE, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            // Not every handshake is followed by a request.
            if matches!(stream.read(&mut [0; 1024]).await, Ok(1..)) {
                let head = b"HTTP/1.1 403 Forbidden\r\nDate: Fri, 31 Dec 1999 23:59:50 GMT\r\n\r\n";
                stream.write_all(head).await.unwrap();
            }
        }
    });
    Server {
        target: address.to_string().parse().unwrap(),
        name: "api.example.com".into(),
        trust: Trust::Any,
        alpn: vec!["http/1.1".into()],
    }
}

fn trusting(authority: &Authority) -> Trust {
    let mut roots = rustls::RootCertStore::empty();
    let identity = authority.identity();
    roots.add(identity.certificate().unwrap()).unwrap();
    Trust::Roots(Arc::new(roots))
}

async fn shake(server: &Server) -> Handshake {
    let dialer = Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None).unwrap();
    check(&dialer, server, LIMITS).await
}

#[tokio::test]
async fn a_session_shows_chain_names_protocol_and_the_servers_clock() {
    let authority = Authority::new("company CA").unwrap();
    let identity = authority.server("api", &["api.example.com", "192.0.2.1"]).unwrap();
    let server = Server { trust: trusting(&authority), ..server(&identity, &[b"http/1.1"]).await };
    let handshake = shake(&server).await;
    let Observation::Tls(session) = handshake.seen else { panic!("{handshake:?}") };
    assert_eq!(&*session.issuer, "CN=company CA");
    assert_eq!(session.chain, ["CN=api".into()]);
    assert_eq!(session.names, ["api.example.com".into(), "192.0.2.1".into()]);
    assert_eq!((session.alpn.as_deref(), &*session.version), (Some("http/1.1"), "TLSv1_3"));
    assert!(handshake.ahead_millis.unwrap() < -86_400_000, "{:?}", handshake.ahead_millis);
}

#[tokio::test]
async fn a_certificate_of_another_authority_is_interception_and_names_it() {
    let (company, proxy) = (Authority::new("company CA").unwrap(), Authority::new("proxy CA").unwrap());
    let identity = proxy.server("api", &["api.example.com"]).unwrap();
    let server = Server { trust: trusting(&company), ..server(&identity, &[]).await };
    let handshake = shake(&server).await;
    assert_eq!(handshake.seen.to_string(), "intercepted: certificate issued by CN=proxy CA");
    // Where the CA is private and nobody has named it, the chain is shown and not judged.
    let handshake = shake(&Server { trust: Trust::Any, ..server }).await;
    assert!(matches!(handshake.seen, Observation::Tls(_)), "{handshake:?}");
}

#[tokio::test]
async fn a_certificate_that_is_expired_or_for_another_name_is_wrong_and_no_interception() {
    let authority = Authority::new("company CA").unwrap();
    for certificate in [
        Certificate::server(&["other.example.com"]),
        Certificate::server(&["api.example.com"]).not_after(2001, 1, 1),
    ] {
        let identity = authority.issue(certificate).unwrap();
        let server = Server { trust: trusting(&authority), ..server(&identity, &[]).await };
        let handshake = shake(&server).await;
        assert!(matches!(handshake.seen, Observation::WrongCertificate { .. }), "{handshake:?}");
    }
}

#[tokio::test]
async fn a_server_without_a_protocol_in_common_or_without_tls_says_so() {
    let authority = Authority::new("company CA").unwrap();
    let identity = authority.server("api", &["api.example.com"]).unwrap();
    let handshake = shake(&server(&identity, &[b"h2"]).await).await;
    assert!(matches!(handshake.seen, Observation::NoTls { .. }), "{handshake:?}");

    let listener = TcpListener::bind((HERE, 0)).await.unwrap();
    let target = listener.local_addr().unwrap().to_string().parse().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"220 mail.example.com ESMTP\r\n").await.unwrap();
        stream.read_u8().await.unwrap();
    });
    let plain = Server { target, ..server(&identity, &[]).await };
    let handshake = shake(&plain).await;
    assert_eq!(handshake.seen, Observation::NoTls { why: "what answers does not speak TLS".into() });
}

#[tokio::test]
async fn a_proxy_that_is_not_there_is_named() {
    let authority = Authority::new("company CA").unwrap();
    let identity = authority.server("api", &["api.example.com"]).unwrap();
    let server = server(&identity, &[]).await;
    let proxy = format!("http://127.0.0.1:{}", crate::free_tcp()).parse().unwrap();
    let dialer = Dialer::with_environment(proxy, ProxyFiles::default(), |_| None).unwrap();
    let handshake = check(&dialer, &server, LIMITS).await;
    assert!(
        matches!(&handshake.seen, Observation::Proxy { proxy, .. } if proxy.starts_with("http://127.")),
        "{handshake:?}"
    );
}
