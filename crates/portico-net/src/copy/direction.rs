//! One direction of a connection: read, write, and what is held between the two.
//!
//! The buffer belongs to the thread; a pipe for splice(2) is lent only while a transfer is large. After a
//! read that did not fill the buffer the socket is taken to be empty. This saves the read that would only
//! learn so.

use std::cell::RefCell;
use std::io;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::Shutdown;
use tokio::io::Interest;

use crate::batch::Batching;
use crate::pipe::Pipe;
use crate::stream::{Socket, Stream, attempt, receive, send_some};

/// The buffer of a thread. No TCP receive window of a connection at rest is larger.
const SCRATCH: usize = 64 * 1024;

/// The bytes of one read where no pipe is to be had. A blocked direction therefore holds no more.
const COPY_CHUNK: usize = 16 * 1024;

/// A read of this size suggests that more is coming.
const LARGE_READ: usize = 16 * 1024;

/// Large reads in a row before a pipe is lent: one may be a certificate or a list of pods, two are a
/// transfer.
const LARGE_READS: u8 = 2;

/// Bytes one direction may move before the other connections of the thread get their turn.
const TURN: usize = 512 * 1024;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into());
}

/// One direction.
#[derive(Debug, Default)]
pub(super) struct Direction {
    /// Read but not yet written; what is before `sent` has gone.
    unsent: Vec<u8>,
    sent: usize,
    pipe: Option<Box<Pipe>>,
    /// Before splicing: large reads in a row. While splicing: small rounds until it copies again.
    large_reads: u8,
    /// Whether bytes go through a pipe, as long as one is to be had.
    splicing: bool,
    batching: Batching,
    /// Whether tokio holds this task's waker for reads of the sender. Set when the sender is not readable,
    /// cleared when it is. Only this direction reads that socket, always in the same task, so the waker stays
    /// valid.
    waiting: bool,
    state: State,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Bytes may still come.
    #[default]
    Open,
    /// The sender has closed; that is not passed on yet.
    Ending,
    /// Nothing more will be moved.
    Ended,
}

/// Why a direction stopped for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// It waits for the sender.
    Idle,
    /// It waits for the receiver; the sender is not read.
    Blocked,
    /// It has had its turn.
    Turn,
    /// It has ended.
    Ended,
    /// Reading failed.
    SenderFailed,
    /// Writing failed.
    ReceiverFailed,
}

/// Which side of a direction failed.
#[derive(Debug)]
enum Failed {
    Sender(Errno),
    Receiver,
}

impl Direction {
    pub(super) fn starting_with(unsent: Vec<u8>) -> Self {
        let mut direction = Self::default();
        direction.unsent = unsent;
        direction
    }

