//! Each order in each state: what is written, what is reported, what is refused.

use portico_api::strategy::ExposeStrategy::{LoadBalancer, NodePort, Tunneling};

use super::*;

fn cluster(wanted: ExposeStrategy, more: &Value) -> Cluster {
    let mut object = json!({"metadata": {"name": "a"}, "spec": {"exposeStrategy": wanted}});
    for part in ["metadata", "spec"] {
        let fields = more[part].as_object().into_iter().flatten();
        fields.for_each(|(key, value)| object[part][key] = value.clone());
    }
    serde_json::from_value(object).unwrap()
}

fn record(first: ExposeStrategy, second: Option<(ExposeStrategy, MigrationState)>) -> ExposedClusterSpec {
    let mut spec = json!({"exposeStrategy": first, "seed": "north"});
    if let Some((second, state)) = second {
        spec["migration"] = json!({"state": state, "since": "2026-01-02T03:04:05Z",
            "second": {"exposeStrategy": second}});
    }
    serde_json::from_value(spec).unwrap()
}

fn order(strategy: ExposeStrategy) -> Order {
    Order::To { strategy, settings: Vec::new() }
}

/// The writes of `order` to a Cluster with the label.
fn written(
    order: &Order,
    wanted: ExposeStrategy,
    record: &ExposedClusterSpec,
) -> Result<Option<Value>, String> {
    let labelled = json!({"metadata": {"labels": {MIGRATION_LABEL: "yes"}}});
    change(order, &cluster(wanted, &labelled), record).map(|change| change.patch)
}

fn strategy(strategy: ExposeStrategy) -> Result<Option<Value>, String> {
    Ok(Some(json!({"spec": {"exposeStrategy": strategy}})))
}

#[test]
fn a_start_is_one_write_of_label_strategy_address_of_agents_and_quiet() {
    let start = Order::To { strategy: NodePort, settings: vec!["quiet=5m".to_owned()] };
    let more = json!({"spec": {"clusterNetwork": {"tunnelingAgentIP": "100.64.30.99"}}});
    let change = change(&start, &cluster(Tunneling, &more), &record(Tunneling, None)).unwrap();
    let expected = json!({
        "metadata": {"labels": {MIGRATION_LABEL: "portico"}, "annotations": {MIGRATION: "quiet=5m"}},
        "spec": {"exposeStrategy": "NodePort", "clusterNetwork": {"tunnelingAgentIP": null}},
    });
    assert_eq!((change.patch, change.until), (Some(expected), Until::Settled(NodePort)));
    assert!(change.said.starts_with("from Tunneling to NodePort"), "{}", change.said);
    assert_eq!(written(&order(Tunneling), NodePort, &record(NodePort, None)), strategy(Tunneling));
}

#[test]
fn what_is_given_takes_the_place_of_what_was_set_and_the_rest_stays() {
    let settings = vec!["nodes=by-hand".to_owned(), "parallel=3".to_owned()];
    let start = Order::To { strategy: NodePort, settings };
    let more = json!({"metadata": {"annotations": {MIGRATION: "parallel=9, quiet=1h,close=Tunneling"}}});
    let change = change(&start, &cluster(Tunneling, &more), &record(Tunneling, None)).unwrap();
    let annotations = &change.patch.unwrap()["metadata"]["annotations"];
    assert_eq!(annotations[MIGRATION], "quiet=1h,nodes=by-hand,parallel=3");
}

/// Back to a strategy, with the mark by which a repetition is known.
fn back(strategy: ExposeStrategy) -> Result<Option<Value>, String> {
    let annotations = json!({ROLLBACK: strategy});
    Ok(Some(json!({"metadata": {"annotations": annotations}, "spec": {"exposeStrategy": strategy}})))
}

