//! The options of sockets, and how a process that runs out of descriptors is recognised.

use std::io;
use std::net::SocketAddr;
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
