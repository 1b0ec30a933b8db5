//! iptables: one file of rules for both families, and a script that loads it any number of times.

use std::fmt::Write as _;

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written, forwarded};
use crate::model::Protocol;

/// Most ports that the module multiport takes; a range counts twice.
const MOST_PORTS: usize = 15;

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let name = chain(rules);
    let mut out = format!(
        "#!/bin/sh\n# {}, role {}: what it needs. Run as root; a second run replaces the first.\n",
        rules.product.title,
        rules.words()
    );
    out.push_str("set -eu\nrules() {\n  cat <<'RULES'\n*filter\n");
    let chains = [("IN", Direction::Ingress), ("OUT", Direction::Egress)];
    for (end, _) in chains {
        let _ = writeln!(out, ":PORTICO-{name}-{end} - [0:0]");
    }
    for (end, direction) in chains {
        let chain = format!("PORTICO-{name}-{end}");
        let interface = if direction == Direction::Ingress { "-i" } else { "-o" };
        let _ = writeln!(out, "-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT");
        let _ = writeln!(out, "-A {chain} {interface} lo -j ACCEPT");
        if writing.default_deny {
            let _ = writeln!(out, "-A {chain} -4 -p icmp -j ACCEPT\n-A {chain} -6 -p ipv6-icmp -j ACCEPT");
        }
        for rule in rules.of(direction) {
            lines(&mut out, &chain, rule);
        }
        if writing.default_deny {
            let _ = writeln!(out, "-A {chain} -j DROP");
        }
    }
    out.push_str("COMMIT\nRULES\n}\n");
    out.push_str("# Of the lines with -4 and -6 each program takes its own.\n");
    out.push_str("for program in iptables ip6tables; do\n  rules | \"$program-restore\" --noflush\n");
    for (chain, end) in [("INPUT", "IN"), ("OUTPUT", "OUT")] {
        let jump = format!("{chain} -j PORTICO-{name}-{end}");
        let _ = writeln!(out, "  \"$program\" -w -C {jump} 2>/dev/null || \"$program\" -w -I {jump}");
    }
    out.push_str("done\n");
    Written { text: out, notes: forwarded(writing) }
}

/// The roles in the name of a chain, which has 28 letters at most: of many roles the first, or its beginning.
fn chain(rules: &Ruleset) -> String {
    const MOST: usize = 28 - "PORTICO--OUT".len();
    const ETC: &str = "-ETC";
    let name = rules.name().to_uppercase();
    match rules.roles.first() {
        Some(first) if name.len() > MOST => {
            first.key.to_uppercase().chars().take(MOST - ETC.len()).chain(ETC.chars()).collect()
        }
        _ => name,
    }
}

fn lines(out: &mut String, chain: &str, rule: &Rule) {
    let family = if rule.is_ipv6() { "-6" } else { "-4" };
    let side = if rule.direction == Direction::Ingress { "-s" } else { "-d" };
    let protocol = match rule.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::IpInIp => "4",
    };
    for peer in &rule.peers {
        for ports in chunks(rule) {
            let ports = if ports.is_empty() {
                String::new()
            } else {
                format!(" -m multiport --dports {}", ports.join(","))
            };
            let comment = format!("-m comment --comment \"{}\"", rule.ids());
            // Writing to a String cannot fail.
            let _ =
                writeln!(out, "-A {chain} {family} {side} {peer} -p {protocol}{ports} {comment} -j ACCEPT");
        }
    }
}

/// The ports in as few lists as multiport takes; one empty list for IP-in-IP.
fn chunks(rule: &Rule) -> Vec<Vec<String>> {
    let mut chunks = vec![Vec::new()];
    let mut room = MOST_PORTS;
    for range in rule.ports.ranges() {
        let (text, cost) = match range.size() {
            1 => (range.first().to_string(), 1),
            _ => (format!("{}:{}", range.first(), range.last()), 2),
        };
        if cost > room {
            chunks.push(Vec::new());
            room = MOST_PORTS;
        }
        room -= cost;
        if let Some(chunk) = chunks.last_mut() {
            chunk.push(text);
        }
    }
    chunks
}
