//! The bytes that an upstream agent sent for one connection and its frontend has not taken.
//!
//! All connections of such an agent share its Connect stream, and the protocol has no way to pause one of
//! them. Up to `--connection-buffer` a connection costs the others nothing: the window of what is put here is
//! given back at once. Beyond that, window is kept back until the frontend takes bytes: a fast endpoint would
//! run ahead of any slow line. It is never kept back for long: [`STEP`] is given back each [`PACE`] whatever
//! the frontend does. So the others wait a tenth of a second, and never for a frontend.
//!
//! A frontend that takes less than that, 10 Mbit/s, falls behind by more and more. The bytes that all such
//! connections hold beyond their buffers are bounded. The one that has waited longest loses its connection.
//! One that takes nothing for [`PATIENCE`] loses it in any case.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use portico_net::MemoryBudget;
use portico_net::memory::Reservation;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::connection_end::ConnectionEnd;
use super::counters::Counted;

/// How long window is kept back. An agent of upstream's has 64 KiB under way before it waits for window. So a
/// packet of another connection waits for about two of these.
const PACE: Duration = Duration::from_millis(50);

/// How much of it is given back then.
const STEP: usize = 64 * 1024;

/// How long a connection over its buffer may take nothing at all. A Unix socket has room again once three
/// quarters of its 208 KiB were read: at 1 Mbit/s that is every 1.3 s. Over TCP it takes 64 KiB each
/// half second then.
const PATIENCE: Duration = Duration::from_secs(4);

/// Payloads are copied together up to this. One that is kept as it came pins the whole frame around it, and
/// upstream's agents send 4 KiB at most. It is also what a frontend gets in one packet, of 4 MiB at most.
const BLOCK: usize = 64 * 1024;

/// Why nothing more comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The endpoint closed; all it sent is here.
    Closed,
    /// The endpoint reset it.
    EndpointReset,
    /// The agent is gone.
    AgentLost,
}

impl From<Ended> for ConnectionEnd {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Closed => Self::EndpointClosed,
            Ended::EndpointReset => Self::EndpointReset,
            Ended::AgentLost => Self::AgentLost,
        }
    }
}

/// The queue of one connection.
#[derive(Debug)]
pub(crate) struct Inbox {
    limit: usize,
    state: Mutex<State>,
    /// Everything that waits.
    reservation: Reservation,
    /// The part of `reservation` that is beyond the limit.
    excess: Reservation,
    went_over: Notify,
}

#[derive(Debug, Default)]
struct State {
    blocks: VecDeque<BytesMut>,
    bytes: usize,
    /// Window that is kept back.
    owed: usize,
    /// While the queue is over its limit: when the frontend was last seen to take something.
    over: Option<Instant>,
    /// Whether it has taken something since then.
    took: bool,
    ended: Option<Ended>,
    reader: Option<Waker>,
}

