//! The largest packet that arrives whole: probes with the "don't fragment" bit, of many sizes.
//!
//! A router that cannot pass one on must say so (RFC 1191, RFC 8201). Where the message does not arrive,
//! connections open and then hang with the first large packet; so silence is searched, too.

use std::net::IpAddr;
use std::time::Duration;

use tokio::time::timeout;

use super::Limits;
use super::datagram::{Answer, Prober};
use crate::observation::Observation;
use crate::probe::PROBE_LENGTH;
use crate::transport::Transport;

/// The smallest that is looked at. IPv6 promises it (RFC 8200), and nothing in a data centre has less.
const SMALLEST: usize = 1280;

/// How long a reply may take, and how often one size is tried.
const REPLY: Duration = Duration::from_millis(400);
const ATTEMPTS: usize = 2;

/// Reports of routers that are followed. Each names a smaller size than the one before.
const MOST_REPORTS: usize = 8;

/// What became of one size.
enum Outcome {
    Arrives,
    Silence,
    TooLarge { mtu: usize, by: Option<IpAddr> },
    Failed(Observation),
}

/// Looks for the largest packet to a responder, with all headers.
pub async fn check(to: IpAddr, transport: Transport, limits: Limits) -> Observation {
    let prober = match Prober::open(to, transport) {
        Ok(prober) => prober,
        Err(seen) => return seen,
    };
    // If the smallest does not come back either, then the size is not the reason.
    match outcome(&prober, PROBE_LENGTH + prober.overhead()).await {
        Outcome::Failed(seen) => return seen,
        Outcome::Arrives => {}
        Outcome::Silence | Outcome::TooLarge { .. } => {
            return Observation::TimedOut { millis: super::millis(limits.answer) };
        }
    }
    // The kernel refuses what is larger than the interface, and says how large that is.
    let mut largest = usize::from(u16::MAX);
    let (mut interface, mut reporter) = (largest, None);
    for _ in 0..MOST_REPORTS {
        match outcome(&prober, largest).await {
            Outcome::Arrives => return found(largest, interface, reporter),
            Outcome::Failed(seen) => return seen,
            Outcome::TooLarge { mtu, by } if (SMALLEST..largest).contains(&mtu) => {
                (largest, reporter) = (mtu, by);
                if by.is_none() {
                    interface = mtu;
                }
            }
            Outcome::Silence | Outcome::TooLarge { .. } => break,
        }
    }
    search(&prober, largest, interface).await
}

/// Halves the range between a size that arrives and one that does not.
async fn search(prober: &Prober, too_large: usize, interface: usize) -> Observation {
    let (mut arrives, mut vanishes) = (SMALLEST, too_large);
    match outcome(prober, SMALLEST).await {
        Outcome::Arrives => {}
        Outcome::Failed(seen) => return seen,
        Outcome::Silence | Outcome::TooLarge { .. } => {
            return Observation::Unreachable {
                by: None,
                why: format!("no packet of {SMALLEST} bytes arrives").into(),
            };
        }
    }
    while vanishes - arrives > 1 {
        let size = arrives + (vanishes - arrives) / 2;
        match outcome(prober, size).await {
            Outcome::Arrives => arrives = size,
            _ => vanishes = size,
        }
    }
    found(arrives, interface, None)
}

fn found(mtu: usize, interface: usize, by: Option<IpAddr>) -> Observation {
    let size = |size| u16::try_from(size).unwrap_or(u16::MAX);
    Observation::PathMtu { mtu: size(mtu), interface: size(interface), by }
}

/// Tries one size, with all headers.
async fn outcome(prober: &Prober, size: usize) -> Outcome {
    for _ in 0..ATTEMPTS {
        match timeout(REPLY, prober.ask(size - prober.overhead())).await {
            Ok(Answer::Reply) => return Outcome::Arrives,
            Ok(Answer::TooLarge { mtu, by }) => {
                return Outcome::TooLarge { mtu: usize::try_from(mtu).unwrap_or(0), by };
            }
            Ok(Answer::Failed(seen)) => return Outcome::Failed(seen),
            Err(_) => {}
        }
    }
    Outcome::Silence
}
