//! A TCP connection: whether it is accepted, and whether by a responder or by a program that waits for the
//! client.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::{Limits, micros, millis, unix_millis};
use crate::observation::Observation;
use crate::probe::{Banner, LONGEST_LINE, Line};
use crate::sys;

/// The answer to a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// What was seen.
    pub seen: Observation,
    /// The responder that accepted. `None`: nothing did, or a service that waits for its client to speak.
    pub responder: Option<Responder>,
}

/// What a responder says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Responder {
    /// Its first line.
    pub banner: Banner,
    /// How far its clock is ahead of ours.
    pub ahead_millis: i64,
}

/// Connects, and closes. Sends nothing.
pub async fn check(to: SocketAddr, limits: Limits) -> Greeting {
    let start = Instant::now();
    let mut stream = match connect(to, limits.answer).await {
        Ok(stream) => stream,
        Err(seen) => return Greeting { seen, responder: None },
    };
    let answered = Observation::Answered { micros: micros(start) };
    match listen(&mut stream, limits.banner).await {
        Ok(responder) => Greeting { seen: answered, responder },
        Err(_) => Greeting { seen: Observation::Reset, responder: None },
    }
}

/// Waits for the first line of a responder. `None`: something else is there.
pub(super) async fn listen(stream: &mut TcpStream, limit: Duration) -> io::Result<Option<Responder>> {
    let mut bytes = Vec::with_capacity(LONGEST_LINE);
    let hear = async {
        loop {
            match Banner::parse(&bytes) {
                Line::Complete(banner) => return Ok::<_, io::Error>(Some(banner)),
                Line::Other => return Ok(None),
                Line::NeedMore => {}
            }
            if stream.read_buf(&mut bytes).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    };
    let banner = match timeout(limit, hear).await {
        // It waits for us.
        Err(_) => None,
        Ok(response) => response?,
    };
    // The number is the other side's: any at all.
    let ahead = |banner: &Banner| banner.unix_millis.saturating_sub(unix_millis());
    Ok(banner.map(|banner| Responder { ahead_millis: ahead(&banner), banner }))
}

/// Connects. The error is what was seen instead.
pub(super) async fn connect(to: SocketAddr, limit: Duration) -> Result<TcpStream, Observation> {
    let stream = begin(to).map_err(|error| Observation::of_error(&error, None))?;
    if timeout(limit, stream.writable()).await.is_err() {
        return Err(Observation::TimedOut { millis: millis(limit) });
    }
    // First: to take the error of the socket empties the queue's signal, not the queue.
    let icmp = sys::next_icmp_error(&stream);
    match stream.take_error() {
        Ok(None) => Ok(stream),
        Ok(Some(error)) if error.raw_os_error() == Some(libc::ETIMEDOUT) => {
            Err(Observation::TimedOut { millis: millis(limit) })
        }
        Ok(Some(error)) | Err(error) => Err(Observation::of_error(&error, icmp)),
    }
}

/// Sends the SYN. The stream is writable once there is an answer.
fn begin(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), None)?;
    sys::keep_icmp_errors(&socket, to.is_ipv6())?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => TcpStream::from_std(socket.into()),
    }
}
