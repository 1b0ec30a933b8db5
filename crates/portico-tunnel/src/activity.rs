//! The facts about one HTTP/2 connection beyond those of h2: signs of life, written bytes, and held bytes.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use portico_net::MemoryBudget;
use portico_net::memory::Reservation;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::chunk::{self, CHUNK};

/// Most bytes that wait for the TCP socket of one connection: four streams with a full window each, a few
/// milliseconds of a fast network. More would not be faster, for the socket is the bottleneck then.
const ROOM: usize = 1 << 20;

/// Most bytes that one connection holds in both directions: a fourth of what a gateway holds in all by
/// default.
const CONNECTION_MEMORY: usize = 32 << 20;

/// The memory of a connection that has not authenticated, beyond its bytes: TLS, the state of HTTP/2 with a
/// few requests, and their answers.
const UNAUTHENTICATED: usize = 32 * 1024;

/// A chunk while the process is short of memory.
const SMALL: usize = 8 * 1024;

/// A peer that takes within this time all that waits for it is at work: 1 MiB at 8 Mbit/s.
const PATIENCE: Duration = Duration::from_secs(1);

/// Shared by the task of a connection and those of its streams, all on one thread.
#[derive(Debug)]
pub struct Activity {
    process: MemoryBudget,
    connection: MemoryBudget,
    /// Memory of the cluster that the connection counts for, once that is known.
    cluster: OnceLock<MemoryBudget>,
    /// Bytes that wait for the peer. Evicted, the connection ends.
    to_peer: Reservation,
    /// The bytes of `to_peer` that h2 has written, and that wait below it.
    behind: AtomicUsize,
    /// Memory held because the peer has not finished: a partial frame, and before authentication its
    /// unanswered requests and the connection itself. Evicted, the connection ends.
    from_peer: Reservation,
    authenticated: AtomicBool,
    /// Until it authenticates, the connection has one of a bounded number of slots in place of the memory.
    has_slot: bool,
    /// The part of `from_peer` that an unfinished frame takes. `frame` is the number of that frame, 0 for
    /// none.
    frame_bytes: AtomicUsize,
    frame: AtomicU64,
    /// Requests under way that came before the client had authenticated.
    requests: AtomicU32,
    /// Notified when `to_peer` has room. Wakes one stream.
    freed: Notify,
    /// Bytes came since this was last asked.
    received: AtomicBool,
    seen: LastSeen,
    /// Streams have queued bytes since the connection was last polled.
    queued: AtomicBool,
    /// How often the connection had nothing left to write.
    flushes: AtomicU64,
    flushed: Notify,
    /// Requests cancelled by their client before they were answered.
    pub(crate) cancelled: AtomicU32,
}

impl Activity {
    /// The activity of a connection that holds bytes within the budget of the process, at most 32 MiB of it.
    pub fn new(process: &MemoryBudget) -> Self {
        Self::within(process, CONNECTION_MEMORY)
    }

    /// Like [`Self::new`], for a connection that holds `most` bytes.
    pub fn within(process: &MemoryBudget, most: usize) -> Self {
        let connection = MemoryBudget::new(most);
        let budgets = vec![connection.clone(), process.clone()];
        Self {
            process: process.clone(),
            connection,
            cluster: OnceLock::new(),
            to_peer: Reservation::new(budgets.clone(), PATIENCE),
            behind: AtomicUsize::default(),
            from_peer: Reservation::new(budgets, Duration::ZERO),
            authenticated: AtomicBool::new(true),
            has_slot: false,
            frame_bytes: AtomicUsize::default(),
            frame: AtomicU64::default(),
            requests: AtomicU32::default(),
            freed: Notify::new(),
            received: AtomicBool::default(),
            seen: LastSeen { begun: Instant::now(), millis: AtomicU64::default() },
            queued: AtomicBool::default(),
            flushes: AtomicU64::default(),
            flushed: Notify::new(),
            cancelled: AtomicU32::default(),
        }
    }

