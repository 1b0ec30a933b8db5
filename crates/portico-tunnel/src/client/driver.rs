//! What drives the connection of a tunnel, from its first byte to its end, and keeps the tunnel's state true.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, Connection};
use h2::{Ping, PingPong, Reason};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout_at};

use super::candidates::Place;
use super::settings::ClientSettings;
use super::signals::Signals;
use super::tunnel::Tunnel;
use crate::activity::Activity;
use crate::keepalive::KeepAlive;
use crate::settings::{FRAME_SIZE, HEADER_LIST, SEND_BUFFER};
use crate::turn::{Batched, Turn, batched};

/// Streams a gateway is thought to allow until it says so (RFC 9113 section 6.5.2 recommends at least 100).
const FIRST_STREAMS: usize = 100;

/// How the connection of a tunnel ended.
#[derive(Debug, Error)]
pub(crate) enum Ended {
    /// In order: GOAWAY, or we closed it.
    #[error("closed")]
    Closed,
    /// Lost, or broken by the gateway.
    #[error("{0}")]
    Failed(#[from] h2::Error),
    /// Silent for too long.
    #[error("no sign of life for {0:?}")]
    Silent(Duration),
}

impl Ended {
    /// Whether the connection was closed or broke, and nothing else was said.
    pub(crate) fn is_hang_up(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Failed(error) => {
                error.is_io() || error.reason() == Some(Reason::NO_ERROR) && !error.is_go_away()
            }
            Self::Silent(_) => false,
        }
    }
}

/// What drives a connection: to be polled until it is over.
pub(crate) struct Driver<S: AsyncRead + AsyncWrite + Unpin> {
    connection: Connection<Batched<S>, Bytes>,
    turn: Turn<S>,
    keep_alive: KeepAlive,
    give_up_after: Duration,
}

/// Speaks HTTP/2 on a connected stream. Returns once the gateway has answered a PING: a frozen process accepts connections, too.
pub(crate) async fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    place: Place,
    renewal: u64,
    settings: &ClientSettings,
    signals: &Arc<Signals>,
    deadline: Instant,
) -> Result<(Arc<Tunnel>, Driver<S>), Ended> {
    let activity = Arc::new(Activity::new(&settings.memory));
    let (stream, turn) = batched(stream, &activity);
    let silent = || Ended::Silent(settings.handshake_timeout);
    let handshake = builder(settings).handshake::<_, Bytes>(stream);
    let (sender, mut connection) = timeout_at(deadline, handshake).await.map_err(|_| silent())??;
    let mut pings = connection.ping_pong();
    if let Some(pings) = &mut pings {
        let alive = prove_alive(&mut connection, pings);
        timeout_at(deadline, alive).await.map_err(|_| silent())??;
    }
    let tunnel = Tunnel::new(place, renewal, sender, settings, signals, activity);
    let keep_alive = KeepAlive::new(pings, settings.ping_interval, settings.ping_timeout);
    let driver = Driver { connection, turn, keep_alive, give_up_after: settings.give_up_after };
    Ok((Arc::new(tunnel), driver))
}

fn builder(settings: &ClientSettings) -> Builder {
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(settings.stream_window)
        .initial_connection_window_size(settings.connection_window())
        .initial_max_send_streams(FIRST_STREAMS)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER);
    builder
}

async fn prove_alive<S: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut Connection<Batched<S>, Bytes>,
    pings: &mut PingPong,
) -> Result<(), h2::Error> {
    pings.send_ping(Ping::opaque())?;
    poll_fn(|cx| {
        if let Poll::Ready(result) = pings.poll_pong(cx) {
            return Poll::Ready(result.map(drop));
        }
        match Pin::new(&mut *connection).poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) => Poll::Ready(Err(Reason::NO_ERROR.into())),
        }
    })
    .await
}

/// What the driver has to see to.
enum Event {
    /// The connection is over.
    Over(Result<(), h2::Error>),
    /// A silent gateway speaks again.
    Heard,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    /// Drives the connection until it ends, keeping its tunnel's state true. Dropping the future resets all streams.
    pub(crate) async fn run(mut self, tunnel: &Tunnel) -> Ended {
        let mut silent_until = None;
        let ended = loop {
            let give_up = async {
                match silent_until {
                    None => std::future::pending().await,
                    Some(at) => tokio::time::sleep_until(at).await,
                }
            };
            tokio::select! {
                biased;
                event = drive(&mut self.connection, &mut self.turn, tunnel, silent_until.is_some()) => match event {
                    Event::Over(Ok(())) => break Ended::Closed,
                    Event::Over(Err(error)) => break Ended::Failed(error),
                    Event::Heard => {
                        silent_until = None;
                        self.keep_alive.restart();
                        tunnel.heard();
                    }
                },
                () = self.keep_alive.silent(&tunnel.activity), if silent_until.is_none() => {
                    silent_until = Some(Instant::now() + self.give_up_after);
                    tunnel.fell_silent();
                }
                () = give_up => break Ended::Silent(self.give_up_after),
            }
        };
        tunnel.close();
        ended
    }
}

/// Polls the connection; notices GOAWAY, and signs of life of a gateway that had gone `silent`.
async fn drive<S: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut Connection<Batched<S>, Bytes>,
    turn: &mut Turn<S>,
    tunnel: &Tunnel,
    silent: bool,
) -> Event {
    let mut connection = pin!(connection);
    poll_fn(|cx| {
        if let Poll::Ready(result) = turn.poll(cx, |cx| connection.as_mut().poll(cx)) {
            return Poll::Ready(Event::Over(result));
        }
        if !tunnel.activity.heard() {
            return Poll::Pending;
        }
        tunnel.poll_goaway(cx);
        if silent { Poll::Ready(Event::Heard) } else { Poll::Pending }
    })
    .await
}
