//! A ticket: plain text that a firewall team can act on without knowing the product.

use std::fmt::Write as _;

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written};
use crate::model::Protocol;
use crate::port_set::text;

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let names: Vec<&str> = rules.roles.iter().map(|role| *role.names.first().unwrap_or(&role.key)).collect();
    let meanings: Vec<&str> = rules.roles.iter().map(|role| role.meaning).collect();
    let own: Vec<String> = rules.own.networks.iter().map(ToString::to_string).collect();
    let own = if own.is_empty() {
        "(these machines; the inventory does not name them)".to_owned()
    } else {
        own.join("\n           ")
    };
    let mut out = format!(
        "Firewall request: {}, {}\n\nWhat:      {}\nAddresses: {own}\n\nPlease allow the connections below. \
         They are stateful: answers to them must pass too.\n",
        rules.product.title,
        names.join(" and "),
        meanings.join("\n           ")
    );
    out.push_str("ICMP and ICMPv6 errors must pass in both directions (path MTU discovery).\n");
    if writing.default_deny {
        out.push_str("Everything else from and to these addresses may be refused.\n");
    }
    for (number, rule) in rules.rules.iter().enumerate() {
        let _ = writeln!(out, "\n{}. {}", number + 1, sentence(rule));
        let peers: Vec<String> = rule.peers.iter().map(ToString::to_string).collect();
        let (from, to) = match rule.direction {
            Direction::Ingress => (peers.join(", "), "the addresses above".to_owned()),
            Direction::Egress => ("the addresses above".to_owned(), peers.join(", ")),
        };
        let _ = writeln!(out, "   From:      {from}\n   To:        {to}\n   Service:   {}", service(rule));
        let _ = writeln!(out, "   Reason:    {}", rule.purpose());
        let sources: Vec<String> =
            rule.rows.iter().map(|row| format!("{} ({})", row.reference, row.id)).collect();
        let _ = writeln!(out, "   Reference: {}", sources.join("; "));
    }
    let _ = write!(
        out,
        "\nTo check: run `portico preflight --role {}` with the same inventory on one of the machines.\n",
        rules.words()
    );
    Written { text: out, notes: Vec::new() }
}

fn sentence(rule: &Rule) -> String {
    match rule.direction {
        Direction::Ingress => format!("{} connect to these machines", rule.peer_role),
        Direction::Egress => format!("These machines connect to {}", rule.peer_role),
    }
}

fn service(rule: &Rule) -> String {
    let ports: Vec<String> = rule.ports.ranges().iter().map(|&range| text(range)).collect();
    match rule.protocol {
        Protocol::IpInIp => "IP protocol 4 (IP-in-IP); it has no ports".to_owned(),
        protocol => format!("{protocol}, destination port {}, any source port", ports.join(", ")),
    }
}
