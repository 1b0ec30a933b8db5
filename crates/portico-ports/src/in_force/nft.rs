//! `nft -j list ruleset` (libnftables-json(5)).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use portico_api::port_range::PortRange;
use serde_json::Value;

use super::chains::{Action, Hook, InForce, Step, protocol_number};
use crate::firewall::Direction;
use crate::port_set::PortSet;

/// Named sets, by family, table and name.
type Sets<'a> = BTreeMap<String, &'a Vec<Value>>;

pub(super) fn read(entries: &[Value]) -> InForce {
    let mut read = InForce::default();
    let mut sets = Sets::new();
    for entry in entries {
        if let Some(elements) = entry["set"]["elem"].as_array() {
            sets.insert(unique(&entry["set"], &entry["set"]["name"]), elements);
        }
    }
    for entry in entries {
        let chain = &entry["chain"];
        if chain.is_object() {
            read.chains.entry(unique(chain, &chain["name"])).or_default();
            let direction = match (chain["type"].as_str(), chain["hook"].as_str()) {
                (Some("filter"), Some("input")) => Direction::Ingress,
                (Some("filter"), Some("output")) => Direction::Egress,
                _ => continue,
            };
            let ipv6 = match chain["family"].as_str() {
                Some("ip") => Some(false),
                Some("ip6") => Some(true),
                Some("inet") => None,
                _ => continue,
            };
            let accepts = chain["policy"].as_str() != Some("drop");
            read.hooks.push(Hook { direction, ipv6, chain: unique(chain, &chain["name"]), accepts });
        }
    }
    for entry in entries {
        let rule = &entry["rule"];
        if !rule.is_object() {
            continue;
        }
        let chain = unique(rule, &rule["chain"]);
        match step(rule, &sets) {
            Some(Some(step)) => read.chains.entry(chain).or_default().push(step),
            Some(None) => {}
            None => read.not_judged.push(text(rule)),
        }
    }
    read.report_own_side();
    read
}

/// A chain or set by its family and table.
fn unique(of: &Value, name: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}/{}", word(&of["family"]), word(&of["table"]), word(name))
}

/// Where the rule is, so that people find it.
fn text(rule: &Value) -> String {
    let comment = rule["comment"].as_str().map(|comment| format!(" ({comment})")).unwrap_or_default();
    format!("{} handle {}{comment}", unique(rule, &rule["chain"]), rule["handle"])
}

/// `None` if the rule is not understood. `Some(None)` if it is for connections that exist, or for the
/// loopback.
fn step(rule: &Value, sets: &Sets<'_>) -> Option<Option<Step>> {
    let mut step = Step::new(text(rule));
    for expression in rule["expr"].as_array()? {
        let (kind, value) = expression.as_object()?.iter().next()?;
        match kind.as_str() {
            "counter" | "log" => {}
            "accept" => step.action = Action::Accept,
            "drop" | "reject" => step.action = Action::Refuse,
            "return" => step.action = Action::Return,
            "jump" => step.action = Action::Jump(unique(rule, &value["target"])),
            "goto" => step.action = Action::Goto(unique(rule, &value["target"])),
            "match" => {
                if value["op"].as_str().is_some_and(|op| op != "==" && op != "in") {
                    return None;
                }
                match narrow(&mut step, &value["left"], &value["right"], rule, sets)? {
                    Narrowed::New => {}
                    Narrowed::OldConnections => return Some(None),
                }
            }
            _ => return None,
        }
    }
    Some(Some(step))
}

enum Narrowed {
    New,
    OldConnections,
}

