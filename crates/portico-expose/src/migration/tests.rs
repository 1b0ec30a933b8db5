//! The whole table of transitions, the obstacles to each, and the invariants on every way through it.

use std::collections::BTreeSet;
use std::time::Duration;

use portico_api::exposed_cluster::MigrationState::{
    Closing, Moving, MovingNodes, Opening, Proving, Quieting,
};
use portico_api::strategy::ExposeStrategy::{LoadBalancer, NodePort, Tunneling};
use proptest::prelude::*;

use super::*;
use crate::testing::read;

type Settings = Result<MigrationSettings, BadMigrationSettings>;

/// The proofs that each state waits for, beside the second door's quiet.
const NEEDED: [(Option<MigrationState>, &[Proof]); 6] = [
    (None, &[Proof::Permission]),
    (Some(Opening), &[Proof::Address, Proof::Routes, Proof::Certificate]),
    (Some(Proving), &[Proof::Answer, Proof::Reach, Proof::Agents, Proof::Konnectivity, Proof::SameAddress]),
    (Some(Moving), &[Proof::Status, Proof::Kubeconfigs, Proof::Endpoints, Proof::Rollouts]),
    (Some(MovingNodes), &[Proof::Nodes]),
    (Some(Closing), &[Proof::GoneInside, Proof::GoneOnSeed]),
];

fn proof() -> impl Iterator<Item = Proof> {
    NEEDED.into_iter().flat_map(|(_, proofs)| proofs).copied()
}

/// So many seconds after some time.
fn time(seconds: i64) -> Timestamp {
    Timestamp::new(1_767_323_045 + seconds, 0).unwrap()
}

fn at(first: ExposeStrategy, second: ExposeStrategy, state: MigrationState) -> Now {
    Now { first, second: Some(Second { strategy: second, state, since: time(0) }) }
}

/// Nobody has used the second door since so many seconds after some time.
fn unused(since: i64) -> Option<Use> {
    Some(Use::Unused { since: time(since), by: None })
}

/// Everything that anything waits for.
fn good(of: Now) -> Facts {
    let proofs = proof().map(|proof| (proof, Fact::So)).collect();
    Facts { of, proofs, second_door: unused(-9_999) }
}

fn settings(text: &str) -> Settings {
    text.parse()
}

/// The next state an hour later, where everything holds.
fn goes_on(now: Now, wanted: ExposeStrategy) -> Next {
    step(now, wanted, &settings("quiet=10m"), &good(now), time(3_600))
}

/// What is recorded, without the time.
fn brief(now: Now) -> (ExposeStrategy, Option<(ExposeStrategy, MigrationState)>) {
    (now.first, now.second.map(|second| (second.strategy, second.state)))
}

#[test]
fn nodes_that_are_away_are_named_until_one_door_is_left_and_hold_nothing_up() {
    for state in [Quieting, Closing] {
        let now = at(Tunneling, NodePort, state);
        let mut facts = good(now);
        facts.proofs.insert(Proof::Present, Fact::NotSo("away: c".to_owned()));
        let none = settings("quiet=10m");
        let next = step(now, Tunneling, &none, &facts, time(3_600));
        let expected = goes_on(now, Tunneling);
        assert_eq!(next.now, expected.now);
        assert_eq!(next.aside.is_some(), next.now.second.is_some(), "{state:?}");
    }
    let now = at(Tunneling, NodePort, Quieting);
    let mut facts = Facts::unknown(now);
    facts.proofs.insert(Proof::Present, Fact::NotSo("away: c".to_owned()));
    let said = step(now, Tunneling, &settings("quiet=10m"), &facts, time(0)).to_string();
    assert!(said.ends_with("; waits for quiet (not known yet); away: c"), "{said}");
}

