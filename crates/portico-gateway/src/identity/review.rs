//! What API servers say about tokens: remembered for a while, asked for once at a time, and asked again while a token is in use.
//!
//! A yes holds for the time set (60 s), a no for [`NO_HOLDS`]. An API server that cannot be asked accepts nobody new, but whom it
//! accepted before stays accepted for [`STAYS_ACCEPTED`]: a restart of an API server cuts nothing. For the same reason a token that was
//! accepted is given up only at the second no, [`DOUBT`] after the first: an API server that has just started may not know its own
//! service accounts and roles yet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use portico_api::api_server_ca::ApiServerCa;
use portico_api::names::Authority;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::exchange::{self, Answer};
use super::{API_SERVER, Hash, api_server_of, hash};
use crate::live::Live;
use crate::upstream::Upstream;
use crate::worker::Shared;

/// Most tokens remembered that nothing rests on. Those in use are always kept.
const MOST_REMEMBERED: usize = 10_000;

/// Exchanges at a time, over all clusters.
pub(super) const MOST_REVIEWS: usize = 64;

/// Exchanges at a time with the API server of one cluster: agents that all come back at once must not look like an attack to it.
pub(crate) const MOST_REVIEWS_PER_CLUSTER: usize = 8;

/// One exchange, from connect to the last byte of the answer; and how long a request waits until its turn comes.
const LIMIT: Duration = Duration::from_secs(3);

/// How long a no is remembered: short, so that a token that becomes valid is not turned away for long.
const NO_HOLDS: Duration = Duration::from_secs(5);

/// How long it is remembered that an API server could not be asked.
const FAILURE_HOLDS: Duration = Duration::from_secs(2);

/// Between the two noes that give up a token that was accepted.
const DOUBT: Duration = Duration::from_secs(2);

/// How long a token stays accepted while nobody can be asked.
const STAYS_ACCEPTED: Duration = Duration::from_secs(600);

/// Between two attempts to make room.
const BETWEEN_CLEANINGS: Duration = Duration::from_secs(1);

/// Upper bounds, in seconds, of the histogram of exchanges.
pub const REVIEW_BUCKETS: [f64; 6] = [0.005, 0.01, 0.05, 0.25, 1.0, 3.0];

/// What was found out about a token.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    /// It is good for the cluster.
    Yes,
    /// It is not.
    No(Box<str>),
    /// Nobody could be asked.
    Unknown(Box<str>),
}

/// Who is asked about a token: the API server of a cluster.
#[derive(Debug)]
pub(super) struct Reviewer {
    pub(super) upstream: Arc<Upstream>,
    /// The name in its certificate.
    pub(super) host: Box<str>,
}

impl Reviewer {
    /// The API server behind `upstream` itself, if it says whom it is known by, else that of the same cluster. `None` if nothing says
    /// whom it is known by.
    pub(super) fn of(upstream: &Arc<Upstream>, authority: Option<&str>, live: &Live) -> Option<Self> {
        let backend = upstream.backend();
        let service = &backend.id.service;
        let own = backend.api_server_ca.is_some() || *service.name == *API_SERVER;
        let (upstream, authority) = if own {
            (Arc::clone(upstream), Authority::parse(authority?).ok()?)
        } else {
            let authority = api_server_of(&service.namespace)?;
            let other = live.routes().authorities.get(&authority).cloned()?;
            (other.cluster.name == upstream.cluster.name).then_some((other, authority))?
        };
        let (host, _) = authority.as_str().rsplit_once(':')?;
        let reviewer = Self { upstream, host: host.into() };
        reviewer.ca().is_some().then_some(reviewer)
    }

    /// Whom it is known by, now.
    pub(super) fn ca(&self) -> Option<ApiServerCa> {
        let backend = self.upstream.backend();
        backend.api_server_ca.clone().or_else(|| backend.policy.api_server_ca.clone())
    }
}

/// A token and what is known of it.
#[derive(Debug)]
pub(crate) struct Reviewed {
    key: Hash,
    reviewer: Reviewer,
    /// Held during an exchange: whoever comes meanwhile waits and then sees what came of it.
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    verdict: Verdict,
    /// Until when that is not asked again.
    holds: Duration,
    /// Until when it counts although nobody can be asked; `None` if it was never accepted.
    stays_accepted: Option<Duration>,
    /// When an API server said no to it for the first time after a yes.
    doubted: Option<Duration>,
    /// The token itself, kept from the first yes on, to ask again.
    token: Option<Box<str>>,
}

impl Reviewed {
    /// Why nothing may rest on it; `None` if something may.
    pub(super) fn why_not(&self) -> Option<String> {
        match &lock(&self.state).verdict {
            Verdict::No(why) => Some(String::from(why.clone())),
            Verdict::Yes | Verdict::Unknown(_) => None,
        }
    }

    /// What is known and holds at `now`.
    fn known(&self, now: Duration) -> Option<Verdict> {
        let state = lock(&self.state);
        (now < state.holds).then(|| state.verdict.clone())
    }
}

