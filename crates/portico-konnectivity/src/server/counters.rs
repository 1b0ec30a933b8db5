//! What the server counts, for `/metrics`. Guards count down what they counted up, also where a task is
//! dropped.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use portico_wire::konnectivity::Packet;

/// Upper bounds of the times of dials, in seconds. As upstream's.
pub const DIAL_BUCKETS: [f64; 9] = [0.000_001, 0.000_01, 0.000_1, 0.005, 0.025, 0.1, 0.5, 2.5, 12.5];

/// Upper bounds of the times of connections, in seconds. As upstream's.
pub const CONNECTION_BUCKETS: [f64; 12] =
    [1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 1_800.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0];

/// Why a dial failed: the words of upstream.
pub const DIAL_FAILURES: [&str; 7] = [
    "no_agent",
    "error_response",
    "unrecognized_response",
    "send_rsp",
    "backend_close",
    "backend_dial_timeout",
    "frontend_close",
];

/// Why a connection ended.
pub const ENDS: [&str; 6] =
    ["frontend_closed", "endpoint_closed", "frontend_lost", "agent_lost", "not_read", "memory"];

/// Kinds of packets: the words of upstream.
pub const PACKETS: [&str; 8] =
    ["DIAL_REQ", "DIAL_RSP", "CLOSE_REQ", "CLOSE_RSP", "DATA", "DIAL_CLS", "DRAIN", "Unknown"];

/// Where a packet was seen: the words of upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// Read from a frontend.
    FromClient,
    /// Sent to a frontend.
    ToClient,
    /// Read from an agent.
    FromAgent,
    /// Sent to an agent.
    ToAgent,
}

impl Segment {
    /// Each of them.
    pub const ALL: [Self; 4] = [Self::FromClient, Self::ToClient, Self::FromAgent, Self::ToAgent];

    /// The word for metrics.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::FromClient => "from_client",
            Self::ToClient => "to_client",
            Self::FromAgent => "from_agent",
            Self::ToAgent => "to_agent",
        }
    }
}

/// A histogram whose buckets are not cumulative; the last has what is above all bounds.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    buckets: [AtomicU64; N],
    above: AtomicU64,
    nanos: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    fn new() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; N], above: AtomicU64::new(0), nanos: AtomicU64::new(0) }
    }

    fn observe(&self, bounds: &[f64; N], took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = bounds.iter().position(|bound| seconds <= *bound);
        bucket.map_or(&self.above, |bucket| &self.buckets[bucket]).fetch_add(1, Relaxed);
        self.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// The counts, those above all bounds last.
    pub fn counts(&self) -> impl Iterator<Item = u64> {
        self.buckets.iter().chain([&self.above]).map(|bucket| bucket.load(Relaxed))
    }

    /// The sum, in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        Duration::from_nanos(self.nanos.load(Relaxed)).as_secs_f64()
    }
}

/// All counters of a server.
#[derive(Debug)]
pub struct Counters {
    /// Times of dials that succeeded.
    pub dials: Histogram<9>,
    /// Times of connections.
    pub connections: Histogram<12>,
    failures: [AtomicU64; DIAL_FAILURES.len()],
    ends: [AtomicU64; ENDS.len()],
    packets: [[AtomicU64; PACKETS.len()]; 4],
    /// Bytes to endpoints, and back.
    bytes: [AtomicU64; 2],
    /// Streams of agents now.
    pub agent_streams: AtomicU64,
    /// Proxy streams now.
    pub proxy_streams: AtomicU64,
    /// HTTP CONNECT connections now.
    pub http_connections: AtomicU64,
    /// Dials under way now.
    pub pending: AtomicU64,
    /// Connections established now.
    pub established: AtomicU64,
    /// Connections of agents that were refused.
    pub agents_refused: AtomicU64,
    /// Connections that could not be accepted, for want of descriptors mostly.
    pub accept_errors: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            dials: Histogram::new(),
            connections: Histogram::new(),
            failures: Default::default(),
            ends: Default::default(),
            packets: Default::default(),
            bytes: Default::default(),
            agent_streams: zero(),
            proxy_streams: zero(),
            http_connections: zero(),
            pending: zero(),
            established: zero(),
            agents_refused: zero(),
            accept_errors: zero(),
        }
    }
}

impl Counters {
    pub(crate) fn dialled(&self, took: Duration) {
        self.dials.observe(&DIAL_BUCKETS, took);
    }

    pub(crate) fn dial_failed(&self, reason: &'static str) {
        count(&DIAL_FAILURES, &self.failures, reason);
    }

    pub(crate) fn ended(&self, reason: &'static str, took: Duration) {
        count(&ENDS, &self.ends, reason);
        self.connections.observe(&CONNECTION_BUCKETS, took);
    }

    pub(crate) fn packet(&self, segment: Segment, packet: &Packet) {
        count(&PACKETS, &self.packets[segment as usize], packet.type_name());
    }

    pub(crate) fn data_packet(&self, segment: Segment) {
        count(&PACKETS, &self.packets[segment as usize], "DATA");
    }

    pub(crate) fn carried(&self, up: usize, down: usize) {
        self.bytes[0].fetch_add(up as u64, Relaxed);
        self.bytes[1].fetch_add(down as u64, Relaxed);
    }

    /// Failed dials by reason.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DIAL_FAILURES.into_iter().zip(self.failures.iter().map(|count| count.load(Relaxed)))
    }

    /// Ended connections by reason.
    pub fn ends(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ENDS.into_iter().zip(self.ends.iter().map(|count| count.load(Relaxed)))
    }

    /// Packets by segment and kind.
    pub fn packets(&self) -> impl Iterator<Item = (Segment, &'static str, u64)> {
        Segment::ALL.into_iter().flat_map(|segment| {
            let counts = self.packets[segment as usize].iter().map(|count| count.load(Relaxed));
            PACKETS.into_iter().zip(counts).map(move |(kind, count)| (segment, kind, count))
        })
    }

    /// Bytes to endpoints, and back.
    #[must_use]
    pub fn bytes(&self) -> [u64; 2] {
        self.bytes.each_ref().map(|bytes| bytes.load(Relaxed))
    }
}

fn count(words: &[&'static str], counters: &[AtomicU64], word: &str) {
    if let Some(counter) = words.iter().position(|known| *known == word).and_then(|at| counters.get(at)) {
        counter.fetch_add(1, Relaxed);
    }
}

/// Counts one until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    pub(crate) fn new(counter: &'a AtomicU64) -> Self {
        counter.fetch_add(1, Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
