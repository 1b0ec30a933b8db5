//! One attempt at a TCP connection, and the options of its socket.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long bytes may stay unacknowledged before the kernel ends the connection, instead of its quarter of an
/// hour. Longer than an unresponsive tunnel may take to come back (`ClientSettings::give_up_after`): a
/// network that is gone for half a minute costs no stream. New streams do not wait for it, because HTTP/2's
/// PING fails within seconds.
const UNACKNOWLEDGED: Duration = Duration::from_secs(75);

/// The interval of TCP keep-alive. It keeps the entries of firewalls and NAT, of which the shortest live
/// about a minute.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Connects within the limit.
pub(crate) async fn connect(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let stream = timeout(limit, TcpStream::connect(address)).await.map_err(|_| {
        io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} ms", limit.as_millis()))
    })??;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE))?;
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_socket_sends_at_once_and_does_not_wait_for_the_dead() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = connect(listener.local_addr().unwrap(), Duration::from_secs(30)).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEP_ALIVE);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNACKNOWLEDGED));
    }
}
