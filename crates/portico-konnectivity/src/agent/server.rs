//! From the address of a server to a [`Session`]: TCP, TLS, HTTP/2, and the head of its answer to Connect.
//!
//! [`Driver`] polls the HTTP/2 connection from then on. A server that falls silent is given up. A server of
//! ours is sent PING every few seconds. Another one is sent PING as `--keepalive-time` says, because it
//! answers frequent PINGs with GOAWAY. For that one the dialler's TCP keep-alive is faster.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, Connection};
use h2::{PingPong, Reason};
use http::uri::{Authority, InvalidUri};
use http::{HeaderMap, HeaderValue, header};
use portico_dial::{DialError, HandshakeError, HandshakeProblem, Socket, Target};
use portico_net::ReadAhead;
use portico_tunnel::connection::{
    Activity, Batched, FRAME_SIZE, HEADER_LIST, Inbound, KeepAlive, SEND_BUFFER, Turn, batched, cause,
    connection_window,
};
use portico_wire::konnectivity::{CONNECT_PATH, Code};
use rustls::AlertDescription::InternalError;
use rustls::Error::AlertReceived;
use thiserror::Error;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use super::session::{Connected, Ended, Session};
use super::shared::Shared;
use crate::grpc::{self, Receiver, Sender};
use crate::streams::{LONGEST_NAME, OFFER, VERSION};

/// ALPN of gRPC.
const H2: &[u8] = b"h2";

/// Streams of one connection whose windows all may be full.
const STREAMS: u32 = 1_000;

/// Window of the Connect stream with an upstream server: 40 Mbit/s at 50 ms. It holds eight messages, each of
/// which may wait for its endpoint.
const SHARED_WINDOW: u32 = 256 * 1024;

/// The smallest window of a stream. The stream that all connections share has it until the server has shown
/// that it is one of upstream's.
const LEAST_WINDOW: usize = 1 << 20;

/// PING to a server of ours, and the wait for its answer: a silent one is found within three times as long.
const PING: Duration = Duration::from_secs(3);

/// The least time between two PINGs to another one, and the wait for the answer: grpc-go's.
const UPSTREAM_PING: Duration = Duration::from_secs(10);
const UPSTREAM_PING_TIMEOUT: Duration = Duration::from_secs(20);

type Tls = TlsStream<ReadAhead<Socket>>;

/// Why there is no session. Another attempt may succeed.
#[derive(Debug, Error)]
pub(super) enum JoinError {
    /// No connection.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// No TLS.
    #[error(transparent)]
    Tls(#[from] Box<HandshakeError>),
    /// TLS, and nothing that speaks gRPC.
    #[error(
        "the server at {0} does not choose h2 by ALPN; it must be the agent port of a Konnectivity server"
    )]
    Alpn(SocketAddr),
    /// The host and port of a server cannot stand in a request.
    #[error("the server's address cannot be used in a request: {0}")]
    Authority(#[from] InvalidUri),
    /// HTTP/2 failed.
    #[error("HTTP/2 with the server at {0} failed: {why}", why = cause(.1))]
    Http(SocketAddr, #[source] h2::Error),
    /// The server refused the stream: our token, or our id.
    #[error("the server at {0} refused us: {1}")]
    Refused(SocketAddr, #[source] grpc::Error),
    /// The answer lacks what an agent must know, or has what no server of Konnectivity says.
    #[error("the server at {0} says no {1} that can be used in its answer; it must be a Konnectivity server")]
    Header(SocketAddr, &'static str),
    /// It took too long.
    #[error("the server at {0} did not answer within {1:?}")]
    Slow(SocketAddr, Duration),
}

impl JoinError {
    /// Whether there is no server, or none that is able to serve. Anything else needs an operator.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::Dial(error) => matches!(
                error,
                DialError::Tcp { .. }
                    | DialError::ProxyTooSlow { .. }
                    | DialError::ProxyGone { .. }
                    | DialError::CannotReach { .. }
            ),
            Self::Tls(error) => match error.problem {
                // A load balancer without a server behind it hangs up.
                HandshakeProblem::Closed | HandshakeProblem::Io(_) => true,
                // The gateway says so.
                HandshakeProblem::Alert(ref alert) => *alert == AlertReceived(InternalError),
                _ => false,
            },
            Self::Http(_, error) | Self::Refused(_, grpc::Error::Http(error)) => !is_alert(error),
            // The server cannot have our token reviewed: its API server is not there yet.
            Self::Refused(_, grpc::Error::Status(status)) => status.code == Code::UNAVAILABLE,
            Self::Slow(..) => true,
            Self::Alpn(_) | Self::Authority(_) | Self::Refused(..) | Self::Header(..) => false,
        }
    }
}

