//! Whether the clock of this machine agrees with that of the API server.
//!
//! One that is off by an hour breaks nothing here: Leases are judged by how long they stay as they are, and
//! certificates begin two hours before they are issued. One that is off by more issues what nobody accepts.

use hyper::Request;
use hyper::header::DATE;
use jiff::SignedDuration;
use jiff::fmt::rfc2822;
use kube::client::Body;

use super::{Context, State};
use crate::write::request;

/// Clocks that differ by less are no trouble: the usual bound of those who sign with the time.
const TOLERATED: SignedDuration = SignedDuration::from_mins(5);

/// The reason of a Seed whose operator has a clock of its own.
pub(super) const CLOCK_OFF: &str = "ClockOff";

impl Context {
    /// How it stands, with the clock: of what is well otherwise, that it is off.
    pub(super) async fn with_clock(&self, state: State) -> State {
        if !state.ready {
            return state;
        }
        let Some(ahead) = self.ahead().await.filter(|ahead| ahead.abs() > TOLERATED) else { return state };
        let side = if ahead.is_positive() { "ahead of" } else { "behind" };
        let message = format!(
            "{}; but the operator's clock is {} minutes {side} the API server's: see NTP on the operator's \
             node and on the control plane",
            state.message,
            (ahead.abs().as_secs() + 30) / 60
        );
        State { reason: CLOCK_OFF, message, ..state }
    }

    /// How much the clock here is ahead. Nothing if the API server does not tell: then others tell of that.
    async fn ahead(&self) -> Option<SignedDuration> {
        let ask = Request::get("/version").body(Body::empty()).ok()?;
        let answer = request("asking for the time", self.client.send(ask)).await.ok()?;
        let theirs = rfc2822::parse(answer.headers().get(DATE)?.to_str().ok()?).ok()?;
        Some((self.settings.clock)().duration_since(theirs.timestamp()))
    }
}
