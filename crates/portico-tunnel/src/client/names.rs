//! What the names of the gateways resolve to, and when they are asked for again: when something at one of their addresses fails, and when
//! an answer has expired, also while all is well.
//!
//! Each question is a task of its own ([`Pool::ask`]), and nobody holds a lock while a name server thinks: who wants to dial waits
//! for an answer for a moment only, if there is an address to dial already. A question that fails changes nothing of what is known.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::backoff::random;
use super::candidates::Candidates;
use super::pool::Pool;
use portico_dial::{ResolveError, Resolved};

/// A name whose gateways fail is resolved again, but not more often than this.
const RESOLVE_AGAIN: Duration = Duration::from_secs(1);

/// While all is well a name is asked for when its answer has expired, but not more often than this: twenty thousand nodes ask too, and a
/// node at rest is to stay asleep. Up to half as much is added, lest they ask together.
const REFRESH: Duration = Duration::from_secs(30);

/// How long an answer is waited for before addresses known from earlier are dialled: a name server that is there is quicker.
const HEAD_START: Duration = Duration::from_millis(200);

/// The addresses that are known, and what is known of each gateway's name, in the order of the settings.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) candidates: Candidates,
    names: Vec<Name>,
}

/// One gateway's name.
#[derive(Debug, Clone, Default)]
struct Name {
    asked: Option<Instant>,
    /// A question is under way.
    asking: bool,
    /// When its addresses expire, if ever.
    until: Option<Instant>,
    /// When they are asked for again while all is well, if ever.
    refresh: Option<Instant>,
    /// An address of it failed: it may lead elsewhere by now.
    doubted: bool,
    /// Why the last question had no answer.
    problem: Option<String>,
}

impl Name {
    fn is_due(&self, now: Instant) -> bool {
        let Some(asked) = self.asked else { return true };
        let old = self.until.is_some_and(|until| until <= now);
        !self.asking && (old || self.doubted) && now.duration_since(asked) >= RESOLVE_AGAIN
    }

    fn is_expired(&self, now: Instant) -> bool {
        !self.asking && self.refresh.is_some_and(|at| at <= now)
    }
}

impl Names {
    pub(super) fn new(gateways: usize) -> Self {
        Self { candidates: Candidates::default(), names: vec![Name::default(); gateways] }
    }

    /// The names to ask for because somebody wants to dial. They count as being asked for from now on.
    fn due(&mut self, now: Instant) -> Vec<usize> {
        self.take(now, Name::is_due)
    }

    /// The names to ask for though all is well. They count as being asked for from now on.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<usize> {
        self.take(now, Name::is_expired)
    }

    fn take(&mut self, now: Instant, fit: impl Fn(&Name, Instant) -> bool) -> Vec<usize> {
        let fit = self.names.iter_mut().enumerate().filter(|(_, name)| fit(name, now));
        fit.map(|(gateway, name)| {
            (name.asked, name.asking, name.doubted) = (Some(now), true, false);
            gateway
        })
        .collect()
    }

    fn answered(&mut self, gateway: usize, answer: Result<Resolved, ResolveError>, now: Instant) {
        let Some(name) = self.names.get_mut(gateway) else { return };
        name.asking = false;
        match answer {
            // An answer without addresses, be it in good order, is none.
            Ok(resolved) if resolved.addresses.is_empty() => {
                (name.until, name.problem) = (Some(now), Some("the name of a gateway has no address".into()));
            }
            Ok(resolved) => {
                self.candidates.update(gateway, &resolved.addresses, now);
                (name.until, name.problem) = (resolved.until, None);
            }
            // What it led to before may still be there.
            Err(error) => (name.until, name.problem) = (Some(now), Some(error.to_string())),
        }
        let soonest = now + REFRESH.mul_f64(1.0 + random() / 2.0);
        name.refresh = name.until.map(|until| until.max(soonest));
    }

    /// An address of the gateway failed.
    pub(super) fn doubt(&mut self, gateway: usize) {
        if let Some(name) = self.names.get_mut(gateway) {
            name.doubted = true;
        }
    }

    /// When the next answer is to be refreshed.
    pub(super) fn next_refresh(&self) -> Option<Instant> {
        self.names.iter().filter(|name| !name.asking).filter_map(|name| name.refresh).min()
    }

    /// Until when it is worth waiting for the questions under way, if it is.
    fn worth_waiting(&self, now: Instant) -> Option<Instant> {
        let latest = self.names.iter().filter(|name| name.asking).filter_map(|name| name.asked).max()?;
        if self.candidates.is_empty() {
            // Each question ends in time, and wakes who waits.
            return Some(now + REFRESH);
        }
        Some(latest + HEAD_START).filter(|until| *until > now)
    }

    /// Why no address is known, if none is.
    pub(super) fn problem(&self) -> Option<&str> {
        self.names.iter().find_map(|name| name.problem.as_deref())
    }
}