#[test]
fn each_state_goes_on_to_the_next_once_its_proofs_are_there() {
    let opened = goes_on(Now::settled(NodePort), Tunneling);
    let second = Second { strategy: Tunneling, state: Opening, since: time(3_600) };
    let expected = Now { first: NodePort, second: Some(second) };
    assert_eq!(opened, Next { now: expected, waits_for: Vec::new(), later: None, aside: None });
    for (state, (first, second)) in
        [(Opening, (NodePort, Some((Tunneling, Proving)))), (Proving, (Tunneling, Some((NodePort, Moving))))]
    {
        let next = goes_on(at(NodePort, Tunneling, state), Tunneling);
        assert_eq!((brief(next.now), next.waits_for), ((first, second), Vec::new()));
    }
    for (state, second) in [
        (Moving, Some((NodePort, MovingNodes))),
        (MovingNodes, Some((NodePort, Quieting))),
        (Quieting, Some((NodePort, Closing))),
        (Closing, None),
    ] {
        let next = goes_on(at(Tunneling, NodePort, state), Tunneling);
        assert_eq!((brief(next.now), next.waits_for), ((Tunneling, second), Vec::new()));
    }
    let rests = goes_on(Now::settled(Tunneling), Tunneling);
    assert_eq!(rests, Next { now: Now::settled(Tunneling), waits_for: Vec::new(), later: None, aside: None });
}

#[test]
fn each_proof_alone_holds_its_state_up_and_says_why() {
    for (state, proofs) in NEEDED {
        let forward = matches!(state, None | Some(Opening | Proving));
        let now = state.map_or(Now::settled(NodePort), |state| at(NodePort, Tunneling, state));
        let wanted = if forward { Tunneling } else { NodePort };
        for &proof in proofs {
            let mut facts = good(now);
            for (fact, why) in [
                (None, None),
                (Some(Fact::NotSo("Node a: away".to_owned())), Some("Node a: away".to_owned())),
            ] {
                facts.proofs.remove(&proof);
                facts.proofs.extend(fact.map(|fact| (proof, fact)));
                let next = step(now, wanted, &settings("quiet=0"), &facts, time(9));
                if (proof, why.is_some()) == (Proof::SameAddress, true) {
                    assert_eq!(brief(next.now), (NodePort, Some((Tunneling, Opening))));
                    continue;
                }
                let waits_for = vec![Waiting::For(proof, why)];
                assert_eq!(next, Next { now, waits_for, later: None, aside: None }, "{state:?}");
            }
        }
    }
}

#[test]
fn a_door_that_has_another_address_than_was_tried_is_opened_anew_and_the_way_back_does_not_ask() {
    let now = at(NodePort, Tunneling, Proving);
    for good in [good(now), Facts::unknown(now)] {
        let mut facts = good;
        facts.proofs.insert(Proof::SameAddress, Fact::NotSo("it is https://b".to_owned()));
        let next = step(now, Tunneling, &settings("quiet=0"), &facts, time(9));
        let opening = Second { strategy: Tunneling, state: Opening, since: time(9) };
        let expected = Now { first: NodePort, second: Some(opening) };
        assert_eq!(next, Next { now: expected, waits_for: Vec::new(), later: None, aside: None });
        let back = step(now, NodePort, &settings("quiet=0"), &facts, time(9));
        assert_eq!(brief(back.now), (NodePort, Some((Tunneling, Moving))));
    }
}

#[test]
fn what_was_observed_of_another_record_proves_nothing() {
    let now = at(Tunneling, NodePort, Moving);
    let swapped = good(at(NodePort, Tunneling, Moving));
    let attempt_before =
        good(Now { second: now.second.map(|second| Second { since: time(-1), ..second }), ..now });
    for stale in [swapped, attempt_before] {
        assert_eq!(step(now, Tunneling, &settings("quiet=0"), &stale, time(9)).waits_for.len(), 4);
        let mut facts = Facts::unknown(now);
        facts.add(&stale);
        assert_eq!(facts, Facts::unknown(now));
    }
    let mut facts = Facts::unknown(now);
    let of_one = Facts { second_door: None, ..good(now) };
    facts.add(&good(now));
    facts.add(&of_one);
    assert_eq!(facts, good(now));
}

