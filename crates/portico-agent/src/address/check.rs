//! Whether the address could be held here: what of this host's interfaces, networks and routes stands against
//! it.
//!
//! [`HostSnapshot`] is one look at the host; what it means is decided without the kernel.

use std::collections::BTreeMap;
use std::io;

use rtnetlink::packet_route::route::RouteProtocol;

use super::collision::{Collision, Report};
use super::error::AddressError;
use super::host::{Address, Host, Link, Route, table_name};
use super::interface::{is_half_made, peer_of};
use super::settings::Settings;

/// Routes up to this prefix are default routes: VPNs use two halves (`0.0.0.0/1`, `128.0.0.0/1`) for the
/// whole.
const DEFAULT_ROUTE: u8 = 1;

/// Looks whether the address could be held here. Changes nothing, and needs no rights.
pub async fn check(settings: &Settings) -> Result<Report, AddressError> {
    settings.validate()?;
    let view = HostSnapshot::read(settings).await;
    let looking = |source| AddressError::of("look at the network of this host", source);
    Ok(view.map_err(looking)?.report(settings))
}

/// The parts of the host's network that concern an address.
#[derive(Debug, Default)]
struct HostSnapshot {
    /// All interfaces.
    links: Vec<Link>,
    /// All addresses of the address's family.
    addresses: Vec<Address>,
    /// Routes that lead to the address, other than default routes.
    routes: Vec<Route>,
    /// How many routes of the family each table has.
    tables: BTreeMap<u32, usize>,
}

impl HostSnapshot {
    async fn read(settings: &Settings) -> io::Result<Self> {
        let wanted = settings.address;
        let host = Host::open()?;
        let links = host.links().await?;
        let addresses = host.addresses(wanted, |_| true).await?;
        let mut tables = BTreeMap::new();
        let to_address = |route: &Route| {
            *tables.entry(route.table).or_default() += 1;
            route.to.prefix_len() > DEFAULT_ROUTE && route.to.contains(&wanted)
        };
        let routes = host.routes(wanted, to_address).await?;
        Ok(Self { links, addresses, routes, tables })
    }

    fn report(&self, settings: &Settings) -> Report {
        let of_link = |address: &Address| {
            let name = self.link(address.index).map(|link| link.name.clone()).unwrap_or_default();
            (address.to_string().into(), name)
        };
        Report {
            collisions: self.collisions(settings),
            interfaces: self.links.iter().map(|link| link.name.clone()).collect(),
            addresses: self.addresses.iter().map(of_link).collect(),
            routes: self.tables.iter().map(|(table, count)| (table_name(*table), *count)).collect(),
        }
    }

    /// Every reason against the address and the interface.
    fn collisions(&self, settings: &Settings) -> Vec<Collision> {
        let is_taken =
            |link: &&Link| link.name == settings.interface && !link.is_ours() && !self.is_half_made(link);
        let name_taken = self.links.iter().find(is_taken);
        let name_taken = name_taken.map(|link| Collision::name_taken(link, &self.addresses));
        let mut found: Vec<_> = name_taken.into_iter().collect();
        found.extend(self.addresses.iter().filter_map(|held| self.of_address(held, settings)));
        found.extend(self.routes.iter().filter_map(|route| self.of_route(route, settings)));
        found
    }

    fn is_half_made(&self, link: &Link) -> bool {
        let peer = peer_of(&link.name);
        let peer = self.links.iter().find(|other| other.name == peer);
        is_half_made(link, peer, !self.addresses.iter().any(|held| held.index == link.index))
    }

    fn of_address(&self, held: &Address, settings: &Settings) -> Option<Collision> {
        let address = settings.address;
        let link = self.link(held.index).filter(|link| !is_own(link, settings))?;
        let interface = link.name.clone();
        if held.address == address {
            Some(Collision::OnInterface { address, interface, agent: link.is_ours() })
        } else if held.network.contains(&address) {
            let network = held.network.trunc().to_string().into();
            Some(Collision::InNetwork { address, interface, network })
        } else {
            None
        }
    }

