//! A connection that has an HTTP/2 stream of its own, as with a server of ours. Flow control, half-close and
//! resets are those of HTTP/2. `portico-tunnel` carries the bytes.
//!
//! The agent opens the stream once it has dialled; that is the answer to the DIAL_REQ.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Reason, RecvStream, SendStream};
use http::uri::{Authority, Parts, PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode, Uri};
use portico_net::Side;
use portico_tunnel::connection::{Activity, Bridge, cause};
use portico_wire::konnectivity::DialId;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::record::Guard;
use crate::streams::{DIAL, STREAM_PATH};

/// How long the server may take to take the stream. It waits only until its frontend has taken its own
/// answer. That takes ten seconds for the write, and one more until it is read. The server is to be the one
/// that gives up.
const OPEN: Duration = Duration::from_secs(15);

/// Why there is no stream. The server may have abandoned the dial.
#[derive(Debug, Error)]
pub(super) enum OpenError {
    #[error("{}", cause(.0))]
    Http(#[from] h2::Error),
    #[error("the request cannot be made: {0}")]
    Request(#[from] http::Error),
    #[error("the server answered {0}")]
    Refused(StatusCode),
    #[error("the server did not answer within {OPEN:?}")]
    Slow,
}

impl OpenError {
    /// Whether the server has taken the stream and does not want it any more: its frontend has left.
    pub(super) fn is_abandoned(&self) -> bool {
        matches!(self, Self::Http(error) if error.is_remote() && error.reason() == Some(Reason::CANCEL))
    }
}

/// Opens the stream of a dial.
pub(super) async fn open(
    requests: SendRequest<Bytes>,
    authority: Authority,
    dial: DialId,
) -> Result<(SendStream<Bytes>, RecvStream), OpenError> {
    timeout(OPEN, request(requests, authority, dial)).await.map_err(|_| OpenError::Slow)?
}

async fn request(
    requests: SendRequest<Bytes>,
    authority: Authority,
    dial: DialId,
) -> Result<(SendStream<Bytes>, RecvStream), OpenError> {
    let mut parts = Parts::default();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(authority);
    parts.path_and_query = Some(PathAndQuery::from_static(STREAM_PATH));
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_parts(parts).map_err(http::Error::from)?;
    request.headers_mut().insert(HeaderName::from_static(DIAL), HeaderValue::from(dial.0));
    let mut requests = requests.ready().await?;
    let (answer, to_server) = requests.send_request(request, false)?;
    let answer = answer.await?;
    match answer.status() {
        StatusCode::OK => Ok((to_server, answer.into_body())),
        status => Err(OpenError::Refused(status)),
    }
}

/// Carries the bytes until the connection is over.
pub(super) async fn carry(
    activity: Arc<Activity>,
    stream: (SendStream<Bytes>, RecvStream),
    socket: TcpStream,
    record: Guard,
) {
    let bridge = Bridge::new(Side::Downstream, stream, socket, record, activity, None, None);
    bridge.answered().run().await;
}
