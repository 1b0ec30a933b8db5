//! The addresses of the gateways' names, and when they are resolved again. Pure; the supervisor asks.
//!
//! A name is resolved again when something at one of its addresses fails, and when its answer has expired. An
//! attempt to connect waits for an answer only for a moment if an address is known. A failed question changes
//! no address.

use std::time::Duration;

use portico_dial::{ResolveError, Resolved};
use tokio::time::Instant;

use super::endpoints::Endpoints;

/// The shortest time between two questions for one name.
const RESOLVE_AGAIN: Duration = Duration::from_secs(1);

/// The time between two questions for one name while all is well. Twenty thousand nodes must not load the
/// name servers, and a node at rest must sleep. Up to half as much is added, so that they do not ask
/// together.
const REFRESH: Duration = Duration::from_secs(30);

/// How long an attempt waits for an answer if an address is known already. A name server that is up is
/// quicker.
const HEAD_START: Duration = Duration::from_millis(200);

/// The addresses that are known, and the state of each gateway's name, in the order of the settings.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) endpoints: Endpoints,
    names: Vec<Name>,
}

#[derive(Debug, Clone, Default)]
struct Name {
    /// When it was resolved last.
    asked: Option<Instant>,
    /// A question is under way.
    asking: bool,
    /// When its addresses expire, if ever.
    expires: Option<Instant>,
    /// When it is resolved again while all is well, if ever.
    refresh: Option<Instant>,
    /// One of its addresses failed since it was resolved: it may lead elsewhere by now.
    stale: bool,
    /// Why the last question gave no address.
    problem: Option<String>,
}

impl Name {
    fn is_due(&self, now: Instant) -> bool {
        let Some(asked) = self.asked else { return true };
        let expired = self.expires.is_some_and(|at| at <= now);
        !self.asking && (expired || self.stale) && now.duration_since(asked) >= RESOLVE_AGAIN
    }

    fn is_refresh_due(&self, now: Instant) -> bool {
        !self.asking && self.refresh.is_some_and(|at| at <= now)
    }
}

impl Names {
    pub(super) fn new(gateways: usize) -> Self {
        Self { endpoints: Endpoints::default(), names: vec![Name::default(); gateways] }
    }

    /// Returns the gateways whose names must be resolved before connecting. They count as being resolved from
    /// now on.
    pub(super) fn due(&mut self, now: Instant) -> Vec<usize> {
        self.take(now, Name::is_due)
    }

    /// Returns the gateways whose names are resolved again although all is well. They count as being resolved
    /// from now on.
    pub(super) fn refresh(&mut self, now: Instant) -> Vec<usize> {
        self.take(now, Name::is_refresh_due)
    }

    fn take(&mut self, now: Instant, is_due: impl Fn(&Name, Instant) -> bool) -> Vec<usize> {
        let due = self.names.iter_mut().enumerate().filter(|(_, name)| is_due(name, now));
        due.map(|(gateway, name)| {
            (name.asked, name.asking, name.stale) = (Some(now), true, false);
            gateway
        })
        .collect()
    }

    /// Applies the answer to a question. `random` is between 0 and 1.
    pub(super) fn resolved(
        &mut self,
        gateway: usize,
        result: Result<Resolved, ResolveError>,
        now: Instant,
        random: f64,
    ) {
        let Some(name) = self.names.get_mut(gateway) else { return };
        name.asking = false;
        match result {
            Ok(resolved) if resolved.addresses.is_empty() => {
                (name.expires, name.problem) =
                    (Some(now), Some("the name of a gateway has no address".into()));
            }
            Ok(resolved) => {
                self.endpoints.update(gateway, &resolved.addresses, now);
                (name.expires, name.problem) = (resolved.until, None);
            }
            Err(error) => (name.expires, name.problem) = (Some(now), Some(error.to_string())),
        }
        let soonest = now + REFRESH.mul_f64(1.0 + random / 2.0);
        name.refresh = name.expires.map(|at| at.max(soonest));
    }

    /// An address of the gateway failed.
    pub(super) fn mark_stale(&mut self, gateway: usize) {
        if let Some(name) = self.names.get_mut(gateway) {
            name.stale = true;
        }
    }

    /// Returns when the next name is to be resolved although all is well.
    pub(super) fn next_refresh(&self) -> Option<Instant> {
        self.names.iter().filter(|name| !name.asking).filter_map(|name| name.refresh).min()
    }

    /// Returns until when an attempt to connect should wait for the questions under way. `None`: it should
    /// not.
    pub(super) fn worth_waiting(&self, now: Instant) -> Option<Instant> {
        let latest = self.names.iter().filter(|name| name.asking).filter_map(|name| name.asked).max()?;
        if self.endpoints.is_empty() {
            // Each question ends within a bound of its own, which is an event.
            return Some(now + REFRESH);
        }
        Some(latest + HEAD_START).filter(|until| *until > now)
    }

    /// Returns why no address is known, if none is.
    pub(super) fn problem(&self) -> Option<&str> {
        self.names.iter().find_map(|name| name.problem.as_deref())
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
    fn a_name_is_resolved_once_at_a_time_and_no_more_than_once_a_second() {
        let (mut names, now) = (Names::new(1), Instant::now());
        assert_eq!(names.due(now), [0]);
        names.mark_stale(0);
        assert!(names.due(now + 2 * RESOLVE_AGAIN).is_empty(), "a question is under way");
        names.resolved(0, answer(&[([10, 0, 0, 1], 8088).into()], None), now, 0.5);
        assert!(names.due(now + RESOLVE_AGAIN / 2).is_empty());
        assert_eq!(names.due(now + RESOLVE_AGAIN), [0]);
    }

    #[test]
    fn an_address_in_place_of_a_name_is_never_resolved_again() {
        let (mut names, now) = (Names::new(1), Instant::now());
        names.due(now);
        names.resolved(0, answer(&[([10, 0, 0, 1], 8088).into()], None), now, 0.5);
        assert_eq!(names.next_refresh(), None);
        assert!(names.due(now + 100 * REFRESH).is_empty());
    }

    #[test]
    fn while_all_is_well_answers_are_refreshed_but_not_too_often() {
        let (mut names, now) = (Names::new(1), Instant::now());
        for (ttl, soonest, latest) in [(5, REFRESH, REFRESH * 3 / 2), (300, REFRESH * 10, REFRESH * 10)] {
            names.due(now);
            let until = now + Duration::from_secs(ttl);
            names.resolved(0, answer(&[([10, 0, 0, 1], 8088).into()], Some(until)), now, 0.5);
            let at = names.next_refresh().unwrap();
            assert!((now + soonest..=now + latest).contains(&at), "{ttl}: {:?}", at - now);
            assert!(names.refresh(at - Duration::from_millis(1)).is_empty());
            assert_eq!(names.refresh(at), [0]);
        }
    }

    #[test]
    fn an_answer_without_addresses_removes_none() {
        let (mut names, now) = (Names::new(1), Instant::now());
        let address: SocketAddr = ([10, 0, 0, 1], 8088).into();
        names.due(now);
        names.resolved(0, answer(&[address], Some(now)), now, 0.5);
        for _ in 0..10 {
            names.resolved(0, answer(&[], Some(now)), now, 0.5);
        }
        assert!(!names.endpoints.is_empty() && names.endpoints.is_known(address));
        assert_eq!(names.problem(), Some("the name of a gateway has no address"));
    }
}
