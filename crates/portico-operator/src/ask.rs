//! One question to a pod of Portico or of a control plane, over HTTP without TLS: its ports of probes and of
//! administration. The server that answers may be anybody's by now, so the answer is short and comes soon.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use portico_kube::error::describe;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// For one answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks for `path`. The answer has `longest` bytes at most.
///
/// # Errors
/// Why there is no such answer, in a few words.
pub(crate) async fn get(
    address: SocketAddr,
    path: &str,
    longest: usize,
) -> Result<(StatusCode, Bytes), String> {
    let answer = async {
        let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| describe(&error))?;
        // Ended with this future.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let request = Request::get(path).header(HOST, "portico").body(Empty::<Bytes>::new());
        let request = request.map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(|error| describe(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), longest).collect().await;
        let body = body.map_err(|_| format!("the answer is broken or longer than {longest} bytes"))?;
        Ok((status, body.to_bytes()))
    };
    timeout(PATIENCE, answer).await.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")))
}
