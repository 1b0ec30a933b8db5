//! What is known of one token: the last verdict, how long it holds, and when something that rests on it falls.
//!
//! A yes holds for the time set (60 s), a no for [`NO_HOLDS`]. An API server that cannot be asked accepts nobody new, but whom it
//! accepted before stays accepted for [`STAYS_ACCEPTED`]: a restart of an API server cuts nothing. For the same reason a token that was
//! accepted is given up only at the second no, [`DOUBT`] after the first: an API server that has just started may not know its own
//! service accounts and roles yet. However long nobody could be asked, what rests on the token is asked about until a no cuts it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portico_api::api_server_ca::ApiServerCa;
use portico_api::names::{Authority, ClusterName};

use super::exchange::Answer;
use super::{API_SERVER, Hash, api_server_of, hash};
use crate::live::Live;
use crate::upstream::Upstream;

/// Most tokens remembered that nothing rests on. Those in use are always kept.
const MOST_REMEMBERED: usize = 10_000;

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
    /// Under which it is exposed; the host is the name in its certificate.
    authority: Authority,
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
        let reviewer = Self { upstream, authority };
        reviewer.ca().is_some().then_some(reviewer)
    }

    /// The name in its certificate.
    pub(super) fn host(&self) -> &str {
        let authority = self.authority.as_str();
        authority.rsplit_once(':').map_or(authority, |(host, _)| host)
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
    authority: Authority,
    /// The Service behind the authority, as it was seen last.
    upstream: Mutex<Arc<Upstream>>,
    /// Held during an exchange: whoever comes meanwhile waits and then sees what came of it.
    pub(super) turn: tokio::sync::Mutex<()>,
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
    /// The token itself, to ask again: kept from the first yes to the no that counts, for so long something may rest on it.
    token: Option<Box<str>>,
}

impl Reviewed {
    /// Nothing is known yet.
    fn new(key: Hash, reviewer: Reviewer) -> Self {
        let Reviewer { upstream, authority } = reviewer;
        let verdict = Verdict::Unknown("not asked yet".into());
        let state =
            State { verdict, holds: Duration::ZERO, stays_accepted: None, doubted: None, token: None };
        Self {
            key,
            authority,
            upstream: Mutex::new(upstream),
            turn: tokio::sync::Mutex::default(),
            state: Mutex::new(state),
        }
    }

    /// Why nothing may rest on it; `None` if something may.
    pub(super) fn why_not(&self) -> Option<String> {
        match &lock(&self.state).verdict {
            Verdict::No(why) => Some(String::from(why.clone())),
            Verdict::Yes | Verdict::Unknown(_) => None,
        }
    }

    /// What is known and holds at `now`.
    pub(super) fn known(&self, now: Duration) -> Option<Verdict> {
        let state = lock(&self.state);
        (now < state.holds).then(|| state.verdict.clone())
    }

    /// The token, if it was accepted and not given up since.
    pub(super) fn accepted_token(&self) -> Option<Box<str>> {
        lock(&self.state).token.clone()
    }

    /// The cluster it is for.
    pub(super) fn cluster(&self) -> ClusterName {
        lock(&self.upstream).cluster.name.clone()
    }

    /// Who is asked about it now. A Service that was made anew has other endpoints, which are found under the same authority; one that is
    /// gone is asked where it was.
    pub(super) fn reviewer(&self, live: &Live) -> Reviewer {
        if let Some(current) = live.routes().authorities.get(&self.authority) {
            self.moves_to(current);
        }
        Reviewer { upstream: Arc::clone(&lock(&self.upstream)), authority: self.authority.clone() }
    }

    /// The Service behind the authority is another object now: what the former said is asked again. One of another cluster has no say.
    fn moves_to(&self, current: &Arc<Upstream>) {
        let mut upstream = lock(&self.upstream);
        if !Arc::ptr_eq(&upstream, current) && upstream.cluster.name == current.cluster.name {
            *upstream = Arc::clone(current);
            lock(&self.state).holds = Duration::ZERO;
        }
    }