#[test]
fn back_from_every_state_nothing_closes_that_users_have_been_told_of_and_no_door_is_believed_unproven() {
    for state in [Opening, Proving] {
        let next = goes_on(at(NodePort, Tunneling, state), NodePort);
        assert_eq!(brief(next.now), (NodePort, Some((Tunneling, Moving))), "{state:?}");
    }
    for state in [Moving, MovingNodes, Quieting, Closing] {
        let next = goes_on(at(Tunneling, NodePort, state), NodePort);
        assert_eq!(brief(next.now), (Tunneling, Some((NodePort, Opening))), "{state:?}");
    }
}

/// The states of a whole way with everything at hand, until nothing changes.
fn way(from: Now, wanted: ExposeStrategy) -> Vec<String> {
    let mut way = Vec::new();
    let mut now = from;
    for hour in 1.. {
        let next = step(now, wanted, &settings("quiet=10m"), &good(now), time(3_600 * hour));
        if next.now == now {
            break;
        }
        now = next.now;
        let later = next.later.map(|later| format!(", {later} later")).unwrap_or_default();
        let second =
            now.second.map_or_else(String::new, |it| format!(" {} {}", it.state.name(), it.strategy));
        way.push(format!("{}{second}{later}", now.first));
    }
    way
}

#[test]
fn a_third_strategy_waits_until_one_door_is_left_on_either_side_of_the_flip() {
    let to_the_end = [
        "NodePort",
        "NodePort Opening LoadBalancer",
        "NodePort Proving LoadBalancer",
        "LoadBalancer Moving NodePort",
        "LoadBalancer MovingNodes NodePort",
        "LoadBalancer Quieting NodePort",
        "LoadBalancer Closing NodePort",
        "LoadBalancer",
    ];
    let before_the_flip = [
        "NodePort Moving Tunneling, LoadBalancer later",
        "NodePort MovingNodes Tunneling, LoadBalancer later",
        "NodePort Quieting Tunneling, LoadBalancer later",
        "NodePort Closing Tunneling, LoadBalancer later",
        "NodePort, LoadBalancer later",
    ];
    let expected = [&before_the_flip[..], &to_the_end[1..]].concat();
    assert_eq!(way(at(NodePort, Tunneling, Proving), LoadBalancer), expected);
    let after_the_flip = ["NodePort Closing Tunneling, LoadBalancer later", "NodePort, LoadBalancer later"];
    let expected = [&after_the_flip[..], &to_the_end[1..]].concat();
    assert_eq!(way(at(NodePort, Tunneling, Quieting), LoadBalancer), expected);
}

#[test]
fn after_two_changes_of_mind_the_door_that_clients_still_use_is_waited_for_as_ever() {
    // There, back, and there again before the flip back: the former door was never closed.
    let back = goes_on(at(Tunneling, NodePort, Quieting), NodePort).now;
    assert_eq!(brief(back), (Tunneling, Some((NodePort, Opening))));
    let expected = [
        "Tunneling Moving NodePort",
        "Tunneling MovingNodes NodePort",
        "Tunneling Quieting NodePort",
        "Tunneling Closing NodePort",
        "Tunneling",
    ];
    assert_eq!(way(back, Tunneling), expected);
    // There, back, and there again after the flip back.
    let expected = ["NodePort Opening Tunneling", "NodePort Proving Tunneling", "Tunneling Moving NodePort"];
    assert_eq!(way(at(NodePort, Tunneling, Moving), Tunneling)[..3], expected);
}

/// What Quieting of NodePort, begun at `time(0)`, says.
fn quieting(settings: &Settings, second_door: Option<Use>, clock: Timestamp) -> String {
    let now = at(Tunneling, NodePort, Quieting);
    let facts = Facts { second_door, ..Facts::unknown(now) };
    let next = step(now, Tunneling, settings, &facts, clock);
    match &next.waits_for[..] {
        [] => next.now.second.unwrap().state.name().to_owned(),
        [waiting] => waiting.to_string(),
        more => panic!("{more:?}"),
    }
}

