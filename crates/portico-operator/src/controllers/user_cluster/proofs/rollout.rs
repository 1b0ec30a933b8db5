//! The reports of nodes and workloads about themselves, as facts: pure. All of it comes from a user cluster,
//! so names are made harmless and few of them are listed.

use std::collections::BTreeSet;

use portico_expose::migration::Fact;
use portico_expose::user_cluster::Id;
use serde_json::Value;

use crate::controllers::user_cluster::nodes::{Nodes, few};

/// Where the controller of DaemonSets counts the changes of the pods' template. Pods have the number as a
/// label.
const TEMPLATE: &str = "/metadata/annotations/deprecated.daemonset.template.generation";

/// How far a DaemonSet is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rollout {
    /// Its own count tells.
    Known(Fact),
    /// Its pods tell, with this number on them.
    ByPods(u64),
}

/// How far a DaemonSet is, by its own count.
pub(super) fn of_daemon_set(id: &Id, object: Option<&Value>, nodes: &Nodes) -> Rollout {
    let object = match present(id, object) {
        Ok(object) => object,
        Err(why) => return Rollout::Known(Fact::NotSo(why)),
    };
    let [wanted, updated, ready] = ["desiredNumberScheduled", "updatedNumberScheduled", "numberReady"]
        .map(|field| object["status"][field].as_u64().unwrap_or_default());
    let enough = wanted >= nodes.ready.len() as u64;
    if enough && updated == wanted && ready == wanted {
        return Rollout::Known(Fact::So);
    }
    // Nodes that are away keep pods of a former generation, which count against it.
    let number = object.pointer(TEMPLATE).and_then(Value::as_str).and_then(|number| number.parse().ok());
    number.map_or_else(
        || {
            let text = format!("{id}: of {wanted} pods {updated} are as it says now, and {ready} are ready");
            Rollout::Known(Fact::NotSo(text + &nodes.left_out()))
        },
        Rollout::ByPods,
    )
}

/// How far a DaemonSet is, by lines of node, ready containers and status of its pods.
pub(super) fn of_pods(id: &Id, label: &str, rows: &[[String; 3]], nodes: &Nodes) -> Fact {
    let missing = nodes.missing_among(&at_work(rows));
    if missing.is_empty() {
        return Fact::So;
    }
    Fact::NotSo(format!(
        "{id} has no ready pod on {} of {} ready nodes: {}; kubectl -n kube-system describe pods -l \
         {label}={} says why{}",
        missing.len(),
        nodes.ready.len(),
        few(&missing),
        id.name,
        nodes.left_out()
    ))
}

/// The nodes of those pods that are ready.
pub(super) fn at_work(rows: &[[String; 3]]) -> BTreeSet<&str> {
    let works = |ready: &str, status: &str| {
        status == "Running" && ready.split_once('/').is_some_and(|(ready, all)| ready == all && all != "0")
    };
    let works = rows.iter().filter(|[_, ready, status]| works(ready, status));
    works.map(|[node, ..]| &**node).collect()
}

/// Whether all pods of a Deployment are as it says, and available.
pub(super) fn of_deployment(id: &Id, object: Option<&Value>, nodes: &Nodes) -> Fact {
    let object = match present(id, object) {
        Ok(object) => object,
        Err(why) => return Fact::NotSo(why),
    };
    let wanted = object["spec"]["replicas"].as_u64().unwrap_or(1);
    let [all, updated, available] = ["replicas", "updatedReplicas", "availableReplicas"]
        .map(|field| object["status"][field].as_u64().unwrap_or_default());
    if all == wanted && updated == wanted && available == wanted {
        return Fact::So;
    }
    Fact::NotSo(format!(
        "{id}: of {wanted} pods {updated} are as it says now, and {available} are available; kubectl -n \
         kube-system describe pods -l app.kubernetes.io/name={} says why{}",
        id.name,
        nodes.left_out()
    ))
}

/// The workload, if it is there and its controller has seen it as it is now.
fn present<'a>(id: &Id, object: Option<&'a Value>) -> Result<&'a Value, String> {
    let object = object.ok_or_else(|| format!("there is no {id} yet"))?;
    let now = object["metadata"]["generation"].as_u64();
    let seen = object["status"]["observedGeneration"].as_u64();
    if now.is_some() && seen >= now {
        return Ok(object);
    }
    Err(format!("no controller has seen {id} as it is now: see whether a kube-controller-manager runs"))
}

