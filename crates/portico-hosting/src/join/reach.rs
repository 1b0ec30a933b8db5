//! The servers that the agents of a node reach beside the API server. A machine can try them before it joins.
//!
//! The operator writes it into ConfigMap `kube-system/kubelet-config`, under the key [`KEY`], a line each:
//! `PURPOSE HOST:PORT`. Administrators of the cluster can write there too, so a machine reads little of it
//! and shows it as text of somebody else.

use std::fmt;

use portico_api::exposed_cluster::ExposedCluster;
use portico_expose::hosts::bracketed;
use portico_expose::user_cluster::{AgentSettings, Konnectivity, gateways};
use thiserror::Error;

/// Where it stands in the ConfigMap.
pub const KEY: &str = "reach";

/// More gateways than any seed has.
const MOST: usize = 32;
/// A name in DNS has at most 253 characters; purpose and port stand beside it.
const LONGEST: usize = 300;

/// Which agent goes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The Konnectivity agent, by which the API server reaches nodes and pods. It runs on some of the nodes.
    Konnectivity,
    /// The agent of the node, by which pods reach the API server. One of several gateways is enough.
    Tunnel,
}

/// An address that agents go to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// Which agent goes there.
    pub purpose: Purpose,
    /// `HOST:PORT`.
    pub address: String,
}

/// Why it cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadReach {
    /// More than the operator writes.
    #[error("it has more than {MOST} lines")]
    TooMany,
    /// A later operator may know more purposes.
    #[error("its line {0} is no `PURPOSE HOST:PORT` with the purpose konnectivity or tunnel")]
    Line(usize),
}

impl Purpose {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::Konnectivity, Self::Tunnel];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Konnectivity => "konnectivity",
            Self::Tunnel => "tunnel",
        }
    }
}

/// Where the agents go that the operator makes in this cluster.
pub fn ways(exposed: &ExposedCluster, konnectivity: &Konnectivity, agents: &AgentSettings) -> Vec<Way> {
    let mut ways = Vec::new();
    if let Konnectivity::At(host, port) = konnectivity {
        ways.push(Way { purpose: Purpose::Konnectivity, address: format!("{}:{port}", bracketed(host)) });
    }
    if exposed.spec.tunnel.is_some() {
        let gateways = gateways(exposed, agents);
        let addresses = gateways.split(',').map(|one| one.rsplit_once("://").map_or(one, |(_, rest)| rest));
        ways.extend(addresses.map(|one| Way { purpose: Purpose::Tunnel, address: one.to_owned() }));
    }
    ways.truncate(MOST);
    ways
}

/// As it stands in the ConfigMap.
pub fn write(ways: &[Way]) -> String {
    ways.iter().map(|way| format!("{way}\n")).collect()
}

/// Reads that.
///
/// # Errors
/// The operator writes something else.
pub fn read(text: &str) -> Result<Vec<Way>, BadReach> {
    if text.lines().nth(MOST).is_some() {
        return Err(BadReach::TooMany);
    }
    let lines = text.lines().zip(1..);
    lines.map(|(line, number)| Way::read(line).ok_or(BadReach::Line(number))).collect()
}

impl Way {
    fn read(line: &str) -> Option<Self> {
        let (word, address) = line.split_once(' ').filter(|_| line.len() <= LONGEST)?;
        let purpose = Purpose::ALL.into_iter().find(|purpose| purpose.as_str() == word)?;
        let (host, port) = address.rsplit_once(':')?;
        let is_port =
            port.bytes().all(|byte| byte.is_ascii_digit()) && matches!(port.parse::<u16>(), Ok(1..));
        let is_host = !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic());
        (is_host && is_port).then(|| Self { purpose, address: address.to_owned() })
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.purpose.as_str(), self.address)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn exposed(tunnel: bool) -> ExposedCluster {
        let mut spec = json!({"exposeStrategy": "NodePort", "seed": "north",
            "address": {"externalName": "a.north.example.com"}});
        if tunnel {
            spec["exposeStrategy"] = json!("Tunneling");
            spec["tunnel"] = json!({"agentIP": "100.64.30.10"});
        }
        serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap()
    }

    fn agents(gateways: &[&str]) -> AgentSettings {
        let gateways = gateways.iter().map(|&one| one.to_owned()).collect();
        AgentSettings { image: None, gateways, server_name: None, tunnel_port: 8_088 }
    }

    #[test]
    fn ways_are_those_of_the_agents_and_come_out_as_they_were_written() {
        let at = |host: &str, port| Konnectivity::At(host.to_owned(), port);
        let lines = |tunnel, at: &Konnectivity, gateways: &[&str]| {
            let ways = ways(&exposed(tunnel), at, &agents(gateways));
            let text = write(&ways);
            assert_eq!(read(&text), Ok(ways));
            text
        };
        assert_eq!(
            lines(true, &at("konnectivity-server.a.north.example.com", 6_443), &[]),
            "konnectivity konnectivity-server.a.north.example.com:6443\ntunnel a.north.example.com:8088\n"
        );
        assert_eq!(
            lines(true, &Konnectivity::Off, &["tls://gw.example.com:443", "h2c://[2001:db8::1]:8088"]),
            "tunnel gw.example.com:443\ntunnel [2001:db8::1]:8088\n"
        );
        assert_eq!(
            lines(false, &at("2001:db8::2", 31_000), &["gw.example.com:1"]),
            "konnectivity [2001:db8::2]:31000\n"
        );
        assert_eq!(lines(false, &Konnectivity::Pending, &[]), "");
        let many = vec!["gw.example.com:443"; MOST + 1];
        assert_eq!(lines(true, &Konnectivity::Off, &many).lines().count(), MOST);
    }

    #[test]
    fn what_the_operator_does_not_write_is_refused_with_its_line() {
        let long = format!("tunnel {}:1", "a".repeat(LONGEST));
        for bad in [
            "",
            "tunnel",
            "tunnel ",
            "tunnel a",
            "tunnel :1",
            "tunnel a:",
            "tunnel a:+1",
            "tunnel a:65536",
            "tunnel a:0",
            "tunnel a b:1",
            " tunnel a:1",
            "tunnel  a:1",
            "Tunnel a:1",
            "proxy a:1",
            "tunnel \u{1b}[2Ja:1",
            "tunnel \u{e4}:1",
            &long,
        ] {
            assert_eq!(read(&format!("konnectivity a:1\n{bad}\n")), Err(BadReach::Line(2)), "{bad:?}");
        }
        assert_eq!(read(&"tunnel a:1\n".repeat(MOST + 1)), Err(BadReach::TooMany));
    }
}
