//! The network of this host: interfaces, addresses and routes, read and changed by rtnetlink(7).

use std::fmt::{self, Display, Formatter};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Mac;
use super::netlink::{Message, ROUTE, Request, attributes};

/// What interfaces of ours carry as their alias (`ip link` shows it), so that an agent knows those of its predecessor.
pub(super) const ALIAS: &str = "portico agent";

/// `IFLA_*` of linux/if_link.h.
mod link {
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const NAME: u16 = 3;
    pub(super) const INFO: u16 = 18;
    pub(super) const ALIAS: u16 = 20;
    pub(super) const AF_SPEC: u16 = 26;
    /// In [`INFO`].
    pub(super) const INFO_KIND: u16 = 1;
    pub(super) const INFO_DATA: u16 = 2;
    /// In the data of a veth: its other end, a whole link message.
    pub(super) const VETH_PEER: u16 = 1;
    /// In the IPv6 part of [`AF_SPEC`]: how link-local addresses are made, and 1 for not at all.
    pub(super) const INET6_ADDR_GEN_MODE: u16 = 8;
    pub(super) const ADDR_GEN_MODE_NONE: u8 = 1;
}

/// `IFA_*` of linux/if_addr.h.
mod addr {
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const LOCAL: u16 = 2;
    pub(super) const LABEL: u16 = 3;
    /// No duplicate address detection (IPv6): nobody else is on an interface of ours.
    pub(super) const NO_DAD: u8 = 0x02;
}

/// Bits of `nlmsg_flags`: a question; to be acknowledged; the whole list; make it; but only if there is none.
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const EXCLUSIVE: u16 = 0x200;
const CREATE: u16 = 0x400;

/// Lengths of the fixed parts.
const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ROUTE_HEADER: usize = 12;

/// Bits of an interface.
pub(super) const UP: u32 = libc::IFF_UP as u32;
pub(super) const BROADCAST: u32 = libc::IFF_BROADCAST as u32;
pub(super) const LOOPBACK: u32 = libc::IFF_LOOPBACK as u32;
pub(super) const NO_ARP: u32 = libc::IFF_NOARP as u32;

/// Groups of notifications that tell of interfaces and of addresses (`RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR`, `RTMGRP_IPV6_IFADDR`).
pub(super) const CHANGES: u32 = 0x1 | 0x10 | 0x100;

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: Box<str>,
    pub(super) alias: Box<str>,
    /// `dummy`, `veth`, `bridge`, ...; empty for a device.
    pub(super) kind: Box<str>,
    pub(super) flags: u32,
    /// Only of Ethernet.
    pub(super) mac: Option<Mac>,
}

impl Link {
    /// Whether an agent made it.
    pub(super) fn is_ours(&self) -> bool {
        &*self.alias == ALIAS
    }

    pub(super) fn is_up(&self) -> bool {
        self.flags & UP != 0
    }

    fn read(body: &[u8]) -> Option<Self> {
        let hardware = u16::from_ne_bytes(body.get(2..4)?.try_into().ok()?);
        let index = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
        let flags = u32::from_ne_bytes(body.get(8..12)?.try_into().ok()?);
        let fields = attributes(body.get(LINK_HEADER..)?);
        let info = attributes(fields.find(link::INFO).unwrap_or_default());
        let mac = fields.find(link::ADDRESS).filter(|_| hardware == libc::ARPHRD_ETHER);
        Some(Self {
            index,
            name: fields.text(link::NAME)?,
            alias: fields.text(link::ALIAS).unwrap_or_default(),
            kind: info.text(link::INFO_KIND).unwrap_or_default(),
            flags,
            mac: mac.and_then(|mac| mac.try_into().ok()).map(Mac),
        })
    }
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// The interface that has it.
    pub(super) index: u32,
    pub(super) address: IpAddr,
    /// The network the interface is in by this address: other than `address` where the other end has one of its own.
    pub(super) network: Network,
    pub(super) label: Box<str>,
}

