//! Requests at a fixed pace, and how long each took.
//!
//! An open loop: each request has a moment at which it is due. Its time counts from there, whether or not the
//! load or the proxy was ready for it. A closed loop would ask less while the proxy is slow and so hide what
//! it looks for.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::epoll::EventFlags;
use rustix::net::{Shutdown, shutdown};

use super::beside::Door;
use super::pingpong::{MESSAGE_BYTES, send};
use super::{Greeted, Greeting, Watch};
use crate::backend::receive;

/// Between two requests of a kind: 500 a second, a pace that leaves every proxy most of its core.
pub(crate) const EVERY: Duration = Duration::from_millis(2);
/// New connections under way at a time. More are due only after half a second without an answer, and then
/// they wait.
pub(crate) const CONNECTIONS: usize = 256;

/// When requests are due, and how long those took that were due since [`Pace::record`].
struct Pace {
    next: Instant,
    since: Instant,
    taken: Vec<Duration>,
}

impl Pace {
    fn new(first: Instant) -> Self {
        Self { next: first, since: first, taken: Vec::new() }
    }

    /// The moment of the next request, if it has come.
    fn take(&mut self, now: Instant) -> Option<Instant> {
        let due = self.next;
        (due <= now).then(|| {
            self.next += EVERY;
            due
        })
    }

    /// Forgets what was recorded so far.
    fn record(&mut self) {
        self.since = self.next;
        self.taken.clear();
    }

    fn answered(&mut self, due: Instant) {
        if due >= self.since {
            self.taken.push(due.elapsed());
        }
    }
}

/// New connections: handshake, hello and answer count, the orderly end comes after.
pub(crate) struct Connections<'a> {
    pace: Pace,
    hellos: std::iter::Cycle<std::slice::Iter<'a, Vec<u8>>>,
    open: Vec<Option<Opened>>,
    free: Vec<usize>,
}

struct Opened {
    greeting: Greeting,
    due: Instant,
    closing: bool,
}

impl<'a> Connections<'a> {
    /// With the given hellos in turn, from `first` on.
    pub(crate) fn new(hellos: &'a [Vec<u8>], first: Instant) -> Self {
        let open = (0..CONNECTIONS).map(|_| None).collect();
        let free = (0..CONNECTIONS).collect();
        Self { pace: Pace::new(first), hellos: hellos.iter().cycle(), open, free }
    }

    /// When something is to be started; `None` while too much is under way.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        (!self.free.is_empty()).then_some(self.pace.next)
    }

    /// Opens the connections that are due; tokens are the numbers below [`CONNECTIONS`].
    pub(crate) fn start_due(&mut self, now: Instant, door: &mut Door) -> Result<()> {
        while let Some(&slot) = self.free.last() {
            let Some(due) = self.pace.take(now) else { break };
            let hello = self.hellos.next().context("there is at least one healthy cluster")?;
            let Some(greeting) = door.knock(hello, slot)? else {
                door.failed("connections")?;
                continue;
            };
            self.open[slot] = Some(Opened { greeting, due, closing: false });
            self.free.pop();
        }
        Ok(())
    }

    /// To be called when the socket with this token is readable.
    pub(crate) fn proceed(&mut self, slot: usize, door: &mut Door) -> Result<()> {
        let Some(opened) = &mut self.open[slot] else { return Ok(()) };
        let ended = if opened.closing {
            !matches!(receive(&opened.greeting.socket, &mut door.scratch), Ok(None))
        } else {
            match opened.greeting.proceed(&mut door.scratch) {
                Greeted::NotYet => false,
                Greeted::Refused => {
                    door.failed("connections")?;
                    true
                }
                Greeted::Yes => {
                    self.pace.answered(opened.due);
                    opened.closing = true;
                    shutdown(&opened.greeting.socket, Shutdown::Write).is_err()
                }
            }
        };
        if ended {
            self.open[slot] = None;
            self.free.push(slot);
        }
        Ok(())
    }

    /// Requests due from now on are recorded.
    pub(crate) fn record(&mut self) {
        self.pace.record();
    }

    /// Whether all have ended.
    pub(crate) fn at_rest(&self) -> bool {
        self.free.len() == CONNECTIONS
    }

    /// How long the recorded ones took.
    pub(crate) fn taken(self) -> Vec<Duration> {
        self.pace.taken
    }
}

/// Small messages and their echoes on connections that are there already.
pub(crate) struct RoundTrips<'a> {
    pace: Pace,
    sockets: &'a [OwnedFd],
    /// For each socket: when its message was due, and the bytes of the echo that are missing.
    under_way: Vec<Option<(Instant, usize)>>,
    idle: VecDeque<usize>,
}

impl<'a> RoundTrips<'a> {
    /// On the given connections in turn, from `first` on. Tokens begin at `tokens`.
    pub(crate) fn new(sockets: &'a [OwnedFd], first: Instant, watch: &Watch, tokens: usize) -> Result<Self> {
        for (number, socket) in sockets.iter().enumerate() {
            watch.add(socket, tokens + number, EventFlags::IN)?;
        }
        let under_way = vec![None; sockets.len()];
        Ok(Self { pace: Pace::new(first), sockets, under_way, idle: (0..sockets.len()).collect() })
    }

    /// How many connections there are.
    pub(crate) fn count(&self) -> usize {
        self.sockets.len()
    }

    /// When something is to be sent; `None` while too much is under way.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        (!self.idle.is_empty()).then_some(self.pace.next)
    }

    /// Sends the messages that are due.
    pub(crate) fn start_due(&mut self, now: Instant) -> Result<()> {
        while let Some(&number) = self.idle.front() {
            let Some(due) = self.pace.take(now) else { break };
            send(&self.sockets[number], &[0x17; MESSAGE_BYTES])?;
            self.under_way[number] = Some((due, MESSAGE_BYTES));
            self.idle.pop_front();
        }
        Ok(())
    }

    /// To be called when this connection is readable.
    pub(crate) fn proceed(&mut self, number: usize, scratch: &mut [u8]) -> Result<()> {
        let (due, missing) = self.under_way[number]
            .as_mut()
            .context("an established connection ended while it was at rest")?;
        let read = receive(&self.sockets[number], &mut scratch[..*missing])
            .context("an established connection broke")?;
        let Some(bytes) = read else { return Ok(()) };
        ensure!(bytes > 0, "the proxy ended an established connection");
        *missing -= bytes;
        if *missing == 0 {
            self.pace.answered(*due);
            self.under_way[number] = None;
            self.idle.push_back(number);
        }
        Ok(())
    }

    /// Messages due from now on are recorded.
    pub(crate) fn record(&mut self) {
        self.pace.record();
    }

    /// Whether all echoes are back.
    pub(crate) fn at_rest(&self) -> bool {
        self.idle.len() == self.sockets.len()
    }

    /// How long the recorded ones took.
    pub(crate) fn taken(self) -> Vec<Duration> {
        self.pace.taken
    }
}