#[test]
fn the_old_door_closes_after_it_was_unused_for_the_time_asked_for_within_that_state() {
    let ten = settings("quiet=10m");
    let waits = "quiet: unused since 2026-01-02T03:04:05Z, it closes at 2026-01-02T03:14:05Z";
    assert_eq!(quieting(&ten, unused(-3_600), time(599)), waits);
    assert_eq!(quieting(&ten, unused(-3_600), time(600)), "Closing");
    assert_eq!(quieting(&ten, unused(300), time(899)), waits.replace(":04", ":09").replace(":14", ":19"));
    assert_eq!(quieting(&ten, unused(300), time(900)), "Closing");
    assert_eq!(quieting(&settings("quiet=0"), unused(-1), time(0)), "Closing");
    // A clock that was put back.
    assert_ne!(quieting(&settings("quiet=0"), unused(-1), time(-1)), "Closing");
    let centuries = "quiet: unused since 2026-01-02T03:04:05Z, it closes at 9999-12-30T22:00:00Z";
    let forever = Ok(MigrationSettings { quiet: Duration::MAX, ..MigrationSettings::default() });
    assert_eq!(quieting(&forever, unused(0), time(0)), centuries);
}

#[test]
fn the_last_user_of_the_old_door_is_named_and_no_time_is_said_of_a_door_that_is_used_again_and_again() {
    let ten = settings("quiet=10m");
    let by = |since| Some(Use::Unused { since: time(since), by: Some("used by 192.0.2.7".to_owned()) });
    for clock in [100, 159] {
        assert_eq!(quieting(&ten, by(100), time(clock)), "quiet: used by 192.0.2.7");
    }
    let rests = "quiet: unused since 2026-01-02T03:05:45Z, it closes at 2026-01-02T03:15:45Z; last used by \
                 192.0.2.7";
    for clock in [160, 699] {
        assert_eq!(quieting(&ten, by(100), time(clock)), rests);
    }
    assert_eq!(quieting(&ten, by(100), time(700)), "Closing");
    assert_eq!(quieting(&settings("quiet=0"), by(100), time(100)), "Closing");
}

#[test]
fn a_door_that_is_used_or_not_known_not_to_be_closes_by_an_order_with_its_name_alone() {
    let used = || Some(Use::Used("192.0.2.7 has 3 connections".to_owned()));
    let ordered = settings("close=NodePort");
    for second_door in [None, used()] {
        assert_eq!(quieting(&ordered, second_door, time(0)), "Closing");
    }
    for other in ["quiet=0", "quiet=0,close=Tunneling", "quiet=0,close=LoadBalancer"] {
        assert_eq!(quieting(&settings(other), used(), time(99_999)), "quiet: 192.0.2.7 has 3 connections");
        assert_eq!(quieting(&settings(other), None, time(99_999)), "quiet (not known yet)");
    }
    let unreadable = settings("close=NodePort,quiet=1d");
    let why = "quiet: the annotation portico.k8c.io/migration cannot be read: quiet: \"1d\" is no time: a \
               unit is missing or unknown, as in 90s or 1m30s";
    assert_eq!(quieting(&unreadable, unused(-9_999), time(99_999)), why);
}

#[test]
fn an_order_to_close_waits_for_nobody_but_for_the_status_and_for_what_is_to_be_removed() {
    let ordered = settings("close=NodePort");
    for (state, next_state) in [(Moving, Moving), (MovingNodes, Quieting), (Closing, Closing)] {
        let now = at(Tunneling, NodePort, state);
        let next = step(now, Tunneling, &ordered, &Facts::unknown(now), time(9));
        assert_eq!(brief(next.now), (Tunneling, Some((NodePort, next_state))));
    }
    for state in [Moving, MovingNodes] {
        let now = at(Tunneling, NodePort, state);
        let mut facts = Facts::unknown(now);
        facts.proofs.insert(Proof::Status, Fact::So);
        let next = step(now, Tunneling, &settings("close=Tunneling"), &facts, time(9));
        assert_eq!(next.now, now);
    }
}

