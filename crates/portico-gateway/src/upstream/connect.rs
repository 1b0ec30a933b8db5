//! Makes the TCP connection to an endpoint, with the fewest segments and system calls that its first second
//! needs.

use std::io;
use std::net::SocketAddr;

use portico_net::stream::send_some;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Starts the TCP handshake. It is not started by tokio. tokio asks every socket for its error once it is
/// connected, and the first bytes make this system call superfluous.
///
/// `client_first` promises that bytes are sent at once. They then travel with the last packet of the TCP
/// handshake. Where the server may speak first, holding that packet back would cost 40 ms. Keep-alive comes
/// once the connection lasts (`Meter::take_due_keepalive`).
pub(super) fn begin(address: SocketAddr, client_first: bool) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    if client_first {
        rustix::net::sockopt::set_tcp_quickack(&socket, false)?;
    }
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => TcpStream::from_std(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Waits for the end of the TCP handshake and sends the `first` bytes, if there are any; returns how many the
/// socket took. A handshake that failed is what sending fails with.
pub(super) async fn send_once_connected(stream: &TcpStream, first: &[u8]) -> io::Result<usize> {
    loop {
        let ready = stream.ready(Interest::WRITABLE).await?;
        if first.is_empty() {
            // Whether there is an error is known already. Asking which one is a system call.
            let failed = if ready.is_write_closed() { stream.take_error()? } else { None };
            return failed.map_or(Ok(0), Err);
        }
        match send_some(stream, first) {
            Ok(sent) => return Ok(sent),
            Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
