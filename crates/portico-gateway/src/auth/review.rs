//! Reviews of tokens by the API servers of their clusters, remembered in a cache and bounded.
//!
//! A verdict comes from the cache while it holds. Otherwise the API server is asked, once for all requests
//! that show the token meanwhile. Reviews under way are bounded, for each cluster and in all. So is the
//! memory of the requests that wait. Permits are given in the order of requests, and a request waits for
//! [`PATIENCE`] at most. A flood of made-up tokens delays the review of a token in use by at most
//! [`PATIENCE`] + [`REVIEW_TIMEOUT`] per bound (one cluster's, all clusters'). A token in use waits longer
//! for its permit. The flood keeps out other tokens, unless they have the grace that they would have while
//! their API server is away. The review of such a token is a task of its own.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::BoxFuture;
use moka::sync::Cache;
use portico_api::names::Tenant;
use portico_net::permits::{Permit, Permits};
use portico_tunnel::Token;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use super::changes::{Affected, Changes};
use super::hash::{Hash, hash};
use super::token_review::Answer;
use super::verdict::{ReviewTimes, TokenState, Verdict};
use crate::line_limit::TenantLines;

/// One review, from connect to the last byte of the response.
pub(super) const REVIEW_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a request waits for its review to begin; with a grace, for its end.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

/// How long the review of a token in use waits for a permit. It is made again soon after.
const PATIENCE_IN_USE: Duration = Duration::from_secs(30);

/// Reviews at a time by the API server of one cluster. Agents that come back at once must not look like an
/// attack.
pub(super) const MAX_PER_CLUSTER: usize = 8;

/// One cluster may use 1/`SHARES` of the memory for waiting requests. So one hanging API server leaves room
/// for three more. With 1 GiB of memory for the gateway, and tokens of 1 KiB, two thousand nodes of a cluster
/// may come at once.
pub(super) const SHARES: usize = 4;

/// The memory of a waiting request beside its token: its stream, its task, and its authority.
pub(super) const WAITER: usize = 3 * 1024;

/// After a no to a token that was accepted, the API server is asked once more. One that has just started
/// answers before it knows its own service accounts and roles.
const CONFIRM_AFTER: Duration = Duration::from_secs(2);

/// Most accepted tokens that are cached: more than the agents of one seed. A token that open connections rest
/// on is reviewed again whether it is cached or not. Of more, those that are seldom shown leave the cache.
const MAX_ACCEPTED: u64 = 100_000;

/// Most of them of one cluster: whoever administers it can have any number accepted.
pub(super) const MAX_ACCEPTED_PER_CLUSTER: usize = 20_000;

/// Most cached tokens that were never accepted. A flood of them displaces its own.
const MAX_UNVERIFIED: u64 = 10_000;

/// How long a token that was never accepted is cached. Its review is over by then, and a no no longer holds.
const UNVERIFIED_CACHED: Duration = Duration::from_secs(15);

/// Upper bounds, in seconds, of the histogram of reviews.
pub const REVIEW_BUCKETS: [f64; 6] = [0.005, 0.01, 0.05, 0.25, 1.0, 3.0];

/// The API server of one cluster.
pub(crate) trait TokenReviewer: fmt::Debug + Send + Sync {
    /// The cluster whose tokens it reviews.
    fn cluster(&self) -> &Tenant;

    /// Differs from the ids of all other API servers, also of one of the same name that another CA signed
    /// for.
    fn id(&self) -> &Hash;

    /// Has it review `token`. The caller bounds the time.
    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Answer>;
}

/// A token, what is known of it, and the API server that knows more.
#[derive(Debug, Clone)]
pub(super) struct ReviewedToken {
    pub(super) token: Token,
    pub(super) state: Arc<TokenState>,
    pub(super) reviewer: Arc<dyn TokenReviewer>,
}