/// Whether the server's TLS ended the connection: by TLS 1.3 it judges our certificate after the handshake.
fn is_alert(error: &h2::Error) -> bool {
    let source = error.get_io().and_then(|error| error.get_ref());
    source.is_some_and(|source| matches!(source.downcast_ref(), Some(AlertReceived(_))))
}

/// A server that has answered.
pub(super) struct Joined {
    pub(super) session: Arc<Session>,
    /// How many servers there are, as it reports.
    pub(super) count: u32,
    driver: Driver,
    keep_alive: KeepAlive,
    silence: Duration,
    sender: Sender,
    receiver: Receiver,
}

/// Connects to one address of a server.
pub(super) async fn join(
    shared: &Arc<Shared>,
    target: &Target,
    address: SocketAddr,
) -> Result<Joined, JoinError> {
    let limit = shared.settings.hello_timeout;
    let joined = timeout(limit, hello(shared, target, address)).await;
    joined.unwrap_or(Err(JoinError::Slow(address, limit)))
}

async fn hello(shared: &Arc<Shared>, target: &Target, address: SocketAddr) -> Result<Joined, JoinError> {
    let settings = &shared.settings;
    let authority: Authority = target.to_string().parse()?;
    let socket = settings.to_servers.connect(target, address).await?;
    let stream = settings.tls.connect(&target.host, socket).await.map_err(Box::new)?;
    if stream.get_ref().1.alpn_protocol() != Some(H2) {
        return Err(JoinError::Alpn(address));
    }
    // One server may have all connections of its cluster.
    let activity = Arc::new(Activity::within(&settings.memory, settings.memory.limit()));
    let (stream, turn) = batched(stream, Inbound::trusted(), &activity);
    let broken = |error| JoinError::Http(address, error);
    let window = u32::try_from(settings.connection_buffer.max(LEAST_WINDOW)).unwrap_or(u32::MAX);
    let handshake = builder(window).handshake::<_, Bytes>(stream);
    let (mut requests, mut connection) = handshake.await.map_err(broken)?;
    let pings = connection.ping_pong();
    let mut driver = Driver { connection, turn };
    let request =
        grpc::Request { authority: authority.clone(), path: CONNECT_PATH, metadata: metadata(shared) };
    let memory = [settings.memory.clone()];
    let answered = async {
        let (sender, answer) = grpc::call(&mut requests, request, &activity, &memory).await?;
        let (metadata, receiver) = answer.answered().await?;
        Ok((sender, metadata, receiver))
    };
    let answered = driver.until(answered).await.map_err(broken)?;
    let (sender, metadata, receiver) = answered.map_err(|error| JoinError::Refused(address, error))?;
    let server = text(&metadata, "serverid").ok_or(JoinError::Header(address, "serverid"))?;
    let count = text(&metadata, "servercount").and_then(|count| count.parse().ok());
    let count = count.ok_or(JoinError::Header(address, "servercount"))?;
    let has_streams = text(&metadata, OFFER) == Some(VERSION);
    if !has_streams {
        // All connections share the one stream: what is under way there for an endpoint that reads slowly is
        // before all else.
        // Refused only while our first SETTINGS are not acknowledged; then it stays as large.
        let _ = driver.connection.set_initial_window_size(SHARED_WINDOW);
    }
    let server = server.into();
    let (keep_alive, silence) = keep_alive(pings, has_streams, settings.keepalive_time);
    let connected = Connected { server, address, authority, requests, activity, has_streams };
    let session = Arc::new(Session::new(shared, connected));
    Ok(Joined { session, count, driver, keep_alive, silence, sender, receiver })
}

