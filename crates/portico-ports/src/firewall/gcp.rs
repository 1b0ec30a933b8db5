//! Google Cloud: VPC firewall rules, as the Compute API takes them (`firewalls.insert`), one a rule.

use portico_api::text::stable_hash;
use serde_json::{Value, json};

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written, json_text};
use crate::model::Protocol;
use crate::port_set::text;

/// Most letters of a name or tag.
const MOST_LETTERS: usize = 63;

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let role = rules.name();
    let mut resources: Vec<Value> = rules.rules.iter().map(|rule| resource(rule, &role)).collect();
    let mut notes = vec!["the rules hold for machines with the network tag of the role".to_owned()];
    if writing.default_deny {
        for (direction, ranges) in [("INGRESS", "sourceRanges"), ("EGRESS", "destinationRanges")] {
            for (family, everything) in [(4, "0.0.0.0/0"), (6, "::/0")] {
                let whole = format!("portico-{role}-{}-deny-ipv{family}", direction.to_lowercase());
                resources.push(json!({
                    "name": name(whole),
                    "network": "global/networks/default",
                    "direction": direction,
                    "priority": 65000,
                    "denied": [{"IPProtocol": "all"}],
                    ranges: [everything],
                    "targetTags": [tag(&role)],
                }));
            }
        }
    } else {
        notes.push(
            "egress is left open, as Google Cloud has it by default; --default-deny narrows it".to_owned(),
        );
    }
    notes.push("the network is `default`: write the name of yours".to_owned());
    Written { text: json_text(&Value::Array(resources)), notes }
}

fn resource(rule: &Rule, role: &str) -> Value {
    let (direction, ranges) = match rule.direction {
        Direction::Ingress => ("INGRESS", "sourceRanges"),
        Direction::Egress => ("EGRESS", "destinationRanges"),
    };
    let peers: Vec<String> = rule.peers.iter().map(ToString::to_string).collect();
    let mut allowed = json!({"IPProtocol": match rule.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::IpInIp => "4",
    }});
    if !rule.ports.is_empty() {
        allowed["ports"] = rule.ports.ranges().iter().map(|&range| text(range)).collect();
    }
    let id = rule.rows.first().map_or("", |row| row.id).replace('.', "-");
    let protocol =
        if rule.protocol == Protocol::IpInIp { "ipip" } else { super::aws::protocol(rule.protocol) };
    let family = if rule.is_ipv6() { 6 } else { 4 };
    let whole = format!("portico-{role}-{}-{id}-{protocol}-ipv{family}", direction.to_lowercase());
    json!({
        "name": name(whole),
        "description": format!("{}: {}", rule.ids(), rule.purpose()),
        "network": "global/networks/default",
        "direction": direction,
        "priority": 1000,
        "allowed": [allowed],
        ranges: peers,
        "targetTags": [tag(role)],
    })
}

fn tag(role: &str) -> String {
    name(format!("portico-{role}"))
}

/// A name that is too long is cut, and gets a hash of the whole.
fn name(whole: String) -> String {
    if whole.len() <= MOST_LETTERS {
        return whole;
    }
    let end = format!("-{:08x}", stable_hash(whole.as_bytes()));
    format!("{}{end}", whole[..MOST_LETTERS - end.len()].trim_end_matches('-'))
}