#[test]
fn where_nothing_follows_an_order_closes_the_door_that_the_status_does_not_name() {
    let now = at(Tunneling, NodePort, Moving);
    let mut facts = Facts::unknown(now);
    for proof in [Proof::Kubeconfigs, Proof::Endpoints, Proof::Rollouts] {
        facts.proofs.insert(proof, Fact::NotSo("there is no Secret".to_owned()));
    }
    let ordered = |facts: &Facts| step(now, Tunneling, &settings("close=NodePort"), facts, time(9));
    for (status, state) in [(Fact::NotSo("another".to_owned()), Moving), (Fact::So, MovingNodes)] {
        facts.proofs.insert(Proof::Status, status.clone());
        assert_eq!(brief(ordered(&facts).now), (Tunneling, Some((NodePort, state))), "{status:?}");
    }
    let waits = step(now, Tunneling, &settings("quiet=0"), &facts, time(9)).waits_for;
    assert_eq!(waits.len(), 3, "without an order it is waited for: {waits:?}");
}

#[test]
fn a_lost_record_is_made_again_from_the_doors_that_are_open() {
    let (a, b, c) =
        ((NodePort, "https://a:31234"), (Tunneling, "https://a:6443"), (LoadBalancer, "https://lb"));
    let rebuilt = |open: &[_], published, wanted| Now::rebuilt(open, published, wanted, time(7)).map(brief);
    assert_eq!(rebuilt(&[], "https://a:6443", Tunneling), None);
    // One door is in force, whatever is wanted and published.
    for (published, wanted) in [(a.1, NodePort), (a.1, Tunneling), ("", Tunneling)] {
        assert_eq!(rebuilt(&[a], published, wanted), Some((NodePort, None)));
    }
    for open in [[a, b], [b, a]] {
        for (published, wanted, expected) in [
            (a.1, Tunneling, (NodePort, Some((Tunneling, Opening)))),
            (a.1, NodePort, (NodePort, Some((Tunneling, Moving)))),
            (b.1, Tunneling, (Tunneling, Some((NodePort, Moving)))),
            (b.1, NodePort, (Tunneling, Some((NodePort, Opening)))),
            // A third waits, as ever.
            (b.1, LoadBalancer, (Tunneling, Some((NodePort, Moving)))),
            // Neither door is published: what is wanted is proven first.
            ("", Tunneling, (NodePort, Some((Tunneling, Opening)))),
        ] {
            assert_eq!(rebuilt(&open, published, wanted), Some(expected), "{published} {wanted}");
        }
    }
    // Somebody has opened a third by hand.
    assert_eq!(rebuilt(&[a, b, c], a.1, LoadBalancer), Some((NodePort, Some((LoadBalancer, Opening)))));
    assert_eq!(Now::rebuilt(&[a, b], a.1, NodePort, time(7)).unwrap().second.unwrap().since, time(7));
}

#[test]
fn a_record_is_read_from_an_exposed_cluster() {
    let settled: ExposedClusterSpec = read(r#"{"exposeStrategy": "NodePort", "seed": "north"}"#);
    assert_eq!(Now::of(&settled), Now::settled(NodePort));
    let migrating: ExposedClusterSpec = read(
        r#"{"exposeStrategy": "NodePort", "seed": "north", "migration": {"state": "Proving",
            "since": "2026-01-02T03:04:05Z", "second": {"exposeStrategy": "LoadBalancer"}}}"#,
    );
    assert_eq!(Now::of(&migrating), at(NodePort, LoadBalancer, Proving));
}

