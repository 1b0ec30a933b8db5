//! One attempt at a TCP connection, and the options of its socket.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use portico_net::socket::{Keepalive, set_keepalive};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::happy_eyeballs::connect_first;

/// Unanswered probes before a silent connection is given up: after two minutes by default.
const PROBES: u32 = 3;

/// When the kernel ends a connection whose peer does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpKeepAlive {
    /// The silence before the first keep-alive probe, and between two probes.
    pub interval: Duration,
    /// How long bytes or probes may stay unacknowledged, or a peer's window may stay closed. It is for peers
    /// that always read. `None`: as long as the kernel has it.
    pub unacknowledged: Option<Duration>,
}

impl TcpKeepAlive {
    /// Keep-alive for a peer that may pause for as long as it likes. With `TCP_USER_TIMEOUT` the kernel also
    /// ends a connection whose window stays closed, although the peer answers each probe. Without it, bytes
    /// may stay unacknowledged for a quarter of an hour (`net.ipv4.tcp_retries2`).
    pub const OF_ONE_THAT_PAUSES: Self = Self { interval: Duration::from_secs(30), unacknowledged: None };
}

impl Default for TcpKeepAlive {
    fn default() -> Self {
        Self {
            // It keeps the entries of firewalls and NAT, of which the shortest live about a minute.
            interval: Duration::from_secs(30),
            // Instead of the kernel's quarter of an hour. Longer than an unresponsive tunnel may take to come
            // back (`ClientSettings::give_up_after`): a network that is gone for half a minute costs no
            // stream. New streams do not wait for it, because HTTP/2's PING fails within seconds.
            unacknowledged: Some(Duration::from_secs(75)),
        }
    }
}

/// Connects to any of these addresses by happy eyeballs (RFC 8305), without a proxy, for a connection whose
/// peer may pause. `None`: there are none. An error is the last one, with its address.
pub async fn connect_direct(
    addresses: &[SocketAddr],
    limit: Duration,
) -> Option<Result<TcpStream, (SocketAddr, io::Error)>> {
    let connect = |address| async move {
        connect(address, limit, TcpKeepAlive::OF_ONE_THAT_PAUSES).await.map_err(|error| (address, error))
    };
    connect_first(addresses, connect).await
}

/// Connects within the limit.
pub(crate) async fn connect(
    address: SocketAddr,
    limit: Duration,
    keep_alive: TcpKeepAlive,
) -> io::Result<TcpStream> {
    let stream = timeout(limit, TcpStream::connect(address)).await.map_err(|_| {
        io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} ms", limit.as_millis()))
    })??;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    let TcpKeepAlive { interval, unacknowledged } = keep_alive;
    set_keepalive(&socket, Keepalive { time: interval, interval, probes: PROBES })?;
    socket.set_tcp_user_timeout(unacknowledged)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_socket_sends_at_once_and_does_not_wait_for_the_dead() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let keep_alive =
            TcpKeepAlive { interval: Duration::from_secs(5), unacknowledged: Some(Duration::from_secs(9)) };
        let stream =
            connect(listener.local_addr().unwrap(), Duration::from_secs(30), keep_alive).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), keep_alive.interval);
        assert_eq!(socket.tcp_user_timeout().unwrap(), keep_alive.unacknowledged);
    }

    #[tokio::test]
    async fn a_peer_of_a_direct_connection_may_pause_for_as_long_as_it_likes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [listener.local_addr().unwrap()];
        let connected = connect_direct(&addresses, Duration::from_secs(30)).await;
        let stream = connected.unwrap().unwrap();
        assert_eq!(SockRef::from(&stream).tcp_user_timeout().unwrap(), None);
        assert!(SockRef::from(&stream).keepalive().unwrap());
    }
}
