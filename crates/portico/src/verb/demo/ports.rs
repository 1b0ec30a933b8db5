//! Free ports on loopback for the demo. A port that is taken, by another program or for another purpose of
//! the demo, is stepped over and reported.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::bail;
use clap::Args;

use crate::outcome::print;

/// NodePorts the demo needs: API server and Konnectivity server of the two clusters that are reached by port.
const NODE_PORTS: u16 = 4;
/// Ports of Konnectivity: for agents, admin of the server, admin of the agent.
const KONNECTIVITY_PORTS: u16 = 3;
/// Ports tried for one purpose before giving up.
const MOST_TRIED: u16 = 500;

// The ports that the demo looks at first.
#[derive(Debug, Args)]
pub(super) struct WantedPorts {
    /// First port to try for clients by server name
    #[arg(long, value_name = "PORT", default_value_t = 6443)]
    sni_port: u16,
    /// First port to try for CONNECT
    #[arg(long, value_name = "PORT", default_value_t = 8088)]
    tunnel_port: u16,
    /// First port to try for /routes, /connections, /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8002)]
    admin_port: u16,
    /// First NodePort to try
    #[arg(long, value_name = "PORT", default_value_t = 31000)]
    node_port: u16,
    /// First port to try for the node agent, which on a node would listen on an address of its own
    #[arg(long, value_name = "PORT", default_value_t = 16443)]
    agent_port: u16,
    /// First port to try for the agent's /tunnels, /connections, /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8004)]
    agent_admin_port: u16,
    /// First port to try for Konnectivity, of three: agents, then /connections of server and of agent
    #[arg(long, value_name = "PORT", default_value_t = 8132)]
    konnectivity_port: u16,
}

/// Where the demo's gateway and its agent listen.
#[derive(Debug)]
pub(super) struct Ports {
    pub(super) sni: u16,
    pub(super) tunnel: u16,
    pub(super) admin: u16,
    /// Where the node agent listens in place of the address it would hold on a node.
    pub(super) agent: u16,
    pub(super) agent_admin: u16,
    /// First of [`KONNECTIVITY_PORTS`] free ports in a row.
    pub(super) konnectivity: u16,
    /// First of [`NODE_PORTS`] free ports in a row.
    pub(super) first_node_port: u16,
}

impl Ports {
    /// Looks for free ports, beginning with those in `wanted`.
    pub(super) fn find(wanted: &WantedPorts) -> anyhow::Result<Self> {
        let wishes = [
            (wanted.sni_port, 1, "connections by server name"),
            (wanted.tunnel_port, 1, "CONNECT"),
            (wanted.admin_port, 1, "the admin listener"),
            (wanted.agent_port, 1, "the node agent"),
            (wanted.agent_admin_port, 1, "the node agent's admin listener"),
            (wanted.konnectivity_port, KONNECTIVITY_PORTS, "Konnectivity"),
            (wanted.node_port, NODE_PORTS, "NodePorts"),
        ];
        let mut found = [0; 7];
        let mut chosen = Vec::new();
        for (index, &(first, count, purpose)) in wishes.iter().enumerate() {
            // A later purpose has its own turn. If two ask for one port, the first gets it.
            let mut spared = chosen.clone();
            spared.extend(wishes[index + 1..].iter().filter(|wish| wish.0 != first).flat_map(span));
            let start = free(first, count, purpose, &spared)?;
            chosen.extend(start..start + count);
            found[index] = start;
        }
        let [sni, tunnel, admin, agent, agent_admin, konnectivity, first_node_port] = found;
        Ok(Self { sni, tunnel, admin, agent, agent_admin, konnectivity, first_node_port })
    }

    /// The range that NodePorts are drawn from, as a KubermaticConfiguration has it.
    pub(super) fn node_port_range(&self) -> String {
        format!("{}-{}", self.first_node_port, self.first_node_port + NODE_PORTS - 1)
    }
}

/// The ports that are wished for.
fn span(&(first, count, _): &(u16, u16, &str)) -> std::ops::Range<u16> {
    first..first.saturating_add(count)
}

/// The first of `count` free ports in a row, at `first` or after it; none of `spared`.
fn free(first: u16, count: u16, purpose: &str, spared: &[u16]) -> anyhow::Result<u16> {
    let mut start = first;
    while start - first < MOST_TRIED && start.checked_add(count).is_some() {
        match (start..start + count).rev().find(|&port| spared.contains(&port) || is_taken(port)) {
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

    /// A port that is taken. Not one of those that clients get, of which a test before this one may have left
    /// hundreds in a row in TIME_WAIT.
    fn take() -> (TcpListener, u16) {
        let mut below_those_of_clients = 20_000..30_000;
        below_those_of_clients
            .find_map(|port| Some((TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?, port)))
            .unwrap()
    }

    #[test]
    fn a_taken_port_is_stepped_over() {
        let (_holder, taken) = take();
        assert!(free(taken, 1, "a test", &[]).unwrap() > taken);
        assert!(free(taken - 1, 2, "a test", &[]).unwrap() > taken);
    }

    #[test]
    fn no_port_is_chosen_for_two_purposes() {
        let (_holder, taken) = take();
        // The next one is asked for by CONNECT, and the admin listener asks for what the first has taken.
        let wanted = WantedPorts {
            sni_port: taken,
            tunnel_port: taken + 1,
            admin_port: taken,
            node_port: taken + 2,
            agent_port: taken + 1,
            agent_admin_port: taken,
            konnectivity_port: taken + 1,
        };
        let ports = Ports::find(&wanted).unwrap();
        let mut all = vec![ports.sni, ports.tunnel, ports.admin, ports.agent, ports.agent_admin];
        all.extend(ports.konnectivity..ports.konnectivity + KONNECTIVITY_PORTS);
        all.extend(ports.first_node_port..ports.first_node_port + NODE_PORTS);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 12, "{ports:?}");
    }
}