#[test]
fn what_is_under_way_reads_as_one_sentence() {
    let text =
        |now, wanted, facts: &Facts| step(now, wanted, &settings("quiet=10m"), facts, time(9)).to_string();
    let of = |now, wanted| text(now, wanted, &Facts::unknown(now));
    assert_eq!(of(Now::settled(NodePort), NodePort), "NodePort is the one way in");
    assert_eq!(
        of(Now::settled(NodePort), Tunneling),
        "NodePort is the one way in; waits for permission to begin (not known yet)"
    );
    let now = at(NodePort, Tunneling, Opening);
    let mut facts = good(now);
    let no = Fact::NotSo("a.example.com is not found".to_owned());
    facts.proofs.insert(Proof::Address, no);
    facts.proofs.remove(&Proof::Routes);
    assert_eq!(
        text(now, Tunneling, &facts),
        "Tunneling is being opened beside NodePort; waits for its address: a.example.com is not found; for \
         routes on every gateway (not known yet)"
    );
    assert_eq!(
        of(at(Tunneling, NodePort, Closing), LoadBalancer),
        "Tunneling is in force, NodePort is being closed; waits for removal inside the cluster (not known \
         yet); for removal on the seed (not known yet); LoadBalancer waits until NodePort is closed"
    );
    let closed = at(Tunneling, NodePort, Closing);
    assert_eq!(
        text(closed, LoadBalancer, &good(closed)),
        "Tunneling is the one way in; LoadBalancer is next"
    );
    let states = MigrationState::ALL.map(|state| {
        let forward = matches!(state, Opening | Proving);
        let text = of(at(NodePort, Tunneling, state), if forward { Tunneling } else { NodePort });
        text.split_once("; waits for ").unwrap().0.to_owned()
    });
    assert_eq!(
        states,
        [
            "Tunneling is being opened beside NodePort",
            "Tunneling is open beside NodePort, and is tried",
            "all are told of NodePort, Tunneling stays open",
            "nodes follow to NodePort, Tunneling stays open",
            "NodePort is in force, Tunneling closes once it is quiet",
            "NodePort is in force, Tunneling is being closed",
        ]
    );
}

// === Whatever happens ===

fn strategy() -> impl Strategy<Value = ExposeStrategy> {
    prop::sample::select(&ExposeStrategy::ALL[..])
}

fn now() -> impl Strategy<Value = Now> {
    let state = prop::option::weighted(0.9, prop::sample::select(&MigrationState::ALL[..]));
    (strategy(), strategy(), state).prop_map(|(first, second, state)| match state {
        Some(state) if first != second => at(first, second, state),
        _ => Now::settled(first),
    })
}

fn any_settings() -> impl Strategy<Value = Settings> {
    prop::sample::select(&["quiet=10m", "quiet=0", "close=NodePort", "close=Tunneling", "quiet=1d"][..])
        .prop_map(settings)
}

/// Each proof holds in fourteen of sixteen cases, because several must hold at the same time.
fn facts_of(of: Now) -> impl Strategy<Value = Facts> {
    let second_door =
        prop_oneof![Just(None), Just(Some(Use::Used("by a".to_owned()))), (-900_i64..900).prop_map(unused),];
    (any::<u64>(), second_door).prop_map(move |(bits, second_door)| {
        let fact = |(index, proof)| match bits >> (4 * index) & 15 {
            0 => None,
            1 => Some((proof, Fact::NotSo("no".to_owned()))),
            _ => Some((proof, Fact::So)),
        };
        Facts { of, proofs: proof().enumerate().filter_map(fact).collect(), second_door }
    })
}

fn holds(facts: &Facts, state: Option<MigrationState>) -> bool {
    let needed = NEEDED.into_iter().find(|(of, _)| *of == state);
    let (_, needed) = needed.unwrap_or_default();
    needed.iter().all(|proof| facts.proofs.get(proof) == Some(&Fact::So))
}

/// Whether the second door is elsewhere by now, as far as is known.
fn has_moved(now: Now, facts: &Facts) -> bool {
    facts.of == now && matches!(facts.proofs.get(&Proof::SameAddress), Some(Fact::NotSo(_)))
}

