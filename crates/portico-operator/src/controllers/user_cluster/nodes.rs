//! The nodes of one user cluster, as they say of themselves: names are made harmless, and few are listed.

use std::collections::BTreeSet;
use std::time::Duration;

use portico_api::text;
use portico_expose::migration::Fact;
use portico_kube::untrusted_api::{UntrustedApi, UntrustedApiError};

/// Where they are.
pub(super) const NODES: &str = "/api/v1/nodes";

/// Lines of one answer; those of Nodes are long.
pub(super) const AT_ONCE: usize = 50;

/// Answers to one list. No cluster of Kubernetes has more nodes than that.
pub(super) const ANSWERS: usize = 100;

/// Most names in one text.
const NAMED: usize = 5;

/// Most characters of a name.
const LONGEST: usize = 80;

/// The nodes of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Nodes {
    /// The nodes that are ready.
    pub(super) ready: BTreeSet<String>,
    /// The others.
    pub(super) away: BTreeSet<String>,
}

impl Nodes {
    /// From lines of name and status, as kubectl shows them.
    pub(super) fn of(rows: Vec<[String; 2]>) -> Self {
        let mut nodes = Self::default();
        for [name, status] in rows {
            let ready = status.split(',').next() == Some("Ready");
            if ready { &mut nodes.ready } else { &mut nodes.away }.insert(name);
        }
        nodes
    }

    /// The nodes that are ready and not among `names`.
    pub(super) fn missing_among(&self, names: &BTreeSet<&str>) -> BTreeSet<&str> {
        self.ready.iter().map(|node| &**node).filter(|node| !names.contains(node)).collect()
    }

    /// What is so or not whatever there is on the nodes.
    pub(super) fn without_looking(&self) -> Option<Fact> {
        match (self.ready.len(), self.away.len()) {
            (0, 0) => Some(Fact::So),
            (0, count) => Some(Fact::NotSo(format!(
                "no node is ready, so none can prove anything ({count} are not: {}): see why, or delete the \
                 Nodes that are gone for good",
                few(&self.away)
            ))),
            _ => None,
        }
    }

    /// What is to be known of the nodes that are away, if there are any.
    pub(super) fn stay_behind(&self) -> Option<String> {
        let text = || format!("nodes that are not ready keep the old address: {}", few(&self.away));
        (!self.away.is_empty()).then(text)
    }

    /// The nodes that hold nobody up, for a text about the others.
    pub(super) fn left_out(&self) -> String {
        if self.away.is_empty() {
            return String::new();
        }
        format!("; not ready, and left out: {}", few(&self.away))
    }
}

/// The first of these names, and how many there are beside them.
pub(super) fn few(names: &BTreeSet<impl AsRef<str>>) -> String {
    text::few(names.iter(), NAMED, LONGEST)
}

/// The nodes of the cluster whose API server is `server`, or those with a label, as in a query. `Err` says
/// why they cannot be used.
pub(super) async fn list(api: &UntrustedApi, server: &str, label: Option<&str>) -> Result<Nodes, Fact> {
    let url = label.map_or(NODES.to_owned(), |label| format!("{NODES}?labelSelector={label}"));
    let found = api.rows(&url, ["Name", "Status"], AT_ONCE, ANSWERS).await;
    let found = found.map_err(|error| failed(server, &error))?;
    if found.more {
        let most = AT_ONCE * ANSWERS;
        return Err(Fact::NotSo(format!("the cluster has more than {most} nodes, and no more are read")));
    }
    Ok(Nodes::of(found.rows))
}

/// What is not so because of an answer of its API server.
pub(super) fn failed(server: &str, error: &UntrustedApiError) -> Fact {
    Fact::NotSo(format!("its API server at {server}: {error}"))
}

/// The message about an API server that a pass cannot wait for.
pub(super) fn too_slow(server: &str, limit: Duration) -> String {
    format!("its API server at {server} is too slow: {limit:?} are not enough")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(all: &[(&str, &str)]) -> Nodes {
        Nodes::of(all.iter().map(|(name, status)| [(*name).to_owned(), (*status).to_owned()]).collect())
    }

    fn three() -> Nodes {
        nodes(&[("c", "NotReady"), ("b", "Ready,SchedulingDisabled"), ("a", "Ready")])
    }

    fn why(fact: Fact) -> String {
        match fact {
            Fact::So => panic!("it holds"),
            Fact::NotSo(why) => why,
        }
    }

    #[test]
    fn a_node_is_ready_or_away_and_without_any_there_is_nothing_to_prove() {
        let nodes = three();
        assert_eq!((few(&nodes.ready), few(&nodes.away)), ("a, b".to_owned(), "c".to_owned()));
        assert_eq!(nodes.without_looking(), None);
        let behind = nodes.stay_behind().unwrap();
        assert_eq!(behind, "nodes that are not ready keep the old address: c");
        assert_eq!(Nodes::default().without_looking(), Some(Fact::So));
        assert_eq!(Nodes::default().stay_behind(), None);
        let why = why(self::nodes(&[("b", "Unknown"), ("a", "")]).without_looking().unwrap());
        assert!(why.starts_with("no node is ready") && why.contains("(2 are not: a, b)"), "{why}");
    }

    #[test]
    fn five_nodes_are_named_in_their_order_and_what_they_are_called_is_made_harmless() {
        let named: BTreeSet<String> = (0..9).rev().map(|number| format!("n{number}")).collect();
        assert_eq!(few(&named), "n0, n1, n2, n3, n4 and 4 more");
        let hostile = format!("\u{1b}[2J\n{}", "x".repeat(10_000));
        let text = few(&[hostile].into());
        assert!(!text.contains(char::is_control) && text.chars().count() == LONGEST + 1, "{text}");
    }
}
