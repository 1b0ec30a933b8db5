//! Drives one HTTP/2 connection, of an agent or of a frontend: h2, PING for silent peers, and the end.
//!
//! The server never sends GOAWAY of itself: an upstream agent drops all its connections when it comes.
//! Requests go to a closure, which gives each a task of its own.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::{Builder, SendResponse};
use http::Request;
use portico_net::slots::Slot;
use portico_tunnel::Flood;
use portico_tunnel::connection::{
    Activity, FRAME_SIZE, HEADER_LIST, Inbound, KeepAlive, LATE_FRAMES, SEND_BUFFER, batched, cause,
    connection_window,
};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::settings::{CLOSING, MAX_REFUSED, NATIVE_PING};
use super::unauthenticated::Crowded;

/// Why a connection ended otherwise than by its peer's wish.
#[derive(Debug, Error)]
pub(crate) enum ConnectionError {
    /// It broke.
    #[error("{}", cause(.0))]
    Http(h2::Error),
    /// Others need the memory that it held. The error says what for.
    #[error("{}", cause(.0))]
    Memory(h2::Error),
    /// Its peer closed it in order.
    #[error("the peer left before it had said what it wants")]
    Left,
    /// PING has no answer.
    #[error("the peer is silent and does not answer PING")]
    Silent,
    /// Nothing asked for in time.
    #[error("the peer did not say what it wants in time")]
    TooSlow,
    /// It had not authenticated.
    #[error(transparent)]
    Crowded(#[from] Crowded),
    /// Frames that cost work and carry nothing.
    #[error(transparent)]
    Flood(#[from] Flood),
    /// Requests that are refused, one after the other.
    #[error("the peer asks again and again for what is refused")]
    Refused,
}

impl ConnectionError {
    fn broken(error: h2::Error, activity: &Activity) -> Self {
        if activity.is_evicted() { Self::Memory(error) } else { Self::Http(error) }
    }

    /// The label value for metrics, of a connection that became no agent's.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Http(_) | Self::Left => "http2",
            Self::Memory(_) => "memory",
            Self::Silent | Self::TooSlow => "silent",
            Self::Crowded(_) => "crowded",
            Self::Flood(_) | Self::Refused => "flood",
        }
    }
}

/// What one connection may.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Streams at once.
    pub(crate) streams: u32,
    /// Window of a stream.
    pub(crate) stream_window: u32,
    /// Silence before PING, and the wait for its answer.
    pub(crate) ping: (Duration, Duration),
    /// When the handshake, and the first request that is accepted, must have come.
    pub(crate) deadline: Instant,
    /// How long there may be no stream after that. An agent has its Connect stream, or ends.
    pub(crate) idle: Option<Duration>,
}

/// The facts learnt about a peer while it is served.
#[derive(Debug)]
pub(crate) struct Peer {
    /// A request was accepted, without which the connection ends at its deadline.
    is_known: AtomicBool,
    /// Until then; others may need it.
    slot: Mutex<Option<Slot>>,
    /// It is an agent of ours, and gets PING soon.
    pub(crate) is_native: AtomicBool,
    /// The agent's Connect stream is over.
    over: Notify,
    /// Requests refused since one was served: over [`MAX_REFUSED`] the connection ends.
    pub(crate) refused: AtomicU32,
    /// Streams that are [`OpenStream`]s.
    open: AtomicU32,
    /// Whether one of them has begun since this was last looked at.
    has_begun: AtomicBool,
}

/// A stream of a peer that may not be without one for long.
#[derive(Debug)]
pub(crate) struct OpenStream(Arc<Peer>);