    /// Takes over what an API server said: the verdict, and whether what rests on the token falls. A yes holds for `yes_holds`.
    pub(super) fn learn(
        &self,
        answer: Answer,
        token: &str,
        now: Duration,
        yes_holds: Duration,
    ) -> (Verdict, bool) {
        let mut state = lock(&self.state);
        let falls = state.learn(answer, token, now, yes_holds);
        (state.verdict.clone(), falls)
    }

    /// Whether it stays accepted at `now` without an answer.
    pub(super) fn stays_accepted(&self, now: Duration) -> bool {
        lock(&self.state).stays_accepted.is_some_and(|until| now < until)
    }
}

impl State {
    fn learn(&mut self, answer: Answer, token: &str, now: Duration, yes_holds: Duration) -> bool {
        match answer {
            Answer::Yes => {
                self.verdict = Verdict::Yes;
                self.stays_accepted = Some(now + STAYS_ACCEPTED.max(2 * yes_holds));
                self.doubted = None;
                self.token.get_or_insert_with(|| token.into());
                self.holds = now + yes_holds;
            }
            Answer::No(why) => {
                let doubted = *self.doubted.get_or_insert(now);
                if self.token.is_some() && now.saturating_sub(doubted) < DOUBT {
                    // Not quite: the second look must come late enough to count.
                    self.holds = doubted + DOUBT;
                } else {
                    self.verdict = Verdict::No(why);
                    self.holds = now + NO_HOLDS;
                    self.stays_accepted = None;
                    // By the token and not by the last verdict: while nobody could be asked, streams stayed.
                    return self.token.take().is_some();
                }
            }
            Answer::Failed(why) => {
                if self.stays_accepted.is_none_or(|until| now >= until) {
                    self.verdict = Verdict::Unknown(
                        format!("the token cannot be reviewed now: {why}; try again").into(),
                    );
                }
                self.holds = now + FAILURE_HOLDS;
            }
        }
        false
    }
}

/// Every token that is remembered.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    by_hash: HashMap<Hash, Arc<Reviewed>>,
    cleaned: Duration,
}

impl Remembered {
    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// What is known of `token` to `reviewer`; perhaps nothing yet.
    pub(super) fn entry(&mut self, token: &str, reviewer: Reviewer, now: Duration) -> Arc<Reviewed> {
        let cluster = &reviewer.upstream.cluster.name;
        let key = hash(&[token, cluster.as_str(), reviewer.authority.as_str()]);
        if let Some(known) = self.by_hash.get(&key) {
            known.moves_to(&reviewer.upstream);
            return Arc::clone(known);
        }
        if self.by_hash.len() >= MOST_REMEMBERED && now.saturating_sub(self.cleaned) >= BETWEEN_CLEANINGS {
            self.cleaned = now;
            self.by_hash.retain(|_, known| Arc::strong_count(known) > 1 || known.known(now).is_some());
        }
        let fresh = Arc::new(Reviewed::new(key, reviewer));
        // One that finds no room is asked about all the same, and forgotten unless it is accepted.
        if self.by_hash.len() < MOST_REMEMBERED {
            self.by_hash.insert(key, Arc::clone(&fresh));
        }
        fresh
    }

    /// Keeps what was accepted, however many there are, for what is in use is asked about again. The answer is what to rest on: of two
    /// that found no room, the first to be accepted stands for both.
    pub(super) fn keep(&mut self, accepted: &Arc<Reviewed>) -> Arc<Reviewed> {
        Arc::clone(self.by_hash.entry(accepted.key).or_insert_with(|| Arc::clone(accepted)))
    }

