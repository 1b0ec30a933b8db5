//! Reviews of tokens: answered from memory ([`reviewed`](super::reviewed)) or by the API server of the cluster, once at a time for each
//! token, within the bounds of [`places`](super::places).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use portico_api::names::ClusterName;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::exchange::{self, Answer};
use super::hash;
use super::places::{Place, Places};
use super::reviewed::{Remembered, Reviewed, Reviewer, Verdict, lock};
use crate::shared::Shared;

/// One exchange, from connect to the last byte of the answer; and how long a request waits until its turn comes.
const LIMIT: Duration = Duration::from_secs(3);

/// An exchange that fails after so long has failed because the API server does not answer. Refusing takes it milliseconds.
const HANGS: Duration = Duration::from_secs(1);

/// Upper bounds, in seconds, of the histogram of exchanges.
pub const REVIEW_BUCKETS: [f64; 6] = [0.005, 0.01, 0.05, 0.25, 1.0, 3.0];

/// Everything known about tokens.
#[derive(Debug)]
pub(super) struct Reviews {
    /// How long a yes holds.
    yes_holds: Duration,
    remembered: Mutex<Remembered>,
    places: Places,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    yes: AtomicU64,
    no: AtomicU64,
    failed: AtomicU64,
    nanos: AtomicU64,
    buckets: [AtomicU64; REVIEW_BUCKETS.len() + 1],
}

/// What is counted of token reviews, at one moment.
#[derive(Debug, Clone, Copy)]
pub struct ReviewTotals {
    /// Exchanges in which the API server said yes.
    pub yes: u64,
    /// In which it said no.
    pub no: u64,
    /// In which it could not be asked, or said nothing that could be understood.
    pub failed: u64,
    /// Time all of them took, in seconds.
    pub seconds: f64,
    /// Counts by [`REVIEW_BUCKETS`], the last for longer ones. Not cumulative.
    pub buckets: [u64; REVIEW_BUCKETS.len() + 1],
    /// Tokens remembered now.
    pub remembered: u64,
}

impl Reviews {
    pub(super) fn new(yes_holds: Duration) -> Self {
        Self {
            yes_holds,
            remembered: Mutex::default(),
            places: Places::default(),
            counters: Counters::default(),
        }
    }

    pub(super) fn totals(&self) -> ReviewTotals {
        let counters = &self.counters;
        ReviewTotals {
            yes: counters.yes.load(Relaxed),
            no: counters.no.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            seconds: Duration::from_nanos(counters.nanos.load(Relaxed)).as_secs_f64(),
            buckets: std::array::from_fn(|bucket| counters.buckets[bucket].load(Relaxed)),
            remembered: lock(&self.remembered).len() as u64,
        }
    }

    /// What is known of `token` to `reviewer`; perhaps nothing yet.
    pub(super) fn entry(&self, token: &str, reviewer: Reviewer, now: Duration) -> Arc<Reviewed> {
        lock(&self.remembered).entry(token, reviewer, now)
    }

    /// What `token` is worth, from memory or from the API server; and what to rest on if that is a yes. `newcomers` bounds the exchanges
    /// about tokens that were never accepted.
    pub(super) async fn verdict(
        &self,
        shared: &Shared,
        reviewed: Arc<Reviewed>,
        token: &str,
        newcomers: &Semaphore,
    ) -> (Arc<Reviewed>, Verdict) {
        if let Some(known) = reviewed.known(shared.now()) {
            return (reviewed, known);
        }
        let is_newcomer = reviewed.accepted_token().is_none();
        let reviewer = reviewed.reviewer(&shared.live);
        let turn = async {
            let turn = reviewed.turn.lock().await;
            // Behind the turn: the streams of one token wait for one exchange, and leave the places to other tokens. Never closed.
            let newcomer = if is_newcomer { newcomers.acquire().await.ok() } else { None };
            let place = self.places.take(reviewer.upstream.cluster.reviews(), is_newcomer).await;
            (turn, newcomer, place)
        };
        let verdict = match timeout(LIMIT, turn).await {
            Err(_) => self.note(shared, &reviewed, token, Answer::Failed("too many reviews wait".into())),
            Ok((_turn, _newcomer, place)) => match reviewed.known(shared.now()) {
                Some(known) => known,
                None => self.ask(shared, &reviewed, &reviewer, token, place).await,
            },
        };
        if !matches!(verdict, Verdict::Yes) {
            return (reviewed, verdict);
        }
        let stands = lock(&self.remembered).keep(&reviewed);
        if !Arc::ptr_eq(&stands, &reviewed) {
            self.note(shared, &stands, token, Answer::Yes);
        }
        (stands, verdict)
    }

    /// Tokens in use whose time has come.
    pub(super) fn due(&self, now: Duration) -> Vec<(ClusterName, Arc<Reviewed>)> {
        let due = lock(&self.remembered).due(now);
        due.into_iter().map(|reviewed| (reviewed.cluster(), reviewed)).collect()
    }

    /// Asks about a token in use again.
    pub(super) async fn again(&self, shared: &Shared, reviewed: Arc<Reviewed>) {
        let Some(token) = reviewed.accepted_token() else { return };
        let reviewer = reviewed.reviewer(&shared.live);
        let _turn = reviewed.turn.lock().await;
        let place = self.places.take(reviewer.upstream.cluster.reviews(), false).await;
        if reviewed.known(shared.now()).is_none() {
            // Boxed: many may wait for their place, few ask.
            Box::pin(self.ask(shared, &reviewed, &reviewer, &token, place)).await;
        }
    }

    async fn ask(
        &self,
        shared: &Shared,
        reviewed: &Reviewed,
        reviewer: &Reviewer,
        token: &str,
        _place: Place<'_>,
    ) -> Verdict {
        let begun = Instant::now();
        let answer = timeout(LIMIT, exchange::review(shared, reviewer, token)).await;
        let answer =
            answer.unwrap_or_else(|_| Answer::Failed("the API server did not answer in time".into()));
        let took = begun.elapsed();
        let hangs = matches!(answer, Answer::Failed(_)) && took >= HANGS;
        reviewer.upstream.cluster.reviews().note(hangs);
        self.count(&answer, took);
        self.note(shared, reviewed, token, answer)
    }

    /// Takes over what an API server said.
    fn note(&self, shared: &Shared, reviewed: &Reviewed, token: &str, answer: Answer) -> Verdict {
        let now = shared.now();
        if let Answer::Failed(why) = &answer
            && let Some(kept_back) = shared.identities.complaints.may_write(now)
        {
            let (cluster, accepted) = (reviewed.cluster(), reviewed.stays_accepted(now));
            tracing::warn!(%cluster, %why, accepted, kept_back, "cannot review a token");
        }
        let (verdict, falls) = reviewed.learn(answer, token, now, self.spread(token));
        if falls {
            shared.identities.changed();
        }
        verdict
    }

    /// How long a yes holds for this token: up to a quarter less than the time set, so that tokens that came at once do not come
    /// back at once.
    fn spread(&self, token: &str) -> Duration {
        let [byte, ..] = hash(&[token]);
        self.yes_holds - self.yes_holds / 4 * u32::from(byte) / 255
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
