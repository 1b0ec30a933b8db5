//! Waiting for descriptors that are no sockets. Tokio has it, behind an unsafe function.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers `descriptor` with the runtime, which reports when there is something to read.
pub(crate) fn readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open, and is the same descriptor of the same file until it is dropped. It moves
    // into the AsyncFd, which lends it out by shared reference only.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
    Ok(registered?)
}
