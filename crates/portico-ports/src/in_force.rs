//! Rules in force, and how they differ from those that a role needs.
//!
//! Each file of this folder reads one form into chains of steps. A packet is judged as the firewall would:
//! step by step, chain by chain. What is needed and refused is missing; what a step accepts beyond all needs
//! is needless. A step with a match that is not understood is skipped and told, never guessed at.

mod aws;
mod compare;
mod iptables;
mod nft;

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use thiserror::Error;

use crate::firewall::Direction;
use crate::model::Protocol;
use crate::port_set::PortSet;

pub use compare::{Comparison, MissingRule, NeedlessRule, compare};

/// Deepest chain of jumps: the kernel allows 16.
const MOST_JUMPS: usize = 16;

/// Rules in force on a machine or in a security group.
#[derive(Debug, Clone, Default)]
pub struct InForce {
    /// Where judging begins. A packet must be accepted by each that is for its direction and family.
    hooks: Vec<Hook>,
    /// All chains, by a name that is unique in its source.
    chains: BTreeMap<String, Vec<Step>>,
    /// Rules with a match that is not understood.
    not_judged: Vec<String>,
}

#[derive(Debug, Clone)]
struct Hook {
    direction: Direction,
    /// Only for one family; `None` for both.
    ipv6: Option<bool>,
    chain: String,
    /// What happens at the end of the chain.
    accepts: bool,
}

/// One rule of a chain.
#[derive(Debug, Clone)]
struct Step {
    /// Networks at the other end; `None` for any.
    peers: Option<Vec<IpNet>>,
    ipv6: Option<bool>,
    /// The number of the protocol; `None` for any.
    protocol: Option<u8>,
    /// Destination ports; `None` for any.
    ports: Option<PortSet>,
    action: Action,
    /// The rule as its source writes it.
    text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Accept,
    Refuse,
    Jump(String),
    Return,
    /// It counts or logs.
    Nothing,
}

/// A new connection.
#[derive(Debug, Clone, Copy)]
struct Packet {
    direction: Direction,
    peer: IpAddr,
    protocol: Protocol,
    port: Option<u16>,
}

/// Why rules cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReadError {
    /// It is none of the forms that are read.
    #[error(
        "this is neither `nft -j list ruleset`, nor iptables-save, nor `aws ec2 describe-security-groups`; \
         give what one of them prints"
    )]
    Unknown,
    /// nftables as text.
    #[error("this is nftables as text; give what `nft -j list ruleset` prints (JSON)")]
    NftText,
    /// JSON that is none.
    #[error("line {line}: {message}")]
    Json {
        /// The line.
        line: usize,
        /// What is wrong.
        message: String,
    },
}

impl InForce {
    /// Reads what `nft -j`, `iptables-save`, `ip6tables-save` or `aws ec2 describe-security-groups` printed.
    ///
    /// # Errors
    /// If it is none of them, or broken.
    pub fn read(text: &str) -> Result<Self, ReadError> {
        let trimmed = text.trim_start();
        if trimmed.starts_with('{') {
            let value: serde_json::Value = serde_json::from_str(trimmed)
                .map_err(|error| ReadError::Json { line: error.line(), message: error.to_string() })?;
            if let Some(entries) = value["nftables"].as_array() {
                return Ok(nft::read(entries));
            }
            return match value["SecurityGroups"].as_array() {
                Some(groups) => Ok(aws::read(groups)),
                None => Err(ReadError::Unknown),
            };
        }
        if text.lines().any(|line| line.trim() == "*filter") {
            return Ok(iptables::read(text));
        }
        let is_nft = trimmed.lines().any(|line| line.starts_with("table ") && line.trim_end().ends_with('{'));
        Err(if is_nft { ReadError::NftText } else { ReadError::Unknown })
    }

    /// Whether there are rules for this direction and family.
    fn judges(&self, direction: Direction, ipv6: bool) -> bool {
        self.hooks.iter().any(|hook| hook.direction == direction && hook.ipv6.is_none_or(|own| own == ipv6))
    }

    /// Whether a new connection is let through.
    fn accepts(&self, packet: Packet) -> bool {
        let of_packet = |hook: &&Hook| {
            hook.direction == packet.direction && hook.ipv6.is_none_or(|ipv6| ipv6 == packet.peer.is_ipv6())
        };
        self.hooks
            .iter()
            .filter(of_packet)
            .all(|hook| self.judge(&hook.chain, packet, MOST_JUMPS).unwrap_or(hook.accepts))
    }

    /// The answer of a chain, if it has one.
    fn judge(&self, chain: &str, packet: Packet, jumps: usize) -> Option<bool> {
        for step in self.chains.get(chain)?.iter().filter(|step| step.matches(packet)) {
            match &step.action {
                Action::Accept => return Some(true),
                Action::Refuse => return Some(false),
                Action::Return => return None,
                Action::Nothing => {}
                Action::Jump(target) if jumps > 0 => {
                    if let Some(answer) = self.judge(target, packet, jumps - 1) {
                        return Some(answer);
                    }
                }
                Action::Jump(_) => return Some(false),
            }
        }
        None
    }

    /// The accepting steps that a direction can lead to.
    fn accepting(&self, direction: Direction) -> Vec<(Option<bool>, &Step)> {
        let mut found = Vec::new();
        for hook in self.hooks.iter().filter(|hook| hook.direction == direction) {
            let mut chains = vec![hook.chain.as_str()];
            let mut next = 0;
            while let Some(&chain) = chains.get(next) {
                next += 1;
                for step in self.chains.get(chain).into_iter().flatten() {
                    match &step.action {
                        Action::Accept => found.push((hook.ipv6.or(step.ipv6), step)),
                        Action::Jump(target) if !chains.contains(&target.as_str()) => chains.push(target),
                        _ => {}
                    }
                }
            }
        }
        found
    }
}

impl Step {
    /// Matches everything and does nothing.
    fn new(text: String) -> Self {
        Self { peers: None, ipv6: None, protocol: None, ports: None, action: Action::Nothing, text }
    }

    fn matches(&self, packet: Packet) -> bool {
        let by_port = match (&self.ports, packet.port) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(ports), Some(port)) => ports.ranges().iter().any(|range| range.contains(port)),
        };
        self.peers.as_ref().is_none_or(|peers| peers.iter().any(|peer| peer.contains(&packet.peer)))
            && self.ipv6.is_none_or(|ipv6| ipv6 == packet.peer.is_ipv6())
            && self.protocol.is_none_or(|protocol| protocol == number(packet.protocol))
            && by_port
    }
}

/// The number of a protocol.
fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::IpInIp => 4,
    }
}

/// The number of a protocol by the words of nft, iptables and AWS; `None` for an unknown one.
fn protocol_number(word: &str) -> Option<u8> {
    Some(match word {
        "icmp" => 1,
        "ipip" | "ipencap" | "ipv4" => 4,
        "tcp" => 6,
        "udp" => 17,
        "esp" => 50,
        "ah" => 51,
        "icmpv6" | "ipv6-icmp" => 58,
        "sctp" => 132,
        word => return word.parse().ok(),
    })
}

#[cfg(test)]
#[path = "in_force/tests.rs"]
mod tests;
