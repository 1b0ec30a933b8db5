//! The last verdict on one token, and how long it is valid.
//!
//! A yes holds for the review interval, a no for [`REFUSED_FOR`]. A review may fail: the API server cannot be
//! asked, is too slow, or has too many requests waiting for it. Then an accepted token stays accepted for the
//! grace. A token that was never accepted is refused. After the grace new requests are refused. Streams that
//! are open stay, and the token is reviewed again until a no cuts them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::token_review::Answer;

/// How long a no holds. It is short, so that a token that becomes valid is soon accepted.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(5);

/// How long a token is not reviewed again after its API server could not be asked.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// How long a token stays accepted after its last yes while its API server cannot be asked. A node restarts
/// within this time. Tokens of service accounts are valid for longer, an hour.
const GRACE: Duration = Duration::from_secs(600);

/// The times that the review interval decides.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReviewTimes {
    /// How long a yes is valid.
    accepted: Duration,
    /// When a token in use is reviewed again: early enough that requests do not wait for it.
    review_after: Duration,
    /// How long the last yes counts while the API server cannot be asked.
    pub(super) grace: Duration,
}

impl ReviewTimes {
    /// A yes holds for `interval`. It counts for two intervals at least, so that one review that fails
    /// refuses nothing.
    pub(super) fn new(interval: Duration) -> Self {
        Self { accepted: interval, review_after: interval / 10 * 9, grace: GRACE.max(2 * interval) }
    }

    /// Reviews some tokens earlier, by up to 15 % of the interval. Tokens that came at once then do not come
    /// back at once.
    pub(super) fn spread(self, by: u8) -> Self {
        let earlier = self.accepted / 20 * 3 * u32::from(by) / 255;
        Self { review_after: self.review_after - earlier, ..self }
    }
}

/// What a token is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It opens the cluster.
    Accepted,
    /// The API server denied the token.
    Refused(Box<str>),
    /// The API server cannot be asked, and has not accepted the token, or not within the grace.
    Unavailable(Box<str>),
}

impl Verdict {
    /// The API server cannot be asked now, for this reason.
    pub(super) fn unavailable(why: &str) -> Self {
        Self::Unavailable(format!("the token cannot be reviewed now: {why}; try again").into())
    }
}

/// The state of one token at one API server.
#[derive(Debug)]
pub(super) struct TokenState {
    /// Held during a review: requests that come meanwhile wait, and share its verdict.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    verdict: Verdict,
    /// Until when requests are decided by that.
    valid_until: Instant,
    /// When a token in use is reviewed again.
    review_at: Instant,
    /// Until when the last yes counts while the API server cannot be asked. `None` if there was no yes since
    /// the last no.
    grace_until: Option<Instant>,
    /// Whether the last review failed.
    is_failing: bool,
}

