//! How long to wait before a gateway is tried again.
//!
//! Three thoughts pull in different directions. Nobody should wait when the gateway is back: so while a connection waits for a tunnel, a gateway
//! that is *absent* (refuses, or does not answer) is tried several times a second, which costs it nothing. Twenty thousand nodes must not
//! stampede a gateway that has just come up: so one that was *overwhelmed* (answered, and then did not finish the handshake) is left
//! alone for longer and longer, wanted or not. Who waits for an operator (*unfit*: a wrong certificate, say) is tried every few seconds
//! while a connection waits, for each attempt costs the gateway a signature. And a node whose pods ask for nothing has no reason to be early.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Waits grow from here.
const FIRST: Duration = Duration::from_millis(250);

/// And stop growing here.
const LAST: Duration = Duration::from_secs(30);

/// Most that somebody waits between two attempts at a gateway that is absent. With the second that an attempt may take, a
/// connection finds the gateway within two of its return.
const WANTED: Duration = Duration::from_millis(500);

/// Most that somebody waits between two attempts at a gateway that is not as it should be.
const WANTED_OF_UNFIT: Duration = Duration::from_secs(5);

/// How an attempt failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    /// Nobody there, as far as we can tell: what stands before a gateway may accept connections while it is away.
    Absent,
    /// Somebody is there with whom we cannot speak until the one or the other is set right.
    Unfit,
    /// Somebody was there and did not serve us.
    Overwhelmed,
}

/// How long to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// If nobody asks for a stream.
    pub(crate) unwanted: Duration,
    /// If somebody does.
    pub(crate) wanted: Duration,
}

/// Counts failures in a row.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
    overwhelmed: u32,
}

impl Backoff {
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// What to do after one more failure. `random` is between 0 and 1.
    pub(crate) fn failed(&mut self, how: Failed, random: f64) -> Wait {
        self.failures = self.failures.saturating_add(1);
        self.overwhelmed = match how {
            Failed::Overwhelmed => self.overwhelmed.saturating_add(1),
            Failed::Absent | Failed::Unfit => self.overwhelmed,
        };
        let wanted = match how {
            Failed::Absent => WANTED,
            Failed::Unfit => grown(self.failures).min(WANTED_OF_UNFIT),
            Failed::Overwhelmed => grown(self.overwhelmed),
        };
        let spread = |limit: Duration| limit.mul_f64(0.25 + 0.75 * random);
        Wait { unwanted: spread(grown(self.failures)), wanted: spread(wanted) }
    }
}

fn grown(failures: u32) -> Duration {
    FIRST.saturating_mul(1 << failures.min(10)).min(LAST)
}

/// A number between 0 and 1 that differs from node to node: the standard library's hasher is seeded by the system.
pub(crate) fn random() -> f64 {
    let bits = RandomState::new().hash_one("portico");
    #[allow(clippy::cast_precision_loss, reason = "53 of 64 bits are random enough")]
    let fraction = (bits >> 11) as f64 / (1_u64 << 53) as f64;
    fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_gateway_is_tried_often_only_while_somebody_waits() {
        let mut backoff = Backoff::default();
        let waits: Vec<Wait> = (0..20).map(|_| backoff.failed(Failed::Absent, 1.0)).collect();
        assert!(waits.iter().all(|wait| wait.wanted == WANTED));
        assert_eq!(waits[0].unwanted, Duration::from_millis(500));
        assert_eq!(waits[19].unwanted, LAST);
        assert!(waits.windows(2).all(|pair| pair[0].unwanted <= pair[1].unwanted));
    }

    #[test]
    fn a_gateway_that_waits_for_an_operator_is_tried_every_few_seconds() {
        let mut backoff = Backoff::default();
        let waits: Vec<Wait> = (0..20).map(|_| backoff.failed(Failed::Unfit, 1.0)).collect();
        assert_eq!(waits[0].wanted, Duration::from_millis(500));
        assert_eq!(waits[19].wanted, WANTED_OF_UNFIT);
        assert_eq!(waits[19].unwanted, LAST);
    }

    #[test]
    fn an_overwhelmed_gateway_is_left_alone_for_longer_and_longer() {
        let mut backoff = Backoff::default();
        let waits: Vec<Wait> = (0..20).map(|_| backoff.failed(Failed::Overwhelmed, 1.0)).collect();
        assert!(waits.windows(2).all(|pair| pair[0].wanted <= pair[1].wanted));
        assert_eq!(waits[19].wanted, LAST);
        // An outage before it does not count against the gateway that is back.
        let mut backoff = Backoff::default();
        for _ in 0..20 {
            backoff.failed(Failed::Absent, 1.0);
        }
        assert_eq!(backoff.failed(Failed::Overwhelmed, 1.0).wanted, Duration::from_millis(500));
    }

    #[test]
    fn nodes_that_fail_together_do_not_return_together() {
        let wait = |random| Backoff::default().failed(Failed::Absent, random).unwanted;
        assert!(wait(0.0) < wait(0.5) && wait(0.5) < wait(1.0));
        assert_ne!(random().to_bits(), random().to_bits());
    }

    #[test]
    fn success_forgets_what_was() {
        let mut backoff = Backoff::default();
        for _ in 0..9 {
            backoff.failed(Failed::Absent, 1.0);
        }
        backoff.succeeded();
        assert_eq!(backoff.failed(Failed::Absent, 1.0).unwanted, Duration::from_millis(500));
    }
}