impl Address {
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let (family, prefix) = (*body.first()?, *body.get(1)?);
        let index = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
        let fields = attributes(body.get(ADDRESS_HEADER..)?);
        let of = |kind| fields.find(kind).and_then(|bytes| ip(family, bytes));
        let address = of(addr::LOCAL).or(of(addr::ADDRESS))?;
        let network = Network { base: of(addr::ADDRESS).unwrap_or(address), prefix };
        Some(Self { index, address, network, label: fields.text(addr::LABEL).unwrap_or_default() })
    }
}

/// Addresses that begin alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Network {
    pub(super) base: IpAddr,
    pub(super) prefix: u8,
}

impl Network {
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                let differ = base.to_bits() ^ address.to_bits();
                differ.leading_zeros() >= u32::from(self.prefix)
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => {
                let differ = base.to_bits() ^ address.to_bits();
                differ.leading_zeros() >= u32::from(self.prefix)
            }
            _ => false,
        }
    }
}

impl Display for Network {
    /// As `ip route` writes it: without the bits that say which host.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let prefix = u32::from(self.prefix);
        let base: IpAddr = match self.base {
            IpAddr::V4(base) => {
                let mask = u32::MAX.checked_shl(32_u32.saturating_sub(prefix)).unwrap_or(0);
                Ipv4Addr::from_bits(base.to_bits() & mask).into()
            }
            IpAddr::V6(base) => {
                let mask = u128::MAX.checked_shl(128_u32.saturating_sub(prefix)).unwrap_or(0);
                Ipv6Addr::from_bits(base.to_bits() & mask).into()
            }
        };
        write!(f, "{base}/{prefix}")
    }
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) kind: u8,
    pub(super) to: Network,
    pub(super) table: u32,
    /// Who made it: the kernel itself for the network of an interface.
    pub(super) origin: u8,
    /// The interface it leads through (the first, if several).
    pub(super) through: Option<u32>,
    pub(super) gateway: Option<IpAddr>,
}

impl Route {
    fn read(body: &[u8]) -> Option<Self> {
        let [family, prefix, _, _, table, origin, _, kind] = *body.first_chunk()?;
        let fields = attributes(body.get(ROUTE_HEADER..)?);
        let any: IpAddr = match i32::from(family) {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            libc::AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
            // Of multicast routing, which speaks in families of its own.
            _ => return None,
        };
        let base = fields.find(libc::RTA_DST).and_then(|bytes| ip(family, bytes)).unwrap_or(any);
        // An rtnexthop is a header of eight bytes with the interface in the second half.
        let hops = fields.find(libc::RTA_MULTIPATH);
        let first_hop = hops.and_then(|hops| Some(u32::from_ne_bytes(hops.get(4..8)?.try_into().ok()?)));
        Some(Self {
            kind,
            to: Network { base, prefix },
            table: fields.number(libc::RTA_TABLE).unwrap_or(u32::from(table)),
            origin,
            through: fields.number(libc::RTA_OIF).or(first_hop),
            gateway: fields.find(libc::RTA_GATEWAY).and_then(|bytes| ip(family, bytes)),
        })
    }

    /// As `ip route show table all` writes it, where `name` knows the interface.
    pub(super) fn describe(&self, name: Option<&str>) -> Box<str> {
        let kind = match self.kind {
            libc::RTN_LOCAL => "local ",
            libc::RTN_BROADCAST => "broadcast ",
            libc::RTN_ANYCAST => "anycast ",
            libc::RTN_MULTICAST => "multicast ",
            libc::RTN_BLACKHOLE => "blackhole ",
            libc::RTN_UNREACHABLE => "unreachable ",
            libc::RTN_PROHIBIT => "prohibit ",
            libc::RTN_THROW => "throw ",
            _ => "",
        };
        let mut text = format!("{kind}{}", self.to);
        if let Some(gateway) = self.gateway {
            text.push_str(&format!(" via {gateway}"));
        }
        if let Some(name) = name {
            text.push_str(&format!(" dev {name}"));
        }
        match self.table {
            MAIN_TABLE => {}
            LOCAL_TABLE => text.push_str(" table local"),
            table => text.push_str(&format!(" table {table}")),
        }
        text.into()
    }
}

