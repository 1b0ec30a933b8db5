//! Which gateway address the next tunnel goes to: a pure choice among those known.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

/// How long answers lack an address before it counts as gone: a name server may give a few of many addresses, and others the next time. Of
/// sixteen of which each answer gives any eight, one is missing from all the fifteen or so answers of that time once in 30,000 times.
const GONE: Duration = Duration::from_secs(600);

/// The most addresses that are remembered though the last answer lacks them; beyond, those missing longest are gone.
const MOST_MISSING: usize = 256;

/// How long an address that failed is left to the others, as long as there are others.
const RESTS: Duration = Duration::from_secs(30);

/// A gateway, by its place in the settings, and one of its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Index among [`ClientSettings::gateways`](super::ClientSettings::gateways).
    pub gateway: usize,
    /// The address connected to: the gateway's, or that of the proxy.
    pub address: SocketAddr,
}

/// The addresses names resolve to now, and those they resolved to a moment ago.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    known: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    place: Place,
    /// When it failed last, if it has not succeeded since.
    failed: Option<Instant>,
    /// Since when answers lack it. New tunnels go only where they do not.
    missing: Option<Instant>,
}

impl Known {
    fn rests(&self, now: Instant) -> bool {
        self.failed.is_some_and(|failed| now.duration_since(failed) < RESTS)
    }
}

impl Candidates {
    /// Takes note of what the name of a gateway resolves to now. What is known of addresses that stay, stays.
    pub(crate) fn update(&mut self, gateway: usize, addresses: &[SocketAddr], now: Instant) {
        for known in self.known.iter_mut().filter(|known| known.place.gateway == gateway) {
            let is_there = addresses.contains(&known.place.address);
            known.missing = if is_there { None } else { known.missing.or(Some(now)) };
        }
        self.forget(now);
        for &address in addresses {
            let place = Place { gateway, address };
            if !self.known.iter().any(|known| known.place == place) {
                self.known.push(Known { place, failed: None, missing: None });
            }
        }
    }

    /// Forgets what is missing for too long, and what is too much.
    fn forget(&mut self, now: Instant) {
        self.known.sort_by_key(|known| Reverse(known.missing));
        let mut missing = 0;
        self.known.retain(|known| {
            known.missing.is_none_or(|since| {
                missing += 1;
                missing <= MOST_MISSING && now.duration_since(since) < GONE
            })
        });
    }

    /// Whether there is no address to go to.
    pub(crate) fn is_empty(&self) -> bool {
        self.current().next().is_none()
    }

    /// Whether a name leads to that address, as far as its answers of the last minutes tell.
    pub(crate) fn is_known(&self, address: SocketAddr) -> bool {
        self.known.iter().any(|known| known.place.address == address)
    }

    /// Whether there is an address that no tunnel goes to, be it one that just failed.
    pub(crate) fn has_unused(&self, used: &[Place]) -> bool {
        self.current().any(|known| uses(&known.place, used) == 0)
    }

    fn current(&self) -> impl Iterator<Item = &Known> {
        self.known.iter().filter(|known| known.missing.is_none())
    }

    pub(crate) fn failed(&mut self, place: Place, now: Instant) {
        self.note(place, Some(now));
    }

    pub(crate) fn succeeded(&mut self, place: Place) {
        self.note(place, None);
    }

    fn note(&mut self, place: Place, failed: Option<Instant>) {
        if let Some(known) = self.known.iter_mut().find(|known| known.place == place) {
            known.failed = failed;
        }
    }

    /// The best address for one more tunnel: one that did not just fail, then one that fewest tunnels (`used`) go to, then the one that
    /// failed longest ago; among equals any, as `random` (0 to 1) says. `None` if no name resolves.
    pub(crate) fn choose(&self, used: &[Place], now: Instant, random: f64) -> Option<Place> {
        let rank = |known: &Known| {
            let rests = known.rests(now);
            (rests, uses(&known.place, used), known.failed.filter(|_| rests))
        };
        let best = self.current().map(rank).min()?;
        let equals: Vec<Place> =
            self.current().filter(|known| rank(known) == best).map(|known| known.place).collect();
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let index = (random * equals.len() as f64) as usize;
        equals.get(index.min(equals.len() - 1)).copied()
    }

    /// An address that no tunnel goes to and that has not just failed, if there is one.
    pub(crate) fn unused(&self, used: &[Place], now: Instant, random: f64) -> Option<Place> {
        let place = self.choose(used, now, random)?;
        let rests = self.known.iter().any(|known| known.place == place && known.rests(now));
        (uses(&place, used) == 0 && !rests).then_some(place)
    }
}