/// Everything known about tokens that are reviewed.
#[derive(Debug)]
pub(super) struct Reviews {
    times: ReviewTimes,
    /// Tokens that were accepted, for the grace after their last review.
    accepted: Cache<Hash, AcceptedToken>,
    /// For tokens in it: as many as there are, and so many of a cluster.
    accepted_permits: Permits<Tenant>,
    unverified: Cache<Hash, Arc<TokenState>>,
    /// For reviews under way.
    permits: Permits<Tenant>,
    /// For requests that wait, a permit a byte.
    waiting: Permits<Tenant>,
    /// For reviews that requests begin after one of the token failed.
    retries: Permits<Tenant>,
    counters: Counters,
    changes: Arc<Changes>,
    log: TenantLines,
}

#[derive(Debug, Clone)]
struct AcceptedToken {
    state: Arc<TokenState>,
    permit: Arc<Permit>,
}

#[derive(Debug, Default)]
struct Counters {
    yes: AtomicU64,
    no: AtomicU64,
    failed: AtomicU64,
    nanos: AtomicU64,
    buckets: [AtomicU64; REVIEW_BUCKETS.len() + 1],
    waiting: Arc<AtomicU32>,
}

/// A request that waits for a verdict.
struct Waiting {
    _bytes: Permit,
    count: Arc<AtomicU32>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Relaxed);
    }
}

/// Counters of token reviews, at one moment.
#[derive(Debug, Clone, Copy)]
pub struct ReviewTotals {
    /// Reviews in which the API server accepted the token.
    pub yes: u64,
    /// Reviews in which it denied the token.
    pub no: u64,
    /// In which it could not be asked, or its response was no TokenReview.
    pub failed: u64,
    /// Duration of all of them, in seconds.
    pub seconds: f64,
    /// Counts by [`REVIEW_BUCKETS`], the last for longer ones. Not cumulative.
    pub buckets: [u64; REVIEW_BUCKETS.len() + 1],
    /// Tokens cached now.
    pub remembered: u64,
    /// Requests that wait for a verdict now.
    pub waiting: u32,
    /// Bytes that these are reckoned to take.
    pub waiting_bytes: usize,
}

impl Reviews {
    /// `interval` is how long a yes holds. A no that revokes is announced to `changes`. At most `most` are
    /// under way, and requests that wait take at most `waiting` bytes.
    pub(super) fn new(interval: Duration, most: u32, waiting: usize, changes: Arc<Changes>) -> Self {
        let times = ReviewTimes::new(interval);
        Self {
            times,
            accepted: Cache::builder().max_capacity(MAX_ACCEPTED).time_to_live(times.grace).build(),
            accepted_permits: Permits::new(Semaphore::MAX_PERMITS, MAX_ACCEPTED_PER_CLUSTER),
            unverified: Cache::builder().max_capacity(MAX_UNVERIFIED).time_to_live(UNVERIFIED_CACHED).build(),
            permits: Permits::new(most as usize, MAX_PER_CLUSTER),
            waiting: Permits::new(waiting, waiting / SHARES),
            retries: Permits::new(most as usize, 1),
            counters: Counters::default(),
            changes,
            log: TenantLines::new(),
        }
    }

    pub(super) fn totals(&self) -> ReviewTotals {
        let counters = &self.counters;
        // The counts lag behind otherwise.
        self.accepted.run_pending_tasks();
        self.unverified.run_pending_tasks();
        ReviewTotals {
            yes: counters.yes.load(Relaxed),
            no: counters.no.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            seconds: Duration::from_nanos(counters.nanos.load(Relaxed)).as_secs_f64(),
            buckets: std::array::from_fn(|bucket| counters.buckets[bucket].load(Relaxed)),
            waiting: counters.waiting.load(Relaxed),
            waiting_bytes: self.waiting.in_use(),
            remembered: self.accepted.entry_count() + self.unverified.entry_count(),
        }
    }