impl TokenState {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let verdict = Verdict::Unavailable("not reviewed yet".into());
        let state = State { verdict, valid_until: now, review_at: now, grace_until: None, is_failing: false };
        Self { turn: Arc::default(), state: Mutex::new(state) }
    }

    /// Returns the verdict if it holds now.
    pub(super) fn known(&self) -> Option<Verdict> {
        let state = self.lock();
        (Instant::now() < state.valid_until).then(|| state.verdict.clone())
    }

    /// Whether a token in use is to be reviewed again now.
    pub(super) fn is_due(&self) -> bool {
        self.lock().review_at <= Instant::now()
    }

    /// Sorts tokens for review. Those whose reviews fail come last, or they would keep others from theirs;
    /// then the longest overdue comes first.
    pub(super) fn urgency(&self) -> (bool, Instant) {
        let state = self.lock();
        (state.is_failing, state.review_at)
    }

    /// Whether the API server has accepted the token, and not refused it since.
    pub(super) fn was_accepted(&self) -> bool {
        self.lock().grace_until.is_some()
    }

    /// Whether its last yes counts where the API server cannot be asked.
    pub(super) fn has_grace(&self) -> bool {
        self.lock().grace_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the API server could not be asked the last time.
    pub(super) fn is_failing(&self) -> bool {
        self.lock().is_failing
    }

    /// Why nothing may rest on the token; `None` unless the API server denied it.
    pub(super) fn why_refused(&self) -> Option<String> {
        match &self.lock().verdict {
            Verdict::Refused(why) => Some(why.to_string()),
            Verdict::Accepted | Verdict::Unavailable(_) => None,
        }
    }

    /// Applies the outcome of a review. Returns the verdict, and whether it revokes what was accepted before.
    pub(super) fn learn(&self, answer: Answer, times: ReviewTimes) -> (Verdict, bool) {
        let now = Instant::now();
        let mut state = self.lock();
        let revokes = matches!(answer, Answer::No(_)) && state.grace_until.is_some();
        state.is_failing = matches!(answer, Answer::Failed(_));
        let accepted_until = state.grace_until.filter(|until| now < *until);
        match (answer, accepted_until) {
            (Answer::Yes, _) => {
                state.verdict = Verdict::Accepted;
                state.grace_until = Some(now + times.grace);
                state.review_at = now + times.review_after;
                state.valid_until = now + times.accepted;
            }
            (Answer::No(why), _) => {
                state.verdict = Verdict::Refused(why);
                state.grace_until = None;
                state.review_at = now + REFUSED_FOR;
                state.valid_until = state.review_at;
            }
            (Answer::Failed(_), Some(until)) => {
                state.review_at = now + RETRY_AFTER;
                state.valid_until = until.min(state.review_at);
            }
            (Answer::Failed(why), None) => {
                // A no stands until a yes.
                if !matches!(state.verdict, Verdict::Refused(_)) {
                    state.verdict = Verdict::unavailable(&why);
                }
                state.review_at = now + RETRY_AFTER;
                state.valid_until = state.review_at;
            }
        }
        (state.verdict.clone(), revokes)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    fn learn(token: &TokenState, answer: Answer) -> Verdict {
        token.learn(answer, ReviewTimes::new(INTERVAL)).0
    }

    fn away() -> Answer {
        Answer::Failed("away".into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_yes_holds_for_the_interval_and_a_no_for_five_seconds() {
        let token = TokenState::new();
        assert!(token.known().is_none() && token.is_due(), "nothing is known of a new token");
        learn(&token, Answer::Yes);
        advance(INTERVAL / 10 * 9 - Duration::from_millis(1)).await;
        assert!(!token.is_due());
        advance(INTERVAL / 10).await;
        assert!(token.is_due() && token.known() == Some(Verdict::Accepted), "requests do not wait");
        advance(Duration::from_millis(1)).await;
        assert!(token.known().is_none());
        learn(&token, Answer::No("gone".into()));
        assert_eq!(token.known(), Some(Verdict::Refused("gone".into())));
        advance(REFUSED_FOR).await;
        assert!(token.known().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_accepted_token_stays_accepted_for_the_grace_and_is_reviewed_all_the_while() {
        let token = TokenState::new();
        learn(&token, Answer::Yes);
        let accepted = Instant::now();
        advance(INTERVAL).await;
        while accepted.elapsed() < GRACE {
            assert_eq!(learn(&token, away()), Verdict::Accepted);
            assert_eq!(token.known(), Some(Verdict::Accepted), "requests do not wait for the next review");
            advance(RETRY_AFTER).await;
            assert!(token.is_due());
        }
        assert!(token.known().is_none());
        assert!(matches!(learn(&token, away()), Verdict::Unavailable(_)), "new requests are refused by then");
        assert_eq!(token.why_refused(), None, "and open streams stay, for nobody said no");
        advance(RETRY_AFTER).await;
        assert!(token.is_due() && token.was_accepted());
        let (_, revokes) = token.learn(Answer::No("gone".into()), ReviewTimes::new(INTERVAL));
        assert!(revokes, "however long nobody could be asked");
        assert_eq!(token.why_refused().as_deref(), Some("gone"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_no_stands_until_a_yes() {
        let token = TokenState::new();
        learn(&token, Answer::Yes);
        learn(&token, Answer::No("gone".into()));
        assert_eq!(learn(&token, away()), Verdict::Refused("gone".into()));
        assert!(!token.was_accepted());
        assert_eq!(learn(&token, Answer::Yes), Verdict::Accepted);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_was_never_accepted_has_no_grace() {
        let token = TokenState::new();
        assert!(matches!(learn(&token, away()), Verdict::Unavailable(_)));
        assert!(matches!(token.known(), Some(Verdict::Unavailable(_))));
        advance(RETRY_AFTER).await;
        assert!(token.known().is_none());
        let (verdict, revokes) = token.learn(Answer::No("unknown".into()), ReviewTimes::new(INTERVAL));
        assert!(verdict == Verdict::Refused("unknown".into()) && !revokes, "nothing rests on it");
    }
}