/// Tunnels to that address. The same address by two names is one gateway.
fn uses(place: &Place, used: &[Place]) -> usize {
    used.iter().filter(|other| other.address == place.address).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 8088))
    }

    fn place(last: u8) -> Place {
        Place { gateway: 0, address: address(last) }
    }

    fn three() -> Candidates {
        let mut candidates = Candidates::default();
        candidates.update(0, &[address(1), address(2), address(3)], Instant::now());
        candidates
    }

    #[test]
    fn two_tunnels_go_to_two_addresses() {
        for random in [0.0, 0.3, 0.6, 0.999, 1.0] {
            let first = three().choose(&[], Instant::now(), random).unwrap();
            let second = three().choose(&[first], Instant::now(), random).unwrap();
            assert_ne!(first, second);
        }
    }

    #[test]
    fn every_address_is_some_nodes_first() {
        let chosen: std::collections::HashSet<_> =
            (0..10).map(|tenth| three().choose(&[], Instant::now(), f64::from(tenth) / 10.0)).collect();
        assert_eq!(chosen.len(), 3);
    }

    #[test]
    fn an_address_that_failed_comes_last_and_rests_for_a_while() {
        let now = Instant::now();
        let mut candidates = three();
        candidates.failed(place(1), now);
        candidates.failed(place(2), now + Duration::from_secs(1));
        let now = now + Duration::from_secs(2);
        assert_eq!(candidates.choose(&[], now, 0.0), Some(place(3)));
        // A second tunnel to the one that works is better than one to those that do not.
        assert_eq!(candidates.choose(&[place(3)], now, 0.0), Some(place(3)));
        assert_eq!(candidates.unused(&[place(3)], now, 0.0), None);
        candidates.failed(place(3), now);
        assert_eq!(candidates.choose(&[], now, 0.0), Some(place(1)), "longest ago");
        let later = now + RESTS;
        assert!(candidates.unused(&[place(3)], later, 0.0).is_some());
    }

    #[test]
    fn an_address_that_is_no_longer_resolved_is_not_tried() {
        let (mut candidates, now) = (three(), Instant::now());
        candidates.update(0, &[address(2)], now);
        assert_eq!(candidates.choose(&[], now, 0.5), Some(place(2)));
        candidates.update(0, &[], now);
        assert_eq!(candidates.choose(&[], now, 0.5), None);
    }

    #[test]
    fn an_address_is_gone_when_the_answers_of_ten_minutes_lack_it() {
        let (mut candidates, now) = (three(), Instant::now());
        let minute = |minutes: u64| now + Duration::from_secs(60 * minutes);
        for minutes in 0..10 {
            candidates.update(0, &[address(2)], minute(minutes));
            assert!(candidates.is_known(address(1)));
        }
        candidates.update(0, &[address(1), address(2)], minute(10));
        assert!(!candidates.is_known(address(3)));
        for minutes in 11..21 {
            candidates.update(0, &[address(2)], minute(minutes));
            assert!(candidates.is_known(address(1)), "counted anew");
        }
        candidates.update(0, &[address(2)], minute(21));
        assert!(!candidates.is_known(address(1)));
        assert!(candidates.is_known(address(2)));
    }

    #[test]
    fn answers_that_give_half_of_the_addresses_in_turn_lose_none() {
        let (mut candidates, now) = (Candidates::default(), Instant::now());
        let all: Vec<SocketAddr> = (0..16).map(address).collect();
        for answer in 0..100 {
            let half = if answer % 2 == 0 { &all[..8] } else { &all[8..] };
            candidates.update(0, half, now + Duration::from_secs(40 * answer));
            assert!(answer == 0 || all.iter().all(|address| candidates.is_known(*address)));
        }
    }

    #[test]
    fn addresses_without_end_are_not_remembered_without_end() {
        let (mut candidates, now) = (Candidates::default(), Instant::now());
        let port = |port| SocketAddr::from(([10, 0, 0, 1], port));
        for number in 0..1000 {
            candidates.update(0, &[port(number)], now + Duration::from_millis(number.into()));
        }
        assert_eq!(candidates.known.len(), MOST_MISSING + 1);
        assert!(candidates.is_known(port(999)) && candidates.is_known(port(998)));
        assert!(!candidates.is_known(port(0)), "those missing longest");
    }

    #[test]
    fn one_address_by_two_names_counts_as_one() {
        let mut candidates = Candidates::default();
        let now = Instant::now();
        candidates.update(0, &[address(1)], now);
        candidates.update(1, &[address(1), address(2)], now);
        let second = candidates.choose(&[place(1)], Instant::now(), 0.0).unwrap();
        assert_eq!(second.address, address(2));
    }
}