    /// Returns the state of `token` at `reviewer`; perhaps nothing is known yet.
    pub(super) fn token(&self, token: &Token, reviewer: Arc<dyn TokenReviewer>) -> ReviewedToken {
        let key = key(token, &*reviewer);
        let unverified = || self.unverified.get_with(key, || Arc::new(TokenState::new()));
        let state = self.accepted.get(&key).map_or_else(unverified, |accepted| accepted.state);
        ReviewedToken { token: token.clone(), state, reviewer }
    }

    /// Returns the verdict on `token`, from the cache or by a review. `None` if too many wait, and the token
    /// has no grace.
    pub(super) async fn verdict(self: &Arc<Self>, token: &ReviewedToken) -> Option<Verdict> {
        if let Some(known) = token.state.known() {
            return Some(known);
        }
        // Boxed: a future that waits for long holds the memory it needs for that, and no more.
        if token.state.has_grace()
            && let Some(verdict) = Box::pin(self.verdict_within_grace(token)).await
        {
            return Some(verdict);
        }
        let _waiting = self.enter(token)?;
        Some(Box::pin(self.wait(token)).await)
    }

    pub(super) async fn wait(&self, token: &ReviewedToken) -> Verdict {
        let begun = Instant::now();
        // Another request reviews it, and learns what comes of that.
        let Ok(_turn) = timeout(PATIENCE, token.state.turn.lock()).await else {
            return Verdict::unavailable(NOT_YET);
        };
        if let Some(known) = token.state.known() {
            return known;
        }
        let reviewed = self.review(token, PATIENCE.saturating_sub(begun.elapsed())).await;
        reviewed.unwrap_or_else(|| self.learn(token, Answer::Failed(TOO_MANY.into())))
    }

    /// Waits for [`PATIENCE`] at most, and not at all while reviews of the token fail. If there is no verdict
    /// by then, the last yes counts; `None` if the grace is over.
    async fn verdict_within_grace(self: &Arc<Self>, token: &ReviewedToken) -> Option<Verdict> {
        self.begin_review(token);
        let is_failing = token.state.is_failing();
        if !is_failing && let Some(_waiting) = self.enter(token) {
            // An error says that the review goes on.
            let _ = timeout(PATIENCE, token.state.turn.lock()).await;
        }
        // Before what is known is read: a no that comes meanwhile ends the grace.
        let has_grace = token.state.has_grace();
        let known = token.state.known();
        if known.is_some() || !has_grace {
            return known;
        }
        // Why reviews fail is in the log already.
        if !is_failing {
            self.warn(token, NOT_YET, true);
        }
        Some(Verdict::Accepted)
    }

    /// Begins a review. It goes on after the end of the request and its connection, so that its result
    /// decides about the next request. Does nothing if one is under way, or too many wait. After a review
    /// that failed, only one token of a cluster is reviewed again at a time. So an API server that hangs
    /// takes one permit, and one that recovers does not get the tokens of all nodes at once.
    fn begin_review(self: &Arc<Self>, token: &ReviewedToken) {
        let Ok(turn) = Arc::clone(&token.state.turn).try_lock_owned() else { return };
        let Some(waiting) = self.enter(token) else { return };
        let (reviews, token) = (Arc::clone(self), token.clone());
        tokio::spawn(async move {
            let is_retry = token.state.is_failing();
            let retry = is_retry.then(|| reviews.retries.try_acquire(token.reviewer.cluster())).flatten();
            if retry.is_some() || !is_retry {
                reviews.review_if_due(&token).await;
            }
            drop((waiting, turn));
        });
    }

    /// `None` if too many wait.
    fn enter(&self, token: &ReviewedToken) -> Option<Waiting> {
        let bytes = u32::try_from(WAITER + token.token.secret().len()).ok()?;
        let bytes = self.waiting.try_acquire_many(token.reviewer.cluster(), bytes)?;
        self.counters.waiting.fetch_add(1, Relaxed);
        Some(Waiting { _bytes: bytes, count: Arc::clone(&self.counters.waiting) })
    }

    /// Reviews a token in use again, if it is due. Returns whether the API server could be asked.
    pub(super) async fn review_again(&self, token: ReviewedToken) -> bool {
        let _turn = token.state.turn.lock().await;
        self.review_if_due(&token).await;
        !token.state.is_failing()
    }

