//! nftables: a table of its own, which a second load replaces as a whole.

use std::fmt::Write as _;

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written, forwarded};
use crate::model::Protocol;
use crate::port_set::text;

/// Where administrators put what they allow besides, a rule a line. No file is no error.
const OWN_RULES: &str = "/etc/portico/nftables";

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let table = format!("portico_{}", rules.name().replace('-', "_"));
    let mut out = format!(
        "# {}, role {}: what it needs. Load with `nft -f FILE`; a second load replaces the first.\n",
        rules.product.title,
        rules.words()
    );
    let policy = if writing.default_deny { "drop" } else { "accept" };
    if !writing.default_deny {
        out.push_str("# Nothing is refused here. An accept does not undo a drop in another table.\n");
    }
    let _ = writeln!(out, "table inet {table}\ndelete table inet {table}\ntable inet {table} {{");
    for (chain, direction) in [("input", Direction::Ingress), ("output", Direction::Egress)] {
        let interface = if direction == Direction::Ingress { "iif" } else { "oif" };
        let _ = writeln!(out, "  chain {chain} {{");
        let _ = writeln!(out, "    type filter hook {chain} priority filter; policy {policy};");
        let _ = writeln!(out, "    ct state established,related accept");
        let _ = writeln!(out, "    {interface} \"lo\" accept");
        if writing.default_deny {
            // Path MTU, neighbours of IPv6: without them what is allowed does not work.
            let _ = writeln!(out, "    meta l4proto {{ icmp, ipv6-icmp }} accept");
        }
        for rule in rules.of(direction) {
            let _ = writeln!(out, "    {}", line(rule));
        }
        if writing.default_deny {
            // A drop is final whatever other tables accept, so what else is allowed must be in this chain.
            let _ = writeln!(out, "    include \"{OWN_RULES}/{}-{chain}*.nft\"", rules.name());
        }
        out.push_str("  }\n");
    }
    out.push_str("}\n");
    Written { text: out, notes: forwarded(writing) }
}

fn line(rule: &Rule) -> String {
    let family = if rule.is_ipv6() { "ip6" } else { "ip" };
    let side = if rule.direction == Direction::Ingress { "saddr" } else { "daddr" };
    let peers: Vec<String> = rule.peers.iter().map(ToString::to_string).collect();
    let ports: Vec<String> = rule.ports.ranges().iter().map(|&range| text(range)).collect();
    let matches = match rule.protocol {
        Protocol::Tcp => format!("tcp dport {{ {} }}", ports.join(", ")),
        Protocol::Udp => format!("udp dport {{ {} }}", ports.join(", ")),
        Protocol::IpInIp => "meta l4proto 4".to_owned(),
    };
    format!("{family} {side} {{ {} }} {matches} accept comment \"{}\"", peers.join(", "), rule.ids())
}
