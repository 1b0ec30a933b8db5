//! One TokenReview (`authentication.k8s.io/v1`), posted over a connection to an API server.
//!
//! The token under review authenticates the request. So the gateway needs no credentials of any cluster, and
//! the cluster decides. The token must be valid, and its account must have the right to create
//! `tokenreviews`.

use std::error::Error;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use portico_api::api_server_ca::ApiServerCa;
use portico_api::text::printable;
use portico_dial::{provider, server_verifier};
use portico_net::{ReadAhead, ReadLimit};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// Longest body of a response that is read. A TokenReview with every group that an account can be in has a
/// few KiB.
const MAX_RESPONSE: usize = 32 * 1024;

/// Longest head of a response that is read.
const MAX_HEAD: usize = 16 * 1024;

/// Most bytes that are read for one review, TLS and interim responses included. hyper takes any number of
/// interim responses, and all that are there at one go. So few bytes keep a worker for a few milliseconds.
const MAX_READ: usize = 96 * 1024;

const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// The outcome of a review.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The token is valid, and its account may review tokens.
    Yes,
    /// It is not, or may not.
    No(Box<str>),
    /// The API server could not be asked, or its response is no TokenReview.
    Failed(Box<str>),
}

/// Reviews `token` over `stream`, a connection to the API server whose certificate `ca` signed for the name
/// `host`. The caller bounds the time.
pub(crate) async fn review(stream: TcpStream, ca: &ApiServerCa, host: &str, token: &str) -> Answer {
    match post(stream, ca, host, token).await {
        Ok((status, body)) => judge(status, &body),
        Err(why) => Answer::Failed(why),
    }
}

async fn post(
    stream: TcpStream,
    ca: &ApiServerCa,
    host: &str,
    token: &str,
) -> Result<(StatusCode, Bytes), Box<str>> {
    // Kept for each token. The words of an API server may be long, such as the names in its certificate.
    let failed = |what: &str, error: &dyn std::fmt::Display| -> Box<str> {
        printable(&format!("{what}: {error}")).into()
    };
    // hyper's own text lacks the cause.
    let of_http = |error: &(dyn Error + 'static)| match error.source() {
        Some(cause) => failed("HTTP", &cause),
        None => failed("HTTP", &error),
    };
    let connector = TlsConnector::from(Arc::new(trusting(ca).map_err(|error| failed("its CA", &error))?));
    let name = ServerName::try_from(host.to_owned()).map_err(|error| failed("its name", &error))?;
    let mut authorization = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| "the token has characters that no header carries")?;
    authorization.set_sensitive(true);
    let review = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    });
    let request = Request::builder()
        .method(Method::POST)
        .uri(PATH)
        .header(HOST, host)
        .header(AUTHORIZATION, authorization)
        .header(CONTENT_TYPE, "application/json")
        .header(ACCEPT, "application/json")
        .body(Full::new(Bytes::from(review.to_string())))
        .map_err(|error| failed("the request", &error))?;

    let stream = ReadAhead::limited(stream, &ReadLimit::new(MAX_READ));
    let stream = connector.connect(name, stream).await.map_err(|error| failed("TLS", &error))?;
    let handshake = http1::Builder::new().max_buf_size(MAX_HEAD).handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| of_http(&error))?;
    // Ended with this future.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let response = sender.send_request(request).await.map_err(|error| of_http(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_RESPONSE).collect().await;
    Ok((status, body.map_err(|error| of_http(&*error))?.to_bytes()))
}

fn trusting(ca: &ApiServerCa) -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for certificate in ca.certificates() {
        roots.add(certificate.clone())?;
    }
    let verifier = server_verifier(roots).map_err(|error| rustls::Error::General(error.to_string()))?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    // A connection carries one review: there is nothing to resume.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// The part of a TokenReview that decides.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenReview {
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    authenticated: bool,
}

fn judge(status: StatusCode, body: &[u8]) -> Answer {
    match status {
        StatusCode::OK | StatusCode::CREATED => match serde_json::from_slice::<TokenReview>(body) {
            Ok(TokenReview { status: Status { authenticated: true } }) => Answer::Yes,
            Ok(_) => Answer::No("the API server of the cluster does not accept the token".into()),
            Err(_) => Answer::Failed("what the API server answered is no TokenReview".into()),
        },
        StatusCode::UNAUTHORIZED => {
            Answer::No("the API server of the cluster does not accept the token".into())
        }
        StatusCode::FORBIDDEN => Answer::No(
            "the token is good, but may not be reviewed: its service account needs the right to create \
             tokenreviews.authentication.k8s.io, as the ClusterRole portico-agent of deploy/agent.yaml gives \
             it"
            .into(),
        ),
        status => Answer::Failed(format!("the API server answered {status}").into()),
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::pki::{Authority, Certificate};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    const YES: &str = r#"{"kind":"TokenReview","status":{"authenticated":true}}"#;

    /// The answer to a review by an API server that sends so many interim responses before its yes.
    async fn after_interim_responses(number: usize) -> Answer {
        let authority = Authority::new("test").unwrap();
        let identity = authority.issue(Certificate::server(&["api.test"])).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(identity.server_config(&[]).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = JoinSet::new();
        server.spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = acceptor.accept(stream).await.unwrap();
            let mut head = [0; 16];
            stream.read_exact(&mut head).await.unwrap();
            let interim = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(100);
            for _ in 0..number / 100 {
                stream.write_all(interim.as_bytes()).await?;
            }
            let length = YES.len();
            let yes = format!("HTTP/1.1 201 Created\r\nContent-Length: {length}\r\n\r\n{YES}");
            stream.write_all(yes.as_bytes()).await?;
            // The client ends the connection.
            stream.read_to_end(&mut Vec::new()).await
        });
        let ca = ApiServerCa::parse(&authority.cert()).unwrap();
        review(TcpStream::connect(address).await.unwrap(), &ca, "api.test", "secret").await
    }

    #[tokio::test]
    async fn an_api_server_that_sends_interim_responses_without_end_is_not_read_to_the_end() {
        assert_eq!(after_interim_responses(100).await, Answer::Yes);
        let failed = Answer::Failed("HTTP: the peer sends too much".into());
        assert_eq!(after_interim_responses(100_000).await, failed);
    }

    #[test]
    fn only_authenticated_true_is_a_yes() {
        let yes = br#"{"kind":"TokenReview","status":{"authenticated":true,"user":{"username":"x"}}}"#;
        assert!(matches!(judge(StatusCode::CREATED, yes), Answer::Yes));
        for no in [&br#"{"status":{"authenticated":false}}"#[..], br#"{"status":{"error":"expired"}}"#, b"{}"]
        {
            assert!(matches!(judge(StatusCode::CREATED, no), Answer::No(_)));
        }
        assert!(matches!(judge(StatusCode::UNAUTHORIZED, yes), Answer::No(_)));
        let Answer::No(why) = judge(StatusCode::FORBIDDEN, yes) else { panic!("403 is a no") };
        assert!(
            why.contains("tokenreviews.authentication.k8s.io"),
            "the log says which right is missing: {why}"
        );
        for failure in [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::TOO_MANY_REQUESTS, StatusCode::FOUND] {
            assert!(matches!(judge(failure, yes), Answer::Failed(_)));
        }
        assert!(matches!(judge(StatusCode::CREATED, b"<html>"), Answer::Failed(_)));
    }
}