/// Where `ip route` shows routes from, and where the kernel keeps addresses of the host itself.
const MAIN_TABLE: u32 = libc::RT_TABLE_MAIN as u32;
const LOCAL_TABLE: u32 = libc::RT_TABLE_LOCAL as u32;

fn ip(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => Some(<[u8; 4]>::try_from(bytes).ok()?.into()),
        libc::AF_INET6 => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
        _ => None,
    }
}

/// What a notification of [`CHANGES`] is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    Link(Link),
    Address(Address),
}

impl Change {
    pub(super) fn read(kind: u16, body: &[u8]) -> Option<Self> {
        match kind {
            libc::RTM_NEWLINK | libc::RTM_DELLINK => Link::read(body).map(Self::Link),
            libc::RTM_NEWADDR | libc::RTM_DELADDR => Address::read(body).map(Self::Address),
            _ => None,
        }
    }
}

/// A conversation with the kernel about the network of this host.
#[derive(Debug)]
pub(super) struct Host(Request);

impl Host {
    pub(super) fn open() -> io::Result<Self> {
        Request::open(ROUTE).map(Self)
    }

    /// All interfaces.
    pub(super) fn links(&mut self) -> io::Result<Vec<Link>> {
        let mut links = Vec::new();
        let message = Message::new(libc::RTM_GETLINK, REQUEST | DUMP, &[0; LINK_HEADER]);
        self.0.ask(message, |_, body| links.extend(Link::read(body)))?;
        Ok(links)
    }

