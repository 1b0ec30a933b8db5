//! Where an address is put: an interface of ours, or a labelled alias of `lo`. Found, made, completed and removed here.
//!
//! A dummy interface is what Linux has for this. Not every kernel has it; a pair of veth interfaces whose ends both stay on the host
//! does the same and is found wherever containers run; an alias of `lo` needs nothing, but is harder to see.

use std::fmt::{self, Display, Formatter};
use std::io;

use super::error::is_right_missing;
use super::host::{self, Host, Link};
use super::look::name_taken_by;
use super::{AddressError, Collision, Settings};

/// What an interface's name has at most (`IFNAMSIZ` less the closing zero), and a label too.
const NAME: usize = 15;

/// The interface whose alias the last way makes.
const LOOPBACK: &str = "lo";

/// The right that all changes need.
const CAPABILITY: &str = "CAP_NET_ADMIN";

/// A way to hold an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A dummy interface.
    Dummy,
    /// A pair of veth interfaces, both on this host.
    Veth,
    /// A further address of the loopback interface.
    Loopback,
}

impl Kind {
    /// All of them, the best first.
    pub const ALL: [Kind; 3] = [Kind::Dummy, Kind::Veth, Kind::Loopback];
}

impl Display for Kind {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dummy => "dummy",
            Self::Veth => "veth",
            Self::Loopback => "loopback",
        })
    }
}

/// Where the address is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) kind: Kind,
    pub(super) index: u32,
    pub(super) interface: Box<str>,
    /// Whether it was there before.
    pub(super) adopted: bool,
    /// Why it is none of the better ways.
    pub(super) why: Box<str>,
}

/// Whether the kernel takes this as the name of an interface, and nft as part of a table's.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME).contains(&name.len()) && name.bytes().all(plain) && ![LOOPBACK, ".", ".."].contains(&name)
}

/// What tells our alias of `lo` from others: `lo:portico`.
pub(super) fn loopback_label(settings: &Settings) -> Box<str> {
    let room = NAME - "lo:".len();
    let name = &settings.interface;
    format!("lo:{}", &name[..name.len().min(room)]).into()
}

/// The name of the other end of a pair: `portico-peer`.
fn peer_of(interface: &str) -> Box<str> {
    let room = NAME - "-peer".len();
    format!("{}-peer", &interface[..interface.len().min(room)]).into()
}

/// Whether the address is where it should be, on an interface that is up.
pub(super) fn is_complete(host: &mut Host, settings: &Settings) -> io::Result<bool> {
    let found = match host.link(&settings.interface)? {
        Some(link) if link.is_ours() => link.is_up().then_some(link.index),
        Some(_) => None,
        None => return Ok(labelled(host, settings)?.is_some()),
    };
    let addresses = host
        .addresses(settings.address, |held| held.address == settings.address && Some(held.index) == found)?;
    Ok(!addresses.is_empty())
}

/// Puts the address where an agent has had it before, or makes a place for it by the first way that works. An interface that was
/// `known` as ours before is ours even if someone has changed its alias.
pub(super) fn establish(
    host: &mut Host,
    settings: &Settings,
    known: Option<u32>,
) -> Result<Place, AddressError> {
    let looking = |source| AddressError::of("look at the interfaces of this host", CAPABILITY, source);
    let interface = &*settings.interface;
    if let Some(link) = host.link(interface).map_err(looking)? {
        if !link.is_ours() && Some(link.index) != known {
            let addresses = host.addresses(settings.address, |_| true).map_err(looking)?;
            return Err(AddressError::Collisions(vec![name_taken_by(&link, &addresses)]));
        }
        let adopting = |source| AddressError::of(format!("adopt interface {interface}"), CAPABILITY, source);
        adopt(host, settings, &link).map_err(adopting)?;
        let kind = if &*link.kind == "veth" { Kind::Veth } else { Kind::Dummy };
        let why = Box::default();
        return Ok(Place { kind, index: link.index, interface: interface.into(), adopted: true, why });
    }
    if let Some(index) = labelled(host, settings).map_err(looking)? {
        let why = Box::default();
        return Ok(Place { kind: Kind::Loopback, index, interface: LOOPBACK.into(), adopted: true, why });
    }
    make(host, settings)
}

/// Makes a place by the first way that works.
fn make(host: &mut Host, settings: &Settings) -> Result<Place, AddressError> {
    let mut tried: Vec<String> = Vec::new();
    for &kind in &settings.kinds {
        let made = match kind {
            Kind::Dummy => make_link(host, settings, |host| host.add_dummy(&settings.interface)),
            Kind::Veth => {
                let peer = peer_of(&settings.interface);
                make_link(host, settings, |host| host.add_veth(&settings.interface, &peer))
            }
            Kind::Loopback => make_alias(host, settings),
        };
        match made {
            Ok((index, interface)) => {
                let why = tried.join("; ").into();
                return Ok(Place { kind, index, interface, adopted: false, why });
            }
            Err(source) if is_right_missing(&source) => {
                let what = format!("make interface {} with {}", settings.interface, settings.address).into();
                return Err(AddressError::Capability { what, capability: CAPABILITY });
            }
            Err(error) => tried.push(format!("{kind}: {error}")),
        }
    }
    Err(AddressError::NoWay { address: settings.address, tried: tried.join("; ").into() })
}

