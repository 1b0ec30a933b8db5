//! The tasks behind credentials in use: one revokes those that do not hold any more, one reviews tokens
//! again.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::ready;
use futures_util::stream::FuturesUnordered;
use portico_api::names::Tenant;
use portico_net::line_limit::{LineLimit, Pace};
use tokio::time::{Instant, MissedTickBehavior, sleep};

use super::Identities;
use super::changes::Affected;
use super::review::{ReviewedToken, Reviews};

/// Between two looks at which tokens are due.
const TICK: Duration = Duration::from_millis(500);

/// Credentials checked before other tasks of this thread get their turn: each may cost a tenth of a
/// millisecond.
const CHECKED_AT_ONCE: usize = 16;

/// After a pass over all credentials, and over all connections to cut them: announcements that follow each
/// other closely are one pass.
const PAUSE: Duration = Duration::from_millis(50);

impl Identities {
    /// Revokes credentials in use that do not hold any more, for as long as the gateway runs. `cut` ends the
    /// streams that rest on a revoked credential, and returns how many.
    pub(crate) async fn supervise(&self, cut: impl Fn() -> usize) {
        let revoke = async {
            let (started, lines) = (Instant::now(), LineLimit::default());
            loop {
                let affected = self.changes.announced().await;
                let revoked = self.revoke_invalid(affected).await;
                if revoked > 0 {
                    let cut = cut();
                    if let Some(left_out) = lines.admit(Pace::WARNINGS, started.elapsed()) {
                        tracing::info!(revoked, cut, left_out, "streams of revoked identities are cut");
                    }
                }
                sleep(PAUSE).await;
            }
        };
        tokio::join!(revoke, self.review_in_use());
    }

    /// Returns how many it has revoked.
    async fn revoke_invalid(&self, affected: Affected) -> usize {
        let mut revoked = 0;
        let all = self.registry.all().into_iter().filter(|credential| credential.is_affected(affected));
        for (index, credential) in all.enumerate() {
            if index % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1 {
                tokio::task::yield_now().await;
            }
            if let Some(why) = credential.revoke_if_invalid(self.tokens.as_deref()) {
                revoked += 1;
                if let Some(left_out) = self.log.admit(Some(credential.cluster())) {
                    let cluster = credential.cluster();
                    tracing::warn!(%cluster, %why, left_out, "a tunnel's identity was revoked");
                }
            }
        }
        revoked
    }

    /// Reviews tokens in use when they are due. Clusters do not wait for each other.
    async fn review_in_use(&self) {
        let Some(reviews) = &self.reviews else { return };
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
                    let mut due = self.due();
                    // One round of a cluster at a time: the next finds what is due by then.
                    due.retain(|cluster, _| under_way.insert(cluster.clone()));
                    for (cluster, tokens) in due {
                        rounds.push(round(reviews, cluster, tokens));
                    }
                }
            }
        }
    }

    /// Returns the tokens in use that are due, by cluster.
    fn due(&self) -> HashMap<Tenant, Vec<ReviewedToken>> {
        let mut due = HashMap::<Tenant, Vec<ReviewedToken>>::new();
        for credential in self.registry.all() {
            if let Some(token) = credential.due_token() {
                due.entry(credential.cluster().clone()).or_default().push(token);
            }
        }
        due
    }
}

/// Reviews tokens of one cluster again. The first is reviewed alone, and the round ends if that fails. So an
/// API server that hangs takes one permit.
async fn round(reviews: &Reviews, cluster: Tenant, mut tokens: Vec<ReviewedToken>) -> Tenant {
    tokens.sort_by_key(|token| token.state.urgency());
    let mut tokens = tokens.into_iter();
    if let Some(first) = tokens.next()
        && !reviews.review_again(first).await
    {
        return cluster;
    }
    // All at once: permits bound the work. A review that waits to be confirmed holds none.
    let rest: FuturesUnordered<_> = tokens.map(|token| reviews.review_again(token)).collect();
    rest.for_each(|_answered| ready(())).await;
    cluster
}
