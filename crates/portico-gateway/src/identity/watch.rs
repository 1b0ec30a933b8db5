//! The task that makes revocations take effect, and the one that asks about tokens in use again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::iter;

use super::Identities;
use super::review::MOST_REVIEWS;
use crate::record::End;
use crate::worker::{Shared, Worker};

/// Between two looks at which tokens are due.
const TICK: Duration = Duration::from_millis(500);

/// Proofs looked at before others on this thread get their turn: each may cost a tenth of a millisecond.
const AT_ONCE: usize = 16;

/// Watches over the identities in use, as long as the gateway lives. Runs on one worker.
pub(crate) async fn watch(shared: Arc<Shared>, workers: Vec<Arc<Worker>>) {
    let identities = &shared.identities;
    let revoke = async {
        loop {
            identities.changed.notified().await;
            revoke(identities, &shared, &workers).await;
        }
    };
    tokio::join!(revoke, review_again(&shared));
}

/// Looks at every proof, and cuts the streams of those that do not stand any more.
async fn revoke(identities: &Identities, shared: &Shared, workers: &[Arc<Worker>]) {
    let mut fallen = 0_u32;
    for (index, proof) in identities.registry.all().into_iter().enumerate() {
        if index % AT_ONCE == AT_ONCE - 1 {
            tokio::task::yield_now().await;
        }
        if let Some(why) = proof.falls(identities.tokens.as_deref()) {
            fallen += 1;
            if let Some(kept_back) = identities.complaints.may_write(shared.now()) {
                tracing::warn!(cluster = %proof.cluster(), %why, kept_back, "a tunnel's identity was revoked");
            }
        }
    }
    if fallen == 0 {
        return;
    }
    let mut cut = 0_u32;
    for record in workers.iter().flat_map(|worker| worker.connections()) {
        if record.proof.as_ref().is_some_and(|proof| proof.has_fallen()) {
            record.cancel(End::Revoked);
            cut += 1;
        }
    }
    tracing::info!(fallen, cut, "streams of revoked identities are cut");
}

/// Asks about each token in use again when its time has come.
async fn review_again(shared: &Shared) {
    let Some(reviews) = &shared.identities.reviews else { return };
    loop {
        tokio::time::sleep(TICK).await;
        let due = reviews.due(shared.now());
        // Each waits for its turn behind those of requests; the number at a time bounds who waits.
        iter(due).for_each_concurrent(MOST_REVIEWS, |reviewed| reviews.again(shared, reviewed)).await;
    }
}
