//! Which gateway address the next tunnel goes to: a pure choice among those known.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

/// Answers in a row that lack an address before it counts as gone: a name server may give a few of many addresses, and others the next
/// time.
const GONE: u8 = 3;

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
    /// Answers in a row without it. Only where this is 0 new tunnels go there.
    missed: u8,
}

impl Known {
    fn rests(&self, now: Instant) -> bool {
        self.failed.is_some_and(|failed| now.duration_since(failed) < RESTS)
    }
}

impl Candidates {
    /// Takes note of what the name of a gateway resolves to now. What is known of addresses that stay, stays.
    pub(crate) fn update(&mut self, gateway: usize, addresses: &[SocketAddr]) {
        for known in self.known.iter_mut().filter(|known| known.place.gateway == gateway) {
            known.missed = if addresses.contains(&known.place.address) { 0 } else { known.missed + 1 };
        }
        self.known.retain(|known| known.missed < GONE);
        for &address in addresses {
            let place = Place { gateway, address };
            if !self.known.iter().any(|known| known.place == place) {
                self.known.push(Known { place, failed: None, missed: 0 });
            }
        }
    }

    /// Whether there is no address to go to.
    pub(crate) fn is_empty(&self) -> bool {
        self.current().next().is_none()
    }

    /// Whether a name leads to that address, as far as its last few answers tell.
    pub(crate) fn is_known(&self, address: SocketAddr) -> bool {
        self.known.iter().any(|known| known.place.address == address)
    }

    /// Whether there is an address that no tunnel goes to, be it one that just failed.
    pub(crate) fn has_unused(&self, used: &[Place]) -> bool {
        self.current().any(|known| uses(&known.place, used) == 0)
    }

    fn current(&self) -> impl Iterator<Item = &Known> {
        self.known.iter().filter(|known| known.missed == 0)
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
        candidates.update(0, &[address(1), address(2), address(3)]);
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
        let mut candidates = three();
        candidates.update(0, &[address(2)]);
        assert_eq!(candidates.choose(&[], Instant::now(), 0.5), Some(place(2)));
        candidates.update(0, &[]);
        assert_eq!(candidates.choose(&[], Instant::now(), 0.5), None);
    }

    #[test]
    fn an_address_is_gone_when_a_few_answers_in_a_row_lack_it() {
        let mut candidates = three();
        for _ in 1..GONE {
            candidates.update(0, &[address(2)]);
            assert!(candidates.is_known(address(1)));
        }
        candidates.update(0, &[address(1), address(2)]);
        for _ in 1..GONE {
            candidates.update(0, &[address(2)]);
        }
        assert!(candidates.is_known(address(1)), "counted anew");
        candidates.update(0, &[address(2)]);
        assert!(!candidates.is_known(address(1)));
        assert!(candidates.is_known(address(2)));
    }

    #[test]
    fn one_address_by_two_names_counts_as_one() {
        let mut candidates = Candidates::default();
        candidates.update(0, &[address(1)]);
        candidates.update(1, &[address(1), address(2)]);
        let second = candidates.choose(&[place(1)], Instant::now(), 0.0).unwrap();
        assert_eq!(second.address, address(2));
    }
}
