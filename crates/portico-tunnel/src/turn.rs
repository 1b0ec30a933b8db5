//! Writes an HTTP/2 connection once a turn: after all tasks that are ready, with the frames of all their
//! streams.
//!
//! h2 flushes each DATA frame of 256 bytes or more by itself, in the order in which its task is woken. One
//! write a message costs a system call, a TCP segment, under TLS a record, and a wake-up of the other end.
//!
//! [`Batched`] is the stream that h2 writes to. It copies small writes together and passes large ones on with
//! them. [`Turn`] belongs to the task that drives the connection: it lets all ready tasks run first, then
//! polls h2, then flushes. Nor does a turn read without end: after so many bytes other tasks have theirs.
//! What is read goes through [`Inbound`].

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use bytes::{Buf, BytesMut};
use portico_dial::TLS_BUFFER;
use portico_net::turn::wake_last;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::activity::Activity;
use crate::inbound::{Flood, Inbound};
use crate::settings::STREAM_WINDOW;

/// Bytes that are read in one turn, give or take one read: a stream's window. Bytes of header blocks count
/// for more.
const READ: usize = STREAM_WINDOW as usize;

/// Bytes that are read in one turn from a client that has not authenticated: one frame.
const READ_UNAUTHENTICATED: usize = 16 * 1024;

/// Most bytes that are copied together: one TLS record.
const BATCH: usize = 16 * 1024;

/// Writes up to this are copied into the batch; a larger one costs less as a slice of its own.
const COPIED: usize = 8 * 1024;

/// How often a flush of small messages waits for the tasks that are ready, as long as each time brings more.
/// A wait takes a few microseconds. In them the answers to the first messages of a batch come back.
const MOST_WAITS: u8 = 2;

/// Slices of one write: the batch, then a frame's header and its payload.
const SLICES: usize = 4;

/// A stream for h2, which `turn` flushes.
#[derive(Debug)]
pub struct Batched<S>(Arc<Mutex<Inner<S>>>);

/// The turn of one connection, for the task that drives it.
#[derive(Debug)]
pub struct Turn<S> {
    inner: Arc<Mutex<Inner<S>>>,
    activity: Arc<Activity>,
    /// How often the tasks that were ready have run since the last flush.
    waits: u8,
    /// After a turn with all the bytes that it may have.
    rest: Option<Arc<Rest>>,
}

/// Holds the connection's task back until all ready tasks ran and tokio polled the sockets. h2 wakes its own
/// task for answers to what it read. Without this, tokio would poll sockets only every 61st task.
#[derive(Debug)]
struct Rest {
    is_over: AtomicBool,
    task: Waker,
}

impl Rest {
    fn begin(cx: &Context<'_>) -> Arc<Self> {
        let rest = Arc::new(Self { is_over: AtomicBool::default(), task: cx.waker().clone() });
        wake_last(&mut Context::from_waker(&Waker::from(Arc::clone(&rest))));
        rest
    }
}

impl Wake for Rest {
    fn wake(self: Arc<Self>) {
        self.is_over.store(true, Relaxed);
        self.task.wake_by_ref();
    }
}

#[derive(Debug)]
struct Inner<S> {
    stream: S,
    activity: Arc<Activity>,
    /// Whether a turn flushes. Not during the handshake, which has none.
    has_turn: bool,
    /// Written by h2, and not yet to the stream.
    batch: BytesMut,
    /// Bytes written to the stream since it was last flushed to the end, up to the buffer of TLS.
    unflushed: usize,
    /// Why the last flush failed: for h2, which did not see it.
    failed: Option<io::Error>,
    inbound: Inbound,
    /// Bytes that may still be read in this turn.
    to_read: usize,
    /// Why nothing more is read.
    flood: Option<Flood>,
    /// The peer did not take all that was written. A client that has not authenticated is then not read, or
    /// its requests would pile up answers.
    is_full: bool,
    /// A read was skipped because of `is_full`. The flush wakes the task.
    is_unread: bool,
}

