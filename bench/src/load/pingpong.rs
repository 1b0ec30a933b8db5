//! Small messages over connections that stay: one message out, its echo back, the next.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::epoll::EventFlags;
use rustix::net::{self, SendFlags};

use super::{Watch, Work, greet_all};
use crate::backend::receive;

/// Connections that exchange messages at the same time.
pub(crate) const CONNECTIONS: usize = 50;
/// A small request or answer of the Kubernetes API in one TLS record. Rows that say so use another size.
pub(crate) const MESSAGE_BYTES: usize = 128;

/// Established connections through one proxy; they stay from slice to slice.
pub(crate) struct PingPong {
    watch: Watch,
    sockets: Vec<OwnedFd>,
    message: Vec<u8>,
}

impl PingPong {
    /// Establishes one connection a hello; their order to the backend must be to echo. Messages have `length`
    /// bytes.
    pub(crate) fn connect(proxy: SocketAddrV4, hellos: &[Vec<u8>], length: usize) -> Result<Self> {
        Self::over(greet_all(proxy, hellos, CONNECTIONS)?, length)
    }

    /// Like [`Self::connect`], over connections that are established already.
    pub(crate) fn over(sockets: Vec<OwnedFd>, length: usize) -> Result<Self> {
        let watch = Watch::new()?;
        for (token, socket) in sockets.iter().enumerate() {
            watch.add(socket, token, EventFlags::IN)?;
        }
        Ok(Self { watch, sockets, message: vec![0x17; length] })
    }

    /// Exchanges messages on all connections until `length` is over; all are at rest afterwards.
    pub(crate) fn run(&mut self, length: Duration) -> Result<Work> {
        let message = self.message.as_slice();
        let mut missing = vec![message.len(); self.sockets.len()];
        let mut scratch = vec![0; message.len()];
        let mut work = Work::default();
        let end = Instant::now() + length;
        for socket in &self.sockets {
            send(socket, message)?;
        }
        let mut under_way = self.sockets.len();
        while under_way > 0 {
            self.watch.wait()?;
            let over = Instant::now() >= end;
            for token in self.watch.ready() {
                let socket = &self.sockets[token];
                let awaited = missing[token];
                let Some(bytes) =
                    receive(socket, &mut scratch[..awaited]).context("an established connection broke")?
                else {
                    continue;
                };
                ensure!(bytes > 0, "the proxy ended an established connection");
                missing[token] -= bytes;
                if missing[token] > 0 {
                    continue;
                }
                work.units += 1;
                missing[token] = message.len();
                if over {
                    under_way -= 1;
                } else {
                    send(socket, message)?;
                }
            }
        }
        Ok(work)
    }
}

/// Sends a message into an empty socket buffer.
pub(crate) fn send(socket: &OwnedFd, message: &[u8]) -> Result<()> {
    let sent = net::send(socket, message, SendFlags::NOSIGNAL).context("an established connection broke")?;
    ensure!(sent == message.len(), "an empty socket buffer did not take {} bytes", message.len());
    Ok(())
}
