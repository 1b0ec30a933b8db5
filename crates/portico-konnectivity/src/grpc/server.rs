//! The server's side of a stream: from a request to its messages, or to a refusal.

use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, Response, StatusCode};
use portico_net::MemoryBudget;
use portico_tunnel::connection::Activity;

use super::error::{Error, Status};
use super::is_grpc;
use super::receiver::{Ends, Receiver};
use super::sender::Sender;

/// A call that has no answer yet.
#[derive(Debug)]
pub struct Call {
    path: Box<str>,
    metadata: HeaderMap,
    messages: RecvStream,
    respond: SendResponse<Bytes>,
}

impl Call {
    /// Takes a request. `None` if it is no gRPC, which is answered: 405 or 415.
    #[must_use]
    pub fn accept(request: http::Request<RecvStream>, mut respond: SendResponse<Bytes>) -> Option<Self> {
        let (head, messages) = request.into_parts();
        let refusal = if head.method != Method::POST {
            StatusCode::METHOD_NOT_ALLOWED
        } else if !is_grpc(head.headers.get(CONTENT_TYPE)) {
            StatusCode::UNSUPPORTED_MEDIA_TYPE
        } else {
            return Some(Self { path: head.uri.path().into(), metadata: head.headers, messages, respond });
        };
        let mut answer = Response::new(());
        *answer.status_mut() = refusal;
        // Fails only if the client is gone.
        let _ = respond.send_response(answer, true);
        None
    }

    /// The method that is called: `/Service/Method`.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The headers of the request, which are gone then.
    #[must_use]
    pub fn take_metadata(&mut self) -> HeaderMap {
        std::mem::take(&mut self.metadata)
    }

    /// Ready when the client has reset the call, or is gone, before there is an answer.
    pub async fn abandoned(&mut self) {
        // How it ended does not matter.
        let _ = poll_fn(|cx| self.respond.poll_reset(cx)).await;
    }

    /// Answers with this metadata, at once. Unfinished messages count in `memory`.
    pub fn start(
        mut self,
        metadata: HeaderMap,
        activity: &Arc<Activity>,
        memory: &[MemoryBudget],
    ) -> Result<(Sender, Receiver), Error> {
        let mut answer = Response::new(());
        *answer.headers_mut() = metadata;
        answer.headers_mut().insert(CONTENT_TYPE, super::CONTENT_TYPE);
        let stream = self.respond.send_response(answer, false)?;
        let receiver = Receiver::new(self.messages, Ends::Plainly, memory);
        Ok((Sender::new(stream, activity), receiver))
    }

    /// Answers with a status and nothing else.
    pub fn refuse(mut self, status: &Status) {
        let mut answer = Response::new(());
        answer.headers_mut().insert(CONTENT_TYPE, super::CONTENT_TYPE);
        status.write(answer.headers_mut());
        // Fails only if the client is gone.
        let _ = self.respond.send_response(answer, true);
    }
}
