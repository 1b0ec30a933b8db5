//! Frontends of a Konnectivity server: connections by HTTP CONNECT on its Unix socket, as kube-apiserver
//! makes them, or by upstream's client library for gRPC. What follows on them is the same hello and the same
//! work as everywhere.

use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::pingpong::send;
use super::{STALL, Work};
use crate::backend::receive;
use crate::hello::{ANSWER_BYTES, Order, client_hello};

/// The backend serves every name.
const HOST: &str = "konnectivity.bench";
/// The longest head of an answer.
const HEAD: usize = 1024;

/// How frontends reach a server.
#[derive(Clone, Debug)]
pub(crate) enum Way {
    /// HTTP CONNECT on the server's socket.
    Connect(PathBuf),
    /// The program at this address, which asks by gRPC; see `lab/konnectivity/frontend`.
    Grpc(SocketAddrV4),
}

/// A server, and what its agent is to dial.
#[derive(Clone, Debug)]
pub(crate) struct Front {
    /// What is asked for a connection.
    pub(crate) way: Way,
    /// The backend.
    pub(crate) target: SocketAddrV4,
}

impl Front {
    /// Whether a connection comes about.
    pub(crate) fn is_open(&self) -> bool {
        self.open(Order::Answer).is_ok()
    }

    /// So many connections that the backend has answered.
    pub(crate) fn open_all(&self, count: usize, order: Order) -> Result<Vec<OwnedFd>> {
        (0..count).map(|_| self.open(order)).collect()
    }

    /// So many connections that the backend sends on, and that nobody reads. All are established before the
    /// first begins: upstream's server would answer no further one.
    pub(crate) fn stop_reading(&self, count: usize, order: Order) -> Result<Vec<OwnedFd>> {
        let sockets = (0..count).map(|_| self.connect()).collect::<Result<Vec<_>>>()?;
        sockets.iter().try_for_each(|socket| greet(socket, order))?;
        Ok(sockets)
    }

    /// A connection that the backend has answered.
    pub(crate) fn open(&self, order: Order) -> Result<OwnedFd> {
        let socket = self.connect()?;
        greet(&socket, order)?;
        let (mut missing, mut answer) = (order.answer_bytes(), [0; ANSWER_BYTES]);
        while missing > 0 {
            let bytes = next(&socket, &mut answer[..missing])?;
            ensure!(bytes > 0, "the backend's answer did not come");
            missing -= bytes;
        }
        Ok(socket)
    }

    /// A connection to the backend, which has sent nothing yet.
    fn connect(&self) -> Result<OwnedFd> {
        match &self.way {
            Way::Connect(socket) => self.connect_by_http(socket),
            Way::Grpc(program) => self.connect_by_grpc(*program),
        }
    }

    fn connect_by_grpc(&self, program: SocketAddrV4) -> Result<OwnedFd> {
        let socket = TcpStream::connect(program).context("no frontend for gRPC")?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let socket = OwnedFd::from(socket);
        send(&socket, format!("{}\n", self.target).as_bytes())?;
        let (mut answer, mut byte) = (Vec::new(), [0]);
        while answer.last() != Some(&b'\n') {
            let is_more = next(&socket, &mut byte)? > 0 && answer.len() < HEAD;
            ensure!(is_more, "no connection: {}", String::from_utf8_lossy(&answer));
            answer.extend(byte);
        }
        ensure!(answer == b"ok\n", "no connection: {}", String::from_utf8_lossy(&answer));
        Ok(socket)
    }

    fn connect_by_http(&self, path: &Path) -> Result<OwnedFd> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        net::connect(&socket, &SocketAddrUnix::new(path)?).context("no Konnectivity server")?;
        let request = format!("CONNECT {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", self.target);
        send(&socket, request.as_bytes())?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut chunk = [0; HEAD];
            let bytes = next(&socket, &mut chunk)?;
            head.extend_from_slice(&chunk[..bytes]);
            ensure!(bytes > 0 && head.len() < HEAD, "no 200: {}", String::from_utf8_lossy(&head));
        }
        ensure!(head.starts_with(b"HTTP/1.1 200 "), "no 200: {}", String::from_utf8_lossy(&head));
        Ok(socket)
    }

    /// Connections opened, answered and closed, one after the other, until `length` is over.
    pub(crate) fn churn(&self, length: Duration) -> Result<Work> {
        let (mut work, end) = (Work::default(), Instant::now() + length);
        while Instant::now() < end {
            drop(self.open(Order::Answer)?);
            work.units += 1;
        }
        Ok(work)
    }
}

/// Says to the backend what it is to do.
fn greet(socket: &OwnedFd, order: Order) -> Result<()> {
    let hello = client_hello(HOST, order);
    let sent = net::send(socket, &hello, SendFlags::NOSIGNAL)?;
    ensure!(sent == hello.len(), "an empty socket buffer did not take a hello");
    Ok(())
}

/// How long each of many round trips took on one connection; `None` if one did not come back.
pub(crate) fn round_trips(
    socket: &OwnedFd,
    message: &[u8],
    length: Duration,
) -> Result<Option<Vec<Duration>>> {
    let (mut times, end) = (Vec::new(), Instant::now() + length);
    let mut scratch = vec![0; message.len()];
    while Instant::now() < end {
        let begun = Instant::now();
        send(socket, message)?;
        let mut missing = message.len();
        while missing > 0 {
            match next(socket, &mut scratch[..missing]) {
                Ok(bytes) if bytes > 0 => missing -= bytes,
                _ => return Ok(None),
            }
        }
        times.push(begun.elapsed());
    }
    Ok(Some(times))
}

/// Waits for bytes and reads them; 0 at the end.
fn next(socket: &OwnedFd, into: &mut [u8]) -> Result<usize> {
    loop {
        if let Some(bytes) = receive(socket, into).context("a connection broke")? {
            return Ok(bytes);
        }
        let stall = STALL.try_into().context("ten seconds fit a timespec")?;
        if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&stall))? == 0 {
            bail!("nothing came for {STALL:?}");
        }
    }
}
