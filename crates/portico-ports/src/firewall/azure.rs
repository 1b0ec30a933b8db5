//! Azure: an ARM template with one network security group.

use serde_json::{Value, json};

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written, json_text};
use crate::model::Protocol;
use crate::port_set::text;

/// The first priority; each rule needs one of its own.
const FIRST_PRIORITY: usize = 100;

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let mut notes = Vec::new();
    let mut entries = Vec::new();
    for direction in [Direction::Ingress, Direction::Egress] {
        for (number, rule) in rules.of(direction).enumerate() {
            if rule.protocol == Protocol::IpInIp {
                notes.push(format!(
                    "{}: Azure carries no IP-in-IP, and no rule can allow it; use VXLAN there",
                    rule.ids()
                ));
            } else {
                entries.push(entry(rule, FIRST_PRIORITY + number));
            }
        }
    }
    if writing.default_deny {
        let allow_probes = json!({
            "name": "in-load-balancer-probes",
            "properties": {
                "priority": 4095, "direction": "Inbound", "access": "Allow", "protocol": "*",
                "sourceAddressPrefix": "AzureLoadBalancer", "sourcePortRange": "*",
                "destinationAddressPrefix": "*", "destinationPortRange": "*",
            },
        });
        entries.extend([allow_probes, deny("in", "Inbound"), deny("out", "Outbound")]);
    } else {
        notes.push(
            "what is in the same virtual network, and egress, stay open as Azure has them by default; \
             --default-deny narrows them"
                .to_owned(),
        );
    }
    let template = json!({
        "$schema": "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#",
        "contentVersion": "1.0.0.0",
        "resources": [{
            "type": "Microsoft.Network/networkSecurityGroups",
            "apiVersion": "2024-05-01",
            "name": format!("portico-{}", rules.name()),
            "location": "[resourceGroup().location]",
            "properties": {"securityRules": entries},
        }],
    });
    Written { text: json_text(&template), notes }
}

fn entry(rule: &Rule, priority: usize) -> Value {
    let (short, direction, own, other) = match rule.direction {
        Direction::Ingress => ("in", "Inbound", "destinationAddressPrefix", "sourceAddressPrefixes"),
        Direction::Egress => ("out", "Outbound", "sourceAddressPrefix", "destinationAddressPrefixes"),
    };
    let ports: Vec<String> = rule.ports.ranges().iter().map(|&range| text(range)).collect();
    let peers: Vec<String> = rule.peers.iter().map(ToString::to_string).collect();
    let (id, family) = (rule.rows.first().map_or("", |row| row.id), if rule.is_ipv6() { 6 } else { 4 });
    let protocol = if rule.protocol == Protocol::Udp { "Udp" } else { "Tcp" };
    let description: String = format!("{}: {}", rule.ids(), rule.purpose()).chars().take(140).collect();
    json!({
        "name": format!("{short}-{id}-{}-ipv{family}", protocol.to_lowercase()),
        "properties": {
            "description": description,
            "priority": priority,
            "direction": direction,
            "access": "Allow",
            "protocol": protocol,
            "sourcePortRange": "*",
            own: "*",
            other: peers,
            "destinationPortRanges": ports,
        },
    })
}

fn deny(short: &str, direction: &str) -> Value {
    json!({
        "name": format!("{short}-everything-else"),
        "properties": {
            "priority": 4096, "direction": direction, "access": "Deny", "protocol": "*",
            "sourceAddressPrefix": "*", "sourcePortRange": "*",
            "destinationAddressPrefix": "*", "destinationPortRange": "*",
        },
    })
}
