//! Bounds the bytes that wait for receivers: one budget for the process, others for parts of it.
//!
//! A [`MemoryBudget`] counts bytes and has a limit. A [`Reservation`] is one queue, of a stream or a
//! connection. It counts in all budgets it is given: those of its connection, its cluster and the process.
//! Over the limit of any of them, the reservation whose bytes have waited longest is evicted. Its bytes no
//! longer count. Its task is woken to end the stream or connection.
//!
//! Reservations of unauthenticated peers are [evicted first](Reservation::set_first), however short they
//! wait. New ones have always waited less. Chosen by age alone, they would push out slow authenticated peers.
//!
//! A connection or a cluster with a budget of its own loses its own streams before it can fill the budget of
//! the process. The owner of a connection may turn out while bytes of it wait. Then its reservations
//! [join](Reservation::join) that budget.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use slab::Slab;
use tokio::time::Instant;

/// Between two log lines about evictions.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Between two searches that find nothing to evict: each looks at every reservation.
const SEARCH_INTERVAL: Duration = Duration::from_millis(10);

/// A limit for the bytes that several reservations hold together. Clones share one count.
#[derive(Debug, Clone)]
pub struct MemoryBudget(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    limit: AtomicUsize,
    held: AtomicUsize,
    reservations: Mutex<Reservations>,
}

#[derive(Debug, Default)]
struct Reservations {
    all: Slab<Arc<State>>,
    searched_in_vain: Option<Instant>,
    warned: Option<Instant>,
    /// Evictions since then.
    evicted: usize,
}

impl MemoryBudget {
    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Budget {
            limit: AtomicUsize::new(limit),
            held: AtomicUsize::default(),
            reservations: Mutex::default(),
        }))
    }

    /// Bytes held now, those of evicted reservations not counted.
    #[must_use]
    pub fn held(&self) -> usize {
        self.0.held.load(Relaxed)
    }

    /// Most bytes that may be held.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.limit.load(Relaxed)
    }

    /// Sets another limit. The next bytes are held against it.
    pub fn set_limit(&self, limit: usize) {
        self.0.limit.store(limit, Relaxed);
    }

    /// Bytes that may still be held.
    #[must_use]
    pub fn room(&self) -> usize {
        self.limit().saturating_sub(self.held())
    }

    fn reservations(&self) -> MutexGuard<'_, Reservations> {
        // A panic elsewhere leaves nothing half done here.
        self.0.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Evicts reservations until the rest is within the limit. Those that go first come first, then those
    /// whose bytes have waited longest.
    fn enforce(&self) {
        if self.held() <= self.limit() {
            return;
        }
        let mut reservations = self.reservations();
        let now = Instant::now();
        if reservations.searched_in_vain.is_some_and(|last| now.duration_since(last) < SEARCH_INTERVAL) {
            return;
        }
        // Somewhat below the limit, or the next bytes would begin this search again.
        let enough = self.limit() - self.limit() / 16;
        let waiting = reservations.all.iter().filter_map(|(_, reservation)| {
            let since = reservation.waits_since(now)?;
            Some((!reservation.goes_first.load(Relaxed), since, Arc::clone(reservation)))
        });
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort_unstable_by_key(|(goes_later, since, _)| (*goes_later, *since));
        for (_, since, longest) in waiting {
            if self.held() <= enough {
                break;
            }
            // Its bytes may have gone since it was listed.
            if longest.waits_since(now) != Some(since) {
                continue;
            }
            longest.evict();
            reservations.evicted += 1;
        }
        if self.held() > enough {
            reservations.searched_in_vain = Some(now);
            return;
        }
        if reservations.warned.is_none_or(|last| now.duration_since(last) >= WARN_INTERVAL) {
            reservations.warned = Some(now);
            let reset = std::mem::take(&mut reservations.evicted);
            let limit = self.limit();
            drop(reservations);
            tracing::warn!(
                reset,
                limit,
                "receivers that do not read use up the memory budget; the longest wait is reset first"
            );
        }
    }
}

/// One queue of bytes for one receiver. Dropped, it holds nothing.
#[derive(Debug)]
pub struct Reservation {
    state: Arc<State>,
    /// Where each budget lists it.
    slots: Vec<usize>,
}

#[derive(Debug)]
struct State {
    budgets: Vec<MemoryBudget>,
    /// One that came later, and where it lists this reservation.
    joined: OnceLock<(MemoryBudget, usize)>,
    patience: Duration,
    goes_first: AtomicBool,
    queue: Mutex<Queue>,
    waker: AtomicWaker,
}