/// Everything known about tokens.
#[derive(Debug)]
pub(super) struct Reviews {
    /// How long a yes holds.
    yes_holds: Duration,
    entries: Mutex<Entries>,
    slots: Semaphore,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Entries {
    by_hash: HashMap<Hash, Arc<Reviewed>>,
    cleaned: Duration,
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
            entries: Mutex::default(),
            slots: Semaphore::new(MOST_REVIEWS),
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
            remembered: lock(&self.entries).by_hash.len() as u64,
        }
    }

    /// What is known of `token` to `reviewer`; perhaps nothing yet.
    pub(super) fn entry(&self, token: &str, reviewer: Reviewer, now: Duration) -> Arc<Reviewed> {
        let cluster = &reviewer.upstream.cluster.name;
        let key = hash(&[token, cluster.as_str(), &reviewer.upstream.id().to_string(), &reviewer.host]);
        let mut entries = lock(&self.entries);
        if let Some(known) = entries.by_hash.get(&key) {
            // A Service that changed hands is another upstream under the same name.
            if Arc::ptr_eq(&known.reviewer.upstream, &reviewer.upstream) {
                return Arc::clone(known);
            }
        }
        if entries.by_hash.len() >= MOST_REMEMBERED
            && now.saturating_sub(entries.cleaned) >= BETWEEN_CLEANINGS
        {
            entries.cleaned = now;
            entries.by_hash.retain(|_, known| Arc::strong_count(known) > 1 || known.known(now).is_some());
        }
        let verdict = Verdict::Unknown("not asked yet".into());
        let state =
            State { verdict, holds: Duration::ZERO, stays_accepted: None, doubted: None, token: None };
        let fresh = Arc::new(Reviewed {
            key,
            reviewer,
            turn: tokio::sync::Mutex::default(),
            state: Mutex::new(state),
        });
        // One that finds no room is asked about all the same, and forgotten unless it is accepted.
        if entries.by_hash.len() < MOST_REMEMBERED {
            entries.by_hash.insert(key, Arc::clone(&fresh));
        }
        fresh
    }

    /// What `token` is worth, from memory or from the API server.
    pub(super) async fn verdict(&self, shared: &Shared, reviewed: &Arc<Reviewed>, token: &str) -> Verdict {
        if let Some(known) = reviewed.known(shared.now()) {
            return known;
        }
        let turn = async { (reviewed.turn.lock().await, self.slots(reviewed).await) };
        let Ok((_turn, slots)) = timeout(LIMIT, turn).await else {
            return self.note(shared, reviewed, token, Answer::Failed("too many reviews wait".into()));
        };
        if let Some(known) = reviewed.known(shared.now()) {
            return known;
        }
        let verdict = self.ask(shared, reviewed, token, slots).await;
        if matches!(verdict, Verdict::Yes) {
            // What is in use is asked about again, however many there are.
            lock(&self.entries).by_hash.entry(reviewed.key).or_insert_with(|| Arc::clone(reviewed));
        }
        verdict
    }

    /// Tokens in use whose time has come.
    pub(super) fn due(&self, now: Duration) -> Vec<Arc<Reviewed>> {
        let entries = lock(&self.entries);
        let in_use = entries.by_hash.values().filter(|known| Arc::strong_count(known) > 1);
        in_use.filter(|known| known.known(now).is_none()).cloned().collect()
    }

    /// Asks about a token in use again.
    pub(super) async fn again(&self, shared: &Shared, reviewed: Arc<Reviewed>) {
        let Some(token) = lock(&reviewed.state).token.clone() else { return };
        let _turn = reviewed.turn.lock().await;
        let slots = self.slots(&reviewed).await;
        if reviewed.known(shared.now()).is_none() {
            self.ask(shared, &reviewed, &token, slots).await;
        }
    }

    /// A place among the exchanges.
    async fn slots<'a>(
        &'a self,
        reviewed: &'a Reviewed,
    ) -> Option<(SemaphorePermit<'a>, SemaphorePermit<'a>)> {
        // Neither is ever closed.
        let of_cluster = reviewed.reviewer.upstream.cluster.reviews().acquire().await.ok()?;
        Some((of_cluster, self.slots.acquire().await.ok()?))
    }

    async fn ask<P>(&self, shared: &Shared, reviewed: &Reviewed, token: &str, _slots: P) -> Verdict {
        let begun = Instant::now();
        let answer = timeout(LIMIT, exchange::review(shared, &reviewed.reviewer, token)).await;
        let answer =
            answer.unwrap_or_else(|_| Answer::Failed("the API server did not answer in time".into()));
        self.count(&answer, begun.elapsed());
        self.note(shared, reviewed, token, answer)
    }

    /// Takes over what an API server said.
    fn note(&self, shared: &Shared, reviewed: &Reviewed, token: &str, answer: Answer) -> Verdict {
        let now = shared.now();
        let mut state = lock(&reviewed.state);
        let accepted = state.stays_accepted.is_some_and(|until| now < until);
        match answer {
            Answer::Yes => {
                state.verdict = Verdict::Yes;
                state.stays_accepted = Some(now + STAYS_ACCEPTED.max(2 * self.yes_holds));
                state.doubted = None;
                state.token.get_or_insert_with(|| token.into());
                state.holds = now + self.spread(token);
            }
            Answer::No(why) => {
                let doubted = *state.doubted.get_or_insert(now);
                if accepted && now.saturating_sub(doubted) < DOUBT {
                    // Not quite: the second look must come late enough to count.
                    state.holds = doubted + DOUBT;
                } else {
                    let falls = matches!(state.verdict, Verdict::Yes);
                    state.verdict = Verdict::No(why);
                    state.holds = now + NO_HOLDS;
                    state.stays_accepted = None;
                    state.token = None;
                    if falls {
                        shared.identities.changed();
                    }
                }
            }
            Answer::Failed(why) => {
                if let Some(kept_back) = shared.identities.complaints.may_write(now) {
                    let cluster = &reviewed.reviewer.upstream.cluster.name;
                    tracing::warn!(%cluster, %why, accepted, kept_back, "cannot review a token");
                }
                if !accepted {
                    state.verdict = Verdict::Unknown(
                        format!("the token cannot be reviewed now: {why}; try again").into(),
                    );
                }
                state.holds = now + FAILURE_HOLDS;
            }
        }
        state.verdict.clone()
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here can be left half done by a panic elsewhere.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