    fn of_route(&self, route: &Route, settings: &Settings) -> Option<Collision> {
        let through = route.through.and_then(|index| self.link(index));
        if through.is_some_and(|link| is_own(link, settings)) {
            return None;
        }
        // The kernel makes a route for each address. That one is reported with the address.
        let comes_with = |held: &Address| {
            let leads = held.network.contains(&settings.address) || held.address == settings.address;
            leads && Some(held.index) == route.through
        };
        if route.origin == RouteProtocol::Kernel && self.addresses.iter().any(comes_with) {
            return None;
        }
        let route = route.describe(through.map(|link| &*link.name));
        Some(Collision::InRoute { address: settings.address, route })
    }

    fn link(&self, index: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.index == index)
    }
}

/// Whether an agent with these settings made the interface.
fn is_own(link: &Link, settings: &Settings) -> bool {
    link.is_ours() && link.name == settings.interface
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;
    use rtnetlink::packet_route::route::RouteType;

    use super::super::host::ALIAS;
    use super::*;

    fn link(index: u32, name: &str) -> Link {
        Link { index, name: name.into(), up: true, ..Link::default() }
    }

    fn ours(index: u32, name: &str) -> Link {
        Link { alias: ALIAS.into(), ..link(index, name) }
    }

    fn address(index: u32, network: &str) -> Address {
        let network: IpNet = network.parse().unwrap();
        Address { index, address: network.addr(), network }
    }

    fn route(through: u32, to: &str) -> Route {
        Route {
            kind: RouteType::Unicast,
            to: to.parse().unwrap(),
            table: 254,
            origin: RouteProtocol::Boot,
            through: Some(through),
            gateway: None,
        }
    }

    fn sentences(view: &HostSnapshot) -> Vec<String> {
        view.collisions(&Settings::default()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_an_agent_left_is_no_collision() {
        let local = Route {
            kind: RouteType::Local,
            table: 255,
            origin: RouteProtocol::Kernel,
            ..route(7, "100.64.30.10/32")
        };
        let view = HostSnapshot {
            links: vec![ours(7, "portico")],
            addresses: vec![address(7, "100.64.30.10/32")],
            routes: vec![local],
            ..HostSnapshot::default()
        };
        assert_eq!(sentences(&view), [""; 0]);
    }

    #[test]
    fn an_address_of_lo_is_a_collision() {
        let view = HostSnapshot {
            links: vec![link(1, "lo")],
            addresses: vec![address(1, "100.64.30.10/32")],
            ..HostSnapshot::default()
        };
        let sentences = sentences(&view);
        assert!(sentences[0].contains("on interface lo of this host"), "{sentences:?}");
    }

    #[test]
    fn an_agent_under_another_name_is_reported_as_such() {
        let view = HostSnapshot {
            links: vec![ours(7, "portico-b")],
            addresses: vec![address(7, "100.64.30.10/32")],
            ..HostSnapshot::default()
        };
        let sentences = sentences(&view);
        assert!(sentences[0].contains("another Portico agent"), "{sentences:?}");
        assert!(sentences[0].contains("--interface portico-b"), "{sentences:?}");
    }

    #[test]
    fn a_network_is_reported_once_and_not_again_as_the_route_that_comes_with_it() {
        let with_it = Route { origin: RouteProtocol::Kernel, ..route(2, "100.64.0.0/16") };
        let view = HostSnapshot {
            links: vec![link(2, "eth0")],
            addresses: vec![address(2, "100.64.7.1/16")],
            routes: vec![with_it, route(2, "100.64.30.0/24")],
            ..HostSnapshot::default()
        };
        let sentences = sentences(&view);
        assert_eq!(sentences.len(), 2, "{sentences:?}");
        assert!(sentences[0].contains("network 100.64.0.0/16 of interface eth0"), "{sentences:?}");
        assert!(sentences[1].contains("\"100.64.30.0/24 dev eth0\""), "{sentences:?}");
    }

    #[test]
    fn a_report_says_what_was_looked_at() {
        let view = HostSnapshot {
            links: vec![link(1, "lo"), link(2, "eth0")],
            addresses: vec![address(2, "192.0.2.7/24")],
            tables: [(254, 2), (255, 4), (52, 1)].into(),
            ..HostSnapshot::default()
        };
        let report = view.report(&Settings::default());
        assert_eq!(report.interfaces, ["lo".into(), "eth0".into()]);
        assert_eq!(report.addresses, [("192.0.2.7/24".into(), "eth0".into())]);
        assert_eq!(report.routes, [("52".into(), 1), ("main".into(), 2), ("local".into(), 4)]);
    }
}
