//! Decides which nodes are moved to another address of their API server, and which are next: pure.
//!
//! A node whose turn it is has a slot until the pod on it is ready, even if the node is away by then. So a
//! kubelet that does not come back takes no other one with it.

use std::collections::BTreeSet;

use portico_expose::migration::Fact;

use super::rollout::at_work;
use crate::controllers::user_cluster::nodes::{Nodes, few};

/// How far the nodes of a cluster are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Turns<'a> {
    /// Nodes whose turn it is, and that have not moved yet.
    busy: BTreeSet<&'a str>,
    /// Nodes with a pod that waits for its turn.
    waiting: BTreeSet<&'a str>,
    /// Ready nodes that have not moved.
    missing: BTreeSet<&'a str>,
    /// How the others are named.
    left_out: String,
}

impl<'a> Turns<'a> {
    /// By the pods of this attempt, and the nodes that were given their turn.
    pub(super) fn of(pods: &'a [[String; 3]], nodes: &'a Nodes, given: &'a BTreeSet<String>) -> Self {
        let done = at_work(pods);
        let with_pod: BTreeSet<&str> = pods.iter().map(|[node, ..]| &**node).collect();
        let missing = nodes.missing_among(&done);
        let waits = |node: &&str| with_pod.contains(node) && !given.contains(*node) && is_name(node);
        let waiting = missing.iter().copied().filter(waits).collect();
        let busy = given.iter().map(|node| &**node).filter(|node| !done.contains(node)).collect();
        Self { busy, waiting, missing, left_out: nodes.left_out() }
    }

    /// The nodes whose turn it is from now on, if so many may be moved at the same time.
    pub(super) fn next(&self, parallel: usize) -> impl Iterator<Item = &'a str> {
        self.waiting.iter().take(parallel.saturating_sub(self.busy.len())).copied()
    }

    /// Whether all are done, and which are not.
    pub(super) fn fact(&self) -> Fact {
        if self.missing.is_empty() {
            return Fact::So;
        }
        let count = self.missing.len();
        let first = if self.busy.is_empty() { &self.waiting } else { &self.busy };
        let first = if first.is_empty() { &self.missing } else { first };
        Fact::NotSo(format!(
            "{count} ready nodes have not moved, it is the turn of {}; kubectl -n kube-system logs -l \
             app.kubernetes.io/name=portico-migration --prefix --all-containers says how far they are{}",
            few(first),
            self.left_out
        ))
    }
}

/// Whether a name can be that of a Node. Such a name is no more than a word of a URL.
pub(super) fn is_name(node: &str) -> bool {
    !node.is_empty() && node.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
}

/// Whether people have moved all nodes to this URL.
pub(super) fn by_hand(pods: &[[String; 3]], nodes: &Nodes, url: &str) -> Fact {
    let missing = nodes.missing_among(&at_work(pods));
    if missing.is_empty() {
        return Fact::So;
    }
    Fact::NotSo(format!(
        "kubelets must use {url}, docs/migration.md says how; {} ready nodes have something that does not: \
         {}{}",
        missing.len(),
        few(&missing),
        nodes.left_out()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(|&name| name.to_owned()).collect()
    }

    fn pods(all: &[(&str, bool)]) -> Vec<[String; 3]> {
        let pod = |&(node, ready): &(&str, bool)| match ready {
            true => [node, "1/1", "Running"].map(str::to_owned),
            false => [node, "0/1", "Init:0/1"].map(str::to_owned),
        };
        all.iter().map(pod).collect()
    }

    #[test]
    fn a_node_that_does_not_come_back_keeps_its_slot_and_no_other_one_begins() {
        let pods = pods(&[("a", true), ("b", false), ("c", false), ("d", false)]);
        let nodes = |ready: &[&str], away: &[&str]| Nodes { ready: names(ready), away: names(away) };
        let given = names(&["a", "b"]);
        let b_away = nodes(&["a", "c", "d"], &["b"]);
        let turns = Turns::of(&pods, &b_away, &given);
        assert_eq!(turns.next(1).count(), 0, "the kubelet of b is away since it was its turn");
        assert_eq!(turns.next(2).collect::<Vec<_>>(), ["c"]);
        let Fact::NotSo(why) = turns.fact() else { panic!("they have not moved") };
        assert!(why.starts_with("2 ready nodes have not moved, it is the turn of b;"), "{why}");
        // One that was away before is nobody's turn.
        let given = names(&["a"]);
        let turns = Turns::of(&pods, &b_away, &given);
        assert_eq!(turns.next(1).collect::<Vec<_>>(), ["c"]);
        let all = nodes(&["a", "e"], &[]);
        assert_eq!(Turns::of(&pods, &all, &given).next(9).count(), 0, "no pod of e waits for it");
        for hostile in ["", "../pods/x", "a?b", "a b"] {
            let pods = self::pods(&[(hostile, false)]);
            let (nodes, given) = (nodes(&[hostile], &[]), BTreeSet::new());
            let turns = Turns::of(&pods, &nodes, &given);
            assert_eq!(turns.next(9).count(), 0, "{hostile:?}");
        }
    }

    #[test]
    fn as_many_as_are_said_are_moved_at_the_same_time_and_each_gets_its_turn() {
        let cases = (1..12usize).flat_map(|count| (1..5usize).map(move |parallel| (count, parallel)));
        for (count, parallel) in cases {
            let all: Vec<String> = (0..count).map(|number| format!("n{number:02}")).collect();
            let nodes = Nodes { ready: all.iter().cloned().collect(), away: BTreeSet::new() };
            let (mut given, mut done) = (BTreeSet::new(), BTreeSet::new());
            for _ in 0..count {
                let pods: Vec<(&str, bool)> = all.iter().map(|node| (&**node, done.contains(node))).collect();
                let pods = self::pods(&pods);
                let next: Vec<_> =
                    Turns::of(&pods, &nodes, &given).next(parallel).map(str::to_owned).collect();
                given.extend(next);
                let busy: Vec<&String> = given.difference(&done).collect();
                assert!((1..=parallel).contains(&busy.len()), "{busy:?}");
                let moved = busy[0].clone();
                done.insert(moved);
            }
            assert_eq!(done.len(), count);
        }
    }
}