#[test]
fn a_rollback_asks_for_the_door_that_is_not_wanted() {
    for state in MigrationState::ALL {
        let forward = matches!(state, MigrationState::Opening | MigrationState::Proving);
        let (first, second) = if forward { (NodePort, Tunneling) } else { (Tunneling, NodePort) };
        let record = record(first, Some((second, state)));
        assert_eq!(written(&Order::Rollback, Tunneling, &record), back(NodePort), "{state:?}");
        assert_eq!(written(&Order::Rollback, NodePort, &record), back(Tunneling), "{state:?}");
        // A third strategy is given up; the door that users know stays.
        assert_eq!(written(&Order::Rollback, LoadBalancer, &record), back(first), "{state:?}");
    }
    // Wanted, and not begun.
    assert_eq!(written(&Order::Rollback, Tunneling, &record(NodePort, None)), back(NodePort));
    let nothing = written(&Order::Rollback, NodePort, &record(NodePort, None)).unwrap_err();
    assert!(nothing.starts_with("there is nothing to roll back: NodePort is the one way in"), "{nothing}");
}

#[test]
fn a_rollback_that_is_repeated_changes_nothing_whatever_the_operator_did_meanwhile() {
    for (target, other) in [(NodePort, Tunneling), (Tunneling, NodePort)] {
        let more = json!({"metadata": {"labels": {MIGRATION_LABEL: "portico"},
            "annotations": {ROLLBACK: target, MIGRATION: "quiet=5m"}}});
        let again = |record: &ExposedClusterSpec| {
            change(&Order::Rollback, &cluster(target, &more), record)
                .map(|change| (change.patch, change.until, change.said))
        };
        let said = format!("goes back to {target} already; --to with another strategy turns it round");
        let goes_on = Ok((None, Until::Settled(target), said));
        for state in MigrationState::ALL {
            for (first, second) in [(target, other), (other, target)] {
                assert_eq!(again(&record(first, Some((second, state)))), goes_on, "{first} {state:?}");
            }
        }
        assert_eq!(again(&record(other, None)), goes_on, "the old door was closed before it was seen");
        let said = format!("{target} is the one way in again already");
        assert_eq!(again(&record(target, None)), Ok((None, Until::Settled(target), said)));
    }
}

#[test]
fn after_another_order_a_rollback_leads_back_from_that() {
    let marked = |wanted| {
        let annotations = json!({ROLLBACK: "NodePort"});
        let more = json!({"metadata": {"labels": {MIGRATION_LABEL: ""}, "annotations": annotations}});
        cluster(wanted, &more)
    };
    let closing = record(NodePort, Some((Tunneling, MigrationState::Quieting)));
    let written = |order: &Order, wanted| change(order, &marked(wanted), &closing).unwrap().patch;
    let unmarked = json!({ROLLBACK: null});
    assert_eq!(
        written(&order(Tunneling), NodePort),
        Some(json!({"metadata": {"annotations": unmarked}, "spec": {"exposeStrategy": "Tunneling"}}))
    );
    assert_eq!(written(&order(NodePort), NodePort), None, "the same direction");
    // Somebody wrote the Cluster, and not the mark.
    let spec = json!({"spec": {"exposeStrategy": "NodePort"}});
    assert_eq!(written(&Order::Rollback, Tunneling), Some(spec));
}

#[test]
fn back_to_tunneling_agents_listen_where_they_did() {
    let mut moving = record(NodePort, Some((Tunneling, MigrationState::MovingNodes)));
    let tunnel = serde_json::from_value(json!({"agentIP": "100.64.30.99"})).unwrap();
    moving.migration.as_mut().unwrap().second.tunnel = Some(tunnel);
    let patch = written(&Order::Rollback, NodePort, &moving).unwrap().unwrap();
    let network = json!({"tunnelingAgentIP": "100.64.30.99"});
    assert_eq!(patch["spec"], json!({"exposeStrategy": "Tunneling", "clusterNetwork": network}));
}