#[cfg(test)]
mod tests {
    use portico_expose::user_cluster::{KONNECTIVITY_AGENT, NODE_PROBE, POD_LABEL};
    use serde_json::json;

    use super::*;

    fn three() -> Nodes {
        let all = [("c", "NotReady"), ("b", "Ready,SchedulingDisabled"), ("a", "Ready")];
        Nodes::of(all.map(|(name, status)| [name.to_owned(), status.to_owned()]).to_vec())
    }

    fn why(fact: Fact) -> String {
        match fact {
            Fact::So => panic!("it holds"),
            Fact::NotSo(why) => why,
        }
    }

    fn daemon_set(status: Value) -> Value {
        json!({"metadata": {"generation": 2,
                "annotations": {"deprecated.daemonset.template.generation": "2"}},
            "status": status})
    }

    #[test]
    fn a_daemon_set_tells_by_its_count_if_all_is_well_and_its_pods_tell_otherwise() {
        let count = |seen: u64, wanted: u64, updated: u64, ready: u64| {
            daemon_set(json!({"observedGeneration": seen, "desiredNumberScheduled": wanted,
                "updatedNumberScheduled": updated, "numberReady": ready}))
        };
        let of = |object: &Value| of_daemon_set(&NODE_PROBE, Some(object), &three());
        assert_eq!(of(&count(2, 3, 3, 3)), Rollout::Known(Fact::So));
        assert_eq!(of(&count(2, 3, 2, 3)), Rollout::ByPods(2), "one is of a former generation");
        assert_eq!(of(&count(2, 3, 3, 2)), Rollout::ByPods(2));
        assert_eq!(of(&count(2, 1, 1, 1)), Rollout::ByPods(2), "there are more nodes by now");
        let unseen = format!("{:?}", of(&count(1, 3, 3, 3)));
        assert!(
            unseen.contains("no controller has seen DaemonSet kube-system/portico-migration"),
            "{unseen}"
        );
        for nothing in [None, Some(&json!({})), Some(&json!([])), Some(&json!({"status": 7}))] {
            let rollout = of_daemon_set(&NODE_PROBE, nothing, &three());
            assert!(matches!(rollout, Rollout::Known(Fact::NotSo(_))), "{nothing:?}");
        }
        let mut no_number = count(2, 3, 3, 2);
        no_number["metadata"]["annotations"].take();
        let text = format!("{:?}", of(&no_number));
        assert!(
            text.contains("of 3 pods 3 are as it says now, and 2 are ready") && text.contains("c"),
            "{text}"
        );
    }

    #[test]
    fn each_ready_node_must_have_a_ready_pod_and_others_are_named_only_if_one_has_not() {
        let of = |rows: &[[&str; 3]]| {
            let rows: Vec<[String; 3]> = rows.iter().map(|row| row.map(str::to_owned)).collect();
            of_pods(&NODE_PROBE, POD_LABEL, &rows, &three())
        };
        let a = ["a", "1/1", "Running"];
        assert_eq!(of(&[a, ["b", "1/1", "Running"]]), Fact::So);
        for bad in
            [["b", "0/1", "Running"], ["b", "1/1", "Terminating"], ["c", "1/1", "Running"], ["", "", ""]]
        {
            let why = why(of(&[a, bad]));
            assert!(why.contains("no ready pod on 1 of 2 ready nodes: b;"), "{why}");
            assert!(why.ends_with("; not ready, and left out: c"), "{why}");
        }
    }

    #[test]
    fn a_deployment_is_rolled_out_once_no_other_pod_is_left_and_all_are_available() {
        let of = |all: u64, updated: u64, available: u64| {
            let status = json!({"observedGeneration": 3, "replicas": all, "updatedReplicas": updated,
                "availableReplicas": available});
            let object = json!({"metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": status});
            of_deployment(&KONNECTIVITY_AGENT, Some(&object), &three())
        };
        assert_eq!(of(2, 2, 2), Fact::So);
        for (all, updated, available) in [(3, 2, 2), (2, 1, 2), (2, 2, 1), (0, 0, 0)] {
            let why = why(of(all, updated, available));
            assert!(why.contains(&format!("of 2 pods {updated}")) && why.contains("left out: c"), "{why}");
        }
        assert!(
            why(of_deployment(&KONNECTIVITY_AGENT, None, &three())).starts_with("there is no Deployment")
        );
    }
}