fn narrow(step: &mut Step, left: &Value, right: &Value, rule: &Value, sets: &Sets<'_>) -> Option<Narrowed> {
    let values = values(right, rule, sets)?;
    if let Some(key) = left["meta"]["key"].as_str() {
        return match key {
            "iif" | "oif" | "iifname" | "oifname" => {
                (values.len() == 1 && values[0].as_str() == Some("lo")).then_some(Narrowed::OldConnections)
            }
            "l4proto" => match values[..] {
                [value] => keep(&mut step.protocol, protocol(value)?),
                // Several at once are those of ICMP, which need no row.
                _ => {
                    let numbers: Vec<u8> =
                        values.iter().map(|value| protocol(value)).collect::<Option<_>>()?;
                    if !numbers.iter().all(|number| matches!(number, 1 | 58)) {
                        return None;
                    }
                    keep(&mut step.protocol, *numbers.first()?)
                }
            },
            "nfproto" => keep(&mut step.ipv6, only(&values)?.as_str()? == "ipv6"),
            _ => None,
        };
    }
    if left["ct"]["key"].as_str() == Some("state") {
        let has_new = values.iter().any(|state| state.as_str() == Some("new"));
        return Some(if has_new { Narrowed::New } else { Narrowed::OldConnections });
    }
    let payload = &left["payload"];
    match (payload["protocol"].as_str()?, payload["field"].as_str()?) {
        ("ip" | "ip6", side @ ("saddr" | "daddr")) => {
            let networks: Option<Vec<Vec<IpNet>>> = values.iter().map(|value| networks(value)).collect();
            keep(&mut step.side, if side == "saddr" { Direction::Ingress } else { Direction::Egress })?;
            keep(&mut step.peers, networks?.concat())
        }
        (family @ "ip", "protocol") | (family @ "ip6", "nexthdr") => {
            keep(&mut step.ipv6, family == "ip6")?;
            keep(&mut step.protocol, protocol(only(&values)?)?)
        }
        (transport @ ("tcp" | "udp"), "dport") => {
            keep(&mut step.protocol, protocol_number(transport)?)?;
            keep(&mut step.ports, values.iter().map(|value| ports(value)).collect::<Option<PortSet>>()?)
        }
        _ => None,
    }
}

/// Keeps what a match says. `None` if an earlier one says otherwise: a step cannot hold both.
fn keep<T: PartialEq>(known: &mut Option<T>, value: T) -> Option<Narrowed> {
    let fits = known.as_ref().is_none_or(|known| *known == value);
    *known = Some(value);
    fits.then_some(Narrowed::New)
}

/// The value, if there is one alone.
fn only<'a>(values: &[&'a Value]) -> Option<&'a Value> {
    match values {
        [value] => Some(value),
        _ => None,
    }
}

/// The values of the right side: of a set, of a named set, or one.
fn values<'a>(right: &'a Value, rule: &Value, sets: &Sets<'a>) -> Option<Vec<&'a Value>> {
    if let Some(name) = right.as_str().and_then(|text| text.strip_prefix('@')) {
        return sets.get(&unique(rule, &name.into())).map(|elements| elements.iter().collect());
    }
    match right["set"].as_array().or_else(|| right.as_array()) {
        Some(elements) => Some(elements.iter().collect()),
        None => Some(vec![right]),
    }
}

fn protocol(value: &Value) -> Option<u8> {
    match value {
        Value::Number(number) => u8::try_from(number.as_u64()?).ok(),
        value => protocol_number(value.as_str()?),
    }
}

fn ports(value: &Value) -> Option<PortRange> {
    let port = |value: &Value| u16::try_from(value.as_u64()?).ok();
    match value["range"].as_array().map(Vec::as_slice) {
        Some([first, last]) => PortRange::new(port(first)?, port(last)?).ok(),
        _ => PortRange::new(port(value)?, port(value)?).ok(),
    }
}

fn networks(value: &Value) -> Option<Vec<IpNet>> {
    let address = |value: &Value| value.as_str()?.parse::<IpAddr>().ok();
    if let Some([first, last]) = value["range"].as_array().map(Vec::as_slice) {
        return match (address(first)?, address(last)?) {
            (IpAddr::V4(first), IpAddr::V4(last)) => Some(between4(first, last)),
            (IpAddr::V6(first), IpAddr::V6(last)) => Some(between6(first, last)),
            _ => None,
        };
    }
    let prefix = &value["prefix"];
    if prefix.is_object() {
        let length = u8::try_from(prefix["len"].as_u64()?).ok()?;
        return IpNet::new(address(&prefix["addr"])?, length).ok().map(|network| vec![network]);
    }
    address(value).map(|address| vec![address.into()])
}

fn between4(first: Ipv4Addr, last: Ipv4Addr) -> Vec<IpNet> {
    ipnet::Ipv4Subnets::new(first, last, 0).map(IpNet::from).collect()
}

fn between6(first: Ipv6Addr, last: Ipv6Addr) -> Vec<IpNet> {
    ipnet::Ipv6Subnets::new(first, last, 0).map(IpNet::from).collect()
}