/// Makes interface and address, or neither.
fn make_link(
    host: &mut Host,
    settings: &Settings,
    add: impl FnOnce(&mut Host) -> io::Result<()>,
) -> io::Result<(u32, Box<str>)> {
    add(host)?;
    let link = host.link(&settings.interface)?.ok_or(io::ErrorKind::NotFound)?;
    if let Err(error) = complete(host, settings, &link) {
        if let Err(error) = host.remove_link(link.index) {
            tracing::warn!(interface = %link.name, %error, "cannot remove an interface that is of no use");
        }
        return Err(error);
    }
    Ok((link.index, link.name))
}

/// Has an interface of ours up, with the address.
fn complete(host: &mut Host, settings: &Settings, link: &Link) -> io::Result<()> {
    host.set_up(link.index)?;
    if &*link.kind == "veth"
        && let Some(peer) = host.link(&peer_of(&link.name))?
    {
        host.set_up(peer.index)?;
    }
    host.add_address(link.index, settings.address, None)
}

/// Takes over what an agent has made: completes it, and removes other addresses, which were of another configuration.
fn adopt(host: &mut Host, settings: &Settings, link: &Link) -> io::Result<()> {
    complete(host, settings, link)?;
    let others = host.addresses(settings.address, |held| {
        let single = held.network.prefix == if held.address.is_ipv4() { 32 } else { 128 };
        held.index == link.index && held.address != settings.address && single
    })?;
    for other in others {
        let (interface, address) = (&settings.interface, other.address);
        tracing::info!(%interface, %address, "removing an address that an earlier agent has left");
        host.remove_address(link.index, address, None)?;
    }
    // One way is enough: an agent of another time may have had to take the other one.
    match labelled(host, settings)? {
        Some(index) => host.remove_address(index, settings.address, Some(&loopback_label(settings))),
        None => Ok(()),
    }
}

fn make_alias(host: &mut Host, settings: &Settings) -> io::Result<(u32, Box<str>)> {
    if settings.address.is_ipv6() {
        // IPv6 addresses have no labels: a restarted agent could not tell it from one that somebody else put there.
        return Err(io::Error::new(io::ErrorKind::Unsupported, "an alias of lo is for IPv4 only"));
    }
    let lo = host.link(LOOPBACK)?.ok_or(io::ErrorKind::NotFound)?;
    host.add_address(lo.index, settings.address, Some(&loopback_label(settings)))?;
    Ok((lo.index, lo.name))
}

/// The number of `lo`, if it has the address as an alias of ours.
fn labelled(host: &mut Host, settings: &Settings) -> io::Result<Option<u32>> {
    if settings.address.is_ipv6() {
        return Ok(None);
    }
    let label = loopback_label(settings);
    let found =
        host.addresses(settings.address, |held| held.address == settings.address && held.label == label)?;
    Ok(found.first().map(|held| held.index))
}

/// Removes the interface or the alias, if agents made it.
pub(super) fn remove(host: &mut Host, settings: &Settings) -> io::Result<()> {
    if let Some(link) = host.link(&settings.interface)?
        && link.is_ours()
    {
        host.remove_link(link.index)?;
    }
    match labelled(host, settings)? {
        Some(index) => host.remove_address(index, settings.address, Some(&loopback_label(settings))),
        None => Ok(()),
    }
}

/// Whether trying again could help.
pub(super) fn is_final(error: &AddressError) -> bool {
    let taken = |collision: &Collision| matches!(collision, Collision::NameTaken { .. });
    match error {
        AddressError::Collisions(collisions) => collisions.iter().any(taken),
        AddressError::Kernel { .. } | AddressError::NoWay { .. } => false,
        _ => true,
    }
}

/// Whether a change is about the place.
pub(super) fn concerns(settings: &Settings, place: &Place, change: &host::Change) -> bool {
    match change {
        host::Change::Link(link) => link.index == place.index || link.name == settings.interface,
        host::Change::Address(held) => held.index == place.index || held.address == settings.address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_names_fit_however_long_the_interface_name_is() {
        for length in 1..=NAME {
            let settings = Settings { interface: "x".repeat(length).into(), ..Settings::default() };
            assert!(is_name(&settings.interface));
            assert!(is_name(&peer_of(&settings.interface)));
            assert_ne!(peer_of(&settings.interface), settings.interface);
            assert!(loopback_label(&settings).len() <= NAME);
        }
        assert_eq!(&*peer_of("portico"), "portico-peer");
        assert_eq!(&*loopback_label(&Settings::default()), "lo:portico");
    }

    #[test]
    fn names_that_the_kernel_or_nft_would_not_take_are_refused() {
        for name in ["", "lo", ".", "..", "a b", "a/b", "a:b", "äh", "sixteen-letters-"] {
            assert!(!is_name(name), "{name:?}");
        }
    }
}