/// The conditions for a step from `before` to `after`, whatever the code is like.
fn is_allowed(
    before: Now,
    after: Now,
    wanted: ExposeStrategy,
    settings: &Settings,
    facts: &Facts,
    clock: i64,
) {
    let state = before.second.map(|second| second.state);
    let proven = facts.of == before && holds(facts, state);
    let ordered = |door| settings.as_ref().is_ok_and(|settings| settings.close == Some(door));
    let (was, is): (BTreeSet<_>, BTreeSet<_>) = (before.open().collect(), after.open().collect());
    assert_ne!(Some(after.first), after.second.map(|second| second.strategy));
    assert!(is.contains(&after.first) && is.len() <= 2);
    for opened in is.difference(&was) {
        assert_eq!((*opened, brief(after).1), (wanted, Some((wanted, Opening))));
        assert!(proven || state == Some(Closing));
    }
    for closed in was.difference(&is) {
        assert_eq!(brief(before).1, Some((*closed, Quieting)));
        assert_ne!(*closed, wanted);
        let quiet = match (&facts.second_door, settings) {
            (Some(Use::Unused { since, .. }), Ok(settings)) => {
                let unused = time(clock).duration_since((*since).max(time(0)));
                facts.of == before && !unused.is_negative() && unused.unsigned_abs() >= settings.quiet
            }
            _ => false,
        };
        assert!(quiet || ordered(*closed));
    }
    if after.first != before.first {
        assert_eq!(brief(before).1, Some((wanted, Proving)));
        assert_eq!(brief(after), (wanted, Some((before.first, Moving))));
        assert!(proven);
    }
    if after.second.is_none() && before.second.is_some() {
        assert!(state == Some(Closing) && proven);
    }
    if brief(after) != brief(before) && !proven && state != Some(Quieting) {
        let (second, state) = brief(before).1.unwrap();
        let changed_mind = (second == wanted) != matches!(state, Opening | Proving);
        let opened_anew = state == Proving && has_moved(before, facts);
        let status = facts.of == before && facts.proofs.get(&Proof::Status) == Some(&Fact::So);
        let closes = ordered(second) && (state == MovingNodes || state == Moving && status);
        assert!(changed_mind || opened_anew || closes);
        assert!(changed_mind || !opened_anew || brief(after) == (before.first, Some((second, Opening))));
    }
}

proptest! {
    #[test]
    fn every_step_has_its_reasons_and_an_observation_makes_one_step(
        (now, facts) in now().prop_flat_map(|now| (Just(now), facts_of(now))),
        stale in prop::bool::weighted(0.1),
        wanted in strategy(),
        settings in any_settings(),
        clock in -60_i64..1_200,
    ) {
        let mut facts = facts;
        if stale {
            facts.of = at(NodePort, LoadBalancer, Moving);
            facts.of.second.as_mut().unwrap().since = time(-1);
        }
        let next = step(now, wanted, &settings, &facts, time(clock));
        is_allowed(now, next.now, wanted, &settings, &facts, clock);
        // A process that was killed before its write decides the same later, or may close by now.
        let again = step(now, wanted, &settings, &facts, time(clock + 60));
        if brief(again.now) != brief(next.now) {
            prop_assert_eq!(next.now.second.unwrap().state, Quieting);
            prop_assert_eq!(again.now.second.unwrap().state, Closing);
        }
        prop_assert_eq!(next.waits_for.is_empty(), next.now != now || brief(now) == (wanted, None));
        // A second look at the same facts makes no second step, unless somebody ordered that.
        let second = next.now.second.map(|second| second.strategy);
        if next.now != now && settings.as_ref().is_ok_and(|settings| settings.close != second) {
            prop_assert_eq!(step(next.now, wanted, &settings, &facts, time(9_999)).now, next.now);
        }
    }

    #[test]
    fn from_everywhere_what_is_wanted_is_the_one_door_after_twelve_steps(
        now in now(),
        wanted in strategy(),
    ) {
        let mut now = now;
        for hour in 1..=12 {
            now = step(now, wanted, &settings("quiet=10m"), &good(now), time(3_600 * hour)).now;
        }
        prop_assert_eq!(now, Now::settled(wanted));
    }
}