    /// This activity for a client that has not authenticated. The connection counts as a whole. The oldest
    /// such connection goes first, before those of clients that have authenticated.
    #[must_use]
    pub fn unauthenticated(self) -> Self {
        self.from_peer.set_first(true);
        self.from_peer.charge(UNAUTHENTICATED);
        self.authenticated.store(false, Relaxed);
        self
    }

    /// This activity for a peer that has not authenticated, where slots bound the number of such connections,
    /// and so what they hold. Until it authenticates, what it has begun does not count. So whatever
    /// authenticated peers hold does not end it.
    #[must_use]
    pub fn in_slot(mut self) -> Self {
        self.has_slot = true;
        self.authenticated.store(false, Relaxed);
        self
    }

    /// The client has authenticated.
    pub fn authenticate(&self) {
        if !self.authenticated.swap(true, Relaxed) && !self.has_slot {
            self.from_peer.release(UNAUTHENTICATED);
            self.from_peer.set_first(false);
        }
    }

    /// Whether it has. A server is, to its client.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated.load(Relaxed)
    }

    /// Counts what waits for the peer in either direction in the budget of a cluster, too.
    pub(crate) fn count_in(&self, cluster: &MemoryBudget) {
        self.to_peer.join(cluster);
        self.from_peer.join(cluster);
        self.cluster.get_or_init(|| cluster.clone());
    }

    /// The peer has sent part of a frame, for which h2 holds so many bytes.
    pub(crate) fn unfinished(&self, bytes: usize, frame: Option<u64>) {
        self.frame.store(frame.unwrap_or(0), Relaxed);
        let bytes = if self.has_slot && !self.is_authenticated() { 0 } else { bytes };
        let before = self.frame_bytes.swap(bytes, Relaxed);
        if before != bytes {
            // In this order, or each frame of a transfer would look like the one before, still waiting.
            self.from_peer.release(before);
            self.from_peer.charge(bytes);
        }
    }

    /// The number of the frame that the peer has begun and not finished.
    pub(crate) fn unfinished_frame(&self) -> Option<u64> {
        Some(self.frame.load(Relaxed)).filter(|&frame| frame > 0)
    }

    /// Counts a request of a client that has not authenticated, and its bytes, until the result is dropped.
    /// `None` if `most` are under way.
    pub(crate) fn request(self: &Arc<Self>, bytes: usize, most: u32) -> Option<Unanswered> {
        let up = |requests| (requests < most).then_some(requests + 1);
        self.requests.fetch_update(Relaxed, Relaxed, up).ok()?;
        self.from_peer.charge(bytes);
        Some(Unanswered { bytes, activity: Arc::clone(self) })
    }

    /// Bytes came.
    pub(crate) fn note_received(&self) {
        self.received.store(true, Relaxed);
    }

    /// Whether bytes came since [`take_received`](Self::take_received) was called.
    pub fn has_received(&self) -> bool {
        self.received.load(Relaxed)
    }

    /// Whether bytes came since the last call.
    pub fn take_received(&self) -> bool {
        let received = self.received.swap(false, Relaxed);
        if received {
            self.seen.now();
        }
        received
    }

    /// How long ago a call of [`Self::take_received`] last found bytes. KeepAlive calls it once an interval,
    /// and the response to its PING counts.
    pub fn last_seen(&self) -> Duration {
        self.seen.elapsed()
    }

    /// So many bytes that h2 has written wait for a socket that takes no more.
    pub(crate) fn behind(&self, bytes: usize) {
        let before = self.behind.swap(bytes, Relaxed);
        if bytes > before {
            self.to_peer.charge(bytes - before);
        } else if bytes < before {
            self.to_peer.release(before - bytes);
            self.pass_on();
        }
    }

    /// All that was queued is written.
    pub(crate) fn flushed(&self) {
        self.flushes.fetch_add(1, Relaxed);
        self.flushed.notify_waiters();
    }

    /// A stream has queued bytes. Returns a mark for `flushed_since`.
    pub fn queue(&self) -> u64 {
        self.queued.store(true, Relaxed);
        self.flushes.load(Relaxed)
    }

    /// Whether streams have queued bytes since the last call.
    pub(crate) fn take_queued(&self) -> bool {
        self.queued.swap(false, Relaxed)
    }

    /// Bytes that wait for the peer, with the buffers that they pin.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.to_peer.held()
    }

    /// Waits until all that was queued before `mark` was taken has been handed to the socket. Queueing has
    /// woken the connection's task.
    pub(crate) async fn flushed_since(&self, mark: u64) {
        loop {
            let flushed = self.flushed.notified();
            if self.flushes.load(Relaxed) > mark {
                return;
            }
            flushed.await;
        }
    }

    /// Ready when the connection has to end, because others need the memory: with the reason.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<&'static str> {
        if self.from_peer.poll_evicted(cx).is_ready() {
            return Poll::Ready(
                "the peer does not finish what it began, or does not authenticate, and the memory for that \
                 is used up",
            );
        }
        let reason = "the peer does not read what it asked for, and the memory for that is used up";
        self.to_peer.poll_evicted(cx).map(|()| reason)
    }

    /// Whether the connection has to end, because others need the memory.
    pub fn is_evicted(&self) -> bool {
        self.to_peer.is_evicted() || self.from_peer.is_evicted()
    }

    /// For a stream whose socket takes bytes more slowly than they come. They count in the budget of its
    /// cluster, too.
    pub(crate) fn reservation(&self, cluster: Option<&MemoryBudget>) -> Reservation {
        let budgets = [&self.connection, &self.process].into_iter().chain(cluster);
        Reservation::new(budgets.cloned().collect(), Duration::ZERO)
    }

    /// Most bytes of the next chunk towards the peer; 0 while there is no room for one. While the process or
    /// the cluster is short of memory, a connection holds one small chunk at a time.
    pub(crate) fn room(&self) -> usize {
        let mut budgets = self.cluster.get().into_iter().chain([&self.process]);
        match (budgets.any(|budget| budget.room() < CHUNK), self.to_peer.held()) {
            (true, 0) => SMALL,
            (true, _) => 0,
            (false, held) if held + CHUNK > ROOM => 0,
            (false, _) => CHUNK,
        }
    }

    /// Returns when there may be room again, to one stream at a time, in the order in which they came. It
    /// then has to call [`pass_on`](Self::pass_on).
    async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Lets the next stream in line have what room is left.
    fn pass_on(&self) {
        if self.room() > 0 {
            self.freed.notify_one();
        }
    }

    /// Counts these bytes until h2 has written or dropped them.
    pub fn counted(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        let cost = chunk::cost(bytes.len());
        self.to_peer.charge(cost);
        Bytes::from_owner(Counted { bytes, cost, activity: Arc::clone(self) })
    }
}