impl Inbox {
    /// A queue for `limit` bytes and some more, which count in `memory`; those beyond the limit also in
    /// `excess`.
    pub(crate) fn new(limit: usize, memory: &MemoryBudget, excess: &MemoryBudget) -> Self {
        let [reservation, excess] =
            [memory, excess].map(|budget| Reservation::new(vec![budget.clone()], Duration::ZERO));
        Self { limit, state: Mutex::default(), reservation, excess, went_over: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a payload at the end. Returns how much of `window`, which it came in, is given back now.
    pub(crate) fn push(&self, payload: Bytes, window: usize) -> usize {
        let len = payload.len();
        let mut state = self.state();
        let more = (state.bytes + len).saturating_sub(self.limit.max(state.bytes));
        if more > 0 && self.excess.is_evicted() {
            // The connection is about to end.
            return window;
        }
        state.bytes += len;
        state.push(&payload);
        if more > 0 {
            state.owed += window;
            if state.over.is_none() {
                state.over = Some(Instant::now());
                self.went_over.notify_one();
            }
        }
        let reader = state.reader.take();
        drop(state);
        self.reservation.charge(len);
        if more > 0 {
            self.excess.charge(more);
        }
        if let Some(reader) = reader {
            reader.wake();
        }
        if more > 0 { 0 } else { window }
    }

    /// Nothing more comes.
    pub(crate) fn end(&self, why: Ended) {
        let mut state = self.state();
        state.ended.get_or_insert(why);
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
    }

    /// The next bytes, or why there are none; and the window that is given back for them.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>) -> Poll<Result<(Bytes, usize), Ended>> {
        let mut state = self.state();
        let Some(bytes) = state.pop() else {
            if let Some(why) = state.ended {
                return Poll::Ready(Err(why));
            }
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let before = state.bytes;
        state.bytes -= bytes.len();
        let less = before.saturating_sub(self.limit.max(state.bytes));
        state.took = true;
        let given = if state.bytes > self.limit {
            state.owed.min(bytes.len())
        } else {
            state.over = None;
            state.owed
        };
        state.owed -= given;
        drop(state);
        self.reservation.release(bytes.len());
        if less > 0 {
            self.excess.release(less);
        }
        Poll::Ready(Ok((bytes, given)))
    }

    /// Window that is kept back still, for the stream to have when the connection is gone.
    pub(crate) fn take_owed(&self) -> usize {
        std::mem::take(&mut self.state().owed)
    }

    /// Gives window back while the connection is over its buffer, and counts it in `full`. Returns why it has
    /// to end, when it has to. May be dropped, and begun again.
    pub(crate) async fn pace(&self, full: &AtomicU64, give_back: impl Fn(usize)) -> ConnectionEnd {
        let evicted = poll_fn(|cx| match self.reservation.poll_evicted(cx) {
            Poll::Ready(()) => Poll::Ready(ConnectionEnd::Memory),
            Poll::Pending => self.excess.poll_evicted(cx).map(|()| ConnectionEnd::BufferFull),
        });
        let stopped = async {
            loop {
                if self.state().over.is_none() {
                    self.went_over.notified().await;
                }
                let _full = Counted::new(full);
                while self.state().over.is_some() {
                    sleep(PACE).await;
                    let (given, is_stopped) = self.state().step();
                    give_back(given);
                    if is_stopped {
                        return ConnectionEnd::NotRead;
                    }
                }
            }
        };
        tokio::select! {
            reason = evicted => reason,
            reason = stopped => reason,
        }
    }
}

impl State {
    /// The window that is given back now, and whether nothing has been taken for too long.
    fn step(&mut self) -> (usize, bool) {
        let given = self.owed.min(STEP);
        self.owed -= given;
        let took = std::mem::take(&mut self.took);
        let Some(last) = &mut self.over else { return (given, false) };
        if took {
            *last = Instant::now();
        }
        (given, last.elapsed() >= PATIENCE)
    }

    fn push(&mut self, mut payload: &[u8]) {
        while !payload.is_empty() {
            let room = self.blocks.back().map_or(0, |last| BLOCK - last.len());
            let (now, rest) = payload.split_at(payload.len().min(room));
            match self.blocks.back_mut() {
                Some(last) if room > 0 => last.extend_from_slice(now),
                _ => self.blocks.push_back(BytesMut::new()),
            }
            payload = rest;
        }
    }

    fn pop(&mut self) -> Option<Bytes> {
        let block = self.blocks.pop_front();
        if self.blocks.is_empty() {
            // A connection at rest holds nothing.
            self.blocks = VecDeque::new();
        }
        block.map(BytesMut::freeze)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const LIMIT: usize = 1_000_000;

    static FULL: AtomicU64 = AtomicU64::new(0);

    struct Budgets {
        memory: MemoryBudget,
        excess: MemoryBudget,
    }

    impl Budgets {
        fn new() -> Self {
            Self { memory: MemoryBudget::new(1 << 30), excess: MemoryBudget::new(8 * LIMIT) }
        }

        fn inbox(&self) -> Inbox {
            Inbox::new(LIMIT, &self.memory, &self.excess)
        }
    }

    async fn take(inbox: &Inbox) -> Result<Bytes, Ended> {
        poll_fn(|cx| inbox.poll_take(cx).map_ok(|(bytes, _)| bytes)).await
    }

    fn payload(len: usize) -> Bytes {
        vec![7; len].into()
    }

    #[tokio::test]
    async fn bytes_leave_in_the_order_they_came_and_the_end_behind_them() {
        let budgets = Budgets::new();
        let inbox = budgets.inbox();
        let (mut expected, mut taken) = (Vec::new(), Vec::new());
        for (index, len) in [1, 5_000, 10, 20, BLOCK - 5_031, BLOCK, 70_000, LIMIT].into_iter().enumerate() {
            expected.extend(vec![index as u8; len]);
            inbox.push(vec![index as u8; len].into(), len);
        }
        inbox.end(Ended::Closed);
        inbox.end(Ended::AgentLost);
        loop {
            match take(&inbox).await {
                Ok(bytes) => {
                    assert!(!bytes.is_empty() && bytes.len() <= BLOCK, "{} bytes", bytes.len());
                    taken.extend_from_slice(&bytes);
                }
                Err(why) => break assert_eq!(why, Ended::Closed, "the first end counts"),
            }
        }
        assert!(taken == expected);
        assert_eq!((budgets.memory.held(), budgets.excess.held()), (0, 0));
    }

    #[tokio::test]
    async fn window_beyond_the_limit_comes_back_as_bytes_are_taken() {
        let budgets = Budgets::new();
        let inbox = budgets.inbox();
        assert_eq!(inbox.push(payload(600_000), 600_005), 600_005);
        assert_eq!(inbox.push(payload(600_000), 600_005), 0);
        assert_eq!(inbox.push(payload(900_000), 900_005), 0);
        assert_eq!(budgets.excess.held(), 1_100_000);
        let taken = async || poll_fn(|cx| inbox.poll_take(cx)).await.unwrap().1;
        let mut given = 0;
        for _ in 0..1_100_000_usize.div_ceil(BLOCK) - 1 {
            let block = taken().await;
            assert_eq!(block, BLOCK, "over the limit, as much as was taken");
            given += block;
        }
        assert_eq!(given + taken().await, 1_500_010, "all, once there is room");
        assert_eq!((inbox.take_owed(), budgets.excess.held()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_others_wait_for_a_reader_that_stops_for_a_moment_at_most_and_then_it_is_closed() {
        let budgets = Budgets::new();
        let inbox = budgets.inbox();
        inbox.push(payload(LIMIT), LIMIT);
        let begun = Instant::now();
        let given = Cell::new(0);
        let sends = async {
            loop {
                // As much as the window allows, like an endpoint without end.
                let window = given.take();
                if window > 0 {
                    inbox.push(payload(window), window);
                }
                sleep(PACE).await;
            }
        };
        inbox.push(payload(STEP), STEP);
        tokio::select! {
            biased;
            reason = inbox.pace(&FULL, |window| given.set(given.get() + window)) => {
                assert_eq!(reason, ConnectionEnd::NotRead);
            }
            () = sends => {}
        }
        assert_eq!(begun.elapsed(), PATIENCE);
        assert!(budgets.excess.held() >= 35 * STEP, "10 Mbit/s all the time: {}", budgets.excess.held());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_that_goes_on_may_fall_behind_as_far_as_there_is_memory_for_it() {
        let budgets = Budgets::new();
        let inbox = budgets.inbox();
        let runs = async {
            loop {
                inbox.push(payload(STEP), 0);
                sleep(PACE).await;
            }
        };
        // An eighth of what comes.
        let reads = async {
            loop {
                sleep(8 * PACE).await;
                take(&inbox).await.unwrap();
            }
        };
        inbox.push(payload(LIMIT), 0);
        tokio::select! {
            reason = inbox.pace(&FULL, |_| {}) => assert_eq!(reason, ConnectionEnd::BufferFull),
            () = runs => {}
            () = reads => {}
        }
        assert_eq!(inbox.push(payload(STEP), STEP), STEP, "what comes after that is not kept");
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_that_fall_behind_the_one_that_has_stopped_goes_first() {
        let budgets = Budgets::new();
        let (stopped, slow) = (budgets.inbox(), budgets.inbox());
        stopped.push(payload(5 * LIMIT), 0);
        for _ in 0..50 {
            slow.push(payload(100_000), 0);
        }
        for _ in 0..10 {
            sleep(PACE).await;
            take(&slow).await.unwrap();
        }
        slow.push(payload(2 * LIMIT), 0);
        assert!(stopped.excess.is_evicted() && !slow.excess.is_evicted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_keeps_up_is_never_closed() {
        let budgets = Budgets::new();
        let inbox = budgets.inbox();
        for _ in 0..40 {
            inbox.push(payload(STEP), 0);
        }
        let lives = async {
            for _ in 0..1_000 {
                inbox.push(payload(STEP), STEP);
                take(&inbox).await.unwrap();
                sleep(PATIENCE / 2).await;
            }
        };
        tokio::select! {
            biased;
            reason = inbox.pace(&FULL, |_| {}) => panic!("{reason:?}"),
            () = lives => {}
        }
    }
}
