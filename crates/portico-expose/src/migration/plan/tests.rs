//! What is printed for each two strategies and each [`ManagedBy`], three whole pages, and what holds for any
//! plan.

use portico_api::exposed_cluster::MigrationState;
use portico_api::seed::Seed;
use portico_api::strategy::ExposeStrategy::{LoadBalancer, NodePort, Tunneling};
use proptest::prelude::*;

use super::*;
use crate::doors::{Door, both};
use crate::inputs::LoadBalancers;
use crate::migration::Second;
use crate::testing::{behind, cluster, plan_of, seed};
use crate::validate::usable;

const ALL: [ManagedBy; 4] = [ManagedBy::Hosted, ManagedBy::Elsewhere, ManagedBy::Pods, ManagedBy::Kkp];

/// Each two different strategies, in both orders.
const PAIRS: [[ExposeStrategy; 2]; 6] = [
    [NodePort, LoadBalancer],
    [NodePort, Tunneling],
    [LoadBalancer, NodePort],
    [LoadBalancer, Tunneling],
    [Tunneling, NodePort],
    [Tunneling, LoadBalancer],
];

/// What a test asks about.
#[derive(Debug, Clone)]
struct Case {
    managed_by: ManagedBy,
    cluster: Cluster,
    seed: Seed,
    presented: Option<Vec<Box<str>>>,
    now: Option<Now>,
    has_image: Option<bool>,
}

impl Case {
    fn of(managed_by: ManagedBy, spec: &str) -> Self {
        let mut cluster = cluster("a", spec);
        let annotation = match managed_by {
            ManagedBy::Hosted => Some((LAYOUT, "compact")),
            ManagedBy::Elsewhere => Some((ENDPOINTS, "203.0.113.50:6443")),
            ManagedBy::Pods | ManagedBy::Kkp => None,
        };
        let annotation = annotation.map(|(key, value)| (key.into(), value.into()));
        cluster.metadata.annotations.extend(annotation);
        if managed_by == ManagedBy::Hosted {
            cluster = cluster.begun();
        }
        Self { managed_by, cluster, seed: seed("north", "{}"), presented: None, now: None, has_image: None }
    }