fn builder(window: u32) -> Builder {
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(window)
        .initial_connection_window_size(connection_window(STREAMS, window))
        .initial_max_send_streams(STREAMS as usize)
        // Endpoints that leave reset the streams of their connections. Frames under way on these are no fault
        // of the server's, which is trusted.
        .max_local_error_reset_streams(None)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER);
    builder
}

/// The identity of this agent. The token is read at each attempt.
fn metadata(shared: &Shared) -> HeaderMap {
    let settings = &shared.settings;
    let mut metadata = HeaderMap::new();
    metadata.insert("agentid", settings.agent_id.clone());
    metadata.insert("agentidentifiers", settings.identifiers.clone());
    metadata.insert(header::USER_AGENT, settings.user_agent.clone());
    metadata.insert(OFFER, HeaderValue::from_static(VERSION));
    let token = settings.token.as_ref().and_then(|token| HeaderValue::try_from(&*token.current()).ok());
    if let Some(mut token) = token {
        token.set_sensitive(true);
        metadata.insert(header::AUTHORIZATION, token);
    }
    metadata
}

fn text<'a>(metadata: &'a HeaderMap, name: &str) -> Option<&'a str> {
    metadata.get(name)?.to_str().ok().filter(|text| (1..=LONGEST_NAME).contains(&text.len()))
}

/// The watch over a silent server, and how long that may be silent after a PING.
fn keep_alive(pings: Option<PingPong>, is_ours: bool, keepalive_time: Duration) -> (KeepAlive, Duration) {
    let (interval, silence) = match is_ours {
        true => (PING, PING),
        false => (keepalive_time.max(UPSTREAM_PING), UPSTREAM_PING_TIMEOUT),
    };
    (KeepAlive::new(pings, interval, silence), silence)
}

impl Joined {
    /// Serves what the server asks for, until the connection ends.
    pub(super) async fn run(self) -> Ended {
        let Self { session, driver, keep_alive, silence, sender, receiver, .. } = self;
        let exchange = pin!(session.exchange(receiver, sender));
        let drive = pin!(driver.run(&session, keep_alive, silence));
        let ended = tokio::select! {
            biased;
            ended = drive => ended,
            ended = exchange => ended,
        };
        // Before the driver is dropped: connections whose streams it resets must see why.
        session.over();
        ended
    }
}

/// Polls an HTTP/2 connection. Dropped, it resets all streams.
struct Driver {
    connection: Connection<Batched<Tls>, Bytes>,
    turn: Turn<Tls>,
}

impl Driver {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        let Self { connection, turn } = self;
        turn.poll(cx, |cx| Pin::new(connection).poll(cx))
    }

    /// Waits for `future`, which needs the connection.
    async fn until<T>(&mut self, future: impl Future<Output = T>) -> Result<T, h2::Error> {
        let mut future = pin!(future);
        poll_fn(|cx| {
            if let Poll::Ready(done) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(done));
            }
            match self.poll(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Ready(Ok(())) => Poll::Ready(Err(Reason::NO_ERROR.into())),
            }
        })
        .await
    }

    async fn run(mut self, session: &Session, mut keep_alive: KeepAlive, silence: Duration) -> Ended {
        let activity = session.activity();
        let over = poll_fn(|cx| {
            let polled = self.poll(cx);
            if polled.is_pending() && activity.has_received() && session.poll_leaving(cx) {
                tracing::info!(
                    server = &**session.server(),
                    "the server sent GOAWAY; it takes no new streams"
                );
            }
            polled
        });
        tokio::select! {
            biased;
            over = over => over.map_or_else(Ended::Connection, |()| Ended::Closed),
            () = keep_alive.silent(activity) => Ended::Silent(silence),
        }
    }
}