/// When bytes were last found.
#[derive(Debug)]
struct LastSeen {
    begun: Instant,
    /// After `begun`.
    millis: AtomicU64,
}

impl LastSeen {
    fn now(&self) {
        let millis = self.begun.elapsed().as_millis();
        self.millis.store(u64::try_from(millis).unwrap_or(u64::MAX), Relaxed);
    }

    fn elapsed(&self) -> Duration {
        self.begun.elapsed().saturating_sub(Duration::from_millis(self.millis.load(Relaxed)))
    }
}

/// A request under way of a client that has not authenticated.
#[derive(Debug)]
pub(crate) struct Unanswered {
    bytes: usize,
    activity: Arc<Activity>,
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.activity.requests.fetch_sub(1, Relaxed);
        self.activity.from_peer.release(self.bytes);
    }
}

/// The turn of one stream in the queue for room on its connection.
#[derive(Default)]
pub struct RoomTurn {
    /// Set only while there is none.
    waits: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Whether it is this stream's turn to have what was freed.
    has_turn: bool,
}

impl RoomTurn {
    /// Room for bytes that wait for the connection's socket, of which the stream takes what it likes.
    pub fn poll(&mut self, activity: &Arc<Activity>, cx: &mut Context<'_>) -> Poll<usize> {
        loop {
            let room = activity.room();
            if room > 0 {
                self.waits = None;
                return Poll::Ready(room);
            }
            let freed = self.waits.get_or_insert_with(|| {
                let activity = Arc::clone(activity);
                Box::pin(async move { activity.freed().await })
            });
            ready!(freed.as_mut().poll(cx));
            self.waits = None;
            self.has_turn = true;
        }
    }

