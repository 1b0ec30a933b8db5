//! Pipes for splice(2): bytes of bulk transfers stay in the kernel.
//!
//! A thread has a few, lent to one direction of one connection while bytes move and given back once it rests.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use rustix::io::{self, Errno};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use std::os::fd::AsFd;

/// Wanted first, then what unprivileged processes still get when they have used up `pipe-user-pages-soft`.
/// Less than this gains nothing over copying.
const CAPACITIES: [usize; 2] = [1 << 20, 256 << 10];

/// Pipes of one thread. Each holds at most its capacity of kernel memory and two descriptors; transfers
/// beyond that many are copied.
const MOST_PIPES: usize = 64;

/// Empty pipes kept for the next transfer.
const KEPT_PIPES: usize = 16;

/// A pipe that is lent.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    capacity: usize,
    held: usize,
}

#[derive(Debug, Default)]
struct Pool {
    free: Vec<Pipe>,
    lent: usize,
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

impl Pipe {
    /// An empty pipe, or `None` where there are enough already or the system gives no large one.
    pub(crate) fn lend() -> Option<Box<Self>> {
        POOL.with_borrow_mut(|pool| {
            if pool.lent >= MOST_PIPES {
                return None;
            }
            let pipe = pool.free.pop().or_else(Self::make)?;
            pool.lent += 1;
            Some(Box::new(pipe))
        })
    }

    fn make() -> Option<Self> {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).ok()?;
        let capacity = CAPACITIES.into_iter().find_map(|size| fcntl_setpipe_size(&write, size).ok())?;
        Some(Self { read, write, capacity, held: 0 })
    }

    /// Returns the pipe to the pool. One that still holds bytes is closed: they must never reach another
    /// connection.
    pub(crate) fn give_back(self: Box<Self>) {
        POOL.with_borrow_mut(|pool| {
            pool.lent -= 1;
            if self.held == 0 && pool.free.len() < KEPT_PIPES {
                pool.free.push(*self);
            }
        });
    }

    /// Bytes in the pipe.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Most bytes it can hold. It may be full with less: each segment takes a slot, whatever its size.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Moves what the socket has, `most` bytes of it, into the pipe; 0 is its end. A full pipe returns what
    /// an empty socket does (`EAGAIN`); an empty one does not.
    pub(crate) fn fill(&mut self, from: impl AsFd, most: usize) -> Result<usize, Errno> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let filled = io::retry_on_intr(|| splice(from.as_fd(), None, &self.write, None, most, flags))?;
        self.held += filled;
        Ok(filled)
    }

    /// Moves what the pipe holds, `most` bytes of it, into the socket, as far as it takes it.
    pub(crate) fn drain(&mut self, to: impl AsFd, most: usize) -> Result<usize, Errno> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let sent = io::retry_on_intr(|| splice(&self.read, None, to.as_fd(), None, most, flags))?;
        self.held -= sent;
        Ok(sent)
    }
}
