//! The checks, one file each: an attempt, bounded in time, with what was seen as its result.
//!
//! [`tcp`] connects, and finds out whether a responder is there. [`datagram`] sends a probe by UDP or
//! IP-in-IP and waits for it to come back; [`path_mtu`] does so with probes of many sizes. [`dns`] asks a
//! name server, [`tls`] speaks TLS, through a corporate proxy if there is one. [`back`] has the other side
//! try. [`port`] looks at this machine. Datagrams without an answer are sent again; else none of them tries
//! again, and none judges.

pub mod back;
pub mod datagram;
pub mod dns;
pub mod path_mtu;
pub mod port;
pub mod tcp;
pub mod tls;

use std::time::Duration;

/// Between two attempts of one check by datagrams: one lost packet is no finding.
const AGAIN: Duration = Duration::from_millis(700);

/// The time limits of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// For an answer. A SYN is sent again after one second, and after three.
    pub answer: Duration,
    /// For the first line of a responder, once it has accepted. It sends at once.
    pub banner: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { answer: Duration::from_millis(3500), banner: Duration::from_millis(500) }
    }
}

/// Milliseconds since 1970, by this machine's clock.
pub(crate) fn unix_millis() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

fn micros(since: tokio::time::Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn millis(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}
