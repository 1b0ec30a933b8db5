//! The first bytes of a TLS client, sent along with CONNECT. A connection through the tunnel then takes one
//! round trip to the gateway less.
//!
//! Only a TLS handshake is sent before the gateway has answered. If the tunnel breaks meanwhile, the
//! handshake is sent again on another. A control plane may then see it twice. That has no effect before its
//! own answer (RFC 8446 section 2). Anything else waits for the answer. A gateway of another make buffers
//! what comes early, as it must: the stream's window allows it (RFC 9113 section 5.2).

use std::task::{Context, Poll};

use bytes::Bytes;
use portico_net::Socket;

use crate::chunk;
use crate::settings::FIRST_REQUESTS;

/// The most bytes. A ClientHello has 2 KiB with post-quantum key shares. Before the gateway has accepted our
/// identity, it gives 64 KiB of window. The first bytes of all requests under way then must fit into it.
const MOST: usize = 65_535 / FIRST_REQUESTS as usize;

/// The type of a TLS record that holds handshake messages (RFC 8446 section 5.1).
const HANDSHAKE: u8 = 22;

/// The first bytes of a client, read at most once.
#[derive(Debug)]
pub(super) struct FirstBytes<'a, S> {
    /// `None` once something was read, or nothing more can be.
    socket: Option<&'a S>,
    bytes: Bytes,
}

impl<'a, S: Socket> FirstBytes<'a, S> {
    /// The first bytes of the client at the other end of `socket`, from which nothing was read yet.
    pub(super) fn new(socket: Option<&'a S>) -> Self {
        Self { socket, bytes: Bytes::new() }
    }

    /// Bytes that may be sent before the gateway has answered, if some were read already.
    pub(super) fn early(&self) -> Option<Bytes> {
        (self.bytes.first() == Some(&HANDSHAKE)).then(|| self.bytes.clone())
    }

    /// All that was read.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Whether nothing was read.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Ready once, when there are bytes that may be sent before the gateway has answered.
    pub(super) fn poll_early(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        while let Some(socket) = self.socket
            && socket.poll_read_ready(cx).is_ready()
        {
            match chunk::read(socket, MOST) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                // An end or an error is found again by the stream's bridge.
                read => self.bytes = read.unwrap_or_default(),
            }
            self.socket = None;
            if let Some(early) = self.early() {
                return Poll::Ready(early);
            }
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn only_a_tls_handshake_may_be_sent_early() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for (said, early) in [(&b"\x16\x03\x01"[..], true), (b"GET", false)] {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (socket, _) = listener.accept().await.unwrap();
            client.write_all(said).await.unwrap();
            socket.readable().await.unwrap();
            let mut first = FirstBytes::new(Some(&socket));
            let polled = poll_fn(|cx| Poll::Ready(first.poll_early(cx))).await;
            assert_eq!(polled, if early { Poll::Ready(said.into()) } else { Poll::Pending });
            assert_eq!((first.bytes(), first.early().is_some()), (said.into(), early));
        }
    }
}