#[derive(Debug)]
struct Queue {
    bytes: usize,
    /// Bytes that were there at `since` and still are: a receiver that takes one byte now and then makes no
    /// progress.
    due: usize,
    since: Instant,
    evicted: bool,
}

impl Reservation {
    /// A reservation that counts in `budgets`. It is not evicted before its bytes have waited for `patience`.
    #[must_use]
    pub fn new(budgets: Vec<MemoryBudget>, patience: Duration) -> Self {
        let queue = Queue { bytes: 0, due: 0, since: Instant::now(), evicted: false };
        let (joined, queue, waker) = (OnceLock::new(), Mutex::new(queue), AtomicWaker::new());
        let goes_first = AtomicBool::default();
        let state = Arc::new(State { budgets, joined, patience, goes_first, queue, waker });
        let slots = state.budgets.iter().map(|budget| budget.reservations().all.insert(Arc::clone(&state)));
        let slots = slots.collect();
        Self { state, slots }
    }

    /// Counts in one more budget, with what waits already. Only the first call does.
    pub fn join(&self, budget: &MemoryBudget) {
        let state = &self.state;
        if state.joined.get().is_some() {
            return;
        }
        let slot = budget.reservations().all.insert(Arc::clone(state));
        let queue = state.queue();
        // Set within the lock, as what waits is counted in all budgets or in none.
        if state.joined.set((budget.clone(), slot)).is_ok() {
            budget.0.held.fetch_add(queue.bytes, Relaxed);
        }
        drop(queue);
        budget.enforce();
    }

    /// Whether this reservation is evicted before all others, however short its bytes have waited.
    pub fn set_first(&self, goes_first: bool) {
        self.state.goes_first.store(goes_first, Relaxed);
    }

    /// Counts `bytes` that begin to wait. May evict this reservation or others.
    pub fn charge(&self, bytes: usize) {
        self.state.charge(bytes);
    }

    /// Counts `bytes` that the receiver took.
    pub fn release(&self, bytes: usize) {
        self.state.release(bytes);
    }

    /// Bytes that wait now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.state.queue().bytes
    }

    /// Whether the reservation has to end.
    #[must_use]
    pub fn is_evicted(&self) -> bool {
        self.state.queue().evicted
    }

    /// Ready once the reservation has to end. Wakes the last task that polled it.
    pub fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.state.waker.register(cx.waker());
        if self.is_evicted() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.state.evict();
        let joined = self.state.joined.get().map(|(budget, slot)| (budget, slot));
        for (budget, slot) in self.state.budgets.iter().zip(&self.slots).chain(joined) {
            let mut reservations = budget.reservations();
            reservations.all.remove(*slot);
            if reservations.all.is_empty() {
                // A thousand streams that once waited need no memory afterwards.
                reservations.all.shrink_to_fit();
            }
        }
    }
}

impl State {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic elsewhere leaves nothing half done here.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn budgets(&self) -> impl Iterator<Item = &MemoryBudget> {
        self.budgets.iter().chain(self.joined.get().map(|(budget, _)| budget))
    }

    fn charge(&self, bytes: usize) {
        let mut queue = self.queue();
        if queue.evicted {
            return;
        }
        if queue.bytes == 0 {
            queue.since = Instant::now();
            queue.due = bytes;
        }
        queue.bytes += bytes;
        // Within the lock, so that an eviction takes off the budgets no more than was put on.
        for budget in self.budgets() {
            budget.0.held.fetch_add(bytes, Relaxed);
        }
        drop(queue);
        self.budgets().for_each(MemoryBudget::enforce);
    }

    fn release(&self, bytes: usize) {
        let mut queue = self.queue();
        // An evicted reservation has nothing left to release.
        let bytes = bytes.min(queue.bytes);
        queue.bytes -= bytes;
        queue.due = queue.due.saturating_sub(bytes);
        if queue.due == 0 && queue.bytes > 0 {
            queue.due = queue.bytes;
            queue.since = Instant::now();
        }
        self.take_off(bytes);
    }

    fn take_off(&self, bytes: usize) {
        for budget in self.budgets() {
            budget.0.held.fetch_sub(bytes, Relaxed);
        }
    }

    /// Since when the oldest bytes wait; `None` if none do, or not for long enough.
    fn waits_since(&self, now: Instant) -> Option<Instant> {
        let queue = self.queue();
        let waits = queue.bytes > 0 && now.saturating_duration_since(queue.since) >= self.patience;
        waits.then_some(queue.since)
    }

