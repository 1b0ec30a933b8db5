//! The gateway addresses that are known, and which of them the next tunnel goes to. Pure.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

/// An address is removed when DNS has left it out for this long. A name server may give a few of many
/// addresses, and others the next time. Suppose each answer gives eight of sixteen. Then an address is
/// missing from the fifteen or so answers of that time once in 30,000 times.
const GONE: Duration = Duration::from_secs(600);

/// The most addresses that are kept though the last answer lacks them. The longest missing go first.
const MOST_MISSING: usize = 256;

/// How long an address that failed is avoided while there are others.
const AVOIDED: Duration = Duration::from_secs(30);

/// One address of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Index among [`ClientSettings::gateways`](super::ClientSettings::gateways).
    pub gateway: usize,
    /// The address connected to: the gateway's, or that of the proxy.
    pub address: SocketAddr,
}

/// The addresses that names resolve to, and those they resolved to until a few minutes ago.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    known: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    endpoint: Endpoint,
    /// When it failed last, if it has not succeeded since.
    failed: Option<Instant>,
    /// Since when answers lack it. It gets no new tunnels meanwhile.
    missing: Option<Instant>,
}

impl Known {
    fn is_avoided(&self, now: Instant) -> bool {
        self.failed.is_some_and(|failed| now.duration_since(failed) < AVOIDED)
    }
}

impl Endpoints {
    /// Whether there is an address that has not failed of late.
    pub(super) fn has_choice(&self, now: Instant) -> bool {
        self.known.iter().any(|known| known.missing.is_none() && !known.is_avoided(now))
    }

    /// Applies the answer of a name server. Addresses that stay keep their history.
    pub(super) fn update(&mut self, gateway: usize, addresses: &[SocketAddr], now: Instant) {
        for known in self.known.iter_mut().filter(|known| known.endpoint.gateway == gateway) {
            let is_there = addresses.contains(&known.endpoint.address);
            known.missing = if is_there { None } else { known.missing.or(Some(now)) };
        }
        self.remove_missing(now);
        for &address in addresses {
            let endpoint = Endpoint { gateway, address };
            if !self.known.iter().any(|known| known.endpoint == endpoint) {
                self.known.push(Known { endpoint, failed: None, missing: None });
            }
        }
    }

    fn remove_missing(&mut self, now: Instant) {
        self.known.sort_by_key(|known| Reverse(known.missing));
        let mut missing = 0;
        self.known.retain(|known| {
            known.missing.is_none_or(|since| {
                missing += 1;
                missing <= MOST_MISSING && now.duration_since(since) < GONE
            })
        });
    }

    /// Whether there is no address to connect to.
    pub(super) fn is_empty(&self) -> bool {
        self.current().next().is_none()
    }

    /// Whether a name led to that address within the last minutes.
    pub(super) fn is_known(&self, address: SocketAddr) -> bool {
        self.known.iter().any(|known| known.endpoint.address == address)
    }

    /// Whether there is an address without a tunnel, even one that failed just now.
    pub(super) fn has_unused(&self, used: &[SocketAddr]) -> bool {
        self.current().any(|known| !used.contains(&known.endpoint.address))
    }

    fn current(&self) -> impl Iterator<Item = &Known> {
        self.known.iter().filter(|known| known.missing.is_none())
    }

    pub(super) fn failed(&mut self, endpoint: Endpoint, now: Instant) {
        self.set_failed(endpoint, Some(now));
    }

    pub(super) fn succeeded(&mut self, endpoint: Endpoint) {
        self.set_failed(endpoint, None);
    }

    fn set_failed(&mut self, endpoint: Endpoint, failed: Option<Instant>) {
        if let Some(known) = self.known.iter_mut().find(|known| known.endpoint == endpoint) {
            known.failed = failed;
        }
    }

    /// Returns the best address for one more tunnel. Addresses that did not fail just now come first. Next
    /// come those with the fewest tunnels (`used`, an entry a tunnel), then the one that failed longest ago.
    /// `random` (0 to 1) chooses among equals. `None` if no name resolves.
    pub(super) fn choose(&self, used: &[SocketAddr], now: Instant, random: f64) -> Option<Endpoint> {
        let rank = |known: &Known| {
            let avoided = known.is_avoided(now);
            (avoided, uses(&known.endpoint, used), known.failed.filter(|_| avoided))
        };
        let best = self.current().map(rank).min()?;
        let equals: Vec<Endpoint> =
            self.current().filter(|known| rank(known) == best).map(|known| known.endpoint).collect();
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let index = (random * equals.len() as f64) as usize;
        equals.get(index.min(equals.len() - 1)).copied()
    }

    /// Returns an address without a tunnel that did not fail just now.
    pub(super) fn choose_unused(&self, used: &[SocketAddr], now: Instant, random: f64) -> Option<Endpoint> {
        let endpoint = self.choose(used, now, random)?;
        let avoided = self.known.iter().any(|known| known.endpoint == endpoint && known.is_avoided(now));
        (uses(&endpoint, used) == 0 && !avoided).then_some(endpoint)
    }
}

