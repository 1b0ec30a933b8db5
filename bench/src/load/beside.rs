//! Requests of many clusters while a crowd comes for one of theirs, in one epoll loop.
//!
//! [`Connections`] and [`RoundTrips`] are measured, the [`Crowd`] is what they are measured beside. One loop,
//! so that neither waits for the other's thread; what the loop itself costs is in all figures alike.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::event::epoll::EventFlags;

use super::crowd::{Count, Crowd};
use super::probe::{CONNECTIONS, Connections, EVERY, RoundTrips};
use super::{Dialer, Greeting, STALL, Watch, Work};
use crate::hello::ANSWER_BYTES;

/// What all clients of a slice share: the way to the proxy.
pub(crate) struct Door {
    proxy: SocketAddrV4,
    watch: Watch,
    dialer: Dialer,
    work: Work,
    /// Room for what is read and not kept.
    pub(crate) scratch: [u8; ANSWER_BYTES],
}

impl Door {
    /// Connects and sends the hello; `None` if the connection broke at once.
    pub(crate) fn knock(&mut self, hello: &[u8], token: usize) -> Result<Option<Greeting>> {
        let Ok(greeting) = Greeting::start(&mut self.dialer, self.proxy, hello) else { return Ok(None) };
        self.watch.add(&greeting.socket, token, EventFlags::IN)?;
        Ok(Some(greeting))
    }

    /// Counts a failed request; an error if they are too many.
    pub(crate) fn failed(&mut self, what: &str) -> Result<()> {
        self.work.failed(what, self.proxy)
    }
}

/// A slice under way.
pub(crate) struct Slice<'a> {
    door: Door,
    connections: Connections<'a>,
    round_trips: RoundTrips<'a>,
    crowd: Option<Crowd<'a>>,
}

/// What a slice found.
pub(crate) struct Findings {
    /// How long new connections took.
    pub(crate) connections: Vec<Duration>,
    /// How long round trips took.
    pub(crate) round_trips: Vec<Duration>,
    /// New connections that failed; a broken round trip ends the slice.
    pub(crate) failures: u64,
    /// What became of the crowd.
    pub(crate) crowd: Count,
}

impl<'a> Slice<'a> {
    /// New connections with `hellos` and round trips on `established`, from now on, beside a crowd that sends
    /// `crowd`.
    pub(crate) fn begin(
        proxy: SocketAddrV4,
        hellos: &'a [Vec<u8>],
        established: &'a [OwnedFd],
        crowd: Option<&'a [u8]>,
    ) -> Result<Self> {
        let watch = Watch::new()?;
        let now = Instant::now();
        // Half a step apart, as neither should wait for the other.
        let round_trips = RoundTrips::new(established, now + EVERY / 2, &watch, CONNECTIONS)?;
        let door = Door {
            proxy,
            watch,
            dialer: Dialer::default(),
            work: Work::default(),
            scratch: [0; ANSWER_BYTES],
        };
        let connections = Connections::new(hellos, now);
        Ok(Self { door, connections, round_trips, crowd: crowd.map(Crowd::new) })
    }

    /// Goes on for `length`.
    pub(crate) fn run(&mut self, length: Duration) -> Result<()> {
        let end = Instant::now() + length;
        loop {
            let now = Instant::now();
            if now >= end {
                return Ok(());
            }
            self.start_due(now)?;
            let due = [self.connections.next_due(), self.round_trips.next_due()];
            let crowd = self.crowd.as_ref().map(Crowd::next_due);
            let wake = due.into_iter().flatten().chain(crowd).fold(end, Instant::min);
            self.wait(wake)?;
        }
    }

    /// Requests due from now on are recorded.
    pub(crate) fn record(&mut self) {
        self.connections.record();
        self.round_trips.record();
    }

    /// Starts nothing more and waits for the end of all that is under way.
    pub(crate) fn finish(mut self) -> Result<Findings> {
        let deadline = Instant::now() + STALL;
        while !self.at_rest() {
            ensure!(
                Instant::now() < deadline,
                "connections to {} are held {STALL:?} after the slice: the proxy's connect timeout should \
                 end them",
                self.door.proxy
            );
            self.wait(deadline)?;
        }
        Ok(Findings {
            crowd: self.count(),
            failures: self.door.work.failures,
            connections: self.connections.taken(),
            round_trips: self.round_trips.taken(),
        })
    }

    fn at_rest(&self) -> bool {
        self.connections.at_rest() && self.round_trips.at_rest() && self.count().waiting == 0
    }

    fn count(&self) -> Count {
        self.crowd.as_ref().map(Crowd::count).unwrap_or_default()
    }

    /// First of the crowd's tokens.
    fn crowd_tokens(&self) -> usize {
        CONNECTIONS + self.round_trips.count()
    }

    fn start_due(&mut self, now: Instant) -> Result<()> {
        let tokens = self.crowd_tokens();
        self.connections.start_due(now, &mut self.door)?;
        self.round_trips.start_due(now)?;
        self.crowd.as_mut().map_or(Ok(()), |crowd| crowd.start_due(now, tokens, &mut self.door))
    }

    fn wait(&mut self, until: Instant) -> Result<()> {
        self.door.watch.wait_at_most(until.saturating_duration_since(Instant::now()))?;
        let tokens = self.crowd_tokens();
        let ready: Vec<usize> = self.door.watch.ready().collect();
        for token in ready {
            if token < CONNECTIONS {
                self.connections.proceed(token, &mut self.door)?;
            } else if token < tokens {
                self.round_trips.proceed(token - CONNECTIONS, &mut self.door.scratch)?;
            } else if let Some(crowd) = &mut self.crowd {
                crowd.proceed(token - tokens, &mut self.door.scratch);
            }
        }
        Ok(())
    }
}
