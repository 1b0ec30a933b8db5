//! The load: TCP clients that behave the same towards every proxy.
//!
//! [`churn`] opens and ends connections. [`pingpong`] exchanges small messages, [`bulk`] moves many bytes.
//! [`idle`] holds connections that rest. [`beside`] measures how long requests take while others crowd in.
//! [`attack`] is clients that mean harm. [`konnectivity`] opens connections through a Konnectivity server.
//! All are single epoll loops with plain non-blocking sockets: on one core beside the backend, the load must
//! cost less than the cheapest proxy. [`tunnel`] speaks HTTP/2 CONNECT itself and is dearer; [`fleet`] is
//! thousands of agents in processes of their own, [`konnectivity_agents`] a thousand in this one. These three
//! are measured only by their effect on the other side.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::backend::receive;
use crate::hello::{ANSWER_BYTES, read_order};

pub(crate) mod attack;
pub(crate) mod beside;
pub(crate) mod bulk;
pub(crate) mod churn;
pub(crate) mod crowd;
pub(crate) mod fleet;
pub(crate) mod idle;
pub(crate) mod konnectivity;
pub(crate) mod konnectivity_agents;
pub(crate) mod pingpong;
pub(crate) mod probe;
pub(crate) mod tunnel;

/// Clients dial from 127.9.0.1 and up, so that closed connections (TIME-WAIT for a minute) do not use up the
/// ports of one address.
const SOURCES: u8 = 64;
/// Without any event for so long, the proxy has lost a connection: the slowest answers come within
/// milliseconds.
const STALL: Duration = Duration::from_secs(10);
/// Failed connections in one slice after which the run is worth nothing.
const FAILURES: u64 = 100;

/// What a slice did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// Connections, round trips or bytes.
    pub(crate) units: u64,
    /// Connections that ended before their answer.
    pub(crate) failures: u64,
}

impl Work {
    fn failed(&mut self, what: &str, proxy: SocketAddrV4) -> Result<()> {
        self.failures += 1;
        if self.failures > FAILURES {
            bail!("{FAILURES} {what} at {proxy} failed in one slice: see the proxy's log");
        }
        Ok(())
    }
}

/// Opens client sockets.
#[derive(Default)]
pub(crate) struct Dialer {
    next: u8,
    only: Option<Ipv4Addr>,
}

impl Dialer {
    /// All come from this address.
    pub(crate) fn from_one(source: Ipv4Addr) -> Self {
        Self { next: 0, only: Some(source) }
    }

    /// A non-blocking socket on its way to `proxy`. On loopback the handshake is done when this returns.
    pub(crate) fn dial(&mut self, proxy: SocketAddrV4) -> rustix::io::Result<OwnedFd> {
        self.next = self.next % SOURCES + 1;
        let source = self.only.unwrap_or(Ipv4Addr::new(127, 9, 0, self.next));
        let source = SocketAddrV4::new(source, 0);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        net::bind(&socket, &SocketAddr::V4(source))?;
        net::sockopt::set_tcp_nodelay(&socket, true)?;
        match net::connect(&socket, &SocketAddr::V4(proxy)) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error),
        }
    }
}

/// An epoll instance and the events it has shown.
pub(crate) struct Watch {
    epoll: OwnedFd,
    events: Vec<Event>,
}

impl Watch {
    /// An instance that watches nothing yet.
    pub(crate) fn new() -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot create an epoll instance")?;
        Ok(Self { epoll, events: Vec::with_capacity(256) })
    }

    /// Watches `socket` for what is in `flags` (level triggered) under the number `token`.
    pub(crate) fn add(&self, socket: &OwnedFd, token: usize, flags: EventFlags) -> Result<()> {
        epoll::add(&self.epoll, socket, EventData::new_u64(token as u64), flags)
            .context("cannot watch a socket")
    }

    /// Watches a watched socket for something else.
    pub(crate) fn change(&self, socket: &OwnedFd, token: usize, flags: EventFlags) -> Result<()> {
        epoll::modify(&self.epoll, socket, EventData::new_u64(token as u64), flags)
            .context("cannot watch a socket")
    }

    /// Waits for events; an error after [`STALL`] without any.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let stall = STALL.try_into().context("ten seconds fit a timespec")?;
        let happened = self.take(&stall)?;
        ensure!(happened, "nothing happened for {STALL:?}: the proxy holds a connection without serving it");
        Ok(())
    }

    /// Waits for events; whether there are any. To the microsecond: `epoll_wait` knows milliseconds only,
    /// which would be most of what a request takes, so `ppoll` waits on its behalf.
    pub(crate) fn wait_at_most(&mut self, patience: Duration) -> Result<bool> {
        self.events.clear();
        let patience = patience.try_into().context("a slice fits a timespec")?;
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&patience)) {
            Ok(0) | Err(Errno::INTR) => Ok(false),
            Ok(_) => self.take(&Timespec::default()),
            Err(error) => Err(error).context("poll"),
        }
    }

    fn take(&mut self, patience: &Timespec) -> Result<bool> {
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), Some(patience)) {
            Ok(events) => Ok(events > 0),
            Err(Errno::INTR) => Ok(true),
            Err(error) => Err(error).context("epoll_wait"),
        }
    }

    /// The numbers of the sockets something happened to.
    pub(crate) fn ready(&self) -> impl Iterator<Item = usize> {
        self.events.iter().map(|event| event.data.u64() as usize)
    }
}