// === A controller that is killed ===

/// What is there outside, as a controller finds and leaves it.
#[derive(Debug)]
struct World {
    record: Option<Now>,
    open: BTreeSet<ExposeStrategy>,
    /// The door of `status.address`.
    published: ExposeStrategy,
    /// Where the second door is; it may be elsewhere at any time.
    address: u8,
    /// Where it is by the record.
    recorded: u8,
    /// The record and the address by which the second door was last tried from inside.
    tried: Option<(Now, u8)>,
}

impl World {
    /// One pass in the order of writes of the exposure controller, ended before write number `killed`.
    fn pass(&mut self, wanted: ExposeStrategy, settings: &Settings, facts: Facts, clock: i64, killed: usize) {
        let urls: Vec<_> = self.open.iter().map(|&door| (door, door.name())).collect();
        let rebuilt = || Now::rebuilt(&urls, self.published.name(), wanted, time(clock));
        let now = self.record.or_else(rebuilt).expect("a door is open");
        let mut facts = Facts { of: now, ..facts };
        self.recorded = self.address;
        facts.proofs.remove(&Proof::SameAddress);
        if let Some((_, tried)) = self.tried.filter(|&(of, _)| of == now) {
            let there = Fact::NotSo("elsewhere".to_owned());
            facts.proofs.insert(Proof::SameAddress, if tried == self.address { Fact::So } else { there });
        }
        let published = self.published == now.first;
        let closed = now.second.is_none_or(|second| !self.open.contains(&second.strategy));
        for (proof, so) in [(Proof::Status, published), (Proof::GoneOnSeed, closed)] {
            if !so {
                facts.proofs.insert(proof, Fact::NotSo("not yet".to_owned()));
            }
        }
        let next = step(now, wanted, settings, &facts, time(clock)).now;
        if killed == 0 {
            return;
        }
        if next.first != now.first {
            assert_eq!(self.tried, Some((now, self.address)), "told of an address that was not proven");
        }
        self.record = Some(next);
        if killed == 1 {
            return;
        }
        self.open.extend(next.open());
        if killed == 2 {
            return;
        }
        self.open = next.open().collect();
        if killed == 3 {
            return;
        }
        self.published = next.first;
    }

    /// A look from inside: by what is recorded, which may be behind.
    fn look(&mut self) {
        self.tried = self.record.map(|record| (record, self.recorded));
    }
}

proptest! {
    #[test]
    fn wherever_the_controller_is_killed_users_know_an_open_door_that_was_proven_and_never_are_there_three(
        passes in prop::collection::vec(
            (strategy(), any_settings(), facts_of(Now::settled(NodePort)), 0_usize..8, 0..15),
            1..60,
        ),
        wanted in strategy(),
    ) {
        let mut world = World {
            record: None,
            open: BTreeSet::from([NodePort]),
            published: NodePort,
            address: 0,
            recorded: 0,
            tried: None,
        };
        let (mut clock, mut wish) = (0, NodePort);
        for (other, settings, facts, killed, event) in passes {
            clock += 300;
            match event {
                0 => wish = other,
                1 => world.record = None,
                2 => world.address = world.address.wrapping_add(1),
                3..9 => world.look(),
                _ => {}
            }
            world.pass(wish, &settings, facts, clock, killed);
            prop_assert!(world.open.contains(&world.published) && world.open.len() <= 2, "{world:?}");
        }
        for hour in 1..=24 {
            let facts = good(Now::settled(NodePort));
            world.look();
            world.pass(wanted, &settings("quiet=10m"), facts, clock + 3_600 * hour, 9);
        }
        prop_assert_eq!(world.record, Some(Now::settled(wanted)));
        prop_assert_eq!((world.open, world.published), (BTreeSet::from([wanted]), wanted));
    }
}
