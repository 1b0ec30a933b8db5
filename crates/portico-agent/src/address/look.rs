//! What of this host stands against an address: interfaces, networks and routes, as one look found them.

use std::collections::HashSet;
use std::io;

use super::collision::Collision;
use super::host::{self, Address, Host, Link, Route};
use super::place::loopback_label;
use super::{Mac, Settings};

/// Routes up to this prefix are default routes: VPNs put two halves in place of a whole.
const DEFAULT_ROUTE: u8 = 1;

/// What of the host's network has to do with an address.
#[derive(Debug, Default)]
pub(super) struct View {
    /// All interfaces.
    links: Vec<Link>,
    /// Addresses equal to it or in its network, and those of the interface that should be made.
    addresses: Vec<Address>,
    /// Routes that it is in, other than default routes.
    routes: Vec<Route>,
    /// Interfaces with an address of the same family.
    addressed: HashSet<u32>,
}

impl View {
    /// Looks. Needs no rights.
    pub(super) fn read(host: &mut Host, settings: &Settings) -> io::Result<Self> {
        let wanted = settings.address;
        let links = host.links()?;
        let named = links.iter().find(|link| link.name == settings.interface).map(|link| link.index);
        let mut addressed = HashSet::new();
        let addresses = host.addresses(wanted, |address| {
            addressed.insert(address.index);
            address.address == wanted || address.network.contains(wanted) || Some(address.index) == named
        })?;
        let routes =
            host.routes(wanted, |route| route.to.prefix > DEFAULT_ROUTE && route.to.contains(wanted))?;
        Ok(Self { links, addresses, routes, addressed })
    }

    /// Every reason against the address and the interface.
    pub(super) fn collisions(&self, settings: &Settings) -> Vec<Collision> {
        let name_taken = self.links.iter().find(|link| link.name == settings.interface && !link.is_ours());
        let mut found: Vec<_> =
            name_taken.map(|link| name_taken_by(link, &self.addresses)).into_iter().collect();
        found.extend(self.addresses.iter().filter_map(|address| self.of_address(address, settings)));
        found.extend(self.routes.iter().filter_map(|route| self.of_route(route, settings)));
        found
    }

    /// Whether an agent of this host has put the address in place already.
    pub(super) fn is_held(&self, settings: &Settings) -> bool {
        let in_place = |held: &Address| held.address == settings.address && self.is_place(held, settings);
        self.addresses.iter().any(in_place)
    }

    /// Whether an address is on an interface of ours, or is our alias of `lo`.
    fn is_place(&self, held: &Address, settings: &Settings) -> bool {
        self.link(held.index).is_some_and(|link| {
            let interface = link.is_ours() && link.name == settings.interface;
            interface || (link.flags & host::LOOPBACK != 0 && held.label == loopback_label(settings))
        })
    }

    fn of_address(&self, held: &Address, settings: &Settings) -> Option<Collision> {
        let address = settings.address;
        let link = self.link(held.index).filter(|_| !self.is_place(held, settings))?;
        let interface = link.name.clone();
        if held.address == address {
            Some(Collision::OnInterface { address, interface, agent: link.is_ours() })
        } else if held.network.contains(address) {
            let network = held.network.to_string().into();
            Some(Collision::InNetwork { address, interface, network })
        } else {
            None
        }
    }

    fn of_route(&self, route: &Route, settings: &Settings) -> Option<Collision> {
        let through = route.through.and_then(|index| self.link(index));
        let of_place = through.is_some_and(|link| link.is_ours() && link.name == settings.interface);
        // The kernel's own route of an address has been told with the address, or is that of our own.
        let told = route.origin == libc::RTPROT_KERNEL
            && self.addresses.iter().any(|address| Some(address.index) == route.through);
        let route = route.describe(through.map(|link| &*link.name));
        (!of_place && !told).then_some(Collision::InRoute { address: settings.address, route })
    }

    fn link(&self, index: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.index == index)
    }

    /// The interfaces to ask on: those with neighbours and an address among them, other than ours.
    pub(super) fn links_to_ask(&self) -> impl Iterator<Item = (&Link, Mac)> {
        self.links.iter().filter_map(|link| {
            let has_neighbours = link.flags & host::BROADCAST != 0 && link.flags & host::NO_ARP == 0;
            let asked = link.is_up()
                && has_neighbours
                && link.flags & host::LOOPBACK == 0
                && !link.is_ours()
                && self.addressed.contains(&link.index);
            link.mac.filter(|_| asked).map(|mac| (link, mac))
        })
    }

    /// The Ethernet addresses of this host.
    pub(super) fn macs(&self) -> Vec<Mac> {
        self.links.iter().filter_map(|link| link.mac).collect()
    }
}