/// A client that waits for the answer to its hello.
pub(crate) struct Greeting {
    /// The connection through the proxy.
    pub(crate) socket: OwnedFd,
    /// Bytes of the answer that have not come yet.
    missing: usize,
}

/// How far a greeting has come.
#[derive(PartialEq, Eq)]
pub(crate) enum Greeted {
    /// More of the answer is awaited.
    NotYet,
    /// The answer is there in full.
    Yes,
    /// The proxy ended or reset the connection first.
    Refused,
}

impl Greeting {
    /// Dials and sends the hello.
    pub(crate) fn start(dialer: &mut Dialer, proxy: SocketAddrV4, hello: &[u8]) -> rustix::io::Result<Self> {
        let socket = dialer.dial(proxy)?;
        let sent = net::send(&socket, hello, SendFlags::NOSIGNAL)?;
        // An empty socket buffer takes far more than a hello.
        let missing = read_order(hello).map_or(ANSWER_BYTES, |(order, _)| order.answer_bytes());
        if sent < hello.len() { Err(Errno::NOBUFS) } else { Ok(Self { socket, missing }) }
    }

    /// To be called when the socket is readable.
    pub(crate) fn proceed(&mut self, scratch: &mut [u8]) -> Greeted {
        match receive(&self.socket, &mut scratch[..self.missing]) {
            Ok(None) => Greeted::NotYet,
            Ok(Some(0)) | Err(_) => Greeted::Refused,
            // The proxy's own answer to a name it does not know is a TLS alert (21); the backend never sends
            // that byte.
            Ok(Some(_)) if scratch[0] == 21 => Greeted::Refused,
            Ok(Some(bytes)) => {
                self.missing -= bytes;
                if self.missing == 0 { Greeted::Yes } else { Greeted::NotYet }
            }
        }
    }
}

/// Opens one connection and waits for its answer; `None` if it was refused or not answered in `patience`.
pub(crate) fn greet_once(
    dialer: &mut Dialer,
    proxy: SocketAddrV4,
    hello: &[u8],
    patience: Duration,
) -> Result<Option<OwnedFd>> {
    let deadline = Instant::now() + patience;
    let Ok(mut greeting) = Greeting::start(dialer, proxy, hello) else { return Ok(None) };
    let watch = Watch::new()?;
    watch.add(&greeting.socket, 0, EventFlags::IN)?;
    let mut scratch = [0; ANSWER_BYTES];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut events = Vec::with_capacity(1);
        let left = left.try_into().context("the patience fits a timespec")?;
        match epoll::wait(&watch.epoll, spare_capacity(&mut events), Some(&left)) {
            Ok(0) => return Ok(None),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("epoll_wait"),
        }
        match greeting.proceed(&mut scratch) {
            Greeted::NotYet => {}
            Greeted::Yes => return Ok(Some(greeting.socket)),
            Greeted::Refused => return Ok(None),
        }
    }
}

/// Opens one connection a hello, waits for all answers, and returns the sockets in the same order. At most
/// `at_once` handshakes are under way at a time.
pub(crate) fn greet_all(proxy: SocketAddrV4, hellos: &[Vec<u8>], at_once: usize) -> Result<Vec<OwnedFd>> {
    let mut dialer = Dialer::default();
    let mut scratch = [0; ANSWER_BYTES];
    let mut sockets = Vec::with_capacity(hellos.len());
    for group in hellos.chunks(at_once) {
        let mut watch = Watch::new()?;
        let mut greetings = Vec::with_capacity(group.len());
        for (token, hello) in group.iter().enumerate() {
            let greeting = Greeting::start(&mut dialer, proxy, hello)
                .with_context(|| format!("cannot connect to the proxy at {proxy}"))?;
            watch.add(&greeting.socket, token, EventFlags::IN | EventFlags::ONESHOT)?;
            greetings.push(greeting);
        }
        let mut missing = group.len();
        while missing > 0 {
            watch.wait()?;
            let ready: Vec<usize> = watch.ready().collect();
            for token in ready {
                match greetings[token].proceed(&mut scratch) {
                    Greeted::NotYet => {
                        watch.change(
                            &greetings[token].socket,
                            token,
                            EventFlags::IN | EventFlags::ONESHOT,
                        )?;
                    }
                    Greeted::Yes => missing -= 1,
                    Greeted::Refused => bail!("the proxy at {proxy} refused a connection: see its log"),
                }
            }
        }
        sockets.extend(greetings.into_iter().map(|greeting| greeting.socket));
    }
    Ok(sockets)
}
