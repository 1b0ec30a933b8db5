//! The interface that holds the address: found, made, completed and removed here.
//!
//! An interface with the agent's alias is the agent's: a restarted agent adopts it. An interface of the same
//! name without an alias, and without any use, is too ([`is_half_made`]): an agent was killed before it could
//! set the alias.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::collision::Collision;
use super::error::{AddressError, is_right_missing};
use super::host::{Host, Link};
use super::settings::{Kind, NAME_MAX, Settings};

/// How an address is held: for log, metrics and `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The kind of interface.
    pub kind: Kind,
    /// The interface that has the address.
    pub interface: Box<str>,
    /// Whether it was there already, left by another agent or still in use by it.
    pub adopted: bool,
    /// Whether the address was not, on an interface that was.
    pub(super) added: bool,
    /// Why it is none of the better kinds. Empty if it is the best, or adopted.
    pub why: Box<str>,
    pub(super) index: u32,
}

/// The name of the other end of a pair: `portico-peer`.
pub(super) fn peer_of(interface: &str) -> Box<str> {
    let room = NAME_MAX - "-peer".len();
    format!("{}-peer", &interface[..interface.len().min(room)]).into()
}

/// Whether the agent's interface is there and up, with the address.
pub(super) async fn is_complete(host: &Host, settings: &Settings) -> io::Result<bool> {
    let Some(link) = host.link(&settings.interface).await? else { return Ok(false) };
    if !link.is_ours() || !link.up {
        return Ok(false);
    }
    let is_it = |held: &super::host::Address| held.address == settings.address && held.index == link.index;
    Ok(!host.addresses(settings.address, is_it).await?.is_empty())
}

/// Adopts the interface that an agent has made, or makes one of the first kind that works. An interface with
/// the index `known` is the agent's even if its alias was changed.
pub(super) async fn establish(
    host: &Host,
    settings: &Settings,
    known: Option<u32>,
) -> Result<Placement, AddressError> {
    let looking = |source| AddressError::of("look at the interfaces of this host", source);
    let interface = &*settings.interface;
    let Some(link) = host.link(interface).await.map_err(looking)? else { return make(host, settings).await };
    let adopted = link.is_ours() || Some(link.index) == known;
    if !adopted {
        let addresses = host.addresses(settings.address, |held| held.index == link.index);
        let addresses = addresses.await.map_err(looking)?;
        let peer = host.link(&peer_of(interface)).await.map_err(looking)?;
        if !is_half_made(&link, peer.as_ref(), addresses.is_empty()) {
            return Err(AddressError::Collisions(vec![Collision::name_taken(&link, &addresses)]));
        }
    }
    let adopting = |source| AddressError::of(format!("adopt interface {interface}"), source);
    let added = complete(host, settings, &link).await.map_err(adopting)?;
    let kind = if is_pair(&link) { Kind::Veth } else { Kind::Dummy };
    Ok(Placement { kind, interface: link.name, adopted, added, why: "".into(), index: link.index })
}

/// Makes an interface of the first kind that works.
async fn make(host: &Host, settings: &Settings) -> Result<Placement, AddressError> {
    let mut tried: Vec<String> = Vec::new();
    for &kind in &settings.kinds {
        match make_kind(host, settings, kind).await {
            Ok(link) => {
                let why = tried.join("; ").into();
                let (interface, index) = (link.name, link.index);
                return Ok(Placement { kind, interface, adopted: false, added: false, why, index });
            }
            Err(source) if is_right_missing(&source) => {
                let what = format!("make interface {} with {}", settings.interface, settings.address);
                return Err(AddressError::of(what, source));
            }
            Err(error) => tried.push(format!("{kind}: {error}")),
        }
    }
    Err(AddressError::NoWay { address: settings.address, tried: tried.join("; ").into() })
}

/// Makes interface and address, or neither.
async fn make_kind(host: &Host, settings: &Settings, kind: Kind) -> io::Result<Link> {
    let interface = &settings.interface;
    match kind {
        Kind::Dummy => host.add_dummy(interface).await?,
        Kind::Veth => host.add_veth(interface, &peer_of(interface)).await?,
    }
    let link = host.link(interface).await?.ok_or(io::ErrorKind::NotFound)?;
    if let Err(error) = complete(host, settings, &link).await {
        if let Err(error) = host.remove_link(link.index).await {
            tracing::warn!(%interface, %error, "cannot remove an interface that is of no use");
        }
        return Err(error);
    }
    Ok(link)
}

/// Sets the interface up, with the address. Returns false if that is there already.
async fn complete(host: &Host, settings: &Settings, link: &Link) -> io::Result<bool> {
    host.set_up(link.index).await?;
    if is_pair(link)
        && let Some(peer) = host.link(&peer_of(&link.name)).await?
    {
        host.set_up(peer.index).await?;
    }
    host.add_address(link.index, settings.address).await
}

/// Whether an agent was killed between making this interface and marking it. `peer` is the one with the name
/// that its other end would have.
pub(super) fn is_half_made(link: &Link, peer: Option<&Link>, is_without_address: bool) -> bool {
    let is_bare = link.alias.is_empty() && !link.up && is_without_address;
    is_bare && (&*link.kind == "dummy" || is_pair(link) && peer.is_some_and(is_pair))
}

/// Removes other addresses from the interface, which are of other configurations.
pub(super) async fn remove_others(host: &Host, settings: &Settings) -> io::Result<()> {
    let Some(link) = host.link(&settings.interface).await?.filter(Link::is_ours) else { return Ok(()) };
    for family in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
        let others = host.addresses(family, |held| {
            held.index == link.index && held.address != settings.address && held.is_single()
        });
        for other in others.await? {
            let (interface, address) = (&settings.interface, other.address);
            tracing::info!(%interface, %address, "removing an address that an earlier agent has left");
            host.remove_address(link.index, address).await?;
        }
    }
    Ok(())
}

/// Removes the interface, if an agent made it.
pub(super) async fn remove(host: &Host, settings: &Settings) -> io::Result<()> {
    match host.link(&settings.interface).await? {
        Some(link) if link.is_ours() => host.remove_link(link.index).await,
        _ => Ok(()),
    }
}

fn is_pair(link: &Link) -> bool {
    &*link.kind == "veth"
}

#[cfg(test)]
mod tests {
    use super::super::settings::is_name;
    use super::*;

    #[test]
    fn the_name_of_the_peer_fits_however_long_that_of_the_interface_is() {
        for length in 1..=NAME_MAX {
            let interface = "x".repeat(length);
            assert!(is_name(&peer_of(&interface)));
            assert_ne!(*peer_of(&interface), interface);
        }
        assert_eq!(&*peer_of("portico"), "portico-peer");
    }
}
