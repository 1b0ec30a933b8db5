//! The options of sockets, and how a process that runs out of descriptors is recognised.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// Connections the kernel holds until they are accepted; `net.core.somaxconn` may lower it.
pub const BACKLOG: i32 = 4_096;

/// TCP keep-alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe.
    pub time: Duration,
    /// Between probes.
    pub interval: Duration,
    /// Unanswered probes before the connection is given up.
    pub probes: u32,
}

impl Default for Keepalive {
    /// A dead peer is noticed after two minutes, sooner than the shortest idle limit of common NAT devices
    /// (five).
    fn default() -> Self {
        Self { time: Duration::from_secs(60), interval: Duration::from_secs(15), probes: 4 }
    }
}

/// Sets keep-alive; on a listening socket, for the connections accepted from it.
pub fn set_keepalive(socket: &SockRef<'_>, keepalive: Keepalive) -> io::Result<()> {
    let settings = TcpKeepalive::new()
        .with_time(keepalive.time)
        .with_interval(keepalive.interval)
        .with_retries(keepalive.probes);
    socket.set_tcp_keepalive(&settings)
}

/// Bounds how many bytes the kernel takes for a receiver beyond those it could send (`TCP_NOTSENT_LOWAT`).
/// It is set once as many were to be written: most connections carry less, and save the system call. A write
/// that is tried again counts again, which sets it rather too early.
#[derive(Debug)]
pub struct UnsentLimit {
    bytes: u32,
    /// What may still be written without it. `None` once it is set.
    left: Option<usize>,
}

impl UnsentLimit {
    /// At most `bytes` unsent.
    #[must_use]
    pub fn new(bytes: u32) -> Self {
        Self { bytes, left: Some(bytes as usize) }
    }

    /// To be called before up to `bytes` are written to `socket`.
    pub fn before_write(&mut self, socket: &impl AsFd, bytes: usize) {
        let Some(left) = self.left else { return };
        self.left = left.checked_sub(bytes);
        if self.left.is_none() {
            // Fails for sockets that are not TCP, whose buffers do not grow.
            let _ = SockRef::from(socket).set_tcp_notsent_lowat(self.bytes);
        }
    }
}

/// A TCP socket that may be bound where connections of a process before us linger in TIME_WAIT. An IPv6 one
/// serves IPv4 as well.
pub fn unbound(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    Ok(socket)
}

/// Whether the process (`EMFILE`) or the machine (`ENFILE`) has no descriptor left, or no memory for one.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn what_the_kernel_takes_is_bounded_before_more_is_written() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let bound = || SockRef::from(&socket).tcp_notsent_lowat().unwrap();
        let unbounded = bound();
        let mut limit = UnsentLimit::new(1_000);
        limit.before_write(&socket, 600);
        limit.before_write(&socket, 400);
        assert_eq!(bound(), unbounded);
        limit.before_write(&socket, 1);
        assert_eq!(bound(), 1_000);
    }
}
