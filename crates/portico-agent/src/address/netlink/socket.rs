//! Sockets to the kernel: one that asks ([`Request`]), one that is told ([`Watch`]).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};
use tokio::io::unix::AsyncFd;

use super::message::{Answer, Message, answers, errno, is_kernel};
use crate::sys::readable;

/// The protocols spoken here. That of interfaces has the number 0, which rustix takes for none.
pub(in super::super) const ROUTE: Option<Protocol> = None;
pub(in super::super) const NETFILTER: Option<Protocol> = Some(netlink::NETFILTER);

/// Message types that every protocol has: an acknowledgement or an error, and the end of a list.
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// What the kernel fills at most with one piece of a list; iproute2 reads with the same.
const BUFFER: usize = 32 * 1024;

/// The kernel answers within the call that asks; a lost answer must not stop the agent for ever.
const PATIENCE: Duration = Duration::from_secs(5);

/// Notifications worth keeping: what matters is that there were some, and the kernel tells when it dropped any.
const WATCH_BUFFER: usize = 16 * 1024;

/// Notifications read in one go before others get their turn.
const WATCH_BATCH: usize = 32;

/// A socket that asks. Opened for a few questions and closed again, since the agent is at rest nearly always. Blocks: the kernel
/// does the work within the call.
#[derive(Debug)]
pub(in super::super) struct Request {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Request {
    /// A socket that speaks `protocol`.
    pub(in super::super) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = socket(protocol, SocketFlags::CLOEXEC, 0)?;
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; BUFFER] })
    }

    /// Sends one message that asks for an acknowledgement or for a list, and hands over what comes back.
    pub(in super::super) fn ask(
        &mut self,
        message: Message,
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.sequence += 1;
        self.send(&message.finish(self.sequence))?;
        loop {
            let length = self.receive(RecvFlags::empty())?;
            for answer in answers(&self.buffer[..length]) {
                match answer {
                    Answer { sequence, .. } if sequence != self.sequence => {}
                    Answer { kind: ERROR, .. } => {
                        return errno(&answer).map_or(Ok(()), |errno| Err(errno.into()));
                    }
                    Answer { kind: DONE, .. } => return Ok(()),
                    Answer { kind, body, .. } => each(kind, body),
                }
            }
        }
    }

    /// Sends several messages that are carried out together or not at all, and answers the first error.
    pub(in super::super) fn batch(&mut self, messages: Vec<Message>) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(1024);
        for message in messages {
            self.sequence += 1;
            bytes.extend_from_slice(&message.finish(self.sequence));
        }
        self.send(&bytes)?;
        let mut first = None;
        // Answers are there when the call is over; that there are none is an answer, too.
        loop {
            match self.receive(RecvFlags::DONTWAIT) {
                Ok(length) => {
                    let errors = answers(&self.buffer[..length]).filter(|answer| answer.kind == ERROR);
                    first = first.or(errors.filter_map(|answer| errno(&answer)).next());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        first.map_or(Ok(()), |errno| Err(errno.into()))
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, bytes, SendFlags::empty(), &kernel)?;
        Ok(())
    }

    fn receive(&mut self, flags: RecvFlags) -> io::Result<usize> {
        loop {
            match rustix::net::recvfrom(&self.socket, &mut self.buffer[..], flags) {
                Ok((length, _, sender)) if is_kernel(sender.clone()) => return Ok(length),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A socket on which the kernel tells of changes.
#[derive(Debug)]
pub(in super::super) struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    /// Told of what happens in `groups` of `protocol` (a bit each, the first group is bit 0).
    pub(in super::super) fn open(protocol: Option<Protocol>, groups: u32) -> io::Result<Self> {
        let socket = socket(protocol, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, groups)?;
        sockopt::set_socket_recv_buffer_size(&socket, WATCH_BUFFER)?;
        Ok(Self(readable(socket)?))
    }

    /// Waits until something happens that `matters`, or until so much happens that the kernel no longer tells all of it.
    pub(in super::super) async fn changed(&self, matters: impl Fn(u16, &[u8]) -> bool) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|socket| read_some(socket.get_ref(), &matters)) {
                Ok(Ok(true)) => return Ok(()),
                Ok(Err(error)) => return Err(error),
                // Read all there is, or more than a turn's worth of what does not matter.
                Ok(Ok(false)) | Err(_) => tokio::task::yield_now().await,
            }
        }
    }
}

/// Reads notifications until one matters; a would-block error says that there is none.
fn read_some(socket: &OwnedFd, matters: impl Fn(u16, &[u8]) -> bool) -> io::Result<bool> {
    let mut buffer = [0; 8192];
    for _ in 0..WATCH_BATCH {
        // With TRUNC the length is that of the datagram, not of what fits into the buffer.
        match rustix::net::recvfrom(socket, &mut buffer[..], RecvFlags::TRUNC) {
            Ok((_, _, sender)) if !is_kernel(sender.clone()) => {}
            Ok((_, length, _)) if length > buffer.len() => return Ok(true),
            Ok((_, length, _)) => {
                if answers(&buffer[..length]).any(|answer| matters(answer.kind, answer.body)) {
                    return Ok(true);
                }
            }
            Err(Errno::NOBUFS) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}

fn socket(protocol: Option<Protocol>, flags: SocketFlags, groups: u32) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}
