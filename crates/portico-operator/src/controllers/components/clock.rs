//! The message about a clock that is off. The gateway is kept all the same: the API server's clock may be the
//! one that is wrong.

use super::context::Context;
use crate::clock::{CLOCK_OFF, ahead, judged};
use crate::condition::State;
use crate::status::SeedReport;

impl Context {
    /// Returns `state`, or one about the clock if `state` is ready and the clock is off. `before` is the last
    /// report of this Seed.
    pub(super) async fn with_clock(&self, state: State, before: Option<&SeedReport>) -> State {
        if !state.ready {
            return state;
        }
        let before = before.filter(|before| before.reason == CLOCK_OFF).map(|before| before.ready);
        let ahead = ahead(&self.client, self.settings.clock).await;
        match ahead.and_then(|ahead| judged(ahead, before)) {
            None => state,
            Some((ready, text)) => {
                let message = format!(
                    "{}; but the operator's clock is {text}: see NTP on the operator's node and on the \
                     control plane",
                    state.message
                );
                State { ready, reason: CLOCK_OFF, message }
            }
        }
    }
}
