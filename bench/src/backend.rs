//! The backend behind every proxy: one thread, one epoll loop, as little work as possible.
//!
//! It stands for the API servers: it waits for the ClientHello, answers as a server's first
//! flight would, then follows the [`Order`] found in the hello.

use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::hello::{Order, read_order};
use crate::machine;
use crate::site::{BACKENDS, Cluster};

/// One write of bulk data; large enough that the backend is not what limits the stream.
const CHUNK: usize = 256 * 1024;
/// Writes or reads of one connection before the others get their turn.
const CHUNKS_A_TURN: usize = 4;
/// Longest hello the backend waits for; ours have about 1.5 KiB.
const LONGEST_HELLO: usize = 4096;
/// Pending connections a listener holds; more than any row opens at once.
const BACKLOG: i32 = 4096;
/// How often the loop looks whether it should end.
const LOOK_UP: Duration = Duration::from_millis(200);

/// A running backend; stops when dropped.
pub(crate) struct Backend {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Listens on `port` of all backend addresses and starts the thread on the load's core.
    pub(crate) fn start(port: u16) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot create an epoll instance")?;
        let mut listeners = Vec::with_capacity(BACKENDS);
        for number in 0..BACKENDS {
            let address = Cluster::numbered(number, port).backend;
            let listener = listen(address, BACKLOG)
                .with_context(|| format!("the backend cannot listen on {address}"))?;
            epoll::add(&epoll, &listener, EventData::new_u64(number as u64), EventFlags::IN)
                .context("cannot watch a backend listener")?;
            listeners.push(listener);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let server = Server {
            epoll,
            listeners,
            connections: Vec::new(),
            free: Vec::new(),
            scratch: vec![0; CHUNK],
            bulk: vec![0x17; CHUNK],
            stop: Arc::clone(&stop),
        };
        let thread = std::thread::Builder::new()
            .name("backend".into())
            .spawn(move || server.run())
            .context("cannot start the backend's thread")?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panicked backend has already printed why.
            let _ = thread.join();
        }
    }
}

/// A listener whose connections may wait.
pub(crate) fn listen(address: SocketAddrV4, backlog: i32) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let listener = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    net::sockopt::set_socket_reuseaddr(&listener, true)?;
    net::bind(&listener, &SocketAddr::V4(address))?;
    net::listen(&listener, backlog)?;
    Ok(listener)
}

/// Where a backend connection stands.
enum State {
    /// The hello, or a part of it, is awaited.
    Hello(Vec<u8>),
    /// Whatever arrives is dropped until the end.
    Answered,
    /// Whatever arrives goes back; the bytes are those the socket did not take yet.
    Echo(Vec<u8>),
    /// This many bytes are still to be sent.
    Sending(u64),
    /// This many bytes are still awaited.
    Taking(u64),
}

struct Connection {
    socket: OwnedFd,
    state: State,
}

/// What became of a connection in one turn.
#[derive(PartialEq)]
enum Turn {
    Goes,
    Ended,
}

struct Server {
    epoll: OwnedFd,
    listeners: Vec<OwnedFd>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    scratch: Vec<u8>,
    bulk: Vec<u8>,
    stop: Arc<AtomicBool>,
}

impl Server {
    fn run(mut self) {
        if let Err(error) = machine::pin_to(machine::LOAD_CORE) {
            eprintln!("backend: {error:#}");
        }
        let look_up = LOOK_UP.try_into().expect("a fifth of a second fits a timespec");
        let mut events = Vec::with_capacity(1024);
        while !self.stop.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&look_up)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    eprintln!("backend: epoll_wait: {error}");
                    return;
                }
            }
            for event in &events {
                let token = event.data.u64() as usize;
                match token.checked_sub(BACKENDS) {
                    None => self.accept(token),
                    Some(slot) => self.turn(slot),
                }
            }
        }
    }

    fn accept(&mut self, listener: usize) {
        // EAGAIN ends the loop; anything else (a client gone again) costs that client only.
        while let Ok(socket) =
            net::accept_with(&self.listeners[listener], SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
        {
            let slot = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            let token = EventData::new_u64((slot + BACKENDS) as u64);
            // Echoed messages must not wait for the peer's ACK, in any proxy.
            let watched = net::sockopt::set_tcp_nodelay(&socket, true)
                .and_then(|()| epoll::add(&self.epoll, &socket, token, EventFlags::IN));
            match watched {
                Ok(()) => {
                    self.connections[slot] = Some(Connection { socket, state: State::Hello(Vec::new()) })
                }
                Err(_) => self.free.push(slot),
            }
        }
    }

    fn turn(&mut self, slot: usize) {
        let Some(connection) = self.connections.get_mut(slot).and_then(Option::as_mut) else { return };
        let token = EventData::new_u64((slot + BACKENDS) as u64);
        let turn = connection.turn(&self.epoll, token, &mut self.scratch, &self.bulk);
        // A reset or an early end is the load's business; the backend just lets go.
        if turn.unwrap_or(Turn::Ended) == Turn::Ended {
            self.connections[slot] = None;
            self.free.push(slot);
        }
    }
}

