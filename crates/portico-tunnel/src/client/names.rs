//! What the names of the gateways resolve to, and when they are asked for again.

use std::time::Duration;

use tokio::time::Instant;

use super::candidates::Candidates;

/// A name whose gateways fail is resolved again, but not more often than this.
const RESOLVE_AGAIN: Duration = Duration::from_secs(1);

/// What the names of the gateways resolve to, and for how long.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    pub(super) candidates: Candidates,
    /// In the order of the settings.
    pub(super) names: Vec<Name>,
}

/// What is known of one gateway's name.
#[derive(Debug, Clone, Default)]
pub(super) struct Name {
    pub(super) asked: Option<Instant>,
    /// When its addresses are to be asked for again, if ever.
    pub(super) until: Option<Instant>,
    /// An address of it failed: it may lead elsewhere by now.
    pub(super) doubted: bool,
}

impl Name {
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let Some(asked) = self.asked else { return true };
        let old = self.until.is_some_and(|until| until <= now);
        (old || self.doubted) && now.duration_since(asked) >= RESOLVE_AGAIN
    }
}
