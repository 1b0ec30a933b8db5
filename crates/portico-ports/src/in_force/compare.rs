//! Compares the needed flows with the rules in force.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use portico_api::port_range::PortRange;
use serde::Serialize;

use super::chains::{InForce, Packet, Step, number};
use crate::firewall::{Direction, Rule, Ruleset};
use crate::model::Protocol;
use crate::port_set::{PortSet, text};

/// Most addresses of one network at which rules are tried: each place where a rule begins or ends.
const MOST_SAMPLES: usize = 4_096;

/// How rules in force differ from what is needed. The names of the fields are stable.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Needed and refused.
    pub missing: Vec<MissingRule>,
    /// Open for more than any row needs.
    pub needless: Vec<NeedlessRule>,
    /// What could not be judged.
    pub not_judged: Vec<String>,
}

/// Something that is needed and refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MissingRule {
    /// `in` or `out`.
    pub direction: &'static str,
    /// The network at the other end.
    pub peer: String,
    /// `TCP`, `UDP` or `4`.
    pub protocol: &'static str,
    /// The ports; none for IP-in-IP.
    pub ports: Vec<String>,
    /// The rows of the model that need it.
    pub rows: Vec<&'static str>,
}

/// Something that is open, and needless as a whole or in part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NeedlessRule {
    /// `in` or `out`.
    pub direction: &'static str,
    /// The network at the other end.
    pub peer: String,
    /// The protocol, or `any`.
    pub protocol: String,
    /// The ports, or `any`.
    pub ports: String,
    /// The rule as its source writes it.
    pub rule: String,
    /// The rows that need a part of it: it is to be narrowed, and must not go.
    pub needed_by: Vec<&'static str>,
}

/// Compares the needs of a role with the rules in force.
pub fn compare(needed: &Ruleset, in_force: &InForce) -> Comparison {
    let mut comparison = Comparison { not_judged: in_force.not_judged.clone(), ..Comparison::default() };
    for rule in &needed.rules {
        if in_force.judges(rule.direction, rule.is_ipv6()) {
            missing(rule, in_force, &mut comparison.missing);
        } else {
            let family = if rule.is_ipv6() { "IPv6" } else { "IPv4" };
            let sentence = format!("{} ({}): no {family} rules are given", rule.ids(), word(rule.direction));
            comparison.not_judged.push(sentence);
        }
    }
    for direction in [Direction::Ingress, Direction::Egress] {
        let own: Vec<&Rule> = needed.of(direction).collect();
        for (ipv6, step) in in_force.accepting(direction) {
            needless(direction, ipv6, step, &own, &mut comparison.needless);
        }
    }
    comparison
}

fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "in",
        Direction::Egress => "out",
    }
}

/// Tries a rule wherever the answer could change, which is where a rule in force begins or ends.
fn missing(rule: &Rule, in_force: &InForce, found: &mut Vec<MissingRule>) {
    let steps = || in_force.chains.values().flatten();
    for &peer in &rule.peers {
        let mut addresses = BTreeSet::from([peer.network()]);
        let inside = steps()
            .filter_map(|step| step.peers.as_ref())
            .flatten()
            .filter(|own| peer.contains(*own) && peer.addr().is_ipv6() == own.addr().is_ipv6());
        for own in inside {
            addresses.extend([Some(own.network()), after(*own)].into_iter().flatten());
        }
        let addresses: Vec<IpAddr> =
            addresses.into_iter().filter(|address| peer.contains(address)).take(MOST_SAMPLES).collect();
        let refused = |port| {
            let packet =
                |&peer: &IpAddr| Packet { direction: rule.direction, peer, protocol: rule.protocol, port };
            addresses.iter().any(|address| !in_force.accepts(packet(address)))
        };
        let mut ports = PortSet::default();
        for range in rule.ports.ranges() {
            for part in parts(*range, steps()) {
                if refused(Some(part.first())) {
                    ports.add(part);
                }
            }
        }
        let is_whole = rule.protocol == Protocol::IpInIp && refused(None);
        if !ports.is_empty() || is_whole {
            found.push(MissingRule {
                direction: word(rule.direction),
                peer: peer.to_string(),
                protocol: rule.protocol.name(),
                ports: ports.ranges().iter().map(|&range| text(range)).collect(),
                rows: rule.rows.iter().map(|row| row.id).collect(),
            });
        }
    }
}