impl Pool {
    /// Asks for these names, each in a task of its own, which takes note of the answer.
    pub(super) fn ask(self: &Arc<Self>, gateways: Vec<usize>) {
        for gateway in gateways {
            let pool = Arc::clone(self);
            tokio::spawn(async move {
                let Some(address) = pool.settings.gateways.get(gateway) else { return };
                let answer = pool.settings.dialer.resolve(&address.target).await;
                pool.names().answered(gateway, answer, Instant::now());
                pool.signals.changed.notify_waiters();
            });
        }
    }

    /// Sees to it that names are asked for that are due. Returns when they are answered, or it is time to go on with what is known.
    pub(super) async fn know_names(self: &Arc<Self>) {
        let due = self.names().due(Instant::now());
        self.ask(due);
        loop {
            let answered = self.signals.changed.notified();
            let Some(until) = self.names().worth_waiting(Instant::now()) else { return };
            // Late answers are for the next attempt.
            let _ = timeout_at(until, answered).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn answer(addresses: &[SocketAddr], until: Option<Instant>) -> Result<Resolved, ResolveError> {
        Ok(Resolved { addresses: addresses.into(), until })
    }

    #[test]
    fn a_name_is_asked_for_once_at_a_time_and_no_more_than_once_a_second() {
        let (mut names, now) = (Names::new(1), Instant::now());
        assert_eq!(names.due(now), [0]);
        names.doubt(0);
        assert!(names.due(now + 2 * RESOLVE_AGAIN).is_empty(), "a question is under way");
        names.answered(0, answer(&[([10, 0, 0, 1], 8088).into()], None), now);
        assert!(names.due(now + RESOLVE_AGAIN / 2).is_empty());
        assert_eq!(names.due(now + RESOLVE_AGAIN), [0]);
    }

    #[test]
    fn an_address_in_place_of_a_name_is_never_asked_for_again() {
        let (mut names, now) = (Names::new(1), Instant::now());
        names.due(now);
        names.answered(0, answer(&[([10, 0, 0, 1], 8088).into()], None), now);
        assert_eq!(names.next_refresh(), None);
        assert!(names.due(now + 100 * REFRESH).is_empty());
    }

    #[test]
    fn while_all_is_well_answers_are_refreshed_but_not_too_often() {
        let (mut names, now) = (Names::new(1), Instant::now());
        for (ttl, soonest, latest) in [(5, REFRESH, REFRESH * 3 / 2), (300, REFRESH * 10, REFRESH * 10)] {
            names.due(now);
            let until = now + Duration::from_secs(ttl);
            names.answered(0, answer(&[([10, 0, 0, 1], 8088).into()], Some(until)), now);
            let at = names.next_refresh().unwrap();
            assert!((now + soonest..=now + latest).contains(&at), "{ttl}: {:?}", at - now);
            assert!(names.expired(at - Duration::from_millis(1)).is_empty());
            assert_eq!(names.expired(at), [0]);
        }
    }

    #[test]
    fn an_answer_without_addresses_forgets_none() {
        let (mut names, now) = (Names::new(1), Instant::now());
        let address: SocketAddr = ([10, 0, 0, 1], 8088).into();
        names.due(now);
        names.answered(0, answer(&[address], Some(now)), now);
        for _ in 0..10 {
            names.answered(0, answer(&[], Some(now)), now);
        }
        assert!(!names.candidates.is_empty() && names.candidates.is_known(address));
        assert_eq!(names.problem(), Some("the name of a gateway has no address"));
    }
}
