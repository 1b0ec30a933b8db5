//! Announces that credentials in use may not hold any more: a file changed, or an API server denied one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use tokio::sync::Notify;

/// Shared by what announces and what checks credentials.
#[derive(Debug, Default)]
pub(super) struct Changes {
    generation: AtomicU64,
    /// A change of files was announced and not taken yet.
    files: AtomicBool,
    notify: Notify,
}

/// Which credentials may not hold any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Affected {
    /// A CA, a revocation list or the file of tokens changed: all.
    All,
    /// An API server refused a token that it had accepted: those that rest on reviewed tokens. A certificate
    /// takes a tenth of a millisecond to verify, and one tenant can have thousands of tokens refused.
    ReviewedTokens,
}

impl Changes {
    pub(super) fn announce(&self, affected: Affected) {
        if affected == Affected::All {
            self.files.store(true, SeqCst);
        }
        self.generation.fetch_add(1, SeqCst);
        self.notify.notify_one();
    }

    /// Waits for announcements. Those that were made since the last call count.
    pub(super) async fn announced(&self) -> Affected {
        self.notify.notified().await;
        if self.files.swap(false, SeqCst) { Affected::All } else { Affected::ReviewedTokens }
    }

    /// Grows with each announcement: what was accepted before it may not hold.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(SeqCst)
    }
}
