//! Rules in force as chains of steps, and whether they let a packet through.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::firewall::Direction;
use crate::model::Protocol;
use crate::port_set::PortSet;

/// Deepest chain of jumps: the kernel allows 16.
const MOST_JUMPS: usize = 16;

/// Rules in force on a machine or in a security group.
#[derive(Debug, Clone, Default)]
pub struct InForce {
    /// Where judging begins. A packet must be accepted by each that is for its direction and family.
    pub(super) hooks: Vec<Hook>,
    /// All chains, by a name that is unique in its source.
    pub(super) chains: BTreeMap<String, Vec<Step>>,
    /// Rules with a match that is not understood.
    pub(super) not_judged: Vec<String>,
}

#[derive(Debug, Clone)]
pub(super) struct Hook {
    pub(super) direction: Direction,
    /// Only for one family; `None` for both.
    pub(super) ipv6: Option<bool>,
    pub(super) chain: String,
    /// What happens at the end of the chain.
    pub(super) accepts: bool,
}

/// One rule of a chain.
#[derive(Debug, Clone)]
pub(super) struct Step {
    /// Networks at the other end; `None` for any.
    pub(super) peers: Option<Vec<IpNet>>,
    /// The direction in which they are at the other end; `None` for each.
    pub(super) side: Option<Direction>,
    pub(super) ipv6: Option<bool>,
    /// The number of the protocol; `None` for any.
    pub(super) protocol: Option<u8>,
    /// Destination ports; `None` for any.
    pub(super) ports: Option<PortSet>,
    pub(super) action: Action,
    /// The rule as its source writes it.
    pub(super) text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    Accept,
    Refuse,
    Jump(String),
    /// As a jump that does not come back: the end of the other chain is the end of this one.
    Goto(String),
    Return,
    /// It counts or logs.
    Nothing,
}

/// A new connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub(super) direction: Direction,
    pub(super) peer: IpAddr,
    pub(super) protocol: Protocol,
    pub(super) port: Option<u16>,
}

impl InForce {
    /// Whether there are rules for this direction and family.
    pub(super) fn judges(&self, direction: Direction, ipv6: bool) -> bool {
        self.hooks.iter().any(|hook| hook.direction == direction && hook.ipv6.is_none_or(|own| own == ipv6))
    }

    /// Whether a new connection is let through.
    pub(super) fn accepts(&self, packet: Packet) -> bool {
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
                Action::Goto(target) if jumps > 0 => return self.judge(target, packet, jumps - 1),
                Action::Jump(_) | Action::Goto(_) => return Some(false),
            }
        }
        None
    }

    /// The accepting steps that a direction can lead to.
    pub(super) fn accepting(&self, direction: Direction) -> Vec<(Option<bool>, &Step)> {
        let mut found = Vec::new();
        for hook in self.hooks.iter().filter(|hook| hook.direction == direction) {
            let steps = self.steps(hook);
            let accepting = steps.filter(|step| step.action == Action::Accept && step.is_of(direction));
            found.extend(accepting.map(|step| (hook.ipv6.or(step.ipv6), step)));
        }
        found
    }

    /// Reports the steps that name the machine's own side: whose packets they match is not known.
    pub(super) fn report_own_side(&mut self) {
        let mut found = Vec::new();
        for hook in &self.hooks {
            let own = self.steps(hook).filter(|step| !step.is_of(hook.direction));
            found.extend(own.map(|step| step.text.clone()));
        }
        self.not_judged.extend(found);
    }

    /// The steps of all chains that a hook can lead to.
    fn steps<'a>(&'a self, hook: &'a Hook) -> impl Iterator<Item = &'a Step> {
        let mut chains = vec![hook.chain.as_str()];
        let mut next = 0;
        while let Some(&chain) = chains.get(next) {
            next += 1;
            for step in self.chains.get(chain).into_iter().flatten() {
                if let Action::Jump(target) | Action::Goto(target) = &step.action
                    && !chains.contains(&target.as_str())
                {
                    chains.push(target);
                }
            }
        }
        chains.into_iter().filter_map(|chain| self.chains.get(chain)).flatten()
    }
}

impl Step {
    /// Matches everything and does nothing.
    pub(super) fn new(text: String) -> Self {
        Self {
            peers: None,
            side: None,
            ipv6: None,
            protocol: None,
            ports: None,
            action: Action::Nothing,
            text,
        }
    }

    /// Whether it names the other end, if it names one.
    fn is_of(&self, direction: Direction) -> bool {
        self.side.is_none_or(|side| side == direction)
    }

    fn matches(&self, packet: Packet) -> bool {
        let by_port = match (&self.ports, packet.port) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(ports), Some(port)) => ports.ranges().iter().any(|range| range.contains(port)),
        };
        self.peers.as_ref().is_none_or(|peers| peers.iter().any(|peer| peer.contains(&packet.peer)))
            && self.is_of(packet.direction)
            && self.ipv6.is_none_or(|ipv6| ipv6 == packet.peer.is_ipv6())
            && self.protocol.is_none_or(|protocol| protocol == number(packet.protocol))
            && by_port
    }
}

/// The number of a protocol.
pub(super) fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::IpInIp => 4,
    }
}

/// The number of a protocol by the words of nft, iptables and AWS; `None` for an unknown one.
pub(super) fn protocol_number(word: &str) -> Option<u8> {
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