/// A stream for h2, read as `inbound` allows, and the turn that belongs to it. Until the turn is first
/// polled, writes are passed on directly.
pub fn batched<S>(stream: S, inbound: Inbound, activity: &Arc<Activity>) -> (Batched<S>, Turn<S>) {
    let inner = Inner {
        inbound,
        to_read: READ_UNAUTHENTICATED,
        flood: None,
        is_full: false,
        is_unread: false,
        stream,
        activity: Arc::clone(activity),
        has_turn: false,
        batch: BytesMut::new(),
        unflushed: 0,
        failed: None,
    };
    let inner = Arc::new(Mutex::new(inner));
    (Batched(Arc::clone(&inner)), Turn { inner, activity: Arc::clone(activity), waits: 0, rest: None })
}

impl<S: AsyncWrite + Unpin> Turn<S> {
    /// Polls the connection by `poll`, then writes what it has queued. If streams have queued a few bytes,
    /// the tasks that are ready run first.
    pub fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if self.rest.as_ref().is_some_and(|rest| !rest.is_over.load(Relaxed)) {
            return Poll::Pending;
        }
        self.rest = None;
        // Without bytes of streams there is nothing to wait for: what came is read at once.
        let has_queued = self.activity.take_queued();
        if has_queued {
            lock(&self.inner).inbound.note_turn();
        }
        let is_small = self.activity.queued_bytes() < BATCH;
        if has_queued && is_small && self.waits < MOST_WAITS {
            self.waits += 1;
            wake_last(cx);
            return Poll::Pending;
        }
        lock(&self.inner).has_turn = true;
        let polled = poll(cx);
        if polled.is_pending() {
            self.waits = 0;
            self.end(cx);
        }
        polled
    }

    /// Why the connection has to end, if it does.
    pub fn flood(&self) -> Option<Flood> {
        lock(&self.inner).flood
    }

    /// The client has authenticated.
    pub fn authenticate(&self) {
        lock(&self.inner).inbound.authenticate();
        self.activity.authenticate();
    }

    /// Ends a turn: writes what was queued.
    fn end(&mut self, cx: &mut Context<'_>) {
        let mut inner = lock(&self.inner);
        if inner.to_read == 0 {
            self.rest = Some(Rest::begin(cx));
        }
        inner.to_read = if self.activity.is_authenticated() { READ } else { READ_UNAUTHENTICATED };
        self.activity.unfinished(inner.inbound.unfinished(), inner.inbound.unfinished_frame());
        let flushed = inner.poll_flush(cx);
        inner.is_full = flushed.is_pending();
        self.activity.behind(if inner.is_full { inner.unflushed + inner.batch.len() } else { 0 });
        if !inner.is_full && std::mem::take(&mut inner.is_unread) {
            cx.waker().wake_by_ref();
        }
        match flushed {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => self.activity.flushed(),
            Poll::Ready(Err(error)) => {
                inner.failed = Some(error);
                cx.waker().wake_by_ref();
            }
        }
    }
}

fn lock<S>(inner: &Mutex<Inner<S>>) -> MutexGuard<'_, Inner<S>> {
    // A panic elsewhere leaves nothing half done here.
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S> Inner<S> {
    /// What h2 gets. Its task rests only after a pending read or write, so this is where it learns that it
    /// has to end.
    fn result<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            return result;
        }
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        if let Poll::Ready(reason) = self.activity.poll_evicted(cx) {
            return Poll::Ready(Err(io::Error::other(reason)));
        }
        result
    }
}

impl<S: AsyncRead + Unpin> Inner<S> {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.flood.is_some() {
            return Poll::Pending;
        }
        if self.is_full && !self.activity.is_authenticated() {
            self.is_unread = true;
            return Poll::Pending;
        }
        if self.to_read == 0 {
            return Poll::Pending;
        }
        let polled = self.inbound.poll_read(&mut self.stream, cx, buf, self.to_read);
        let read = self.inbound.take_read();
        if read > 0 {
            self.to_read = self.to_read.saturating_sub(read);
            self.activity.note_received();
        }
        polled.unwrap_or_else(|flood| {
            self.flood = Some(flood);
            Poll::Pending
        })
    }
}