    async fn review_if_due(&self, token: &ReviewedToken) {
        // Boxed: many wait, few ask.
        if token.state.is_due() && Box::pin(self.review(token, PATIENCE_IN_USE)).await.is_none() {
            self.learn(token, Answer::Failed(TOO_MANY.into()));
        }
    }

    /// `None` if there is no permit in time.
    async fn review(&self, token: &ReviewedToken, patience: Duration) -> Option<Verdict> {
        let mut answer = self.ask(token, patience).await?;
        if matches!(answer, Answer::No(_)) && token.state.was_accepted() {
            sleep(CONFIRM_AFTER).await;
            answer = self.ask(token, patience).await?;
        }
        Some(self.learn(token, answer))
    }

    /// Has the API server review `token` once. `None` if there is no permit in time.
    async fn ask(&self, token: &ReviewedToken, patience: Duration) -> Option<Answer> {
        let reviewer = &token.reviewer;
        let _permit = timeout(patience, self.permits.acquire(reviewer.cluster())).await.ok()?;
        let begun = Instant::now();
        let answer = timeout(REVIEW_TIMEOUT, reviewer.review(token.token.secret())).await;
        let answer =
            answer.unwrap_or_else(|_| Answer::Failed("the API server did not answer in time".into()));
        self.count(&answer, begun.elapsed());
        Some(answer)
    }

    fn learn(&self, token: &ReviewedToken, answer: Answer) -> Verdict {
        let failure = match &answer {
            Answer::Failed(why) => Some(why.clone()),
            Answer::Yes | Answer::No(_) => None,
        };
        let key = key(&token.token, &*token.reviewer);
        let (verdict, revokes) = token.state.learn(answer, self.times.spread(key[0]));
        if revokes {
            self.changes.announce(Affected::ReviewedTokens);
        }
        if token.state.was_accepted() {
            self.keep_accepted(key, token);
        }
        if let Some(why) = failure {
            self.warn(token, &why, verdict == Verdict::Accepted);
        }
        verdict
    }

    /// Caches a token that was accepted for the time of its grace, if its cluster has room for one more.
    /// Otherwise it stays where tokens are that never were.
    fn keep_accepted(&self, key: Hash, token: &ReviewedToken) {
        let cached = self.accepted.get(&key).map(|accepted| accepted.permit);
        let new = || self.accepted_permits.try_acquire(token.reviewer.cluster()).map(Arc::new);
        if let Some(permit) = cached.or_else(new) {
            self.accepted.insert(key, AcceptedToken { state: Arc::clone(&token.state), permit });
            self.unverified.invalidate(&key);
        }
    }

    fn warn(&self, token: &ReviewedToken, why: &str, accepted: bool) {
        let cluster = token.reviewer.cluster();
        if let Some(left_out) = self.log.admit(Some(cluster)) {
            tracing::warn!(%cluster, %why, accepted, left_out, "cannot review a token");
        }
    }

    fn count(&self, answer: &Answer, took: Duration) {
        let counters = &self.counters;
        let counter = match answer {
            Answer::Yes => &counters.yes,
            Answer::No(_) => &counters.no,
            Answer::Failed(_) => &counters.failed,
        };
        counter.fetch_add(1, Relaxed);
        counters.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        let seconds = took.as_secs_f64();
        let bucket = REVIEW_BUCKETS.iter().position(|&bound| seconds <= bound);
        counters.buckets[bucket.unwrap_or(REVIEW_BUCKETS.len())].fetch_add(1, Relaxed);
    }
}

const TOO_MANY: &str = "too many reviews wait";

const NOT_YET: &str = "its API server takes too long, or too many reviews wait";

/// The caches know a token by its hash.
fn key(token: &Token, reviewer: &dyn TokenReviewer) -> Hash {
    hash(&[token.secret().as_bytes(), reviewer.id()])
}
