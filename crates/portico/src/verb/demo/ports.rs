//! Free ports on loopback for the demo. A port that is taken is stepped over, and that is said.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::bail;

use super::Flags;
use crate::outcome::print;

/// NodePorts the demo needs: API server and Konnectivity server of the two clusters that are reached by port.
const NODE_PORTS: u16 = 4;
/// Ports tried for one purpose before giving up.
const MOST_TRIED: u16 = 500;

/// Where the demo's gateway listens.
#[derive(Debug)]
pub(super) struct Ports {
    pub(super) sni: u16,
    pub(super) tunnel: u16,
    pub(super) admin: u16,
    /// First of [`NODE_PORTS`] free ports in a row.
    pub(super) first_node_port: u16,
}

impl Ports {
    /// Looks for free ports, beginning with those in `flags`.
    pub(super) fn find(flags: &Flags) -> anyhow::Result<Self> {
        Ok(Self {
            sni: free(flags.sni_port, 1, "connections by server name")?,
            tunnel: free(flags.tunnel_port, 1, "CONNECT")?,
            admin: free(flags.admin_port, 1, "the admin listener")?,
            first_node_port: free(flags.node_port, NODE_PORTS, "NodePorts")?,
        })
    }

    /// The range that NodePorts are drawn from, as a KubermaticConfiguration has it.
    pub(super) fn node_port_range(&self) -> String {
        format!("{}-{}", self.first_node_port, self.first_node_port + NODE_PORTS - 1)
    }
}

/// The first of `count` free ports in a row, at `first` or after it.
fn free(first: u16, count: u16, purpose: &str) -> anyhow::Result<u16> {
    let mut start = first;
    while start - first < MOST_TRIED && start.checked_add(count).is_some() {
        match (start..start + count).rev().find(|&port| is_taken(port)) {
            None if start == first => return Ok(start),
            None => {
                print(&format!("Port {first} for {purpose} is taken; taking {start} instead.\n"))?;
                return Ok(start);
            }
            Some(taken) => start = taken + 1,
        }
    }
    bail!("no free port for {purpose} from {first} on; name another first port")
}

fn is_taken(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_stepped_over() {
        let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let taken = holder.local_addr().unwrap().port();
        if taken < u16::MAX - MOST_TRIED {
            assert!(free(taken, 1, "a test").unwrap() > taken);
            assert!(free(taken - 1, 2, "a test").unwrap() > taken);
        }
    }
}
