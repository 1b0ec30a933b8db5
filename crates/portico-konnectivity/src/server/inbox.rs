//! What an upstream agent sent for one connection and its frontend has not taken.
//!
//! All connections of such an agent share its Connect stream, which gives back window at once for what is
//! put here, up to `--connection-buffer` a connection. So one that is not read does not hold up the others.
//! Beyond that it does, by what it keeps of the stream's window: that is how a fast agent learns to wait for
//! a reader that reads. A reader that takes less than [`PROGRESS`] in [`PATIENCE`] meanwhile loses its
//! connection. In total, the memory budget bounds what waits.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use portico_net::MemoryBudget;
use portico_net::memory::Holder;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// How long a connection over its buffer may go without [`PROGRESS`].
const PATIENCE: Duration = Duration::from_secs(1);

/// What a reader takes in [`PATIENCE`] to keep its connection: 2 Mbit/s.
const PROGRESS: usize = 256 * 1024;

/// Payloads below this are copied together: each pins the whole frame that it came in.
const SMALL: usize = 2 * 1024;

/// Why nothing more comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The endpoint closed; all it sent is here.
    Closed,
    /// The agent is gone.
    AgentLost,
}

/// The queue of one connection.
#[derive(Debug)]
pub(crate) struct Inbox {
    limit: usize,
    state: Mutex<State>,
    holder: Holder,
    went_over: Notify,
}

#[derive(Debug, Default)]
struct State {
    whole: VecDeque<Bytes>,
    /// Small payloads, behind all of `whole`.
    small: BytesMut,
    bytes: usize,
    /// Window that is kept back.
    owed: usize,
    /// Since when the queue is over its limit, and what was taken since then.
    over: Option<(Instant, usize)>,
    ended: Option<Ended>,
    reader: Option<Waker>,
}

impl Inbox {
    pub(crate) fn new(limit: usize, memory: &MemoryBudget) -> Self {
        let holder = Holder::new(vec![memory.clone()], Duration::ZERO);
        Self { limit, state: Mutex::default(), holder, went_over: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a payload at the end. Returns how much of `window`, which it came in, is given back now.
    pub(crate) fn push(&self, payload: Bytes, window: usize) -> usize {
        self.holder.hold(payload.len());
        let mut state = self.state();
        state.bytes += payload.len();
        state.push(payload);
        let is_over = state.bytes > self.limit;
        if is_over {
            state.owed += window;
            if state.over.is_none() {
                state.over = Some((Instant::now(), 0));
                self.went_over.notify_one();
            }
        }
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
        if is_over { 0 } else { window }
    }

    /// Nothing more comes.
    pub(crate) fn end(&self, why: Ended) {
        let mut state = self.state();
        state.ended.get_or_insert(why);
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
    }

    /// The next bytes, or why there are none; and the window that was kept back for what fits now.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>) -> Poll<Result<(Bytes, usize), Ended>> {
        let mut state = self.state();
        let Some(bytes) = state.pop() else {
            if let Some(why) = state.ended {
                return Poll::Ready(Err(why));
            }
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        };
        state.bytes -= bytes.len();
        if let Some((_, taken)) = &mut state.over {
            *taken += bytes.len();
        }
        let owed = if state.bytes <= self.limit {
            state.over = None;
            std::mem::take(&mut state.owed)
        } else {
            0
        };
        drop(state);
        self.holder.release(bytes.len());
        Poll::Ready(Ok((bytes, owed)))
    }

    /// Window that is kept back still, for the stream to have when the connection is gone.
    pub(crate) fn take_owed(&self) -> usize {
        std::mem::take(&mut self.state().owed)
    }

    /// Ready when the connection has to end because it is not read.
    pub(crate) async fn is_stuck(&self) {
        loop {
            let over = self.state().over;
            let Some((since, _)) = over else {
                self.went_over.notified().await;
                continue;
            };
            sleep_until(since + PATIENCE).await;
            if self.state().makes_no_progress(since) {
                return;
            }
        }
    }

    /// Ready when others need the memory.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.holder.poll_evicted(cx)
    }
}

impl State {
    /// Whether too little was taken since the queue went over its limit at `since`. Begins to count anew.
    fn makes_no_progress(&mut self, since: Instant) -> bool {
        match &mut self.over {
            Some((begun, taken)) if *begun == since && *taken < PROGRESS => true,
            Some((begun, taken)) if *begun == since => {
                (*begun, *taken) = (Instant::now(), 0);
                false
            }
            _ => false,
        }
    }

    fn push(&mut self, payload: Bytes) {
        if payload.len() < SMALL {
            return self.small.extend_from_slice(&payload);
        }
        if !self.small.is_empty() {
            self.whole.push_back(std::mem::take(&mut self.small).freeze());
        }
        self.whole.push_back(payload);
    }

    fn pop(&mut self) -> Option<Bytes> {
        if let Some(bytes) = self.whole.pop_front() {
            return Some(bytes);
        }
        if self.whole.capacity() > 0 {
            // A connection at rest holds nothing.
            self.whole = VecDeque::new();
        }
        let small = std::mem::take(&mut self.small).freeze();
        (!small.is_empty()).then_some(small)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    fn inbox() -> (Inbox, MemoryBudget) {
        let memory = MemoryBudget::new(1 << 30);
        (Inbox::new(1_000_000, &memory), memory)
    }

    async fn take(inbox: &Inbox) -> Result<Bytes, Ended> {
        poll_fn(|cx| inbox.poll_take(cx).map_ok(|(bytes, _)| bytes)).await
    }

    fn payload(len: usize) -> Bytes {
        vec![7; len].into()
    }

    #[tokio::test]
    async fn bytes_leave_in_the_order_they_came_and_the_end_behind_them() {
        let (inbox, memory) = inbox();
        let (mut expected, mut taken) = (Vec::new(), Vec::new());
        for (index, len) in [1, 5_000, 10, 20, 2_048, 2_047, 70_000].into_iter().enumerate() {
            expected.extend(vec![index as u8; len]);
            inbox.push(vec![index as u8; len].into(), len);
        }
        inbox.end(Ended::Closed);
        inbox.end(Ended::AgentLost);
        loop {
            match take(&inbox).await {
                Ok(bytes) => taken.extend_from_slice(&bytes),
                Err(why) => break assert_eq!(why, Ended::Closed, "the first end counts"),
            }
        }
        assert!(taken == expected);
        assert_eq!(memory.held(), 0);
    }

    #[tokio::test]
    async fn window_beyond_the_limit_comes_back_once_there_is_room() {
        let (inbox, _memory) = inbox();
        assert_eq!(inbox.push(payload(600_000), 600_005), 600_005);
        assert_eq!(inbox.push(payload(600_000), 600_005), 0);
        let (_, owed) = poll_fn(|cx| inbox.poll_take(cx)).await.unwrap();
        assert_eq!(owed, 600_005);
        assert_eq!(inbox.take_owed(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_stuck_after_a_second() {
        let (inbox, _memory) = inbox();
        inbox.push(payload(1_000_001), 0);
        let begun = Instant::now();
        inbox.is_stuck().await;
        assert_eq!(begun.elapsed(), PATIENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_that_goes_on_is_not() {
        let (inbox, _memory) = inbox();
        for _ in 0..20 {
            inbox.push(payload(PROGRESS), 0);
        }
        let reads = async {
            for _ in 0..10 {
                tokio::time::sleep(PATIENCE / 2).await;
                take(&inbox).await.unwrap();
            }
        };
        tokio::select! {
            biased;
            () = inbox.is_stuck() => panic!("it reads"),
            () = reads => {}
        }
    }
}
