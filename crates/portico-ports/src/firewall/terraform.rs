//! Terraform with the provider AWS: a security group, and a resource for each of its rules.

use std::fmt::Write as _;

use super::aws::{description, protocol, quota};
use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written};

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let rules = rules.split();
    let name = rules.name().replace('-', "_");
    let mut out = format!(
        "# {}, role {}: what it needs.\n\nvariable \"vpc_id\" {{\n  type        = string\n  description = \
         \"The VPC of these machines\"\n}}\n\nresource \"aws_security_group\" \"{name}\" {{\n  name        = \
         \"portico-{}\"\n  description = \"{}, role {}\"\n  vpc_id      = var.vpc_id\n}}\n",
        rules.product.title,
        rules.words(),
        rules.name(),
        rules.product.title,
        rules.words()
    );
    let mut notes = Vec::new();
    let mut most = 0;
    for (direction, word) in [(Direction::Ingress, "ingress"), (Direction::Egress, "egress")] {
        if direction == Direction::Egress && !writing.default_deny {
            // Terraform takes the rule away that AWS adds.
            for (family, everything) in [("ipv4", "0.0.0.0/0"), ("ipv6", "::/0")] {
                let _ = write!(
                    out,
                    "\nresource \"aws_vpc_security_group_egress_rule\" \"{name}_open_{family}\" {{\n  \
                     security_group_id = aws_security_group.{name}.id\n  description       = \
                     \"Egress is open\"\n  ip_protocol       = \"-1\"\n  \
                     cidr_{family}         = \"{everything}\"\n}}\n"
                );
            }
            notes.push("egress is left open; --default-deny narrows it".to_owned());
            continue;
        }
        let mut number = 0;
        for rule in rules.of(direction) {
            resources(&mut out, rule, &name, word, &mut number);
        }
        most = most.max(number);
    }
    notes.extend(quota(most));
    Written { text: out, notes }
}

fn resources(out: &mut String, rule: &Rule, name: &str, word: &str, number: &mut usize) {
    let family = if rule.is_ipv6() { "ipv6" } else { "ipv4" };
    for peer in &rule.peers {
        for range in rule.ranges() {
            *number += 1;
            // Writing to a String cannot fail.
            let _ = write!(
                out,
                "\nresource \"aws_vpc_security_group_{word}_rule\" \"{name}_{word}_{number}\" {{\n  \
                 security_group_id = aws_security_group.{name}.id\n  description       = {:?}\n  \
                 ip_protocol       = {:?}\n",
                description(rule).replace("${", "{"),
                protocol(rule.protocol)
            );
            if let Some(range) = range {
                let (first, last) = (range.first(), range.last());
                let _ = write!(out, "  from_port         = {first}\n  to_port           = {last}\n");
            }
            let _ = write!(out, "  cidr_{family}         = \"{peer}\"\n}}\n");
        }
    }
}
