//! Bytes on their way to a socket that takes them more slowly than they come.
//!
//! At most one stream window, for window is given back only for what was written. Frames of a few bytes are
//! copied together, or a thousand frames of one byte would cost a thousand times their size.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use portico_net::memory::Reservation;
use portico_net::{MemoryBudget, Socket};

use crate::activity::Activity;
use crate::settings::FRAME_SIZE;

/// Frames below this are copied together. A larger frame is kept as it is, with the buffer it was read into.
/// That buffer is at most twice its size, so the bytes held are the bytes counted, up to a factor of two.
const SMALL: usize = FRAME_SIZE as usize / 2;

/// Slices of one write: more than the frames of a whole stream window.
const SLICES: usize = 8;

/// What waits for one socket, counted.
#[derive(Debug)]
pub struct Waiting {
    queue: Queue,
    reservation: Reservation,
}

impl Waiting {
    /// Nothing waits. Bytes that will wait count in the budgets of the connection, and in that of a cluster.
    pub fn new(activity: &Activity, cluster: Option<&MemoryBudget>) -> Self {
        Self { queue: Queue::default(), reservation: activity.reservation(cluster) }
    }

    /// Counts what waits in the budget of a cluster as well, which is known only after the first bytes.
    pub(crate) fn count_in(&self, cluster: &MemoryBudget) {
        self.reservation.join(cluster);
    }

    /// Bytes that wait.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// More bytes wait.
    pub fn push(&mut self, frame: Bytes) {
        self.reservation.charge(frame.len());
        self.queue.push(frame);
    }

    /// Takes what has waited longest.
    pub fn pop(&mut self) -> Option<Bytes> {
        let frame = self.queue.pop()?;
        self.reservation.release(frame.len());
        Some(frame)
    }

    /// Writes what the socket takes in one call. Returns how much that was.
    pub fn write_to(&mut self, socket: &impl Socket) -> io::Result<usize> {
        let written = self.queue.write_to(socket)?;
        self.reservation.release(written);
        Ok(written)
    }

    /// Ready when others need the memory, and the stream has to end.
    pub fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.reservation.poll_evicted(cx)
    }
}

#[derive(Debug, Default)]
struct Queue {
    whole: VecDeque<Bytes>,
    /// Small frames, behind all of `whole`.
    small: BytesMut,
}

impl Queue {
    fn len(&self) -> usize {
        self.whole.iter().map(Bytes::len).sum::<usize>() + self.small.len()
    }

    fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.small.is_empty()
    }

    fn push(&mut self, frame: Bytes) {
        if frame.len() < SMALL {
            self.small.extend_from_slice(&frame);
            return;
        }
        if !self.small.is_empty() {
            self.whole.push_back(std::mem::take(&mut self.small).freeze());
        }
        self.whole.push_back(frame);
    }

    fn pop(&mut self) -> Option<Bytes> {
        let small = || (!self.small.is_empty()).then(|| std::mem::take(&mut self.small).freeze());
        self.whole.pop_front().or_else(small)
    }

    fn write_to(&mut self, socket: &impl Socket) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let parts = self.whole.iter().map(|frame| &frame[..]).chain(std::iter::once(&self.small[..]));
        let mut count = 0;
        for (slice, part) in slices.iter_mut().zip(parts.filter(|part| !part.is_empty())) {
            *slice = IoSlice::new(part);
            count += 1;
        }
        let written = socket.try_write_vectored(&slices[..count])?;
        self.advance(written);
        Ok(written)
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(frame) = self.whole.front_mut() {
            if written < frame.len() {
                frame.advance(written);
                return;
            }
            written -= frame.len();
            self.whole.pop_front();
        }
        self.small.advance(written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(queue: &Queue) -> Vec<u8> {
        let mut all: Vec<u8> = queue.whole.iter().flatten().copied().collect();
        all.extend_from_slice(&queue.small);
        all
    }

    #[test]
    fn bytes_leave_in_the_order_they_came() {
        let mut queue = Queue::default();
        let mut expected = Vec::new();
        for (index, size) in [1, 5000, 2, 3, 4096, 4095, 70_000, 1].into_iter().enumerate() {
            let frame = vec![index as u8; size];
            expected.extend_from_slice(&frame);
            queue.push(frame.into());
        }
        for step in [1, 4999, 1, 1, 8000, 60_000] {
            assert_eq!(contents(&queue), expected);
            queue.advance(step);
            expected.drain(..step);
        }
        assert_eq!(contents(&queue), expected);
        queue.advance(expected.len());
        assert!(queue.is_empty());
    }

    #[test]
    fn small_frames_share_one_allocation() {
        let mut queue = Queue::default();
        for _ in 0..100_000 {
            queue.push(Bytes::from_static(b"x"));
        }
        assert!(queue.whole.is_empty());
        assert!(queue.small.capacity() < 300_000);
    }
}
