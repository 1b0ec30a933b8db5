//! Which nodes a round looks at, and what it says about this one: pure functions.

use std::collections::BTreeMap;
use std::net::IpAddr;

use portico_api::names::MESH_CONDITION;
use portico_operator::mesh::{Members, NodeVerdict};
use portico_preflight::verdict::{Finding, Status};

/// Flows that the message names; `/status` has all.
const MOST_NAMED: usize = 3;

/// Returns the ready members that a round checks: the next ones after those of the round before, in a ring of
/// names that begins at this node. So each round spreads over all nodes, and every pair has its turn.
pub(super) fn some(
    members: &Members,
    node: &str,
    round: usize,
    most: usize,
) -> BTreeMap<String, Vec<IpAddr>> {
    let (before, after): (Vec<_>, Vec<_>) = members
        .iter()
        .filter(|(name, member)| member.is_ready && *name != node)
        .partition(|(name, _)| name.as_str() < node);
    let ring: Vec<_> = after.into_iter().chain(before).collect();
    let first = (round * most).checked_rem(ring.len()).unwrap_or(0);
    let chosen = ring.iter().cycle().skip(first).take(most.min(ring.len()));
    chosen.map(|(name, member)| ((*name).clone(), member.addresses.clone())).collect()
}

/// What the findings of a round say about this node.
pub(super) fn of(findings: &[Finding], peers: &BTreeMap<String, Vec<IpAddr>>) -> NodeVerdict {
    let verdict = |holds, reason, message| NodeVerdict { kind: MESH_CONDITION, holds, reason, message };
    let failed: Vec<&Finding> = findings.iter().filter(|finding| finding.status == Status::Failed).collect();
    if peers.is_empty() {
        return verdict(None, "NoPeers", "no other node has a member of the mesh that is ready".to_owned());
    }
    if failed.is_empty() {
        let passed = findings.iter().filter(|finding| finding.status == Status::Passed).count();
        let message = format!("{passed} checks towards {} nodes passed", peers.len());
        return verdict(Some(true), "FlowsWork", message);
    }
    let named: Vec<String> = failed.iter().take(MOST_NAMED).map(|finding| sentence(finding, peers)).collect();
    let more = match failed.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        more => format!("; and {more} more, see /status"),
    };
    verdict(Some(false), "FlowsFail", named.join("; ") + &more)
}

fn sentence(finding: &Finding, peers: &BTreeMap<String, Vec<IpAddr>>) -> String {
    let node = node(finding, peers).unwrap_or("?");
    let opens = finding.transport.map(|transport| format!(" {transport}")).unwrap_or_default();
    let remedy = finding.remedy.as_ref().map(|remedy| format!(" ({}: {})", remedy.who, remedy.what));
    let Finding { row, check, seen, .. } = finding;
    format!("{} {check}{opens} to {node}: {seen}{}", row.id, remedy.unwrap_or_default())
}

/// The node that a finding is about.
pub(super) fn node<'a>(finding: &Finding, peers: &'a BTreeMap<String, Vec<IpAddr>>) -> Option<&'a str> {
    let address: IpAddr = finding.to.parse().ok()?;
    peers.iter().find(|(_, addresses)| addresses.contains(&address)).map(|(name, _)| name.as_str())
}

#[cfg(test)]
mod tests {
    use portico_operator::mesh::Member;

    use super::*;

    fn members(count: usize) -> Members {
        let member = |number: usize| {
            let addresses = vec![IpAddr::from([10, 0, 0, number as u8])];
            (format!("node-{number}"), Member { addresses, is_ready: number != 3 })
        };
        (0..count).map(member).collect()
    }

    #[test]
    fn every_ready_node_but_this_one_has_its_turn_within_few_rounds() {
        let members = members(8);
        let names = |round| some(&members, "node-2", round, 4).into_keys().collect::<Vec<_>>();
        assert_eq!(names(0), ["node-4", "node-5", "node-6", "node-7"]);
        assert_eq!(names(1), ["node-0", "node-1", "node-4", "node-5"]);
        assert_eq!(some(&members, "node-2", 7, 50).len(), 6);
        assert!(some(&Members::new(), "node-2", 1, 4).is_empty());
    }
}
