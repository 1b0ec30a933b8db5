//! `aws ec2 describe-security-groups`: what is not named is refused.

use ipnet::IpNet;
use portico_api::port_range::PortRange;
use serde_json::Value;

use super::chains::{Action, Hook, InForce, Step, protocol_number};
use crate::firewall::Direction;
use crate::port_set::PortSet;

pub(super) fn read(groups: &[Value]) -> InForce {
    let mut read = InForce::default();
    for (direction, chain, key) in [
        (Direction::Ingress, "ingress", "IpPermissions"),
        (Direction::Egress, "egress", "IpPermissionsEgress"),
    ] {
        read.hooks.push(Hook { direction, ipv6: None, chain: chain.to_owned(), accepts: false });
        let mut steps = Vec::new();
        for group in groups {
            for permission in group[key].as_array().into_iter().flatten() {
                let group = group["GroupId"].as_str().unwrap_or_default();
                let step = step(permission, group);
                if step.is_none() || names_others(permission) {
                    read.not_judged.push(format!("{group}: {permission}"));
                }
                steps.extend(step);
            }
        }
        read.chains.insert(chain.to_owned(), steps);
    }
    read
}

/// Whether it allows other groups or prefix lists, whose addresses are not known.
fn names_others(permission: &Value) -> bool {
    let names = |key: &str| permission[key].as_array().is_some_and(|others| !others.is_empty());
    names("UserIdGroupPairs") || names("PrefixListIds")
}

/// What its ranges allow. AWS puts them into one permission with the groups of the same ports.
fn step(permission: &Value, group: &str) -> Option<Step> {
    let list = |key: &str| permission[key].as_array().cloned().unwrap_or_default();
    let addresses = |key: &str, field: &str| -> Option<Vec<IpNet>> {
        list(key).iter().map(|range| range[field].as_str()?.parse().ok()).collect()
    };
    let mut peers = addresses("IpRanges", "CidrIp")?;
    peers.extend(addresses("Ipv6Ranges", "CidrIpv6")?);
    let word = permission["IpProtocol"].as_str()?;
    let protocol = if word == "-1" { None } else { Some(protocol_number(word)?) };
    let port = |key: &str| permission[key].as_i64().and_then(|port| u16::try_from(port).ok());
    let ports = match (protocol, port("FromPort"), port("ToPort")) {
        (Some(6 | 17), Some(first), Some(last)) => Some(all_or(first, last)?),
        _ => None,
    };
    let from = permission["FromPort"].as_i64().map(|port| format!(" {port}")).unwrap_or_default();
    let to = permission["ToPort"].as_i64().map(|port| format!("-{port}")).unwrap_or_default();
    let mut step = Step::new(format!("{group}: {word}{from}{to}"));
    (step.peers, step.protocol, step.ports, step.action) = (Some(peers), protocol, ports, Action::Accept);
    Some(step)
}

/// Ports from 0 are all ports from 1.
fn all_or(first: u16, last: u16) -> Option<PortSet> {
    Some(PortRange::new(first.max(1), last).ok()?).map(|range| PortSet::from_iter([range]))
}