    /// The stream needs no room for now.
    pub fn leave(&mut self) {
        self.waits = None;
    }

    /// The stream has taken what it needs: the next one may have the rest.
    pub fn pass_on(&mut self, activity: &Activity) {
        if std::mem::take(&mut self.has_turn) {
            activity.pass_on();
        }
    }
}

impl std::fmt::Debug for RoomTurn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RoomTurn").field("has_turn", &self.has_turn).finish_non_exhaustive()
    }
}

struct Counted {
    bytes: Bytes,
    cost: usize,
    activity: Arc<Activity>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.activity.to_peer.release(self.cost);
        self.activity.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Waker;

    use super::*;

    fn chunk(activity: &Arc<Activity>, bytes: usize) -> Option<Bytes> {
        let bytes = bytes.min(activity.room());
        (bytes > 0).then(|| activity.counted(vec![0; bytes].into()))
    }

    #[test]
    fn a_connection_holds_a_megabyte_for_its_peer() {
        let process = MemoryBudget::new(64 << 20);
        let activity = Arc::new(Activity::new(&process));
        let held: Vec<_> = std::iter::from_fn(|| chunk(&activity, CHUNK)).collect();
        assert_eq!(held.len(), ROOM / CHUNK);
        assert_eq!(process.held(), held.len() * CHUNK);
        drop(held);
        assert_eq!(process.held(), 0);
    }

    #[test]
    fn of_a_connection_in_a_slot_nothing_counts_until_it_has_authenticated() {
        let process = MemoryBudget::new(64 << 20);
        let activity = Activity::new(&process).in_slot();
        activity.unfinished(10_000, Some(1));
        assert_eq!((process.held(), activity.unfinished_frame()), (0, Some(1)));
        activity.authenticate();
        assert_eq!(process.held(), 0);
        activity.unfinished(10_000, Some(1));
        assert_eq!(process.held(), 10_000);
        activity.unfinished(0, None);
        assert_eq!(process.held(), 0);
    }

    #[test]
    fn a_turn_that_is_not_used_is_the_next_ones() {
        let activity = Arc::new(Activity::new(&MemoryBudget::new(64 << 20)));
        let mut held: Vec<_> = std::iter::from_fn(|| chunk(&activity, CHUNK)).collect();
        let mut cx = Context::from_waker(Waker::noop());
        let [mut first, mut second, mut third] = std::array::from_fn(|_| Box::pin(activity.freed()));
        for waiting in [&mut first, &mut second, &mut third] {
            assert!(waiting.as_mut().poll(&mut cx).is_pending());
        }
        held.pop();
        drop(first);
        assert!(third.as_mut().poll(&mut cx).is_pending(), "one at a time, in the order they came");
        assert!(second.as_mut().poll(&mut cx).is_ready());
        activity.pass_on();
        assert!(third.as_mut().poll(&mut cx).is_ready());
        assert!(pin!(activity.freed()).poll(&mut cx).is_pending());
    }

    #[test]
    fn while_memory_is_short_a_connection_holds_one_small_chunk() {
        let process = MemoryBudget::new(4 * CHUNK);
        let (other, activity) = (Arc::new(Activity::new(&process)), Arc::new(Activity::new(&process)));
        let held: Vec<_> = std::iter::from_fn(|| chunk(&other, CHUNK)).collect();
        assert_eq!(held.len(), 4);
        let small = chunk(&activity, CHUNK).unwrap();
        assert_eq!(small.len(), SMALL);
        assert!(chunk(&activity, 1).is_none());
        drop(small);
        assert!(chunk(&activity, 1).is_some());
        drop(held);
        assert_eq!(activity.room(), CHUNK);
    }

    #[test]
    fn small_chunks_take_the_room_of_their_bytes() {
        let process = MemoryBudget::new(64 << 20);
        let activity = Arc::new(Activity::new(&process));
        let held: Vec<_> = (0..1000).map_while(|_| chunk(&activity, 256)).collect();
        assert_eq!((held.len(), process.held()), (1000, 256_000));
    }
}
