//! Pipes for splice(2): bytes of bulk transfers stay in the kernel. A few a thread, lent to one direction of one connection
//! while bytes are moving, given back as soon as it has come to rest.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use rustix::io::{self, Errno};
use rustix::net::{RecvFlags, SendFlags};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use std::os::fd::AsFd;

/// Wanted first, then what unprivileged processes still get when they have used up `pipe-user-pages-soft`. Less than this
/// gains nothing over copying.
const CAPACITIES: [usize; 2] = [1 << 20, 256 << 10];

/// Pipes of one thread. Each holds at most its capacity of kernel memory and two descriptors; transfers beyond that many
/// are copied.
const MOST_PIPES: usize = 64;

/// Empty pipes kept for the next transfer.
const KEPT_PIPES: usize = 16;

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

    /// Returns the pipe to the pool. One that still holds bytes is closed: they must never reach another connection.
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

    /// Moves what the socket has into the pipe; 0 is its end. Only into an empty pipe: a full one answers like an empty socket.
    pub(crate) fn fill(&mut self, from: impl AsFd) -> Result<usize, Errno> {
        debug_assert_eq!(self.held, 0);
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        self.held =
            io::retry_on_intr(|| splice(from.as_fd(), None, &self.write, None, self.capacity, flags))?;
        Ok(self.held)
    }

    /// Moves what the pipe holds into the socket, as far as it takes it.
    pub(crate) fn drain(&mut self, to: impl AsFd) -> Result<usize, Errno> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let sent = io::retry_on_intr(|| splice(&self.read, None, to.as_fd(), None, self.held, flags))?;
        self.held -= sent;
        Ok(sent)
    }
}

/// Reads what the socket has into `buffer`; 0 is its end.
pub(crate) fn receive(from: impl AsFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    io::retry_on_intr(|| rustix::net::recv(from.as_fd(), &mut *buffer, RecvFlags::empty()))
        .map(|(read, _)| read)
}

/// Writes `bytes` as far as the socket takes them.
pub(crate) fn send(to: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    io::retry_on_intr(|| rustix::net::send(to.as_fd(), bytes, SendFlags::NOSIGNAL))
}
