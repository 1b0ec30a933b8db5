//! CONNECT over HTTP/1.1 (RFC 9110 section 9.3.6): after one request the connection is the tunnel.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::StatusCode;
use portico_net::{End, Meter, Side, linger};
use portico_wire::Parse;
use portico_wire::connect;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use super::caller::{Caller, read_more};
use super::failure::Failure;
use crate::handler::{BadRequest, Handler, Protocol, REASON, Refusal, Request, Upstream};
use crate::token::Token;

const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// How long a refused client may take to read the response and close.
const GOODBYE: Duration = Duration::from_secs(1);

/// Most refused clients that have this time at once. More get what fits into their sockets: a flood that is
/// turned away must not hold descriptors.
const MOST_GOODBYES: usize = 256;

static GOODBYES: Semaphore = Semaphore::const_new(MOST_GOODBYES);

/// Waits until a client has its response or GOAWAY.
pub(crate) async fn goodbye(parting: impl Future) {
    let permit = GOODBYES.try_acquire();
    let limit = if permit.is_ok() { GOODBYE } else { Duration::ZERO };
    // What fails, fails because the client is gone.
    let _ = timeout(limit, parting).await;
}

/// Most bytes of a refused client that are read and dropped. Closing with unread bytes would reset the
/// connection, and the client would lose the response.
const THROWN_AWAY: u64 = 64 * 1024;

/// A tunnel whose client has got its 200.
pub(crate) struct Opened<M> {
    /// What came together with the request.
    pub(crate) early: Bytes,
    pub(crate) upstream: Upstream<M>,
}

/// Reads the request, connects and responds. `None` if the client was refused.
pub(crate) async fn open<S, H>(
    stream: &mut S,
    bytes: BytesMut,
    caller: &Caller,
    deadline: Instant,
    handler: &Arc<H>,
) -> Result<Option<Opened<H::Meter>>, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Handler,
{
    let mut bytes = bytes;
    let head = match timeout_at(deadline, read_head(stream, &mut bytes, caller)).await {
        Ok(Err(HeadError::Gone(error))) => return Err(Failure::Http1(error)),
        Ok(Err(HeadError::Refused(bad_request))) => Err(bad_request),
        Err(_) => Err(BadRequest::TooSlow),
        Ok(Ok(request)) => Ok(request),
    };
    caller.established(&**handler);
    let bad_request = match head {
        Err(bad_request) => bad_request,
        Ok(request) => match connect_unless_evicted(handler, &request).await {
            Err(evicted) => {
                refuse(stream, &evicted, true).await;
                return Err(Failure::Evicted);
            }
            Ok(Err(refusal)) => {
                refuse(stream, &refusal, true).await;
                return Ok(None);
            }
            Ok(Ok(upstream)) => {
                if let Err(error) = answer(stream, ESTABLISHED).await {
                    client_left(upstream);
                    return Err(Failure::Http1(error));
                }
                return Ok(Some(Opened { early: bytes.freeze(), upstream }));
            }
        },
    };
    let status = handler.refused(&bad_request);
    refuse(stream, &Refusal::new(status, bad_request.reason()), may_have_content(&bytes)).await;
    Ok(None)
}

/// Ends what was connected for a client that has left before its response.
pub(crate) fn client_left<M: Meter>(upstream: Upstream<M>) {
    // A reset tells the upstream that nothing will come.
    linger::abort(&upstream.stream);
    upstream.meter.ended(End::Reset { by: Side::Downstream });
}

/// Connects. `Err` if the connection has to make room for others before that is done.
async fn connect_unless_evicted<H: Handler>(
    handler: &Arc<H>,
    request: &Request,
) -> Result<Result<Upstream<H::Meter>, Refusal>, Refusal> {
    // Boxed: a tunnel at rest does not keep the memory that connecting needs.
    let connect = Box::pin(handler.connect(request));
    tokio::select! {
        biased;
        outcome = connect => Ok(outcome),
        evicted = handler.evicted() => Err(evicted),
    }
}

/// Tells a client without TLS, whose `first` bytes were read, that it needs TLS.
pub(crate) async fn refuse_plaintext<S, H>(stream: &mut S, first: &[u8], handler: &H)
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Handler,
{
    let status = handler.plaintext_status();
    refuse(stream, &Refusal::new(status, "this listener serves TLS only"), may_have_content(first)).await;
}

enum HeadError {
    /// The client left, or its connection broke.
    Gone(io::Error),
    /// The request cannot be served.
    Refused(BadRequest),
}

/// Reads a request head. `bytes` holds the bytes read before, and afterwards those that came after the head.
async fn read_head<S: AsyncRead + Unpin>(
    stream: &mut S,
    bytes: &mut BytesMut,
    caller: &Caller,
) -> Result<Request, HeadError> {
    loop {
        match connect::parse(bytes) {
            Parse::NeedMore => {}
            Parse::Malformed(malformed) => {
                return Err(HeadError::Refused(BadRequest::Malformed(malformed.reason())));
            }
            Parse::Complete(head) if !head.is_connect() => {
                return Err(HeadError::Refused(BadRequest::Method));
            }
            Parse::Complete(head) => {
                let token = [head.authorization, head.proxy_authorization].into_iter().flatten();
                let token = token.filter_map(Token::from_header).next();
                let request = caller.request(head.target, token, Protocol::Http1);
                let len = head.len;
                bytes.advance(len);
                return Ok(Request { client_first: !bytes.is_empty(), ..request });
            }
        }
        match read_more(stream, bytes).await {
            Ok(0) => return Err(HeadError::Gone(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => {}
            Err(error) => return Err(HeadError::Gone(error)),
        }
    }
}

async fn answer<S: AsyncWrite + Unpin>(stream: &mut S, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

/// Whether the response to this request may have content. After HEAD it must not: the client reads none (RFC
/// 9110 section 9.3.2).
fn may_have_content(request: &[u8]) -> bool {
    !request.starts_with(b"HEAD ")
}

/// Responds with a status and, if it may have content, a sentence; then closes.
async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, refusal: &Refusal, with_content: bool) {
    let Refusal { status, reason } = refusal;
    let header = refusal.header();
    let header = header.to_str().unwrap_or_default();
    let more = match *status {
        StatusCode::METHOD_NOT_ALLOWED => "Allow: CONNECT\r\n",
        StatusCode::UNAUTHORIZED => "WWW-Authenticate: Bearer\r\n",
        _ => "",
    };
    let mut response = format!(
        "HTTP/1.1 {status}\r\n{more}{REASON}: {header}\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n",
        length = reason.len() + 1,
    );
    if with_content {
        response.push_str(reason);
        response.push('\n');
    }
    goodbye(async {
        answer(stream, response.as_bytes()).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(THROWN_AWAY), &mut tokio::io::sink()).await
    })
    .await;
}