    fn evict(&self) {
        let mut queue = self.queue();
        queue.evicted = true;
        self.take_off(std::mem::take(&mut queue.bytes));
        drop(queue);
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn stream(budgets: &[&MemoryBudget]) -> Reservation {
        Reservation::new(budgets.iter().copied().cloned().collect(), Duration::ZERO)
    }

    async fn stream_with(budget: &MemoryBudget, bytes: usize) -> Reservation {
        advance(SECOND).await;
        let reservation = stream(&[budget]);
        reservation.charge(bytes);
        reservation
    }

    #[tokio::test(start_paused = true)]
    async fn over_the_limit_the_reservation_that_waits_longest_is_evicted() {
        let budget = MemoryBudget::new(1000);
        let first = stream_with(&budget, 300).await;
        let second = stream_with(&budget, 400).await;
        let third = stream_with(&budget, 300).await;
        assert!(![&first, &second, &third].iter().any(|reservation| reservation.is_evicted()));
        let last = stream_with(&budget, 1).await;
        assert!(first.is_evicted() && !second.is_evicted() && !third.is_evicted() && !last.is_evicted());
        assert_eq!(budget.held(), 701, "an evicted reservation no longer counts");
        first.charge(500);
        first.release(300);
        assert_eq!(budget.held(), 701, "whatever it still does");
        drop((first, second, third, last));
        assert_eq!(budget.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn reservations_that_go_first_do_so_before_those_that_wait_longer() {
        let budget = MemoryBudget::new(1000);
        let slow = stream_with(&budget, 300).await;
        let [first, second] = [stream_with(&budget, 300).await, stream_with(&budget, 300).await];
        first.set_first(true);
        second.set_first(true);
        let third = stream_with(&budget, 101).await;
        assert!(first.is_evicted() && !second.is_evicted() && !slow.is_evicted());
        second.set_first(false);
        third.charge(300);
        assert!(slow.is_evicted() && !second.is_evicted() && !third.is_evicted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_receiver_that_takes_a_byte_now_and_then_still_waits() {
        let budget = MemoryBudget::new(1000);
        let trickle = stream_with(&budget, 500).await;
        let reads = stream_with(&budget, 400).await;
        for _ in 0..10 {
            advance(SECOND).await;
            trickle.release(1);
            trickle.charge(1);
            reads.release(300);
            reads.charge(300);
        }
        reads.charge(101);
        assert!(trickle.is_evicted() && !reads.is_evicted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_over_its_own_budget_loses_its_own_stream() {
        let (process, connection) = (MemoryBudget::new(1000), MemoryBudget::new(500));
        let other = stream_with(&process, 400).await;
        let first = stream(&[&connection, &process]);
        first.charge(250);
        advance(SECOND).await;
        let second = stream(&[&connection, &process]);
        second.charge(251);
        assert!(first.is_evicted() && !second.is_evicted() && !other.is_evicted());
        assert_eq!((connection.held(), process.held()), (251, 651));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reservation_that_joins_a_budget_counts_there_with_all_its_bytes() {
        let (process, cluster) = (MemoryBudget::new(1000), MemoryBudget::new(500));
        let reservation = stream_with(&process, 300).await;
        reservation.join(&cluster);
        reservation.join(&MemoryBudget::new(0));
        reservation.charge(100);
        assert_eq!((process.held(), cluster.held()), (400, 400));
        reservation.release(350);
        assert_eq!((process.held(), cluster.held()), (50, 50));
        advance(SECOND).await;
        let other = stream(&[&process]);
        other.charge(451);
        assert!(!other.is_evicted() && !reservation.is_evicted());
        other.join(&cluster);
        assert!(reservation.is_evicted() && !other.is_evicted(), "the limit holds at once");
        assert_eq!((process.held(), cluster.held()), (451, 451));
        drop((reservation, other));
        assert_eq!((process.held(), cluster.held()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reservation_is_not_evicted_before_its_patience_is_over() {
        let budget = MemoryBudget::new(1000);
        let connection = Reservation::new(vec![budget.clone()], SECOND);
        connection.charge(1001);
        assert!(!connection.is_evicted());
        advance(SECOND).await;
        connection.charge(1);
        assert!(connection.is_evicted());
    }

    #[tokio::test(start_paused = true)]
    async fn an_eviction_wakes_the_task() {
        let budget = MemoryBudget::new(1000);
        let reservation = Arc::new(stream_with(&budget, 1000).await);
        let waiting = Arc::clone(&reservation);
        let task = tokio::spawn(std::future::poll_fn(move |cx| waiting.poll_evicted(cx)));
        tokio::task::yield_now().await;
        assert!(!task.is_finished());
        let other = stream_with(&budget, 1).await;
        task.await.unwrap();
        assert!(!other.is_evicted());
    }
}
