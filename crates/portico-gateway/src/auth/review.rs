//! Reviews of tokens by the API servers of their clusters, remembered in a cache and bounded.
//!
//! A verdict comes from the cache while it holds, else from the API server: once for all requests that show
//! the token meanwhile. Reviews under way are bounded, for each cluster and in all, and so are the requests
//! that wait ([`Waiters`]). Permits are given in the order of requests, and a request waits for [`PATIENCE`]
//! at most. A flood of made-up tokens delays the review of a token in use by at most [`PATIENCE`] +
//! [`REVIEW_TIMEOUT`] per bound (one cluster's, all clusters'). A token in use waits longer for its permit.
//! The flood keeps out other tokens, unless they have the grace that they would have while their API server
//! is away. The review of such a token is a task of its own.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::BoxFuture;
use moka::sync::Cache;
use portico_api::names::Tenant;
use portico_net::permits::Permits;
use portico_tunnel::Token;
use tokio::time::{Instant, sleep, timeout};

use super::changes::{Affected, Changes};
use super::hash::{Hash, hash};
use super::token_review::Answer;
use super::verdict::{ReviewTimes, TokenState, Verdict};
use super::waiters::{Waiter, Waiters};
use crate::line_limit::TenantLines;

/// One review, from connect to the last byte of the response.
pub(super) const REVIEW_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a request waits for its review to begin; with a grace, for its end.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

/// How long the review of a token in use waits for a permit. It is made again soon after.
const PATIENCE_IN_USE: Duration = Duration::from_secs(30);

/// Reviews at a time by the API server of one cluster: agents that come back at once must not look like an
/// attack.
pub(super) const MAX_PER_CLUSTER: usize = 8;

/// After a no to a token that was accepted, the API server is asked once more: one that has just started
/// answers before it knows its own service accounts and roles.
const CONFIRM_AFTER: Duration = Duration::from_secs(2);

/// Most tokens cached that were accepted: more than the agents of one seed. A token that open connections
/// rest on is reviewed again whether it is cached or not.
const MAX_ACCEPTED: u64 = 100_000;

/// Most tokens cached that were never accepted. A flood of them displaces its own.
const MAX_UNVERIFIED: u64 = 10_000;

/// How long a token that was never accepted is cached: until its review is over, and a no has held.
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
    accepted: Cache<Hash, Arc<TokenState>>,
    unverified: Cache<Hash, Arc<TokenState>>,
    /// For reviews under way.
    permits: Permits<Tenant>,
    waiters: Arc<Waiters>,
    /// For reviews that requests begin after one of the token failed.
    retries: Permits<Tenant>,
    counters: Counters,
    changes: Arc<Changes>,
    log: TenantLines,
}

#[derive(Debug, Default)]
struct Counters {
    yes: AtomicU64,
    no: AtomicU64,
    failed: AtomicU64,
    nanos: AtomicU64,
    buckets: [AtomicU64; REVIEW_BUCKETS.len() + 1],
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
            unverified: Cache::builder().max_capacity(MAX_UNVERIFIED).time_to_live(UNVERIFIED_CACHED).build(),
            permits: Permits::new(most as usize, MAX_PER_CLUSTER),
            waiters: Arc::new(Waiters::new(waiting)),
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
            waiting: self.waiters.count(),
            waiting_bytes: self.waiters.bytes(),
            remembered: self.accepted.entry_count() + self.unverified.entry_count(),
        }
    }

    /// Returns what is known of `token` to `reviewer`; perhaps nothing yet.
    pub(super) fn token(&self, token: &Token, reviewer: Arc<dyn TokenReviewer>) -> ReviewedToken {
        let key = key(token, &*reviewer);
        let unverified = || self.unverified.get_with(key, || Arc::new(TokenState::new()));
        let state = self.accepted.get(&key).unwrap_or_else(unverified);
        ReviewedToken { token: token.clone(), state, reviewer }
    }

    /// Returns what `token` is worth now, from the cache or by a review. `None` if too many wait, and the
    /// token has no grace.
    pub(super) async fn verdict(self: &Arc<Self>, token: &ReviewedToken) -> Option<Verdict> {
        if let Some(known) = token.state.known() {
            return Some(known);
        }
        // Boxed: what waits for long holds what it needs for that, and no more.
        if token.state.has_grace()
            && let Some(verdict) = Box::pin(self.verdict_within_grace(token)).await
        {
            return Some(verdict);
        }
        let _waiter = self.enter(token)?;
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
        if !is_failing && let Some(_waiter) = self.enter(token) {
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

    /// Begins a review that goes on when the request and its connection are gone, so that what it finds
    /// decides about the next one. Does nothing if one is under way, or too many wait. After a review that
    /// failed, one token of a cluster is reviewed again at a time: an API server that hangs takes one permit,
    /// and one that recovers is not asked by all nodes at once.
    fn begin_review(self: &Arc<Self>, token: &ReviewedToken) {
        let Ok(turn) = Arc::clone(&token.state.turn).try_lock_owned() else { return };
        let Some(waiter) = self.enter(token) else { return };
        let (reviews, token) = (Arc::clone(self), token.clone());
        tokio::spawn(async move {
            let is_retry = token.state.is_failing();
            let retry = is_retry.then(|| reviews.retries.try_acquire(token.reviewer.cluster())).flatten();
            if retry.is_some() || !is_retry {
                reviews.review_if_due(&token).await;
            }
            drop((waiter, turn));
        });
    }

    fn enter(&self, token: &ReviewedToken) -> Option<Waiter> {
        self.waiters.enter(token.reviewer.cluster(), token.token.secret().len())
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
            self.accepted.insert(key, Arc::clone(&token.state));
            self.unverified.invalidate(&key);
        }
        if let Some(why) = failure {
            self.warn(token, &why, verdict == Verdict::Accepted);
        }
        verdict
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