    /// Whether nothing more will be moved.
    pub(super) fn has_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Moves what can be moved now. `last`: the other direction has ended. Then shutdown(2) is skipped, since
    /// the caller closes both sockets at once, which sends the FIN.
    pub(super) fn advance(
        &mut self,
        cx: &mut Context<'_>,
        from: &Stream,
        to: &Stream,
        last: bool,
        mut count: impl FnMut(usize),
    ) -> Stop {
        let mut moved = 0;
        while self.state != State::Ended {
            if self.holds() {
                match self.flush(to) {
                    Ok(sent) => {
                        count(sent);
                        moved += sent;
                    }
                    Err(Errno::WOULDBLOCK) => match to.poll_write_ready(cx) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(_)) => return self.fail(Stop::ReceiverFailed),
                        Poll::Pending => return Stop::Blocked,
                    },
                    Err(_) => return self.fail(Stop::ReceiverFailed),
                }
                continue;
            }
            if self.state == State::Ending {
                if !last {
                    // Fails where the receiver is gone; its own direction says so.
                    let _ = rustix::net::shutdown(to, Shutdown::Write);
                }
                self.give_pipe_back();
                self.state = State::Ended;
                break;
            }
            if moved >= TURN {
                return Stop::Turn;
            }
            match self.poll_sender(cx, from) {
                Poll::Pending => {
                    self.rest(cx, from, moved);
                    return Stop::Idle;
                }
                Poll::Ready(Err(_)) => return self.fail(Stop::SenderFailed),
                Poll::Ready(Ok(())) => {}
            }
            match self.fill(from, to) {
                Ok(sent) => {
                    count(sent);
                    moved += sent;
                }
                // Nothing there after all: the next look at the socket waits for it.
                Err(Failed::Sender(Errno::WOULDBLOCK)) => {}
                Err(Failed::Sender(_)) => return Stop::SenderFailed,
                Err(Failed::Receiver) => return self.fail(Stop::ReceiverFailed),
            }
        }
        Stop::Ended
    }

    /// Whether the sender has something. A wake-up for either socket makes the task look at both. If the task
    /// waits for this one already, it does not register again: that takes a lock and two looks at the task's
    /// budget.
    fn poll_sender(&mut self, cx: &mut Context<'_>, from: &Stream) -> Poll<io::Result<()>> {
        // Only looks: a call that finds nothing is what clears tokio's readiness.
        if from.try_io(Interest::READABLE, || Ok(())).is_ok() {
            self.waiting = false;
            return Poll::Ready(Ok(()));
        }
        if self.waiting {
            return Poll::Pending;
        }
        let ready = from.poll_read_ready(cx);
        self.waiting = ready.is_pending();
        ready
    }

    /// Writes all that is held; false if `to` failed.
    pub(super) fn poll_flush_all(&mut self, cx: &mut Context<'_>, to: &Stream) -> Poll<bool> {
        while self.holds() {
            match self.flush(to) {
                Ok(_) => {}
                Err(Errno::WOULDBLOCK) => {
                    if ready!(to.poll_write_ready(cx)).is_err() {
                        return Poll::Ready(false);
                    }
                }
                Err(_) => return Poll::Ready(false),
            }
        }
        Poll::Ready(true)
    }

    /// Whether bytes that were read are still to be written.
    pub(super) fn holds(&self) -> bool {
        self.sent < self.unsent.len() || self.pipe.as_ref().is_some_and(|pipe| pipe.held() > 0)
    }

    /// Writes held bytes as far as `to` takes them.
    fn flush(&mut self, to: &Stream) -> Result<usize, Errno> {
        if self.sent < self.unsent.len() {
            let sent = send_some(to, &self.unsent[self.sent..])?;
            self.sent += sent;
            if self.sent == self.unsent.len() {
                self.unsent = Vec::new();
                self.sent = 0;
            }
            return Ok(sent);
        }
        match &mut self.pipe {
            // Not "short means full": splice may stop early for reasons of the pipe, and no event would
            // follow.
            Some(pipe) => attempt(to, Interest::WRITABLE, || pipe.drain(to, pipe.held()), |_| false),
            None => Ok(0),
        }
    }

    /// Reads once and passes on what it can; returns the bytes passed on.
    fn fill(&mut self, from: &Stream, to: &Stream) -> Result<usize, Failed> {
        if self.splicing && self.pipe.is_none() {
            self.pipe = Pipe::lend();
        }
        if let Some(pipe) = &mut self.pipe {
            // Not "short means empty": a pipe takes a limited number of segments, whatever their size.
            let read = attempt(from, Interest::READABLE, || pipe.fill(from, pipe.capacity()), |_| false)
                .map_err(Failed::Sender)?;
            if read == 0 {
                self.state = State::Ending;
            }
            self.batching.count(read);
            return Ok(0);
        }
        BUFFER.with_borrow_mut(|buffer| {
            let size = if self.splicing { COPY_CHUNK } else { SCRATCH };
            let buffer = &mut buffer[..size];
            let read = receive(from, buffer).map_err(Failed::Sender)?;
            if read == 0 {
                self.state = State::Ending;
                return Ok(0);
            }
            if read < LARGE_READ {
                self.large_reads = 0;
            } else if self.large_reads < LARGE_READS {
                self.large_reads += 1;
            }
            self.splicing |= self.large_reads == LARGE_READS;
            let sent = match send_some(to, &buffer[..read]) {
                Ok(sent) => sent,
                Err(Errno::WOULDBLOCK) => 0,
                Err(_) => return Err(Failed::Receiver),
            };
            if sent < read {
                self.unsent = buffer[sent..read].to_vec();
            }
            Ok(sent)
        })
    }

    /// The sender has nothing for now. A transfer that pauses goes on splicing: the first reads of a copy
    /// cost as much as all that a splice saves. A transfer that has become a conversation goes back to
    /// copying, which is cheaper for few bytes.
    fn rest(&mut self, cx: &mut Context<'_>, from: &Stream, moved: usize) {
        self.give_pipe_back();
        if !self.splicing {
            return;
        }
        match moved {
            // The other direction was woken.
            0 => {}
            // It is 0 already if there was no pipe to be had, and a small read was copied.
            1..LARGE_READ => self.large_reads = self.large_reads.saturating_sub(1),
            LARGE_READ.. => self.large_reads = LARGE_READS,
        }
        self.splicing = self.large_reads > 0;
        if self.splicing {
            self.batching.pause(cx, from);
        } else {
            self.batching.stop(from);
        }
    }

    /// An idle connection should not hold a pipe.
    fn give_pipe_back(&mut self) {
        if let Some(pipe) = self.pipe.take() {
            pipe.give_back();
        }
    }

    fn fail(&mut self, stop: Stop) -> Stop {
        self.give_pipe_back();
        self.unsent = Vec::new();
        self.sent = 0;
        self.state = State::Ended;
        stop
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.give_pipe_back();
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_conversation_is_copied_again_also_where_no_pipe_was_to_be_had() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let mut direction = Direction::default();
        direction.splicing = true;
        direction.rest(&mut Context::from_waker(Waker::noop()), &socket.into(), 1);
        assert!(!direction.splicing);
    }
}
