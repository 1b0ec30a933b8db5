//! AWS: a CloudFormation template with one security group.

use serde_json::{Value, json};

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{Writing, Written, json_text};
use crate::model::Protocol;

/// Rules a security group may have in each direction and family, unless the quota was raised.
pub(super) const QUOTA: usize = 60;

pub(super) fn write(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let rules = rules.split();
    let entries = |direction| rules.of(direction).flat_map(entries).collect::<Vec<Value>>();
    let (ingress, mut egress) = (entries(Direction::Ingress), entries(Direction::Egress));
    let mut notes = quota(ingress.len().max(egress.len()));
    let mut properties = json!({
        "GroupDescription": format!("{}, role {}", rules.product.title, rules.words()),
        "VpcId": {"Ref": "VpcId"},
        "SecurityGroupIngress": ingress,
    });
    if writing.default_deny {
        if egress.is_empty() {
            // Without any, AWS adds one that allows everything.
            egress.push(json!({"IpProtocol": "-1", "CidrIp": "127.0.0.1/32", "Description": "nothing"}));
        }
        properties["SecurityGroupEgress"] = egress.into();
    } else {
        notes.push("egress is left open, as AWS has it by default; --default-deny narrows it".to_owned());
    }
    let template = json!({
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": format!("Portico: what the role {} of {} needs", rules.words(), rules.product.key),
        "Parameters": {"VpcId": {"Type": "AWS::EC2::VPC::Id", "Description": "The VPC of these machines"}},
        "Resources": {
            "SecurityGroup": {"Type": "AWS::EC2::SecurityGroup", "Properties": properties},
        },
        "Outputs": {"SecurityGroupId": {"Value": {"Fn::GetAtt": ["SecurityGroup", "GroupId"]}}},
    });
    Written { text: json_text(&template), notes }
}

pub(super) fn quota(entries: usize) -> Vec<String> {
    if entries <= QUOTA {
        return Vec::new();
    }
    vec![format!(
        "{entries} entries are more than the {QUOTA} that a security group has by default: raise the quota, \
         or name networks instead of addresses in the inventory"
    )]
}

/// One entry for each network and range.
fn entries(rule: &Rule) -> Vec<Value> {
    let mut entries = Vec::new();
    for peer in &rule.peers {
        for range in rule.ranges() {
            let mut entry = json!({
                "IpProtocol": protocol(rule.protocol),
                "Description": description(rule),
            });
            entry[if rule.is_ipv6() { "CidrIpv6" } else { "CidrIp" }] = peer.to_string().into();
            if let Some(range) = range {
                entry["FromPort"] = range.first().into();
                entry["ToPort"] = range.last().into();
            }
            entries.push(entry);
        }
    }
    entries
}

pub(super) fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::IpInIp => "4",
    }
}

/// Ids and purpose in the characters that AWS allows in a description.
pub(super) fn description(rule: &Rule) -> String {
    let text = format!("{}: {}", rule.ids(), rule.purpose());
    let legal = |letter: &char| letter.is_ascii_alphanumeric() || " ._-:/()#,@[]+=&;{}!$*".contains(*letter);
    text.chars().filter(legal).take(255).collect()
}
