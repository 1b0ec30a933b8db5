//! OpenStack: a script of `openstack security group` commands.

use std::fmt::Write as _;

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written};
use crate::model::Protocol;

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let rules = rules.split();
    let group = format!("portico-{}", rules.name());
    let mut out =
        format!("#!/bin/sh\n# {}, role {}: what it needs.\nset -eu\n", rules.product.title, rules.words());
    let _ = writeln!(out, "openstack security group create --stateful '{group}'");
    let mut notes = Vec::new();
    if writing.default_deny {
        out.push_str("# A new group lets everything out.\n");
        let _ = writeln!(
            out,
            "openstack security group rule list --egress -f value -c ID '{group}' |\n  xargs -r openstack \
             security group rule delete"
        );
    } else {
        notes.push(
            "egress is left open, as OpenStack has it by default; --default-deny narrows it".to_owned(),
        );
    }
    for rule in &rules.rules {
        if rule.direction == Direction::Ingress || writing.default_deny {
            commands(&mut out, rule, &group);
        }
    }
    Written { text: out, notes }
}

fn commands(out: &mut String, rule: &Rule, group: &str) {
    let direction = if rule.direction == Direction::Ingress { "--ingress" } else { "--egress" };
    let family = if rule.is_ipv6() { "IPv6" } else { "IPv4" };
    let protocol = match rule.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::IpInIp => "4",
    };
    for peer in &rule.peers {
        for range in rule.ranges() {
            let ports = range
                .map_or_else(String::new, |range| format!(" --dst-port {}:{}", range.first(), range.last()));
            // Writing to a String cannot fail.
            let _ = writeln!(
                out,
                "openstack security group rule create {direction} --ethertype {family} --protocol {protocol}\
                 {ports} --remote-ip {peer} --description '{}' '{group}'",
                rule.ids()
            );
        }
    }
}