    fn plan(&self, [from, to]: [ExposeStrategy; 2]) -> MigrationPlan {
        let known = behind(&[("203.0.113.9", "lb.example.com")]);
        let load_balancers = match self.managed_by {
            ManagedBy::Kkp => LoadBalancers::Cloud,
            _ => LoadBalancers::CloudAndGateway,
        };
        let alone = |strategy| Door::of(&self.cluster, strategy).alone(&self.cluster);
        let by = |strategy| plan_of(&alone(strategy), &self.seed, &known, load_balancers);
        let (from, target) = (by(from), alone(to));
        let to = by(to);
        let both = both(&from, &to);
        let configuration = crate::testing::configuration(r#"{"ingress": {"domain": "kkp.example.com"}}"#);
        let seeds = [Box::new(self.seed.clone())];
        let problems = usable(&target, &seeds, Some(&configuration)).err().unwrap_or_default();
        plan(&Facts {
            cluster: &self.cluster,
            managed_by: self.managed_by,
            from: &from,
            to: &to,
            both: &both,
            now: self.now,
            problems: &problems,
            presented: self.presented.as_deref(),
            has_image: self.has_image,
        })
    }
}

fn at(first: ExposeStrategy, second: ExposeStrategy, state: MigrationState) -> Option<Now> {
    let since = "2026-01-02T03:04:05Z".parse().unwrap();
    Some(Now { first, second: Some(Second { strategy: second, state, since }) })
}

#[test]
fn each_two_strategies_can_be_exchanged_or_it_is_said_why_not() {
    for pair in PAIRS {
        for managed_by in ALL {
            let case = Case::of(managed_by, "{}");
            assert_eq!(super::managed_by(&case.cluster, managed_by == ManagedBy::Kkp), managed_by);
            let plan = case.plan(pair);
            // Between the two by port the number, and so the port of the pods, is the same.
            let conflict = managed_by == ManagedBy::Pods && pair.contains(&Tunneling);
            assert_eq!(plan.blockers.len(), usize::from(conflict), "{pair:?} {managed_by:?}");
            let restarts = conflict || managed_by == ManagedBy::Kkp;
            assert_eq!(plan.restarts_api_server, restarts, "{pair:?} {managed_by:?}");
            let both = matches!(managed_by, ManagedBy::Hosted | ManagedBy::Elsewhere);
            assert_eq!(plan.both.is_some(), both, "{pair:?} {managed_by:?}");
            let steps = if managed_by == ManagedBy::Pods { 5 } else { 6 };
            assert_eq!(plan.steps.len(), steps, "{pair:?} {managed_by:?}");
            let names: Vec<_> = plan.steps.iter().filter_map(|step| step.state).collect();
            assert_eq!(names, if both { &MigrationState::ALL[..] } else { &[] });
            let cannot_tell = plan.notes.iter().any(|note| note.contains("cannot tell"));
            assert_eq!(cannot_tell, both && !pair.contains(&Tunneling), "{pair:?} {managed_by:?}");
        }
    }
}

#[test]
fn a_plan_that_stays_with_a_strategy_or_that_nobody_may_carry_out_is_blocked() {
    let blocked = |spec: &str, pair| -> Vec<String> {
        let plan = Case::of(ManagedBy::Hosted, spec).plan(pair);
        plan.blockers.into_iter().map(|blocker| format!("{}; {}", blocker.what, blocker.remedy)).collect()
    };
    let only = |found: Vec<String>, expected: &str| {
        assert!(found.len() == 1 && found[0].contains(expected), "{expected}: {found:?}");
    };
    let there = [NodePort, Tunneling];
    only(blocked("{}", [NodePort, NodePort]), "its strategy is NodePort already");
    only(blocked(r#"{"pause": true}"#, there), "spec.pause: false");
    let ranges = r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24"]}}"#;
    only(blocked(ranges, there), "every client may come by either door");
    assert_eq!(blocked(ranges, [NodePort, LoadBalancer]), Vec::<String>::new());
    let inside = r#"{"clusterNetwork": {"pods": {"cidrBlocks": ["100.64.0.0/10"]}}}"#;
    only(blocked(inside, there), "tunnelingAgentIP: 100.64.30.10 (the default) lies in the pod network");
    let six = r#"{"clusterNetwork": {"tunnelingAgentIP": "2001:db8::1"}}"#;
    assert!(blocked(six, [LoadBalancer, Tunneling]).iter().any(|text| text.contains("family")));
    let mut going = Case::of(ManagedBy::Hosted, "{}");
    going.cluster.metadata.deletion_timestamp = "2026-01-02T03:04:05Z".parse().ok();
    assert_eq!(going.plan(there).blockers[0].what, "the Cluster is being deleted");

    let mut without = Case::of(ManagedBy::Hosted, "{}");
    without.cluster.metadata.annotations.remove(LAYOUT);
    let found = without.plan(there).blockers;
    assert!(found.len() == 1 && found[0].what.contains("portico.k8c.io/layout is gone"), "{found:?}");
    without.now = at(NodePort, Tunneling, MigrationState::Proving);
    assert_eq!(without.plan([Tunneling, NodePort]).blockers, [], "the way back is open");

    let mut refused = Case::of(ManagedBy::Hosted, "{}");
    refused.cluster.metadata.finalizers = Box::default();
    assert_eq!(refused.plan(there).blockers, [], "a manifest does not say what was begun");
    let condition = r#"{"status": "False", "reason": "QuotaExceeded", "message": "Seed north is full"}"#;
    refused.cluster.status.conditions.insert(CONTROL_PLANE_READY.into(), crate::testing::read(condition));
    let found = refused.plan(there).blockers;
    assert!(found.len() == 1 && found[0].what.ends_with("not begun: Seed north is full"), "{found:?}");
}

#[test]
fn a_migration_whose_proofs_nobody_could_make_is_not_begun_and_its_way_back_is_open() {
    let inside = |reason: &str| {
        let mut case = Case::of(ManagedBy::Elsewhere, "{}");
        let condition = format!(r#"{{"status": "False", "reason": "{reason}", "message": "no Secret x"}}"#);
        case.cluster.status.conditions.insert(USER_CLUSTER_READY.into(), crate::testing::read(&condition));
        case
    };
    let blocked = |case: &Case, pair| -> Vec<String> {
        case.plan(pair).blockers.into_iter().map(|it| it.what).collect()
    };
    let there = [NodePort, Tunneling];
    let nobody_looks = ["nothing inside the cluster can be looked at: no Secret x"];
    for reason in [NO_KUBECONFIG, BAD_KUBECONFIG] {
        assert_eq!(blocked(&inside(reason), there), nobody_looks);
    }
    let mut case = inside("Unreachable");
    assert!(blocked(&case, there).is_empty(), "that may pass");
    case.has_image = Some(false);
    let found = blocked(&case, there);
    assert!(found.len() == 1 && found[0].contains("without --image"), "{found:?}");
    case.now = at(NodePort, Tunneling, MigrationState::Proving);
    assert!(blocked(&case, [Tunneling, NodePort]).is_empty());
}

#[test]
fn without_an_address_there_is_no_door_to_keep() {
    let case = Case::of(ManagedBy::Hosted, "{}");
    let by = |strategy| {
        let alone = Door::of(&case.cluster, strategy).alone(&case.cluster);
        plan_of(&alone, &case.seed, &Default::default(), LoadBalancers::CloudAndGateway)
    };
    let (from, to) = (by(LoadBalancer), by(Tunneling));
    let both = both(&from, &to);
    let (cluster, managed_by) = (&case.cluster, ManagedBy::Hosted);
    let facts = Facts {
        cluster,
        managed_by,
        from: &from,
        to: &to,
        both: &both,
        now: None,
        problems: &[],
        presented: None,
        has_image: None,
    };
    let plan = plan(&facts);
    assert_eq!(plan.blockers.len(), 1, "{:?}", plan.blockers);
    assert!(plan.blockers[0].what.starts_with("it has no address yet"));
    assert!(plan.to_string().contains("not known before it has a load balancer"));
}

#[test]
fn names_that_a_certificate_elsewhere_lacks_are_reported() {
    let mut case = Case::of(ManagedBy::Elsewhere, "{}");
    let missing = |case: &Case| case.plan([LoadBalancer, Tunneling]).missing_names;
    let notes = |case: &Case| case.plan([LoadBalancer, Tunneling]).notes.join("\n");
    assert!(missing(&case).is_empty() && notes(&case).contains("Nobody looked at its certificate"));
    case.presented = Some(vec!["203.0.113.9".into()]);
    assert_eq!(missing(&case), ["100.64.30.10", "a.north.kkp.example.com"]);
    assert!(notes(&case).contains("Step 1 waits until its certificate has 100.64.30.10, a.north"));
    case.presented = Some(vec!["100.64.30.10".into(), "*.North.kkp.example.com".into()]);
    assert_eq!(missing(&case), Vec::<String>::new());
    case.managed_by = ManagedBy::Hosted;
    case.presented = Some(Vec::new());
    assert_eq!(missing(&case), Vec::<String>::new(), "Portico issues it anew");
}

#[test]
fn a_name_with_a_star_stands_for_one_label_and_for_no_address() {
    assert!(covers("*.example.com", "a.example.com") && covers("A.example.com", "a.EXAMPLE.com"));
    for (pattern, name) in [
        ("*.example.com", "a.b.example.com"),
        ("*.example.com", "example.com"),
        ("*.0.2.1", "192.0.2.1"),
        ("*", "a"),
    ] {
        assert!(!covers(pattern, name), "{pattern} {name}");
    }
}

#[test]
fn a_plan_knows_what_is_under_way() {
    let notes = |now, pair| {
        let case = Case { now, ..Case::of(ManagedBy::Hosted, "{}") };
        let plan = case.plan(pair);
        assert_eq!(plan.blockers, []);
        (plan.notes[0].clone(), plan.steps[0].name)
    };
    let opening = at(NodePort, Tunneling, MigrationState::Opening);
    assert_eq!(notes(opening, [NodePort, Tunneling]).0, "This migration is under way: Opening.");
    let (third, _) = notes(opening, [NodePort, LoadBalancer]);
    assert_eq!(
        third,
        "Tunneling is open beside NodePort (Opening): LoadBalancer waits until one door is left."
    );
    let (back, first) = notes(opening, [Tunneling, NodePort]);
    assert!(back.starts_with("NodePort is the door that users know; Tunneling"), "{back}");
    assert_eq!(first, "Moving", "nobody was told of the other");
}

#[test]
fn what_else_depends_on_the_address_is_noted() {
    let spec = r#"{"clusterNetwork": {"tunnelingAgentIP": "100.64.30.99"}, "cloud": {"dc": "here"},
        "mla": {"monitoringEnabled": true},
        "componentsOverride": {"apiserver": {"endpointReconcilingDisabled": true}}}"#;
    let mut case = Case::of(ManagedBy::Hosted, spec);
    case.seed = seed("north", r#"{"mla": {"userClusterMLAEnabled": true}, "datacenters": {"here": {}}}"#);
    case.cluster.metadata.annotations.insert(MAX_CONNECTIONS.into(), "100".into());
    let leaving = case.plan([Tunneling, NodePort]).notes.join("\n");
    for expected in [
        "tunnelingAgentIP 100.64.30.99 has to leave the Cluster",
        "endpointReconcilingDisabled is set",
        "address of the MLA gateway",
        "one budget (portico.k8c.io/max-connections: 100)",
        "Firewalls, proxies and NetworkPolicies that name https://a.north.kkp.example.com:6443",
        "step 4 ends once you say so, and that closes Tunneling too",
        "/doors?cluster=a of each gateway",
    ] {
        assert!(leaving.contains(expected), "no {expected} in:\n{leaving}");
    }
    let entering = case.plan([NodePort, Tunneling]).notes.join("\n");
    assert!(entering.contains("Agents will listen on 100.64.30.99 of every node"), "{entering}");
}

#[test]
fn where_no_gateway_can_tell_the_old_door_apart_only_an_order_closes_it() {
    let case = Case::of(ManagedBy::Hosted, "{}");
    let past = Case { seed: seed("north", r#"{"nodeportProxy": {"disable": true}}"#), ..case.clone() };
    for (case, pair, why) in [
        (&case, [NodePort, LoadBalancer], Some("the same ports of the gateway")),
        (&case, [LoadBalancer, NodePort], Some("the same ports of the gateway")),
        (&past, [NodePort, LoadBalancer], Some("past the gateway")),
        (&case, [NodePort, Tunneling], None),
        (&case, [Tunneling, LoadBalancer], None),
    ] {
        let plan = case.plan(pair);
        let quieting = plan.steps.iter().find(|step| step.name == "Quieting").unwrap();
        assert_eq!(quieting.proof.starts_with("portico migrate a --finish"), why.is_some(), "{pair:?}");
        let notes = plan.notes.join("\n");
        assert_eq!(notes.contains("step 5 ends by --finish alone"), why.is_some(), "{notes}");
        assert!(why.is_none_or(|why| notes.contains(why) && quieting.proof.contains(why)), "{notes}");
    }
}

#[test]
fn the_page_of_a_hosted_cluster() {
    insta::assert_snapshot!(Case::of(ManagedBy::Hosted, "{}").plan([NodePort, Tunneling]));
}

#[test]
fn the_page_beside_kkp() {
    insta::assert_snapshot!(Case::of(ManagedBy::Kkp, "{}").plan([Tunneling, LoadBalancer]));
}

#[test]
fn the_page_of_somebodys_pods() {
    insta::assert_snapshot!(Case::of(ManagedBy::Pods, "{}").plan([NodePort, Tunneling]));
}

#[test]
fn programs_read_a_plan_in_camel_case() {
    let plan = Case::of(ManagedBy::Hosted, "{}").plan([NodePort, Tunneling]);
    let json = serde_json::to_value(&plan).unwrap();
    let mut fields: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(
        fields,
        [
            "blockers",
            "both",
            "cluster",
            "from",
            "keeper",
            "missingNames",
            "notes",
            "restartsApiServer",
            "steps",
            "to"
        ]
    );
    assert_eq!((&json["keeper"], &json["to"]["agentIp"]), (&"hosted".into(), &"100.64.30.10".into()));
    assert_eq!(json["steps"][3]["state"], "MovingNodes");
    assert_eq!(json["steps"][3]["who"], "operator");
    assert_eq!(json["steps"][4]["who"], "administrator");
}

fn any_case() -> impl Strategy<Value = (Case, [ExposeStrategy; 2])> {
    let strategy = || prop::sample::select(ExposeStrategy::ALL.to_vec());
    let spec = prop::sample::select(vec![
        "{}",
        r#"{"pause": true}"#,
        r#"{"clusterNetwork": {"tunnelingAgentIP": "2001:db8::1"}}"#,
        r#"{"clusterNetwork": {"tunnelingAgentIP": "nonsense"}, "exposeStrategy": "Nothing"}"#,
        r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24", "x"]}, "cloud": {"dc": "gone"}}"#,
        r#"{"mla": {"loggingEnabled": true}}"#,
    ]);
    let seed_spec = prop::sample::select(vec![
        "{}",
        r#"{"nodeportProxy": {"disable": true}}"#,
        r#"{"mla": {"userClusterMLAEnabled": true}, "seedDNSOverwrite": "-"}"#,
    ]);
    let state = prop::option::of(prop::sample::select(MigrationState::ALL.to_vec()));
    let presented = prop::option::of(prop::collection::vec("[*a-z.0-9:]{0,12}", 0..4));
    let managed_by = prop::sample::select(ALL.to_vec());
    let strategies = [strategy(), strategy(), strategy(), strategy()];
    (managed_by, spec, seed_spec, state, presented, strategies).prop_map(
        |(managed_by, spec, seed_spec, state, presented, [from, to, first, second])| {
            let mut case = Case::of(managed_by, spec);
            case.seed = seed("north", seed_spec);
            case.presented = presented.map(|names| names.into_iter().map(Into::into).collect());
            case.now = state.and_then(|state| at(first, second, state));
            (case, [from, to])
        },
    )
}

proptest! {
    #[test]
    fn every_step_has_a_proof_and_a_way_back_and_what_is_not_blocked_has_steps(
        (case, pair) in any_case(),
    ) {
        let plan = case.plan(pair);
        for step in &plan.steps {
            let texts = [&step.does, &step.proof, &step.users, &step.back];
            prop_assert!(texts.iter().all(|text| !text.is_empty()), "{step:?}");
        }
        prop_assert!(!plan.blockers.is_empty() || !plan.steps.is_empty());
        for blocker in &plan.blockers {
            prop_assert!(!blocker.what.is_empty() && !blocker.remedy.is_empty(), "{blocker:?}");
        }
        let text = plan.to_string();
        for line in text.lines() {
            let is_long = line.chars().count() > 110 && line.split_whitespace().all(|word| word.len() < 60);
            let is_table = line.contains("  authority ");
            prop_assert!(!is_long || is_table, "{line}");
        }
    }
}