    /// Tokens in use whose time has come.
    pub(super) fn due(&self, now: Duration) -> Vec<Arc<Reviewed>> {
        let in_use = self.by_hash.values().filter(|known| Arc::strong_count(known) > 1);
        in_use.filter(|known| known.known(now).is_none()).cloned().collect()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here can be left half done by a panic elsewhere.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use portico_api::meta::ObjectKey;
    use portico_api::policy::ClusterPolicy;
    use portico_routes::route::{Backend, BackendId};

    use super::*;
    use crate::cluster::Cluster;

    const SECOND: Duration = Duration::from_secs(1);
    const YES_HOLDS: Duration = Duration::from_secs(60);

    fn reviewer() -> Reviewer {
        let cluster = ClusterName::new("a");
        let backend = Backend {
            id: BackendId {
                service: ObjectKey::new("cluster-a", API_SERVER),
                port_name: "secure".into(),
                port: 443,
            }
            .into(),
            endpoints: Vec::new().into(),
            policy: Arc::new(ClusterPolicy::open(cluster.clone())),
            send_proxy: false,
            api_server_ca: None,
        };
        let upstream = Arc::new(Upstream::new(Arc::new(backend), Arc::new(Cluster::new(cluster))));
        Reviewer { upstream, authority: api_server_of("cluster-a").unwrap() }
    }

    fn reviewed() -> Reviewed {
        Reviewed::new(Hash::default(), reviewer())
    }

    fn learn(reviewed: &Reviewed, answer: Answer, now: Duration) -> bool {
        reviewed.learn(answer, "token", now, YES_HOLDS).1
    }

    #[test]
    fn a_no_cuts_what_rests_on_a_token_however_long_nobody_could_be_asked() {
        let reviewed = reviewed();
        let mut now = SECOND;
        learn(&reviewed, Answer::Yes, now);
        while now < 2 * STAYS_ACCEPTED {
            now += FAILURE_HOLDS;
            assert!(!learn(&reviewed, Answer::Failed("away".into()), now));
            assert_eq!(reviewed.why_not(), None, "nobody said no");
        }
        assert!(matches!(reviewed.known(now), Some(Verdict::Unknown(_))), "nothing new by then");
        assert!(reviewed.accepted_token().is_some(), "and it goes on being asked about");
        assert!(!learn(&reviewed, Answer::No("gone".into()), now), "it may have just started");
        assert!(learn(&reviewed, Answer::No("gone".into()), now + DOUBT));
        assert_eq!(reviewed.why_not().as_deref(), Some("gone"));
    }

    #[test]
    fn a_token_that_was_never_accepted_takes_nothing_with_it() {
        let reviewed = reviewed();
        assert!(!learn(&reviewed, Answer::No("unknown".into()), SECOND));
        assert!(matches!(reviewed.known(SECOND), Some(Verdict::No(_))), "and its first no counts");
    }

    #[test]
    fn of_two_that_found_no_room_one_is_kept_and_both_rest_on_it() {
        let mut remembered = Remembered::default();
        let mut entry = |token: &str| remembered.entry(token, reviewer(), SECOND);
        let _junk: Vec<_> = (0..MOST_REMEMBERED).map(|number| entry(&number.to_string())).collect();
        let (first, second) = (entry("token"), entry("token"));
        assert!(!Arc::ptr_eq(&first, &second), "there was no room to remember the first");
        let stands = remembered.keep(&first);
        assert!(Arc::ptr_eq(&remembered.keep(&second), &stands));
        assert!(remembered.due(SECOND).iter().any(|due| Arc::ptr_eq(due, &stands)), "it is asked again");
    }

    #[test]
    fn a_service_that_was_made_anew_is_asked_about_the_token_that_the_old_one_accepted() {
        let mut remembered = Remembered::default();
        let before = remembered.entry("token", reviewer(), SECOND);
        learn(&before, Answer::Yes, SECOND);
        let anew = reviewer();
        let upstream = Arc::clone(&anew.upstream);
        let after = remembered.entry("token", anew, SECOND);
        assert!(Arc::ptr_eq(&before, &after), "streams on the old one are looked after");
        assert!(before.known(SECOND).is_none(), "what the old one said is asked again");
        assert!(Arc::ptr_eq(&before.reviewer(&Live::default()).upstream, &upstream));
    }
}