/// The finding that an interface of someone else has the name.
pub(super) fn name_taken_by(link: &Link, addresses: &[Address]) -> Collision {
    let of_link = addresses.iter().filter(|address| address.index == link.index);
    let addresses = of_link.map(|held| format!("{}/{}", held.address, held.network.prefix).into()).collect();
    Collision::NameTaken { interface: link.name.clone(), kind: link.kind.clone(), addresses }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::super::host::{ALIAS, Network};
    use super::*;

    fn settings() -> Settings {
        Settings::default()
    }

    fn link(index: u32, name: &str) -> Link {
        Link { index, name: name.into(), flags: host::UP | host::BROADCAST, ..Link::default() }
    }

    fn ours(index: u32, name: &str) -> Link {
        Link { alias: ALIAS.into(), ..link(index, name) }
    }

    fn loopback() -> Link {
        Link { flags: host::UP | host::LOOPBACK, ..link(1, "lo") }
    }

    fn address(index: u32, address: &str, prefix: u8) -> Address {
        let address: IpAddr = address.parse().unwrap();
        Address { index, address, network: Network { base: address, prefix }, label: "".into() }
    }

    fn route(through: u32, to: &str, prefix: u8) -> Route {
        let to = Network { base: to.parse().unwrap(), prefix };
        let (kind, table) = (libc::RTN_UNICAST, u32::from(libc::RT_TABLE_MAIN));
        Route { kind, to, table, origin: libc::RTPROT_BOOT, through: Some(through), gateway: None }
    }

    fn told(view: &View) -> Vec<String> {
        view.collisions(&settings()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_an_agent_left_is_no_collision() {
        let own_route = Route {
            kind: libc::RTN_LOCAL,
            table: 255,
            origin: libc::RTPROT_KERNEL,
            ..route(7, "100.64.30.10", 32)
        };
        let view = View {
            links: vec![ours(7, "portico")],
            addresses: vec![address(7, "100.64.30.10", 32)],
            routes: vec![own_route.clone()],
            ..View::default()
        };
        assert_eq!(view.collisions(&settings()), []);
        let labelled = Address { label: "lo:portico".into(), ..address(1, "100.64.30.10", 32) };
        let view = View {
            links: vec![loopback()],
            addresses: vec![labelled],
            routes: vec![Route { through: Some(1), ..own_route }],
            ..View::default()
        };
        assert_eq!(view.collisions(&settings()), []);
    }

    #[test]
    fn an_alias_of_lo_without_our_label_is_someone_elses() {
        let view = View {
            links: vec![loopback()],
            addresses: vec![address(1, "100.64.30.10", 32)],
            ..View::default()
        };
        assert!(told(&view)[0].contains("on interface lo of this host"), "{:?}", told(&view));
    }

    #[test]
    fn an_agent_under_another_name_is_told_as_such() {
        let view = View {
            links: vec![ours(7, "portico-b")],
            addresses: vec![address(7, "100.64.30.10", 32)],
            ..View::default()
        };
        assert!(told(&view)[0].contains("another Portico agent"), "{:?}", told(&view));
        assert!(told(&view)[0].contains("--interface portico-b"), "{:?}", told(&view));
    }

    #[test]
    fn a_network_is_told_once_and_not_again_as_the_route_that_comes_with_it() {
        let with_it = Route { origin: libc::RTPROT_KERNEL, ..route(2, "100.64.0.0", 16) };
        let view = View {
            links: vec![link(2, "eth0")],
            addresses: vec![address(2, "100.64.7.1", 16)],
            routes: vec![with_it, route(2, "100.64.30.0", 24)],
            ..View::default()
        };
        let told = told(&view);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("network 100.64.0.0/16 of interface eth0"), "{told:?}");
        assert!(told[1].contains("\"100.64.30.0/24 dev eth0\""), "{told:?}");
    }

    #[test]
    fn only_links_with_neighbours_and_an_address_are_asked() {
        let mac = Some(Mac([2; 6]));
        let flagged = |index, flags| Link { mac, flags, ..link(index, "x") };
        let (up, wire) = (host::UP, host::BROADCAST);
        let view = View {
            links: vec![
                flagged(1, up | wire),
                flagged(2, wire),
                flagged(3, up | wire | host::NO_ARP),
                flagged(4, up | host::LOOPBACK | wire),
                flagged(5, up),
                flagged(6, up | wire),
                Link { alias: ALIAS.into(), ..flagged(7, up | wire) },
                Link { mac: None, ..flagged(8, up | wire) },
            ],
            addressed: [1, 2, 3, 4, 5, 7, 8].into(),
            ..View::default()
        };
        let asked: Vec<u32> = view.links_to_ask().map(|(link, _)| link.index).collect();
        assert_eq!(asked, [1]);
    }
}
