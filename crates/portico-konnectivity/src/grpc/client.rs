//! The client's side of a stream.

use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use http::header::{CONTENT_TYPE, TE};
use http::uri::{Authority, Parts, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use portico_net::MemoryBudget;
use portico_tunnel::connection::Activity;

use super::error::{Error, Status};
use super::is_grpc;
use super::receiver::{Ends, Receiver};
use super::sender::Sender;

/// What is called.
#[derive(Debug, Clone)]
pub struct Request {
    /// The server, as its certificate names it.
    pub authority: Authority,
    /// The method: `/Service/Method`.
    pub path: &'static str,
    /// Headers beside those of gRPC itself.
    pub metadata: HeaderMap,
}

/// The answer to a call, which is to come.
#[derive(Debug)]
pub struct Answer {
    response: ResponseFuture,
    memory: Vec<MemoryBudget>,
}

/// Sends the head of a call over TLS. Unfinished messages of the answer count in `memory`.
pub async fn call(
    requests: &mut SendRequest<Bytes>,
    request: Request,
    activity: &Arc<Activity>,
    memory: &[MemoryBudget],
) -> Result<(Sender, Answer), Error> {
    let mut parts = Parts::default();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(request.authority);
    parts.path_and_query = Some(PathAndQuery::from_static(request.path));
    let uri = Uri::from_parts(parts).map_err(http::Error::from)?;
    let mut head = http::Request::new(());
    *head.method_mut() = Method::POST;
    *head.uri_mut() = uri;
    *head.headers_mut() = request.metadata;
    head.headers_mut().insert(CONTENT_TYPE, super::CONTENT_TYPE);
    head.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
    poll_fn(|cx| requests.poll_ready(cx)).await?;
    let (response, stream) = requests.send_request(head, false)?;
    Ok((Sender::new(stream, activity), Answer { response, memory: memory.to_vec() }))
}

impl Answer {
    /// Waits for the server's metadata. The caller bounds the time.
    pub async fn answered(self) -> Result<(HeaderMap, Receiver), Error> {
        let (head, messages) = self.response.await?.into_parts();
        if let Some(status) = Status::of(&head.headers).filter(|_| messages.is_end_stream()) {
            return Err(Error::Status(status));
        }
        let content_type = head.headers.get(CONTENT_TYPE);
        if head.status != StatusCode::OK || !is_grpc(content_type) {
            return Err(Error::NotGrpc { status: head.status, content_type: content_type.cloned() });
        }
        Ok((head.headers, Receiver::new(messages, Ends::WithStatus, &self.memory)))
    }
}
