//! The listeners of this gateway and of its replicas, as addresses that no upstream connection may lead to.
//!
//! Otherwise the author of an EndpointSlice could reach the admin listener through the gateway. A connection
//! could also go round in it for ever, so this is known before it begins: a listener accepts one that is
//! given up at once, too. Only the kernel knows every address that is this machine, so it is asked: what
//! goes to an address of the machine itself comes from that address.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use socket2::{Domain, Socket, Type};

use crate::config::Config;

/// Where this process listens.
#[derive(Debug)]
pub(crate) struct OwnListeners {
    /// All but those of NodePorts: three or four.
    fixed: ArcSwap<Vec<SocketAddr>>,
    /// The address of NodePort listeners.
    node_port_address: IpAddr,
    /// The NodePorts that are open: one bit for each number.
    node_ports: Box<[AtomicU64]>,
    /// The addresses of replicas, whose listeners have the ports of these.
    replicas: ArcSwap<BTreeSet<IpAddr>>,
}

impl OwnListeners {
    pub(crate) fn new(config: &Config) -> Self {
        let own = [config.sni_listen, config.tunnel_listen].into_iter().flatten();
        let others = config.other_listeners.iter().map(|(address, _)| *address);
        Self {
            fixed: ArcSwap::from_pointee(own.chain(others).map(plain).collect()),
            node_port_address: config.node_port_address.to_canonical(),
            node_ports: std::iter::repeat_with(AtomicU64::default).take(1 << 10).collect(),
            replicas: ArcSwap::default(),
        }
    }

    /// Replaces the addresses of replicas.
    pub(crate) fn set_replicas(&self, replicas: BTreeSet<IpAddr>) {
        if **self.replicas.load() != replicas {
            self.replicas.store(replicas.into());
        }
    }

    /// Adds where a listener is bound: it may have been asked for with port 0.
    pub(crate) fn add(&self, bound: SocketAddr) {
        let mut fixed = Vec::clone(&self.fixed.load());
        fixed.push(plain(bound));
        self.fixed.store(fixed.into());
    }

    /// Notes that the NodePort listener `port` is open.
    pub(crate) fn opened(&self, port: u16) {
        let (word, bit) = self.node_port(port);
        word.fetch_or(bit, Relaxed);
    }

    /// Notes that the NodePort listener `port` is closed.
    pub(crate) fn closed(&self, port: u16) {
        let (word, bit) = self.node_port(port);
        word.fetch_and(!bit, Relaxed);
    }

    fn node_port(&self, port: u16) -> (&AtomicU64, u64) {
        (&self.node_ports[usize::from(port / 64)], 1 << (port % 64))
    }

    /// Whether a connection to `address` would lead back into this process, or into a replica. Costs system
    /// calls only where a listener on all addresses has that port.
    pub(super) fn are_at(&self, address: SocketAddr) -> io::Result<bool> {
        let (word, bit) = self.node_port(address.port());
        let node_port = (word.load(Relaxed) & bit != 0).then_some(self.node_port_address);
        let fixed = self.fixed.load();
        let same_port = fixed.iter().filter(|own| own.port() == address.port());
        let ip = address.ip().to_canonical();
        for own in same_port.map(SocketAddr::ip).chain(node_port) {
            // A listener on 0.0.0.0 takes no IPv6; one on [::] takes both.
            let on_all = own.is_unspecified() && (own.is_ipv6() || ip.is_ipv4());
            if own == ip || self.replicas.load().contains(&ip) || (on_all && is_this_machine(address)?) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// IPv4 mapped into IPv6 is IPv4.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Asks by a socket of UDP, which sends nothing when it is connected.
fn is_this_machine(address: SocketAddr) -> io::Result<bool> {
    let address = plain(address);
    if address.ip().is_loopback() {
        return Ok(true);
    }
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    socket.connect(&address.into())?;
    Ok(socket.local_addr()?.as_socket().is_some_and(|local| local.ip() == address.ip()))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// The kernel binds `::ffff:127.0.0.1` as 127.0.0.1.
    #[test]
    fn a_listener_at_ipv4_written_as_ipv6_is_found_out() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 443));
        for own in ["::ffff:127.0.0.1", "::ffff:0.0.0.0", "127.0.0.1", "0.0.0.0", "::"] {
            let own: IpAddr = own.parse().unwrap();
            let fixed = OwnListeners::new(&Config::default());
            assert!(!fixed.are_at(address).unwrap());
            fixed.add(SocketAddr::new(own, address.port()));
            assert!(fixed.are_at(address).unwrap(), "{own}");
            let node_ports = OwnListeners::new(&Config { node_port_address: own, ..Config::default() });
            node_ports.opened(address.port());
            assert!(node_ports.are_at(address).unwrap(), "NodePorts at {own}");
        }
    }
}
