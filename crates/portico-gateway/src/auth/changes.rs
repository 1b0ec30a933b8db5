//! Announces that credentials in use may not hold any more: a file changed, or an API server said no.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use tokio::sync::Notify;

/// Shared by what announces and what checks credentials.
#[derive(Debug, Default)]
pub(super) struct Changes {
    generation: AtomicU64,
    notify: Notify,
}

impl Changes {
    pub(super) fn announce(&self) {
        self.generation.fetch_add(1, SeqCst);
        self.notify.notify_one();
    }

    /// Waits for an announcement. One that was made since the last call counts.
    pub(super) async fn announced(&self) {
        self.notify.notified().await;
    }

    /// Grows with each announcement: what was accepted before it may not hold.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(SeqCst)
    }
}
