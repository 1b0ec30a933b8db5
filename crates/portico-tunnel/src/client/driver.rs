//! Runs the connection of a tunnel from its first byte to its end, and keeps the tunnel's state current.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, Connection};
use h2::{Ping, PingPong, Reason};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout_at};

use super::event::{Connection as Opened, Ended, Signals};
use super::settings::ClientSettings;
use super::tunnel::{Tunnel, TunnelOrigin};
use crate::activity::Activity;
use crate::inbound::Inbound;
use crate::keepalive::KeepAlive;
use crate::settings::{FRAME_SIZE, HEADER_LIST, SEND_BUFFER};
use crate::turn::{Batched, Turn, batched};

/// Streams that a gateway is assumed to allow until it says so. RFC 9113 section 6.5.2 recommends at least
/// 100.
const FIRST_STREAMS: usize = 100;

struct Driver<S: AsyncRead + AsyncWrite + Unpin> {
    connection: Connection<Batched<S>, Bytes>,
    turn: Turn<S>,
    keep_alive: KeepAlive,
    give_up_after: Duration,
}

/// Speaks HTTP/2 on a connected stream. Returns once the gateway has answered a PING: a frozen process
/// accepts connections, too.
pub(super) async fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    origin: TunnelOrigin,
    settings: &ClientSettings,
    signals: &Arc<Signals>,
    deadline: Instant,
) -> Result<Opened, Ended> {
    let activity = Arc::new(Activity::new(&settings.memory));
    let (stream, turn) = batched(stream, Inbound::trusted(), &activity);
    let silent = || Ended::Silent(settings.handshake_timeout);
    let handshake = builder(settings).handshake::<_, Bytes>(stream);
    let (sender, mut connection) = timeout_at(deadline, handshake).await.map_err(|_| silent())??;
    let mut pings = connection.ping_pong();
    if let Some(pings) = &mut pings {
        let alive = prove_alive(&mut connection, pings);
        timeout_at(deadline, alive).await.map_err(|_| silent())??;
    }
    let tunnel = Arc::new(Tunnel::new(origin, sender, settings, signals, activity));
    let keep_alive = KeepAlive::new(pings, settings.ping_interval, settings.ping_timeout);
    let driver = Driver { connection, turn, keep_alive, give_up_after: settings.give_up_after };
    let driver = Box::pin(driver.run(Arc::clone(&tunnel)));
    Ok(Opened { tunnel, driver })
}

fn builder(settings: &ClientSettings) -> Builder {
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(settings.stream_window)
        .initial_connection_window_size(settings.connection_window())
        .initial_max_send_streams(FIRST_STREAMS)
        // Pods that leave reset their streams. Frames under way on these are no fault of the gateway's, which
        // is trusted.
        .max_local_error_reset_streams(None)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER);
    builder
}

/// Returns once the gateway has answered a PING.
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

/// What [`drive`] returns for.
enum Driven {
    /// The connection is over.
    Over(Result<(), h2::Error>),
    /// An unresponsive gateway sent something.
    Responsive,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    /// Runs the connection until it ends. Dropping the future resets all streams.
    async fn run(mut self, tunnel: Arc<Tunnel>) -> Ended {
        let mut silent_until = None;
        let ended = loop {
            let give_up = async {
                match silent_until {
                    None => std::future::pending().await,
                    Some(at) => tokio::time::sleep_until(at).await,
                }
            };
            let is_silent = silent_until.is_some();
            tokio::select! {
                biased;
                event = drive(&mut self.connection, &mut self.turn, &tunnel, is_silent) => match event {
                    Driven::Over(Ok(())) => break Ended::Closed,
                    Driven::Over(Err(error)) => break Ended::Failed(error),
                    Driven::Responsive => {
                        silent_until = None;
                        self.keep_alive.restart();
                        tunnel.responsive();
                    }
                },
                () = self.keep_alive.silent(&tunnel.activity), if silent_until.is_none() => {
                    silent_until = Some(Instant::now() + self.give_up_after);
                    tunnel.unresponsive();
                }
                () = give_up => break Ended::Silent(self.give_up_after),
            }
        };
        tunnel.close();
        ended
    }
}

/// Polls the connection. Notices GOAWAY, and that an unresponsive (`silent`) gateway sent something.
async fn drive<S: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut Connection<Batched<S>, Bytes>,
    turn: &mut Turn<S>,
    tunnel: &Tunnel,
    silent: bool,
) -> Driven {
    let mut connection = pin!(connection);
    poll_fn(|cx| {
        if let Poll::Ready(result) = turn.poll(cx, |cx| connection.as_mut().poll(cx)) {
            return Poll::Ready(Driven::Over(result));
        }
        if !tunnel.activity.has_received() {
            return Poll::Pending;
        }
        tunnel.poll_goaway(cx);
        if silent { Poll::Ready(Driven::Responsive) } else { Poll::Pending }
    })
    .await
}