#[test]
fn a_finish_orders_the_old_door_closed_and_keeps_other_settings() {
    let moved = record(Tunneling, Some((NodePort, MigrationState::MovingNodes)));
    let settings = |written: &str| {
        let more = json!({"metadata": {"annotations": {MIGRATION: written}}});
        change(&Order::Finish, &cluster(Tunneling, &more), &moved).map(|change| change.patch)
    };
    let annotated = |text: &str| Ok(Some(json!({"metadata": {"annotations": {MIGRATION: text}}})));
    assert_eq!(written(&Order::Finish, Tunneling, &moved), annotated("close=NodePort"));
    assert_eq!(settings("quiet=5m"), annotated("quiet=5m,close=NodePort"));
    assert_eq!(settings("close=LoadBalancer, quiet=5m"), annotated("quiet=5m,close=NodePort"));
    assert_eq!(settings("close=NodePort"), Ok(None), "it is ordered already");
    let unread = settings("quiet=soon").unwrap_err();
    assert!(unread.contains("cannot be read") && unread.contains("correct it"), "{unread}");

    let change = change(&Order::Finish, &cluster(LoadBalancer, &json!({})), &moved).unwrap();
    assert_eq!(change.until, Until::Closed { door: NodePort, wanted: LoadBalancer });
    assert_eq!(
        change.said,
        "NodePort closes, whoever still uses it; Tunneling stays; then LoadBalancer is opened"
    );
}

#[test]
fn a_door_that_is_not_in_force_yet_is_not_finished_with() {
    let alone = written(&Order::Finish, Tunneling, &record(Tunneling, None)).unwrap_err();
    assert_eq!(alone, "there is no second door to close: Tunneling is the one way in");
    let opening = record(NodePort, Some((Tunneling, MigrationState::Opening)));
    let early = written(&Order::Finish, Tunneling, &opening).unwrap_err();
    assert!(early.starts_with("Tunneling is wanted and not in force yet (Opening)"), "{early}");
}

#[test]
fn a_second_change_of_mind_is_defined() {
    let said = |to, wanted, record: &ExposedClusterSpec| {
        change(&order(to), &cluster(wanted, &json!({})), record).map(|change| change.said)
    };
    let opening = record(NodePort, Some((Tunneling, MigrationState::Proving)));
    let waits =
        "LoadBalancer waits until one door is left: Tunneling closes first (--finish), then it begins";
    assert_eq!(said(LoadBalancer, Tunneling, &opening).unwrap(), waits);
    assert_eq!(written(&order(LoadBalancer), Tunneling, &opening), strategy(LoadBalancer));
    assert_eq!(written(&order(Tunneling), Tunneling, &opening), Ok(None), "it is under way");
    assert!(said(NodePort, Tunneling, &opening).unwrap().starts_with("NodePort stays, nobody was told"));
    let moving = record(Tunneling, Some((NodePort, MigrationState::Quieting)));
    assert!(said(NodePort, Tunneling, &moving).unwrap().starts_with("back from Tunneling to NodePort"));
    assert!(said(LoadBalancer, Tunneling, &moving).unwrap().contains("NodePort closes first"));
    let settled = record(NodePort, None);
    assert_eq!(said(NodePort, NodePort, &settled).unwrap_err(), "its strategy is NodePort already");
}

#[test]
fn an_order_to_close_is_not_taken_along_into_another_direction() {
    let moving = record(Tunneling, Some((NodePort, MigrationState::MovingNodes)));
    let more = json!({"metadata": {"labels": {MIGRATION_LABEL: ""},
        "annotations": {MIGRATION: "close=NodePort"}}});
    let cluster = cluster(Tunneling, &more);
    let back = change(&Order::Rollback, &cluster, &moving).unwrap().patch.unwrap();
    assert_eq!(back["metadata"]["annotations"], json!({MIGRATION: null, ROLLBACK: "NodePort"}));
    let again = change(&order(Tunneling), &cluster, &moving).unwrap();
    assert_eq!(again.patch, None, "the same direction");
}

#[test]
fn a_cluster_at_which_everything_stands_still_is_not_changed() {
    for order in [order(Tunneling), Order::Rollback, Order::Finish] {
        let moving = record(Tunneling, Some((NodePort, MigrationState::MovingNodes)));
        let paused = cluster(Tunneling, &json!({"spec": {"pause": true}}));
        let why = change(&order, &paused, &moving).unwrap_err();
        assert!(why.contains("paused") && why.contains("spec.pause: false"), "{why}");
        let going = cluster(Tunneling, &json!({"metadata": {"deletionTimestamp": "2026-01-02T03:04:05Z"}}));
        assert_eq!(change(&order, &going, &moving).unwrap_err(), "the Cluster is being deleted");
    }
}
