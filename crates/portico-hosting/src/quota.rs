//! How many clusters a seed hosts at most, and which of those that ask get a control plane.

use portico_api::annotations::MAX_HOSTED;
use portico_api::cluster::Cluster;

/// Whether the control plane of `new`, which is not begun, may be begun on a seed that hosts at most `limit`
/// clusters. The clusters that are `begun` count, and are kept whatever the quota is. The `others` are begun
/// in the order of their age, then of their names. A cluster that is paused, ends, or cannot be hosted as it
/// is written (`usable`) takes no turn.
pub fn admits<'a>(
    limit: usize,
    new: &Cluster,
    begun: usize,
    others: impl IntoIterator<Item = &'a Cluster>,
    usable: impl Fn(&Cluster) -> bool,
) -> bool {
    let waits = |cluster: &Cluster| {
        cluster.has_layout() && !cluster.spec.pause && cluster.metadata.deletion_timestamp.is_none()
    };
    let before = |cluster: &&Cluster| {
        *cluster.metadata.name != *new.metadata.name
            && waits(cluster)
            && rank(cluster) < rank(new)
            && usable(cluster)
    };
    let room = limit.saturating_sub(begun);
    // Without room nobody is judged: thousands may wait.
    others.into_iter().filter(before).take(room).count() < room
}

fn rank(cluster: &Cluster) -> impl Ord + '_ {
    (cluster.metadata.creation_timestamp, &*cluster.metadata.name)
}

/// Why a Cluster has to wait.
pub fn exceeded(seed: &str, limit: usize) -> String {
    format!(
        "Seed {seed} hosts as many clusters as its annotation {MAX_HOSTED} allows, {limit}; this one is made \
         once there is room: raise the number, or delete a Cluster that nobody needs"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cluster(name: &str, second: u8) -> Cluster {
        let text = json!({"metadata": {"name": name, "annotations": {"portico.k8c.io/layout": "compact"},
            "creationTimestamp": format!("2026-01-01T00:00:0{second}Z")}});
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn what_has_begun_counts_and_among_new_ones_the_older_goes_first() {
        let all = [cluster("c", 1), cluster("a", 2), cluster("b", 2)];
        let admitted = |limit, begun: &[&str]| -> Vec<&str> {
            let new = all.iter().filter(|cluster| !begun.contains(&&*cluster.metadata.name));
            let admitted =
                new.clone().filter(|cluster| admits(limit, cluster, begun.len(), new.clone(), |_| true));
            admitted.map(|cluster| &*cluster.metadata.name).collect()
        };
        assert_eq!(admitted(0, &[]), [""; 0]);
        assert_eq!(admitted(2, &[]), ["c", "a"]);
        assert_eq!(admitted(2, &["b"]), ["c"]);
        // The quota was lowered.
        assert_eq!(admitted(1, &["a", "b"]), [""; 0]);
        assert_eq!(admitted(3, &["a", "b"]), ["c"]);
    }

    #[test]
    fn what_is_paused_ends_is_not_hosted_or_cannot_be_takes_no_room() {
        let new = cluster("z", 9);
        let mut others = [cluster("a", 1), cluster("b", 1), cluster("c", 1), cluster("d", 1)];
        others[0].spec.pause = true;
        others[1].metadata.deletion_timestamp = others[1].metadata.creation_timestamp;
        others[2].metadata.annotations = Default::default();
        let usable = |cluster: &Cluster| *cluster.metadata.name != *"d";
        assert!(admits(1, &new, 0, &others, usable));
        assert!(!admits(1, &new, 0, &others, |_| true) && admits(2, &new, 0, &others, |_| true));
    }

    #[test]
    fn without_room_no_other_is_judged() {
        let (new, other) = (cluster("z", 9), cluster("a", 1));
        assert!(!admits(3, &new, 3, [&other], |_| panic!("it was judged")));
    }
}