    /// The interface of this name, if there is one.
    pub(super) fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        let mut link = None;
        let message =
            Message::new(libc::RTM_GETLINK, REQUEST | ACK, &[0; LINK_HEADER]).text(link::NAME, name);
        match self.0.ask(message, |_, body| link = Link::read(body)) {
            Ok(()) => Ok(link),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All addresses of one family that `wanted` picks.
    pub(super) fn addresses(
        &mut self,
        family: IpAddr,
        mut wanted: impl FnMut(&Address) -> bool,
    ) -> io::Result<Vec<Address>> {
        let mut addresses = Vec::new();
        let mut header = [0; ADDRESS_HEADER];
        header[0] = family_of(family);
        let message = Message::new(libc::RTM_GETADDR, REQUEST | DUMP, &header);
        self.0.ask(message, |_, body| addresses.extend(Address::read(body).filter(&mut wanted)))?;
        Ok(addresses)
    }

    /// All routes of one family, in whatever table, that `wanted` picks. A host may have a million.
    pub(super) fn routes(
        &mut self,
        family: IpAddr,
        mut wanted: impl FnMut(&Route) -> bool,
    ) -> io::Result<Vec<Route>> {
        let mut routes = Vec::new();
        let mut header = [0; ROUTE_HEADER];
        header[0] = family_of(family);
        let message = Message::new(libc::RTM_GETROUTE, REQUEST | DUMP, &header);
        self.0.ask(message, |_, body| routes.extend(Route::read(body).filter(&mut wanted)))?;
        Ok(routes)
    }

    /// Makes a dummy interface.
    pub(super) fn add_dummy(&mut self, name: &str) -> io::Result<()> {
        let message = Message::new(libc::RTM_NEWLINK, REQUEST | ACK | CREATE | EXCLUSIVE, &[0; LINK_HEADER])
            .text(link::NAME, name)
            .nest(link::INFO, |info| info.text(link::INFO_KIND, "dummy"));
        self.0.ask(message, |_, _| {})
    }

    /// Makes a pair of interfaces.
    pub(super) fn add_veth(&mut self, name: &str, peer: &str) -> io::Result<()> {
        let message = Message::new(libc::RTM_NEWLINK, REQUEST | ACK | CREATE | EXCLUSIVE, &[0; LINK_HEADER])
            .text(link::NAME, name)
            .nest(link::INFO, |info| {
                info.text(link::INFO_KIND, "veth").nest(link::INFO_DATA, |data| {
                    data.nest(link::VETH_PEER, |end| end.raw(&[0; LINK_HEADER]).text(link::NAME, peer))
                })
            });
        self.0.ask(message, |_, _| {})
    }

    /// Marks an interface as ours, and has it up and without ARP.
    pub(super) fn set_up(&mut self, index: u32) -> io::Result<()> {
        // Without the link-local IPv6 address that nobody uses, and its traffic. Where there is no IPv6 this fails.
        let message = Message::new(libc::RTM_SETLINK, REQUEST | ACK, &link_header(index, 0, 0)).nest(
            link::AF_SPEC,
            |families| {
                families.nest(libc::AF_INET6 as u16, |inet6| {
                    inet6.with(link::INET6_ADDR_GEN_MODE, &[link::ADDR_GEN_MODE_NONE])
                })
            },
        );
        if let Err(error) = self.0.ask(message, |_, _| {}) {
            tracing::debug!(%error, "the interface may get a link-local IPv6 address");
        }
        let flags = UP | NO_ARP;
        let message = Message::new(libc::RTM_SETLINK, REQUEST | ACK, &link_header(index, flags, flags))
            .text(link::ALIAS, ALIAS);
        self.0.ask(message, |_, _| {})
    }

    /// Removes an interface; with one end of a pair goes the other.
    pub(super) fn remove_link(&mut self, index: u32) -> io::Result<()> {
        let message = Message::new(libc::RTM_DELLINK, REQUEST | ACK, &link_header(index, 0, 0));
        self.0.ask(message, |_, _| {})
    }

    /// Gives an interface an address that is of use on this host only.
    pub(super) fn add_address(&mut self, index: u32, address: IpAddr, label: Option<&str>) -> io::Result<()> {
        let flags = REQUEST | ACK | CREATE | EXCLUSIVE;
        match self.0.ask(address_message(libc::RTM_NEWADDR, flags, index, address, label), |_, _| {}) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result,
        }
    }

    /// Takes an address from an interface.
    pub(super) fn remove_address(
        &mut self,
        index: u32,
        address: IpAddr,
        label: Option<&str>,
    ) -> io::Result<()> {
        self.0.ask(address_message(libc::RTM_DELADDR, REQUEST | ACK, index, address, label), |_, _| {})
    }
}

fn family_of(address: IpAddr) -> u8 {
    // The families have the numbers 2 and 10.
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

fn link_header(index: u32, flags: u32, change: u32) -> [u8; LINK_HEADER] {
    let mut header = [0; LINK_HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&change.to_ne_bytes());
    header
}

fn address_message(kind: u16, flags: u16, index: u32, address: IpAddr, label: Option<&str>) -> Message {
    let (prefix, own_flags) = if address.is_ipv4() { (32, 0) } else { (128, addr::NO_DAD) };
    let mut header = [0; ADDRESS_HEADER];
    header[..4].copy_from_slice(&[family_of(address), prefix, own_flags, libc::RT_SCOPE_HOST]);
    header[4..].copy_from_slice(&index.to_ne_bytes());
    let message = Message::new(kind, flags, &header);
    let message = match address {
        IpAddr::V4(address) => {
            message.with(addr::LOCAL, &address.octets()).with(addr::ADDRESS, &address.octets())
        }
        IpAddr::V6(address) => message.with(addr::ADDRESS, &address.octets()),
    };
    match label {
        Some(label) => message.text(addr::LABEL, label),
        None => message,
    }
}
