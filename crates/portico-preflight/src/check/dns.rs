//! Two checks of names: a name server answers, by UDP and by TCP; a name resolves on this machine.

use std::io;
use std::net::SocketAddr;

use portico_dial::{Dialer, Target};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};

use super::{AGAIN, Limits, micros, millis, tcp};
use crate::observation::Observation;
use crate::sys;
use crate::transport::Transport;

/// The fixed part of a message (RFC 1035 section 4.1.1).
const HEADER: usize = 12;

/// The largest answer that is read. Ours to the root has some hundred bytes.
const LARGEST: usize = 4096;

/// Asks a name server for the root's name servers. Any answer will do, a refusal too: it has been reached.
pub async fn check(server: SocketAddr, is_tcp: bool, limits: Limits) -> Observation {
    // It ties the answer to the question; a stranger on the path could forge more than that.
    let id = (super::unix_millis() & 0xffff) as u16;
    let asking =
        async { if is_tcp { over_tcp(server, id, limits).await } else { over_udp(server, id).await } };
    timeout(limits.answer, asking).await.unwrap_or(Observation::TimedOut { millis: millis(limits.answer) })
}

/// Resolves a name as this machine's programs do.
pub async fn resolve(dialer: &Dialer, name: &str) -> Observation {
    // The port is of no importance to a resolver.
    match dialer.resolve(&Target { host: name.into(), port: 443 }).await {
        Ok(resolved) => {
            Observation::Resolved { addresses: resolved.addresses.iter().map(SocketAddr::ip).collect() }
        }
        Err(error) => Observation::NotResolved { why: error.to_string().into() },
    }
}

async fn over_udp(server: SocketAddr, id: u16) -> Observation {
    let local: SocketAddr = if server.is_ipv6() { ([0; 16], 0).into() } else { ([0; 4], 0).into() };
    let asking = async {
        let socket = UdpSocket::bind(local).await?;
        sys::keep_icmp_errors(&socket, server.is_ipv6())?;
        socket.connect(server).await?;
        let outcome = ask_until_answered(&socket, id).await;
        Ok(outcome.unwrap_or_else(|error| Observation::of_error(&error, sys::next_icmp_error(&socket))))
    };
    asking.await.unwrap_or_else(|error: io::Error| Observation::of_error(&error, None))
}

/// Asks again and again, for ever. An answer to an earlier attempt will do, so the time is that since the
/// first.
async fn ask_until_answered(socket: &UdpSocket, id: u16) -> io::Result<Observation> {
    let began = Instant::now();
    loop {
        if let Ok(answered) = timeout(AGAIN, ask(socket, id)).await {
            return answered.map(|()| Observation::Answered { micros: micros(began) });
        }
    }
}

/// Asks once, and waits for the answer, for ever.
async fn ask(socket: &UdpSocket, id: u16) -> io::Result<()> {
    socket.send(&question(id)).await?;
    let mut bytes = vec![0; LARGEST];
    loop {
        let length = socket.recv(&mut bytes).await?;
        if is_answer(&bytes[..length], id) {
            return Ok(());
        }
    }
}

async fn over_tcp(server: SocketAddr, id: u16, limits: Limits) -> Observation {
    let start = Instant::now();
    let mut stream = match tcp::connect(server, limits.answer).await {
        Ok(stream) => stream,
        Err(seen) => return seen,
    };
    let exchange = async {
        let question = question(id);
        // Its length goes first (RFC 1035 section 4.2.2).
        let length = u16::try_from(question.len()).unwrap_or(u16::MAX).to_be_bytes();
        stream.write_all(&[&length[..], &question].concat()).await?;
        let mut bytes = vec![0; usize::from(stream.read_u16().await?).min(LARGEST)];
        stream.read_exact(&mut bytes).await?;
        Ok::<_, io::Error>(bytes)
    };
    match exchange.await {
        Ok(bytes) if is_answer(&bytes, id) => Observation::Answered { micros: micros(start) },
        Ok(_) => Observation::not_tried(format_args!(
            "what answers at {} does not speak DNS",
            Transport::Tcp(server.port())
        )),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Observation::Reset,
        Err(error) => Observation::of_error(&error, None),
    }
}

/// Asks for the name servers of the root.
fn question(id: u16) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    // Recursion desired; one question.
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    // The root, NS, IN.
    bytes.extend([0, 0, 2, 0, 1]);
    bytes
}

/// Whether it is an answer to our question.
fn is_answer(bytes: &[u8], id: u16) -> bool {
    bytes.len() >= HEADER && bytes.starts_with(&id.to_be_bytes()) && bytes[2] & 0x80 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_our_number_and_is_no_question() {
        let mut message = question(0x1234);
        assert!(!is_answer(&message, 0x1234));
        message[2] |= 0x80;
        assert!(is_answer(&message, 0x1234));
        assert!(!is_answer(&message, 0x1235));
        for length in 0..HEADER {
            assert!(!is_answer(&message[..length], 0x1234), "{length}");
        }
    }
}
