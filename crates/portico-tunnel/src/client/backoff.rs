//! How long to wait before the next attempt to connect to a gateway.
//!
//! While a stream waits, an *absent* gateway is tried several times a second. That costs the gateway nothing,
//! and it is found as soon as it is back. An *overwhelmed* gateway accepts connections but does not finish
//! the handshake. For it the waits grow whether a stream waits or not: twenty thousand nodes must not
//! stampede a gateway that just came up. An *unfit* gateway needs an operator (its certificate is wrong,
//! say). It is tried every few seconds, because each attempt costs it a signature. Without a stream that
//! waits, waits grow in every case.

use std::time::Duration;

/// The first wait is twice this.
const FIRST: Duration = Duration::from_millis(250);

/// The longest wait.
const LAST: Duration = Duration::from_secs(30);

/// The longest wait for an absent gateway while a stream waits. With the second that an attempt may take, a
/// stream finds the gateway within two seconds of its return.
const ABSENT: Duration = Duration::from_millis(500);

/// The longest wait for an unfit gateway while a stream waits.
const UNFIT: Duration = Duration::from_secs(5);

/// Nobody waits for the successor of a tunnel that is up: eight times its first wait is minutes.
const MOST_DOUBLINGS: u32 = 3;

/// How an attempt failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failed {
    /// No gateway, as far as can be seen: a load balancer may accept connections while its gateways are away.
    Absent,
    /// The gateway answers, and an operator must change something on one of the two sides.
    Unfit,
    /// The gateway accepted the connection and did not serve it.
    Overwhelmed,
}

/// How long to wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wait {
    /// While no stream waits for a tunnel.
    pub(super) idle: Duration,
    /// While one does. Not longer than `idle` counts.
    pub(super) wanted: Duration,
}

/// Counts failures in a row.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    overwhelmed: u32,
}

impl Backoff {
    pub(super) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Returns the wait after one more failure. `random` is between 0 and 1.
    pub(super) fn failed(&mut self, how: Failed, random: f64) -> Wait {
        self.failures = self.failures.saturating_add(1);
        if how == Failed::Overwhelmed {
            self.overwhelmed = self.overwhelmed.saturating_add(1);
        }
        let wanted = match how {
            Failed::Absent => ABSENT,
            Failed::Unfit => grown(self.failures).min(UNFIT),
            Failed::Overwhelmed => grown(self.overwhelmed),
        };
        let spread = |limit: Duration| limit.mul_f64(0.25 + 0.75 * random);
        Wait { idle: spread(grown(self.failures)), wanted: spread(wanted) }
    }

    /// Counts one more failure to replace a tunnel that is up. Returns how many times the first wait is to be
    /// waited.
    pub(super) fn failed_to_replace(&mut self) -> u32 {
        let times = 1 << self.failures.min(MOST_DOUBLINGS);
        self.failures = self.failures.saturating_add(1);
        times
    }
}

fn grown(failures: u32) -> Duration {
    FIRST.saturating_mul(1 << failures.min(10)).min(LAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_gateway_is_tried_often_only_while_a_stream_waits() {
        let mut backoff = Backoff::default();
        let waits: Vec<Wait> = (0..20).map(|_| backoff.failed(Failed::Absent, 1.0)).collect();
        assert!(waits.iter().all(|wait| wait.wanted == ABSENT));
        assert_eq!(waits[0].idle, Duration::from_millis(500));
        assert_eq!(waits[19].idle, LAST);
        assert!(waits.windows(2).all(|pair| pair[0].idle <= pair[1].idle));
    }

    #[test]
    fn an_unfit_gateway_is_tried_every_few_seconds() {
        let mut backoff = Backoff::default();
        let waits: Vec<Wait> = (0..20).map(|_| backoff.failed(Failed::Unfit, 1.0)).collect();
        assert_eq!(waits[0].wanted, Duration::from_millis(500));
        assert_eq!(waits[19].wanted, UNFIT);
        assert_eq!(waits[19].idle, LAST);
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
        let wait = |random| Backoff::default().failed(Failed::Absent, random).idle;
        assert!(wait(0.0) < wait(0.5) && wait(0.5) < wait(1.0));
    }

    #[test]
    fn success_forgets_earlier_failures() {
        let mut backoff = Backoff::default();
        for _ in 0..9 {
            backoff.failed(Failed::Absent, 1.0);
        }
        backoff.succeeded();
        assert_eq!(backoff.failed(Failed::Absent, 1.0).idle, Duration::from_millis(500));
    }
}