impl Connection {
    fn turn(
        &mut self,
        epoll: &OwnedFd,
        token: EventData,
        scratch: &mut [u8],
        bulk: &[u8],
    ) -> rustix::io::Result<Turn> {
        match &mut self.state {
            State::Hello(held) => {
                let Some(bytes) = receive(&self.socket, &mut scratch[..LONGEST_HELLO])? else {
                    return Ok(Turn::Goes);
                };
                held.extend_from_slice(&scratch[..bytes]);
                if bytes == 0 || held.len() > LONGEST_HELLO {
                    return Ok(Turn::Ended);
                }
                let Some((order, length)) = read_order(held) else { return Ok(Turn::Goes) };
                let early = held.split_off(length);
                net::send(&self.socket, &bulk[..order.answer_bytes()], SendFlags::NOSIGNAL)?;
                self.state = match order {
                    Order::Answer | Order::AnswerOneByte => State::Answered,
                    Order::AnswerAndEnd => return Ok(Turn::Ended),
                    Order::Echo => {
                        send_all(&self.socket, &early)?;
                        State::Echo(Vec::new())
                    }
                    Order::Send(bytes) => {
                        epoll::modify(epoll, &self.socket, token, EventFlags::OUT)?;
                        State::Sending(bytes)
                    }
                    Order::Take(bytes) => State::Taking(bytes.saturating_sub(early.len() as u64)),
                };
                Ok(Turn::Goes)
            }
            State::Answered => {
                Ok(if receive(&self.socket, scratch)? == Some(0) { Turn::Ended } else { Turn::Goes })
            }
            State::Echo(pending) => {
                if !pending.is_empty() {
                    let sent = net::send(&self.socket, pending, SendFlags::NOSIGNAL)?;
                    pending.drain(..sent);
                    if pending.is_empty() {
                        epoll::modify(epoll, &self.socket, token, EventFlags::IN)?;
                    }
                    return Ok(Turn::Goes);
                }
                let Some(bytes) = receive(&self.socket, scratch)? else { return Ok(Turn::Goes) };
                if bytes == 0 {
                    return Ok(Turn::Ended);
                }
                let sent = match net::send(&self.socket, &scratch[..bytes], SendFlags::NOSIGNAL) {
                    Err(Errno::AGAIN) => 0,
                    sent => sent?,
                };
                if sent < bytes {
                    pending.extend_from_slice(&scratch[sent..bytes]);
                    epoll::modify(epoll, &self.socket, token, EventFlags::OUT)?;
                }
                Ok(Turn::Goes)
            }
            State::Sending(left) => {
                for _ in 0..CHUNKS_A_TURN {
                    let chunk = bulk.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    match net::send(&self.socket, &bulk[..chunk], SendFlags::NOSIGNAL) {
                        Ok(sent) => *left -= sent as u64,
                        Err(Errno::AGAIN) => break,
                        Err(error) => return Err(error),
                    }
                    if *left == 0 {
                        epoll::modify(epoll, &self.socket, token, EventFlags::IN)?;
                        self.state = State::Answered;
                        break;
                    }
                }
                Ok(Turn::Goes)
            }
            State::Taking(left) => {
                for _ in 0..CHUNKS_A_TURN {
                    match discard(&self.socket, scratch)? {
                        None => break,
                        Some(0) => return Ok(Turn::Ended),
                        Some(bytes) => *left = left.saturating_sub(bytes as u64),
                    }
                    if *left == 0 {
                        net::send(&self.socket, &bulk[..1], SendFlags::NOSIGNAL)?;
                        self.state = State::Answered;
                        break;
                    }
                }
                Ok(Turn::Goes)
            }
        }
    }
}

/// Reads once; `None` when there is nothing yet, `Some(0)` at the end.
pub(crate) fn receive(socket: &OwnedFd, into: &mut [u8]) -> rustix::io::Result<Option<usize>> {
    match net::recv(socket, into, RecvFlags::empty()) {
        Ok((bytes, _)) => Ok(Some(bytes)),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// As [`receive`], but the kernel drops the bytes without copying them (`MSG_TRUNC`, tcp(7)), so that the
/// sink of a bulk transfer costs the load's core next to nothing.
pub(crate) fn discard(socket: &OwnedFd, room: &mut [u8]) -> rustix::io::Result<Option<usize>> {
    match net::recv(socket, room, RecvFlags::TRUNC) {
        Ok((_, bytes)) => Ok(Some(bytes)),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends what fits an empty socket buffer; the bytes that came with a hello are few.
fn send_all(socket: &OwnedFd, bytes: &[u8]) -> rustix::io::Result<()> {
    if !bytes.is_empty() {
        net::send(socket, bytes, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}
