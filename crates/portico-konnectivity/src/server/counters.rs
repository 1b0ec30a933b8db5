//! What the server counts, for `/metrics`. Guards count down what they counted up, also where a task is
//! dropped.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use portico_wire::konnectivity::{Code, Packet};

use super::connection_end::ConnectionEnd;
use super::lease_counters::LeaseCounters;
use crate::counting::{Histogram, PacketCounts, count};
use crate::grpc;

/// Upper bounds of the times of dials, in seconds. As upstream's.
pub const DIAL_BUCKETS: [f64; 9] = [0.000_001, 0.000_01, 0.000_1, 0.005, 0.025, 0.1, 0.5, 2.5, 12.5];

/// Upper bounds of the times of connections, in seconds. As upstream's.
pub const CONNECTION_BUCKETS: [f64; 12] =
    [1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 1_800.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0];

/// Why a dial failed: the label values of upstream.
pub const DIAL_FAILURES: [&str; 7] = [
    "no_agent",
    "error_response",
    "unrecognized_response",
    "send_rsp",
    "backend_close",
    "backend_dial_timeout",
    "frontend_close",
];

/// How a dial ended: `ok`, or the label value of its failure.
pub const DIAL_RESULTS: [&str; 6] =
    ["ok", "no_agent", "error_response", "backend_close", "backend_dial_timeout", "frontend_close"];

/// Why a connection to the agent port became no agent's: see the manual.
pub const REFUSALS: [&str; 11] = [
    "tls",
    "crowded",
    "silent",
    "flood",
    "http2",
    "memory",
    "metadata",
    "token",
    "review",
    "identifiers",
    "full",
];

/// Where a packet was seen: the label values of upstream.
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

    /// The label value for metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FromClient => "from_client",
            Self::ToClient => "to_client",
            Self::FromAgent => "from_agent",
            Self::ToAgent => "to_agent",
        }
    }
}

/// All counters of a server.
#[derive(Debug, Default)]
pub struct Counters {
    /// Times of connections.
    pub connections: Histogram<12>,
    failures: [AtomicU64; DIAL_FAILURES.len()],
    results: [Histogram<{ DIAL_BUCKETS.len() }>; DIAL_RESULTS.len()],
    ends: [AtomicU64; ConnectionEnd::ALL.len()],
    packets: [PacketCounts; 4],
    stream_errors: [[PacketCounts; Code::COUNT]; 4],
    /// Times of writes to frontends.
    pub frontend_writes: Histogram<{ DIAL_BUCKETS.len() }>,
    /// Connections of upstream agents over their buffer now.
    pub full_agents: AtomicU64,
    /// Frontends whose bytes wait for their agent now.
    pub full_frontends: AtomicU64,
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
    refusals: [AtomicU64; REFUSALS.len()],
    /// Agents that wait for the review of their token now.
    pub reviews_waiting: AtomicU64,
    /// Connections that could not be accepted, for want of descriptors mostly.
    pub accept_errors: AtomicU64,
    /// Counters of `--enable-lease-controller`.
    pub leases: LeaseCounters,
}

impl Counters {
    /// A dial is over; an error is one of [`DIAL_FAILURES`].
    pub(crate) fn dialled(&self, result: Result<(), &'static str>, took: Duration) {
        if let Err(reason) = result {
            self.dial_failed(reason);
        }
        let word = result.err().unwrap_or("ok");
        if let Some(index) = DIAL_RESULTS.iter().position(|known| *known == word) {
            self.results[index].observe(&DIAL_BUCKETS, took);
        }
    }

    /// Times of dials that succeeded.
    #[must_use]
    pub fn dials(&self) -> &Histogram<{ DIAL_BUCKETS.len() }> {
        // `ok` is the first of the results.
        &self.results[0]
    }

    /// Times of dials by result, one of [`DIAL_RESULTS`].
    pub fn dial_results(&self) -> impl Iterator<Item = (&'static str, &Histogram<{ DIAL_BUCKETS.len() }>)> {
        DIAL_RESULTS.into_iter().zip(&self.results)
    }

    pub(crate) fn dial_failed(&self, reason: &'static str) {
        count(&DIAL_FAILURES, &self.failures, reason);
    }

    pub(crate) fn agent_refused(&self, reason: &'static str) {
        count(&REFUSALS, &self.refusals, reason);
    }

    pub(crate) fn ended(&self, end: ConnectionEnd, took: Duration) {
        self.ends[end as usize].fetch_add(1, Relaxed);
        self.connections.observe(&CONNECTION_BUCKETS, took);
    }

    pub(crate) fn packet(&self, segment: Segment, packet: &Packet) {
        self.packets[segment as usize].packet(packet);
    }

    pub(crate) fn data_packet(&self, segment: Segment) {
        self.packets[segment as usize].data();
    }

    /// A stream broke while a packet was sent, or while any was awaited (`Unknown`).
    pub(crate) fn stream_failed(&self, segment: Segment, error: &grpc::Error, packet: &'static str) {
        let code = match error {
            // To a server, a caller that is gone has cancelled.
            grpc::Error::Http(_) => Code::CANCELED,
            error => error.code(),
        };
        let code = usize::from(code.number()).min(Code::COUNT - 1);
        self.stream_errors[segment as usize][code].named(packet);
    }

    pub(crate) fn frontend_written(&self, took: Duration) {
        self.frontend_writes.observe(&DIAL_BUCKETS, took);
    }

    pub(crate) fn carried(&self, up: usize, down: usize) {
        self.bytes[0].fetch_add(up as u64, Relaxed);
        self.bytes[1].fetch_add(down as u64, Relaxed);
    }

    /// Failed dials by reason.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DIAL_FAILURES.into_iter().zip(self.failures.iter().map(|count| count.load(Relaxed)))
    }

    /// Connections to the agent port that became no agent's, by reason.
    pub fn agents_refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REFUSALS.into_iter().zip(self.refusals.iter().map(|count| count.load(Relaxed)))
    }

    /// Ended connections by reason.
    pub fn ends(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.ends.iter().map(|count| count.load(Relaxed));
        ConnectionEnd::ALL.into_iter().map(|(_, word)| word).zip(counts)
    }

    /// Packets by segment and kind.
    pub fn packets(&self) -> impl Iterator<Item = (Segment, &'static str, u64)> {
        Segment::ALL.into_iter().flat_map(|segment| {
            self.packets[segment as usize].all().map(move |(kind, count)| (segment, kind, count))
        })
    }

    /// Streams that broke, by segment, code and kind of packet.
    pub fn stream_errors(&self) -> impl Iterator<Item = (Segment, &'static str, &'static str, u64)> {
        Segment::ALL.into_iter().flat_map(move |segment| {
            Code::all().zip(&self.stream_errors[segment as usize]).flat_map(move |(code, counts)| {
                counts.all().map(move |(kind, count)| (segment, code.name(), kind, count))
            })
        })
    }

    /// Bytes to endpoints, and back.
    #[must_use]
    pub fn bytes(&self) -> [u64; 2] {
        self.bytes.each_ref().map(|bytes| bytes.load(Relaxed))
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