/// The first address after a network, if there is one.
fn after(network: IpNet) -> Option<IpAddr> {
    match network.broadcast() {
        IpAddr::V4(last) => Some(Ipv4Addr::from_bits(last.to_bits().checked_add(1)?).into()),
        IpAddr::V6(last) => Some(Ipv6Addr::from_bits(last.to_bits().checked_add(1)?).into()),
    }
}

/// A range, cut where a step's ports begin or end.
fn parts<'a>(range: PortRange, steps: impl Iterator<Item = &'a Step>) -> Vec<PortRange> {
    let mut starts = BTreeSet::from([range.first()]);
    for own in steps.filter_map(|step| step.ports.as_ref()).flat_map(|ports| ports.ranges().iter()) {
        starts.insert(own.first());
        starts.extend(own.last().checked_add(1));
    }
    let starts: Vec<u16> = starts.into_iter().filter(|start| range.contains(*start)).collect();
    let ends = starts.iter().skip(1).map(|next| next - 1).chain([range.last()]);
    starts.iter().zip(ends).filter_map(|(&first, last)| PortRange::new(first, last).ok()).collect()
}

/// What a step accepts beyond every need.
fn needless(
    direction: Direction,
    ipv6: Option<bool>,
    step: &Step,
    needed: &[&Rule],
    found: &mut Vec<NeedlessRule>,
) {
    // Errors and neighbours: they are part of IP, and of no row.
    if matches!(step.protocol, Some(1 | 58)) {
        return;
    }
    let everything =
        [IpNet::from(IpAddr::from([0, 0, 0, 0])), IpNet::from(IpAddr::from(Ipv6Addr::UNSPECIFIED))];
    let everything: Vec<IpNet> = everything
        .iter()
        .filter(|all| ipv6.is_none_or(|ipv6| all.addr().is_ipv6() == ipv6))
        .filter_map(|all| IpNet::new(all.addr(), 0).ok())
        .collect();
    for &peer in step.peers.as_ref().unwrap_or(&everything) {
        let covers = |rule: &&&Rule| {
            step.protocol.is_none_or(|own| own == number(rule.protocol))
                && IpNet::aggregate(&rule.peers).iter().any(|wide| wide.contains(&peer))
        };
        let covering: Vec<&&Rule> = needed.iter().filter(covers).collect();
        let ports: PortSet = covering.iter().flat_map(|rule| rule.ports.ranges().iter().copied()).collect();
        let left = match (&step.ports, step.protocol) {
            (Some(own), _) => own.without(&ports),
            // IP-in-IP has no ports.
            (None, Some(4)) if !covering.is_empty() => continue,
            (None, _) => PortSet::default(),
        };
        if step.ports.is_some() && left.is_empty() {
            continue;
        }
        let serves = |rule: &&&Rule| {
            let of_peer = rule.peers.iter().any(|own| own.contains(&peer) || peer.contains(own));
            let of_port = step.ports.as_ref().is_none_or(|own| own.without(&rule.ports) != *own);
            of_peer && of_port && step.protocol.is_none_or(|own| own == number(rule.protocol))
        };
        let rows = needed.iter().filter(serves).flat_map(|rule| rule.rows.iter().map(|row| row.id));
        found.push(NeedlessRule {
            needed_by: rows.collect::<BTreeSet<_>>().into_iter().collect(),
            direction: word(direction),
            peer: peer.to_string(),
            protocol: step.protocol.map_or("any".to_owned(), name),
            ports: if step.ports.is_some() { left.to_string() } else { "any".to_owned() },
            rule: step.text.clone(),
        });
    }
}

fn name(number: u8) -> String {
    match number {
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        number => number.to_string(),
    }
}