impl OpenStream {
    pub(crate) fn of(peer: &Arc<Peer>) -> Self {
        peer.open.fetch_add(1, Relaxed);
        peer.has_begun.store(true, Relaxed);
        Self(Arc::clone(peer))
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

impl Peer {
    /// One that has `slot` until a request of it is accepted.
    pub(crate) fn new(slot: Slot) -> Self {
        Self {
            is_known: AtomicBool::default(),
            slot: Mutex::new(Some(slot)),
            is_native: AtomicBool::default(),
            over: Notify::new(),
            refused: AtomicU32::default(),
            open: AtomicU32::default(),
            has_begun: AtomicBool::default(),
        }
    }

    /// Whether there is no stream, and none has begun since the last call.
    fn is_idle(&self) -> bool {
        !self.has_begun.swap(false, Relaxed) && self.open.load(Relaxed) == 0
    }

    /// A request is accepted.
    pub(crate) fn accept(&self) {
        self.is_known.store(true, Relaxed);
        *self.slot() = None;
    }

    /// Ends the connection soon: by itself the peer does it once it has read why.
    pub(crate) fn end(&self) {
        self.over.notify_one();
    }

    pub(crate) fn is_known(&self) -> bool {
        self.is_known.load(Relaxed)
    }

    /// Ready when others need the slot.
    async fn evicted(&self) {
        poll_fn(|cx| self.slot().as_ref().map_or(Poll::Pending, |slot| slot.poll_evicted(cx))).await;
    }

    fn slot(&self) -> MutexGuard<'_, Option<Slot>> {
        // A panic elsewhere leaves nothing half done here.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polled whenever the connection's task runs, which the answer to an agent of ours wakes.
    async fn becomes_native(&self) {
        poll_fn(|_| if self.is_native.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// Serves `stream` until it ends, or `stop` does. A peer whose `activity` is not authenticated
/// has the smallest window, and few frames, until it is known.
pub(crate) async fn serve<S>(
    stream: S,
    limits: Limits,
    activity: &Arc<Activity>,
    peer: &Peer,
    mut start: impl FnMut(Request<RecvStream>, SendResponse<Bytes>),
    stop: impl Future<Output = ()>,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (stream, mut turn) = batched(stream, Inbound::unauthenticated(), activity);
    let mut stop = pin!(stop);
    let handshake = timeout_at(limits.deadline, builder(limits).handshake(stream));
    let mut connection = tokio::select! {
        shaken = handshake => {
            let shaken = shaken.map_err(|_| ConnectionError::TooSlow)?;
            shaken.map_err(|error| ConnectionError::broken(error, activity))?
        }
        () = peer.evicted(), if !peer.is_known() => return Err(Crowded.into()),
        () = &mut stop => return Ok(()),
    };
    let window = connection_window(limits.streams, limits.stream_window);
    let mut is_limited = true;
    let (interval, wait) = limits.ping;
    let mut keep_alive = KeepAlive::new(connection.ping_pong(), interval, wait);
    let mut impatience = pin!(sleep_until(limits.deadline));
    let mut over = pin!(async {
        peer.over.notified().await;
        sleep(CLOSING).await;
    });
    let (mut patient, mut pings_soon) = (false, false);
    loop {
        let accepted = poll_fn(|cx| {
            if is_limited && (activity.is_authenticated() || peer.is_known()) {
                is_limited = false;
                turn.authenticate();
                connection.set_target_window_size(window);
            }
            let accepted = turn.poll(cx, |cx| connection.poll_accept(cx));
            match turn.flood() {
                Some(flood) => Poll::Ready(Err(flood)),
                None => accepted.map(Ok),
            }
        });
        tokio::select! {
            biased;
            () = &mut stop => return Ok(()),
            () = peer.evicted(), if !peer.is_known() => return Err(Crowded.into()),
            () = &mut over => return Ok(()),
            () = peer.becomes_native(), if !pings_soon => {
                pings_soon = true;
                keep_alive.set(NATIVE_PING, NATIVE_PING);
            }
            accepted = accepted => match accepted? {
                None if peer.is_known() => return Ok(()),
                None => return Err(ConnectionError::Left),
                Some(Err(error)) => return Err(ConnectionError::broken(error, activity)),
                Some(Ok((request, respond))) => {
                    start(request, respond);
                    if peer.refused.load(Relaxed) > MAX_REFUSED {
                        return Err(ConnectionError::Refused);
                    }
                }
            },
            () = keep_alive.silent(activity) => return Err(ConnectionError::Silent),
            () = &mut impatience, if !patient => {
                if !peer.is_known() {
                    return Err(ConnectionError::TooSlow);
                }
                match limits.idle {
                    None => patient = true,
                    Some(_) if peer.is_idle() => return Ok(()),
                    Some(idle) => impatience.as_mut().reset(Instant::now() + idle),
                }
            }
        }
    }
}

fn builder(limits: Limits) -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(limits.stream_window)
        .max_concurrent_streams(limits.streams)
        // A frontend that restarts cancels all it asked for at once.
        .max_pending_accept_reset_streams(1_024)
        // Frontends that leave reset the streams of their connections. An API server that restarts leaves
        // thousands, and a slow line may have seconds of each under way.
        .max_concurrent_reset_streams(8_192)
        .reset_stream_duration(Duration::from_secs(10))
        .max_local_error_reset_streams(Some(LATE_FRAMES))
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER);
    builder
}

#[cfg(test)]
mod tests {
    use portico_net::MemoryBudget;
    use portico_net::memory::Reservation;
    use portico_net::slots::Slots;
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stranger_that_does_not_read_while_others_need_the_memory_is_told_from_one_that_goes_away() {
        const SECOND: Duration = Duration::from_secs(1);
        let memory = MemoryBudget::new(1_000);
        let activity = Arc::new(Activity::within(&memory, memory.limit()).in_slot());
        let peer = Peer::new(Slots::new(1, "strangers").enter(None));
        let limits = Limits {
            streams: 1,
            stream_window: 64 * 1024,
            ping: (60 * SECOND, SECOND),
            deadline: Instant::now() + 60 * SECOND,
            idle: None,
        };
        // The SETTINGS of the server fit, their answers to PING do not.
        let (mut stranger, stream) = duplex(128);
        let serves = serve(stream, limits, &activity, &peer, |_, _| {}, std::future::pending());
        let does_not_read = async {
            stranger.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
            for _ in 0..7 {
                stranger.write_all(b"\0\0\x08\x06\0\0\0\0\0\0\0\0\0\0\0\0\0").await.unwrap();
            }
            sleep(2 * SECOND).await;
            assert!(memory.held() > 0);
            let other = Reservation::new(vec![memory.clone()], Duration::ZERO);
            other.charge(memory.limit());
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            ended = serves => ended,
            () = does_not_read => unreachable!("it never ends"),
        };
        let error = ended.unwrap_err();
        assert_eq!(error.reason(), "memory");
        assert!(error.to_string().contains("does not read"), "{error}");
    }
}