/// Tunnels to the address of an endpoint. One address by two names is one gateway.
fn uses(endpoint: &Endpoint, used: &[SocketAddr]) -> usize {
    used.iter().filter(|address| **address == endpoint.address).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 8088))
    }

    fn endpoint(last: u8) -> Endpoint {
        Endpoint { gateway: 0, address: address(last) }
    }

    fn three() -> Endpoints {
        let mut endpoints = Endpoints::default();
        endpoints.update(0, &[address(1), address(2), address(3)], Instant::now());
        endpoints
    }

    #[test]
    fn two_tunnels_go_to_two_addresses() {
        for random in [0.0, 0.3, 0.6, 0.999, 1.0] {
            let first = three().choose(&[], Instant::now(), random).unwrap();
            let second = three().choose(&[first.address], Instant::now(), random).unwrap();
            assert_ne!(first, second);
        }
    }

    #[test]
    fn every_address_is_the_first_of_some_node() {
        let chosen: std::collections::HashSet<_> =
            (0..10).map(|tenth| three().choose(&[], Instant::now(), f64::from(tenth) / 10.0)).collect();
        assert_eq!(chosen.len(), 3);
    }

    #[test]
    fn an_address_that_failed_comes_last_for_a_while() {
        let now = Instant::now();
        let mut endpoints = three();
        endpoints.failed(endpoint(1), now);
        endpoints.failed(endpoint(2), now + Duration::from_secs(1));
        let now = now + Duration::from_secs(2);
        assert_eq!(endpoints.choose(&[], now, 0.0), Some(endpoint(3)));
        // A second tunnel to the one that works is better than one to those that do not.
        assert_eq!(endpoints.choose(&[address(3)], now, 0.0), Some(endpoint(3)));
        assert_eq!(endpoints.choose_unused(&[address(3)], now, 0.0), None);
        endpoints.failed(endpoint(3), now);
        assert_eq!(endpoints.choose(&[], now, 0.0), Some(endpoint(1)), "longest ago");
        let later = now + AVOIDED;
        assert!(endpoints.choose_unused(&[address(3)], later, 0.0).is_some());
    }

    #[test]
    fn an_address_that_is_no_longer_resolved_is_not_tried() {
        let (mut endpoints, now) = (three(), Instant::now());
        endpoints.update(0, &[address(2)], now);
        assert_eq!(endpoints.choose(&[], now, 0.5), Some(endpoint(2)));
        endpoints.update(0, &[], now);
        assert_eq!(endpoints.choose(&[], now, 0.5), None);
    }

    #[test]
    fn an_address_is_gone_when_the_answers_of_ten_minutes_lack_it() {
        let (mut endpoints, now) = (three(), Instant::now());
        let minute = |minutes: u64| now + Duration::from_secs(60 * minutes);
        for minutes in 0..10 {
            endpoints.update(0, &[address(2)], minute(minutes));
            assert!(endpoints.is_known(address(1)));
        }
        endpoints.update(0, &[address(1), address(2)], minute(10));
        assert!(!endpoints.is_known(address(3)));
        for minutes in 11..21 {
            endpoints.update(0, &[address(2)], minute(minutes));
            assert!(endpoints.is_known(address(1)), "counted anew");
        }
        endpoints.update(0, &[address(2)], minute(21));
        assert!(!endpoints.is_known(address(1)));
        assert!(endpoints.is_known(address(2)));
    }

    #[test]
    fn answers_that_give_half_of_the_addresses_in_turn_lose_none() {
        let (mut endpoints, now) = (Endpoints::default(), Instant::now());
        let all: Vec<SocketAddr> = (0..16).map(address).collect();
        for answer in 0..100 {
            let half = if answer % 2 == 0 { &all[..8] } else { &all[8..] };
            endpoints.update(0, half, now + Duration::from_secs(40 * answer));
            assert!(answer == 0 || all.iter().all(|address| endpoints.is_known(*address)));
        }
    }

    #[test]
    fn addresses_without_end_are_not_remembered_without_end() {
        let (mut endpoints, now) = (Endpoints::default(), Instant::now());
        let port = |port| SocketAddr::from(([10, 0, 0, 1], port));
        for number in 0..1000 {
            endpoints.update(0, &[port(number)], now + Duration::from_millis(number.into()));
        }
        assert_eq!(endpoints.known.len(), MOST_MISSING + 1);
        assert!(endpoints.is_known(port(999)) && endpoints.is_known(port(998)));
        assert!(!endpoints.is_known(port(0)), "those missing longest");
    }

    #[test]
    fn one_address_by_two_names_counts_as_one() {
        let mut endpoints = Endpoints::default();
        let now = Instant::now();
        endpoints.update(0, &[address(1)], now);
        endpoints.update(1, &[address(1), address(2)], now);
        let second = endpoints.choose(&[address(1)], Instant::now(), 0.0).unwrap();
        assert_eq!(second.address, address(2));
    }
}
