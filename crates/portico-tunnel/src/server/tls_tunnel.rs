//! HTTP/1.1 CONNECT under TLS: copies between the TLS stream and the upstream. (Without TLS the caller's copy
//! engine does.)
//!
//! Keeps the promises that [`bridge`](crate::bridge) makes for HTTP/2. A FIN is passed on as close_notify and
//! back. A reset is passed on as a reset, after the bytes that came before it. A TLS client that ends without
//! close_notify was cut off; its upstream gets a reset.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use portico_net::linger::{self, LINGER};
use portico_net::meter::set_due_keepalive;
use portico_net::{ErrorWatch, Idle, SharedTcp};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::http1::Opened;
use crate::handler::{End, Meter, Side, Upstream};

/// Bytes of one read. Each direction holds such a buffer.
const READ: usize = 8 * 1024;

/// Copies until the tunnel is over, ends both sides accordingly and reports. `socket` is the one under
/// `client`.
pub(crate) async fn carry<S, M>(client: S, socket: Arc<TcpStream>, opened: Opened<M>, idle: Option<Duration>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    M: Meter,
{
    let Opened { early, upstream: Upstream { stream, mut meter } } = opened;
    let upstream = Arc::new(stream);
    let (from_client, to_client) = split(client);
    let (from_upstream, to_upstream) = split(SharedTcp(Arc::clone(&upstream)));
    let moved = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let mut up = pin!(copy(early, from_client, to_upstream, &moved[0]));
    let mut down = pin!(copy(Bytes::new(), from_upstream, to_client, &moved[1]));
    // How each direction ended, and which was first.
    let (mut up_ended, mut down_ended, mut first) = (None, None, None);
    let mut watches = [ErrorWatch::default(), ErrorWatch::default()];
    let mut idle = Idle::new(idle);
    let count = |meter: &mut M| {
        let [up, down] = moved.each_ref().map(|moved| moved.swap(0, Relaxed));
        meter.carried(up, down);
        up + down > 0
    };
    let end = poll_fn(|cx| {
        set_due_keepalive(&mut meter, &*upstream);
        if meter.poll_cut(cx).is_ready() {
            return Poll::Ready(End::Cut);
        }
        if up_ended.is_none()
            && let Poll::Ready(ended) = up.as_mut().poll(cx)
        {
            first.get_or_insert(Side::Downstream);
            up_ended = Some(ended);
        }
        if down_ended.is_none()
            && let Poll::Ready(ended) = down.as_mut().poll(cx)
        {
            first.get_or_insert(Side::Upstream);
            down_ended = Some(ended);
        }
        if count(&mut meter) {
            idle.moved();
        }
        match (up_ended, down_ended) {
            (Some(Err(Failed::Reader)), _) | (_, Some(Err(Failed::Writer))) => {
                return Poll::Ready(End::Reset { by: Side::Downstream });
            }
            (Some(Err(Failed::Writer)), _) | (_, Some(Err(Failed::Reader))) => {
                return Poll::Ready(End::Reset { by: Side::Upstream });
            }
            (Some(Ok(())), Some(Ok(()))) => {
                return Poll::Ready(End::Closed { first: first.unwrap_or(Side::Upstream) });
            }
            _ => {}
        }
        // A side that is not read, because the other is full, still shows its reset here.
        for (watch, socket, by) in [(0, &socket, Side::Downstream), (1, &upstream, Side::Upstream)] {
            if watches[watch].poll(socket, cx).is_ready() {
                return Poll::Ready(End::Reset { by });
            }
        }
        idle.poll(cx).map(|()| End::Idle)
    })
    .await;
    if let End::Reset { by } = end {
        // The bytes that the lost side sent before go to the other one first.
        let deadline = Instant::now() + LINGER;
        match by {
            Side::Downstream if up_ended.is_none() => drop(timeout_at(deadline, up).await),
            Side::Upstream if down_ended.is_none() => drop(timeout_at(deadline, down).await),
            _ => {}
        }
        count(&mut meter);
        linger::sent(if by == Side::Downstream { &upstream } else { &socket }, deadline).await;
    }
    if !matches!(end, End::Closed { .. }) {
        linger::abort(&*upstream);
        linger::abort(&*socket);
    }
    meter.ended(end);
}

/// The end of a direction that failed.
#[derive(Clone, Copy)]
enum Failed {
    Reader,
    Writer,
}

/// Writes `early`, then all that `from` has, then ends `to`. `moved` counts the bytes.
async fn copy(
    early: Bytes,
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    moved: &AtomicUsize,
) -> Result<(), Failed> {
    let mut buffer = vec![0; READ];
    to.write_all(&early).await.map_err(|_| Failed::Writer)?;
    moved.fetch_add(early.len(), Relaxed);
    drop(early);
    loop {
        let read = from.read(&mut buffer).await.map_err(|_| Failed::Reader)?;
        if read == 0 {
            return to.shutdown().await.map_err(|_| Failed::Writer);
        }
        to.write_all(&buffer[..read]).await.map_err(|_| Failed::Writer)?;
        // TLS records that do not fit the socket wait in the stream.
        to.flush().await.map_err(|_| Failed::Writer)?;
        moved.fetch_add(read, Relaxed);
    }
}
