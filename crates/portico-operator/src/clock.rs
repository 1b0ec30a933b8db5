//! Whether the clock of this machine agrees with that of the API server.
//!
//! A clock that is off by less than two hours breaks nothing here. Leases are judged by how long they stay as
//! they are. Certificates begin two hours before they are issued. A clock that is further off issues
//! certificates that may be void.

use std::time::Duration;

use hyper::Request;
use hyper::header::DATE;
use jiff::fmt::rfc2822;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;

use crate::write::request;

/// Clocks that differ by less are no trouble: the usual bound of protocols that sign the time.
const TOLERATED: SignedDuration = SignedDuration::from_mins(5);

/// Certificates begin so long before they are issued: of a clock that is ahead by more, nobody accepts a new
/// one yet.
const HARMLESS: SignedDuration = SignedDuration::from_hours(2);

/// Hysteresis: a clock beyond a bound counts as beyond it until it is this much below.
const MARGIN: SignedDuration = SignedDuration::from_mins(1);

/// How often to look whether a clock that is off is right again.
pub(crate) const CLOCK_PERIOD: Duration = Duration::from_secs(30);

/// The reason of the condition and the Event about a wrong clock.
pub(crate) const CLOCK_OFF: &str = "ClockOff";

/// How much `now` is ahead of the API server. Nothing if it does not tell: then others tell of that.
pub(crate) async fn ahead(client: &Client, now: fn() -> Timestamp) -> Option<SignedDuration> {
    let ask = Request::get("/version").body(Body::empty()).ok()?;
    let answer = request("asking for the time", client.send(ask)).await.ok()?;
    let theirs = rfc2822::parse(answer.headers().get(DATE)?.to_str().ok()?).ok()?;
    Some(now().duration_since(theirs.timestamp()))
}

/// `None` if the clock is right. Otherwise whether it is still harmless, and a text. `before` is the former
/// of the two at the last look.
pub(crate) fn judged(ahead: SignedDuration, before: Option<bool>) -> Option<(bool, String)> {
    let beyond = |bound: SignedDuration, was: bool| ahead.abs() > if was { bound - MARGIN } else { bound };
    let side = if ahead.is_positive() { "ahead of" } else { "behind" };
    if beyond(HARMLESS, before == Some(false)) {
        Some((false, format!("more than two hours {side} the API server's, and what it issues may be void")))
    } else if beyond(TOLERATED, before.is_some()) {
        Some((true, format!("more than {} minutes {side} the API server's", TOLERATED.as_mins())))
    } else {
        None
    }
}

/// Why nothing may be issued by `now` in place of what is there. By a clock that is far off, a certificate
/// may seem to have ended and be good. A new one may be good for nobody.
pub(crate) async fn far_off(client: &Client, now: fn() -> Timestamp) -> Option<String> {
    match judged(ahead(client, now).await?, None)? {
        (true, _) => None,
        (false, clock) => Some(clock),
    }
}

/// What a status says while no certificate is written because of `clock`, which [`far_off`] has returned.
pub(crate) fn waits(clock: &str) -> String {
    format!(
        "certificates are due or seem lost, and the operator's clock is {clock}: none is written before it \
         is right. See NTP on the operator's node and on the seed's control plane"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_reported_by_bounds_at_which_nothing_flips() {
        let seconds = |seconds| SignedDuration::from_secs(seconds);
        let level = |ahead, before| judged(seconds(ahead), before).map(|(ready, _)| ready);
        for side in [1, -1] {
            assert_eq!(level(side * 300, None), None);
            assert_eq!(level(side * 301, None), Some(true));
            assert_eq!(level(side * 299, Some(true)), Some(true));
            assert_eq!(level(side * 240, Some(true)), None);
            assert_eq!(level(side * 7_200, Some(true)), Some(true));
            assert_eq!(level(side * 7_201, Some(true)), Some(false));
            assert_eq!(level(side * 7_199, Some(false)), Some(false));
            assert_eq!(level(side * 7_140, Some(false)), Some(true));
        }
        // The message is the same at each look.
        assert_eq!(judged(seconds(400), None), judged(seconds(4_000), Some(true)));
        assert!(judged(seconds(-400), None).unwrap().1.contains("behind"));
    }
}
