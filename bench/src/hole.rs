//! A black hole on loopback: an endpoint that never answers a SYN, as behind a firewall that drops.
//!
//! No firewall and no root: a listener without accept(2), whose accept queue the bench has filled itself.
//! Linux drops every further SYN of such a listener (`tcp_conn_request`), so a client gets no answer, repeats
//! the SYN after a second and gives up by its own timeout. [`BlackHole::open`] checks this before anything is
//! measured.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};

use crate::backend::listen;
use crate::load::Dialer;

/// The shortest queue there is; Linux still lets one connection in.
const BACKLOG: i32 = 0;
/// Connections after which the queue must be full.
const MOST_TO_FILL: usize = 8;
/// A handshake on loopback takes microseconds; the first repetition of a dropped SYN comes after a second.
const SILENCE: Duration = Duration::from_millis(300);
/// With it the kernel would answer where it could not queue (tcp(7)), so clients would be refused instead of
/// ignored.
const ABORT_ON_OVERFLOW: &str = "/proc/sys/net/ipv4/tcp_abort_on_overflow";

/// An address that swallows every SYN while this lives.
pub(crate) struct BlackHole {
    address: SocketAddrV4,
    _listener: OwnedFd,
    _queued: Vec<OwnedFd>,
}

impl BlackHole {
    /// Opens one beside the backends, which listen on 127.8.0.1 and up.
    pub(crate) fn open(port: u16) -> Result<Self> {
        let abort = fs::read_to_string(ABORT_ON_OVERFLOW)
            .with_context(|| format!("cannot read {ABORT_ON_OVERFLOW}"))?;
        ensure!(
            abort.trim() == "0",
            "{ABORT_ON_OVERFLOW} is {}: a full queue must be silent here, set it to 0",
            abort.trim()
        );
        let address = SocketAddrV4::new(Ipv4Addr::new(127, 8, 1, 1), port);
        let listener =
            listen(address, BACKLOG).with_context(|| format!("the black hole cannot listen on {address}"))?;
        let mut dialer = Dialer::default();
        let mut queued = Vec::new();
        while queued.len() < MOST_TO_FILL {
            let socket = dialer.dial(address).context("cannot fill the black hole")?;
            if !is_connected(&socket)? {
                return Ok(Self { address, _listener: listener, _queued: queued });
            }
            queued.push(socket);
        }
        bail!(
            "{address} took {MOST_TO_FILL} connections that nobody accepts: this kernel makes no black hole"
        )
    }

    /// Where it listens and never answers.
    pub(crate) fn address(&self) -> SocketAddrV4 {
        self.address
    }
}

/// Whether the handshake ends, either way, before [`SILENCE`] is over.
fn is_connected(socket: &OwnedFd) -> Result<bool> {
    let silence = SILENCE.try_into().context("a part of a second fits a timespec")?;
    let events = poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&silence)).context("poll")?;
    Ok(events > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_connects_to_a_black_hole_gets_no_answer() {
        let hole = BlackHole::open(28_999).unwrap();
        for _ in 0..3 {
            let socket = Dialer::default().dial(hole.address()).unwrap();
            assert!(!is_connected(&socket).unwrap());
        }
    }
}
