//! The task that makes revocations take effect, and the one that asks about tokens in use again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{FuturesUnordered, iter};
use portico_api::names::ClusterName;
use tokio::time::MissedTickBehavior;

use super::Identities;
use super::places::MOST_PER_CLUSTER;
use super::review::Reviews;
use super::reviewed::Reviewed;
use crate::outcome::End;
use crate::shared::Shared;
use crate::worker::Worker;

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

/// Asks about each token in use again when its time has come: cluster by cluster, none of which waits for another.
async fn review_again(shared: &Shared) {
    let Some(reviews) = &shared.identities.reviews else { return };
    let mut rounds = FuturesUnordered::new();
    let mut under_way = HashSet::new();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(cluster) = rounds.next() => {
                under_way.remove(&cluster);
            }
            _ = tick.tick() => {
                let mut due = HashMap::<ClusterName, Vec<Arc<Reviewed>>>::new();
                for (cluster, reviewed) in reviews.due(shared.now()) {
                    due.entry(cluster).or_default().push(reviewed);
                }
                // One round of a cluster at a time: the next finds what is due by then.
                due.retain(|cluster, _| under_way.insert(cluster.clone()));
                rounds.extend(due.into_iter().map(|(cluster, due)| round(reviews, shared, cluster, due)));
            }
        }
    }
}

/// Asks the API server of one cluster; as many wait at a time as may ask.
async fn round(
    reviews: &Reviews,
    shared: &Shared,
    cluster: ClusterName,
    due: Vec<Arc<Reviewed>>,
) -> ClusterName {
    iter(due).for_each_concurrent(MOST_PER_CLUSTER, |reviewed| reviews.again(shared, reviewed)).await;
    cluster
}
