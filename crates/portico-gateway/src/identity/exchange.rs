//! One TokenReview (`authentication.k8s.io/v1`), posted to the API server of a cluster, authenticated by the very token it is about.
//!
//! So the gateway needs no credentials of any cluster, and who may come in is decided there: the token must be good, and whoever bears
//! it must be allowed to review tokens (`create` on `tokenreviews.authentication.k8s.io`, which is all it needs). Goes to a ready endpoint, by the way every connection goes.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use portico_api::api_server_ca::ApiServerCa;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::reviewed::Reviewer;
use crate::admission::proxy_header;
use crate::shared::Shared;

/// Longest answer read. A TokenReview with every group a person can be in has a few KiB.
const LONGEST_ANSWER: usize = 64 * 1024;

const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// What came of it.
#[derive(Debug)]
pub(super) enum Answer {
    /// The token is good, and its bearer may review tokens.
    Yes,
    /// It is not, or may not.
    No(Box<str>),
    /// Nobody could be asked, or the answer means nothing.
    Failed(Box<str>),
}

/// Asks. The caller bounds the time.
pub(super) async fn review(shared: &Shared, reviewer: &Reviewer, token: &str) -> Answer {
    match ask(shared, reviewer, token).await {
        Ok((status, body)) => judge(status, &body),
        Err(why) => Answer::Failed(why),
    }
}

async fn ask(shared: &Shared, reviewer: &Reviewer, token: &str) -> Result<(StatusCode, Bytes), Box<str>> {
    let failed =
        |what: &str, error: &dyn std::fmt::Display| -> Box<str> { format!("{what}: {error}").into() };
    let ca = reviewer.ca().ok_or("the annotation portico.k8c.io/api-server-ca is gone")?;
    let connector = TlsConnector::from(Arc::new(trusting(&ca).map_err(|error| failed("its CA", &error))?));
    let name =
        ServerName::try_from(reviewer.host().to_owned()).map_err(|error| failed("its name", &error))?;
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
        .header(HOST, reviewer.host())
        .header(AUTHORIZATION, authorization)
        .header(CONTENT_TYPE, "application/json")
        .header(ACCEPT, "application/json")
        .body(Full::new(Bytes::from(review.to_string())))
        .map_err(|error| failed("the request", &error))?;

    let (mut stream, _in_use) = reviewer
        .upstream
        .connect(shared.config.connect_timeout, || shared.now(), true)
        .await
        .map_err(|refusal| refusal.message())?;
    if reviewer.upstream.backend().send_proxy {
        greet(shared, &mut stream).await.map_err(|error| failed("PROXY header", &error))?;
    }
    let stream = connector.connect(name, stream).await.map_err(|error| failed("TLS", &error))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed("HTTP", &error))?;
    // Ended with this future.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let answer = sender.send_request(request).await.map_err(|error| failed("HTTP", &error))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LONGEST_ANSWER).collect().await;
    Ok((status, body.map_err(|error| failed("its answer", &error))?.to_bytes()))
}

/// An API server that expects a PROXY header gets one from this gateway as the client.
async fn greet(shared: &Shared, stream: &mut TcpStream) -> std::io::Result<()> {
    let header = proxy_header(stream.local_addr()?, stream.peer_addr()?, None, shared.next_id());
    stream.write_all(&header).await
}

fn trusting(ca: &ApiServerCa) -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for certificate in ca.certificates() {
        roots.add(certificate.clone())?;
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    // Each is made once: there is nothing to resume.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// The part of a TokenReview that says what came of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Reviewed {
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    authenticated: bool,
}

fn judge(status: StatusCode, body: &[u8]) -> Answer {
    match status {
        StatusCode::OK | StatusCode::CREATED => match serde_json::from_slice::<Reviewed>(body) {
            Ok(Reviewed { status: Status { authenticated: true } }) => Answer::Yes,
            Ok(_) => Answer::No("the API server of the cluster does not accept the token".into()),
            Err(_) => Answer::Failed("what the API server answered is no TokenReview".into()),
        },
        StatusCode::UNAUTHORIZED => {
            Answer::No("the API server of the cluster does not accept the token".into())
        }
        StatusCode::FORBIDDEN => Answer::No(
            "the token is good, but may not be reviewed: its service account needs the right to create tokenreviews.authentication.k8s.io, as the ClusterRole portico-agent of deploy/agent.yaml gives it"
                .into(),
        ),
        status => Answer::Failed(format!("the API server answered {status}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
