//! Connections at rest: opened, answered, then silent, as a watch is for hours.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use anyhow::Result;

use super::greet_all;

/// Handshakes under way at once while the connections are opened.
const AT_ONCE: usize = 50;

/// Opens `count` connections with the given hellos in turn; they rest until the sockets are dropped.
pub(crate) fn open(proxy: SocketAddrV4, hellos: &[Vec<u8>], count: usize) -> Result<Vec<OwnedFd>> {
    let hellos: Vec<_> = hellos.iter().cycle().take(count).cloned().collect();
    greet_all(proxy, &hellos, AT_ONCE)
}