impl<S: AsyncWrite + Unpin> Inner<S> {
    fn poll_write(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let length: usize = bufs.iter().map(|buf| buf.len()).sum();
        self.inbound.note_sent(length);
        if self.has_turn && length <= COPIED && self.batch.len() + length <= BATCH {
            self.batch.reserve(BATCH - self.batch.len());
            bufs.iter().for_each(|buf| self.batch.extend_from_slice(buf));
            return Poll::Ready(Ok(length));
        }
        while !self.batch.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            slices[0] = IoSlice::new(&self.batch);
            let count = 1 + bufs.len().min(SLICES - 1);
            slices[1..count].copy_from_slice(&bufs[..count - 1]);
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &slices[..count]))?;
            let batch = self.batch.len();
            self.wrote(written.min(batch))?;
            self.passed_on(written.saturating_sub(batch));
            if written > batch {
                return Poll::Ready(Ok(written - batch));
            }
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        self.passed_on(written);
        Poll::Ready(Ok(written))
    }

    /// Writes the batch, and what the stream itself holds (TLS records).
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let batch = self.poll_write_batch(cx)?;
        // Also if the batch has to wait. A socket without TLS holds nothing, and says so.
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.unflushed = 0;
        batch.map(Ok)
    }

    fn poll_write_batch(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.batch.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.batch))?;
            self.wrote(written)?;
        }
        Poll::Ready(Ok(()))
    }

    fn passed_on(&mut self, written: usize) {
        self.unflushed = TLS_BUFFER.min(self.unflushed + written);
    }

    fn wrote(&mut self, written: usize) -> io::Result<()> {
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.passed_on(written);
        self.batch.advance(written);
        if self.batch.is_empty() {
            // A connection at rest holds no buffer.
            self.batch = BytesMut::new();
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Batched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut inner = lock(&self.0);
        let read = inner.poll_read(cx, buf);
        inner.result(cx, read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Batched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = lock(&self.0);
        let written = inner.poll_write(cx, bufs);
        inner.result(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Left to the turn, if there is one.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = lock(&self.0);
        if inner.has_turn {
            return Poll::Ready(Ok(()));
        }
        let flushed = inner.poll_flush(cx);
        inner.result(cx, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = lock(&self.0);
        ready!(inner.poll_flush(cx))?;
        Pin::new(&mut inner.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;

    use portico_net::MemoryBudget;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    use super::*;

    /// Notes what each write has.
    #[derive(Debug, Default)]
    struct Writes {
        all: Vec<Vec<u8>>,
        is_broken: bool,
        /// Written bytes stay in the stream, as records of TLS do whose socket is full.
        is_full: bool,
        /// A frame that is read again and again, without end. Without one there is nothing to read.
        endless: &'static [u8],
    }

    impl AsyncWrite for Writes {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(buf)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bufs: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            if self.is_broken {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
            self.all.push(bytes);
            Poll::Ready(Ok(self.all[self.all.len() - 1].len()))
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            if self.is_full { Poll::Pending } else { Poll::Ready(Ok(())) }
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncRead for Writes {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.endless.is_empty() {
                return Poll::Pending;
            }
            (0..buf.remaining() / self.endless.len()).for_each(|_| buf.put_slice(self.endless));
            Poll::Ready(Ok(()))
        }
    }

    fn connection() -> (Batched<Writes>, Turn<Writes>) {
        let activity = Arc::new(Activity::new(&MemoryBudget::new(1 << 20)));
        batched(Writes::default(), Inbound::trusted(), &activity)
    }

    fn written(stream: &Batched<Writes>) -> Vec<Vec<u8>> {
        std::mem::take(&mut lock(&stream.0).stream.all)
    }

    /// One turn of a connection that writes as h2 does, and flushes each frame.
    async fn turn(turn: &mut Turn<Writes>, stream: &mut Batched<Writes>, frames: &[&[u8]]) {
        let mut polled = 0;
        turn.activity.queue();
        poll_fn(|cx| {
            let pending = turn.poll(cx, |cx| {
                for frame in frames {
                    let write = async {
                        stream.write_all(frame).await?;
                        stream.flush().await
                    };
                    assert!(matches!(pin!(write).poll(cx), Poll::Ready(Ok(()))));
                }
                polled += 1;
                Poll::<()>::Pending
            });
            assert!(pending.is_pending());
            if polled > 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[tokio::test]
    async fn the_frames_of_a_turn_leave_in_one_write() {
        let (mut stream, mut of) = connection();
        stream.write_all(b"preface").await.unwrap();
        assert_eq!(written(&stream), [b"preface"], "before the first turn nothing is held back");
        turn(&mut of, &mut stream, &[&[1; 300], &[2; 300], &[3; 300]]).await;
        let expected = [[1; 300], [2; 300], [3; 300]].concat();
        assert_eq!(written(&stream), [expected]);
        assert_eq!(lock(&stream.0).batch.capacity(), 0, "at rest it holds no buffer");
    }

    #[tokio::test]
    async fn a_large_frame_takes_what_was_written_before_along() {
        let (mut stream, mut of) = connection();
        turn(&mut of, &mut stream, &[&[1; 300], &[2; 100_000], &[3; 300]]).await;
        let expected = [[vec![1; 300], vec![2; 100_000]].concat(), vec![3; 300]];
        assert!(written(&stream) == expected);
    }

    #[tokio::test]
    async fn a_connection_is_polled_behind_the_tasks_that_are_ready() {
        let (mut stream, mut of) = connection();
        let ready = tokio::spawn(async {});
        turn(&mut of, &mut stream, &[b"frame"]).await;
        assert!(ready.is_finished());
    }

    /// DATA, and DATA that says nothing, which h2 does not see.
    const FRAMES: [&[u8]; 2] = [&[0, 0, 3, 0, 0, 0, 0, 0, 1, 7, 7, 7], &[0, 0, 0, 0, 0, 0, 0, 0, 1]];

    #[tokio::test]
    async fn sockets_are_looked_at_between_two_turns_of_a_connection_that_always_has_more() {
        for frame in FRAMES {
            look_between_turns_that_read(frame).await;
        }
    }

    async fn look_between_turns_that_read(endless: &'static [u8]) {
        let (mut stream, mut turn) = connection();
        lock(&stream.0).stream.endless = endless;
        let turns = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&turns);
        let task = tokio::spawn(poll_fn(move |cx| {
            turn.poll(cx, |cx| {
                counted.fetch_add(1, Relaxed);
                while Pin::new(&mut stream).poll_read(cx, &mut ReadBuf::new(&mut [0; 4096])).is_ready() {}
                // As h2 does, after an answer to what it has read.
                cx.waker().wake_by_ref();
                Poll::<()>::Pending
            })
        }));
        let (mut client, mut server) = UnixStream::pair().unwrap();
        for _ in 0..10 {
            // Otherwise the socket's readiness may be known from before.
            assert!(client.try_read(&mut [0]).is_err());
            server.write_all(b"x").await.unwrap();
            let before = turns.load(Relaxed);
            client.read_exact(&mut [0]).await.unwrap();
            let waited = turns.load(Relaxed) - before;
            assert!(waited <= 2, "{waited} turns");
        }
        task.abort();
    }

    #[tokio::test]
    async fn what_tls_holds_for_a_peer_that_does_not_read_is_counted_until_it_has_left() {
        let (mut stream, mut of) = connection();
        lock(&stream.0).stream.is_full = true;
        turn(&mut of, &mut stream, &[&[1; 300]]).await;
        assert_eq!(of.activity.queued_bytes(), 300);
        turn(&mut of, &mut stream, &[&[1; TLS_BUFFER]]).await;
        assert_eq!(of.activity.queued_bytes(), TLS_BUFFER, "TLS takes no more than that");
        lock(&stream.0).stream.is_full = false;
        turn(&mut of, &mut stream, &[]).await;
        assert_eq!(of.activity.queued_bytes(), 0);
    }

    #[tokio::test]
    async fn a_flush_that_fails_is_the_connections_next_error() {
        let (mut stream, mut of) = connection();
        lock(&stream.0).stream.is_broken = true;
        turn(&mut of, &mut stream, &[b"frame"]).await;
        let read = poll_fn(|cx| Pin::new(&mut stream).poll_read(cx, &mut ReadBuf::new(&mut [0])));
        assert_eq!(read.await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
