//! Whose turn it is, look by look.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::Progress::{Elsewhere, There, UnderWay, Unknown, Waits};
use super::*;

fn seen(all: &[(&str, Progress)]) -> AllProgress {
    all.iter().map(|&(name, progress)| (name.to_owned(), progress)).collect()
}

/// Whose turn comes in one look, if each can be begun.
fn begun(waves: &mut Waves, seen: &AllProgress) -> Vec<String> {
    let mut names = Vec::new();
    while let Some(name) = waves.next(seen) {
        waves.note(name, Tried::Ordered);
        names.push(name.to_owned());
    }
    names
}

#[test]
fn the_next_begins_when_one_is_through() {
    let mut waves = Waves::new(2);
    let mut now = seen(&[("a", Waits), ("b", Waits), ("c", Waits), ("d", There)]);
    waves.observe(&now);
    assert_eq!(begun(&mut waves, &now), ["a", "b"]);
    assert!(!waves.is_over(&now));
    now.extend(seen(&[("a", UnderWay), ("b", UnderWay)]));
    waves.observe(&now);
    assert_eq!(waves.next(&now), None);
    now.extend(seen(&[("b", There)]));
    waves.observe(&now);
    assert_eq!(begun(&mut waves, &now), ["c"]);
    now.extend(seen(&[("a", There), ("c", There)]));
    waves.observe(&now);
    assert!(waves.is_over(&now));
}

#[test]
fn those_that_migrate_already_have_slots_in_whatever_direction() {
    let mut waves = Waves::new(2);
    let now = seen(&[("a", Waits), ("b", UnderWay), ("c", Elsewhere)]);
    assert!(waves.observe(&now).is_empty());
    assert_eq!(waves.next(&now), None);
    // Once the other change is over, its turn comes.
    let now = seen(&[("a", There), ("b", There), ("c", Elsewhere)]);
    waves.observe(&now);
    assert!(!waves.is_over(&now));
    let now = seen(&[("a", There), ("b", There), ("c", Waits)]);
    assert!(waves.observe(&now).is_empty(), "nobody took it back");
    assert_eq!(waves.next(&now), Some("c"));
}

#[test]
fn one_that_is_skipped_takes_no_slot_and_its_turn_does_not_come_again() {
    let mut waves = Waves::new(1);
    let now = seen(&[("a", Unknown), ("b", Waits)]);
    assert_eq!(waves.next(&now), Some("a"));
    waves.note("a", Tried::Skipped("nothing is recorded".to_owned()));
    assert_eq!(begun(&mut waves, &now), ["b"]);
    let now = seen(&[("a", Waits), ("b", There)]);
    waves.observe(&now);
    assert!(waves.next(&now).is_none() && waves.is_over(&now));
}

#[test]
fn after_one_that_went_back_or_could_not_be_begun_no_other_begins() {
    for back in [Waits, Elsewhere] {
        let mut waves = Waves::new(1);
        let now = seen(&[("a", UnderWay), ("b", Waits)]);
        waves.observe(&now);
        let now = seen(&[("a", back), ("b", Waits)]);
        assert_eq!(waves.observe(&now), ["a"]);
        assert!(waves.observe(&now).is_empty(), "it is reported once");
        assert!(waves.next(&now).is_none() && waves.is_over(&now));
    }
    let mut waves = Waves::new(3);
    let now = seen(&[("a", UnderWay), ("b", Waits), ("c", Waits)]);
    waves.observe(&now);
    waves.note("b", Tried::Failed("the API server answered 500".to_owned()));
    assert_eq!(waves.next(&now), None);
    assert!(!waves.is_over(&now), "the one under way is waited for");
    assert!(waves.is_over(&seen(&[("a", There), ("b", Waits), ("c", Waits)])));
}

#[test]
fn a_record_that_is_lost_on_the_way_does_not_free_the_slot() {
    let mut waves = Waves::new(1);
    waves.observe(&seen(&[("a", UnderWay), ("b", Waits)]));
    let now = seen(&[("a", Unknown), ("b", Waits)]);
    assert!(waves.observe(&now).is_empty());
    assert!(waves.next(&now).is_none() && !waves.is_over(&now));
}

/// What the world does to one cluster between two looks.
#[derive(Debug, Clone, Copy)]
enum Event {
    GetsOn,
    LosesRecord,
    GoesBack,
}

fn progress() -> impl Strategy<Value = Progress> {
    prop_oneof![
    1 => Just(There), 1 => Just(UnderWay), 1 => Just(Elsewhere), 5 => Just(Waits), 1 => Just(Unknown)
    ]
}

/// One cluster, and whether something stands in its way.
fn clusters() -> impl Strategy<Value = Vec<(Progress, bool)>> {
    prop::collection::vec((progress(), prop::bool::weighted(0.2)), 0..12)
}

/// A run over clusters of this progress, of which those that `cannot` are skipped. Each look is followed
/// by the events for its turn; after those the world only gets on. Returns how often each was ordered.
fn run(
    mut now: AllProgress,
    cannot: &BTreeSet<String>,
    most: usize,
    events: &[(usize, Event)],
) -> Result<(Waves, AllProgress, BTreeMap<String, usize>), TestCaseError> {
    let mut waves = Waves::new(most);
    let mut ordered: BTreeMap<String, usize> = BTreeMap::new();
    let mut events = events.iter();
    for look in 0.. {
        prop_assert!(look < 200, "the run ends: {now:?}");
        waves.observe(&now);
        let is_moving = |it: &&Progress| matches!(it, UnderWay | Elsewhere);
        let before = now.values().filter(is_moving).count();
        let shown = now.clone();
        while let Some(name) = waves.next(&shown) {
            if cannot.contains(name) {
                waves.note(name, Tried::Skipped(String::new()));
                continue;
            }
            waves.note(name, Tried::Ordered);
            *ordered.entry(name.to_owned()).or_default() += 1;
            now.insert(name.to_owned(), UnderWay);
        }
        let moving = now.values().filter(is_moving).count();
        prop_assert!(moving <= most.max(before), "{moving} at a time: {now:?}");
        if waves.is_over(&shown) {
            return Ok((waves, now, ordered));
        }
        match events.next() {
            Some(&(index, event)) => {
                let index = index.checked_rem(now.len()).unwrap_or_default();
                let Some(progress) = now.values_mut().nth(index) else { continue };
                *progress = match (event, *progress) {
                    (Event::GetsOn, UnderWay | Unknown) => There,
                    (Event::GetsOn | Event::GoesBack, Elsewhere) => Waits,
                    (Event::LosesRecord, _) => Unknown,
                    (Event::GoesBack, UnderWay) => Elsewhere,
                    (_, other) => other,
                };
            }
            None => {
                for (name, progress) in &mut now {
                    let was_ordered = waves.tried(name) == Some(&Tried::Ordered);
                    *progress = match *progress {
                        UnderWay => There,
                        Unknown if was_ordered => There,
                        Elsewhere => Waits,
                        other => other,
                    };
                }
            }
        }
    }
    unreachable!()
}

fn named(clusters: &[(Progress, bool)]) -> (AllProgress, BTreeSet<String>) {
    let name = |index: usize| format!("c{index:02}");
    let all = clusters.iter().enumerate().map(|(index, &(progress, _))| (name(index), progress)).collect();
    let cannot = clusters.iter().enumerate().filter(|(_, (_, cannot))| *cannot);
    (all, cannot.map(|(index, _)| name(index)).collect())
}

proptest! {
    #[test]
    fn each_that_can_gets_its_turn_once_and_ends_there(clusters in clusters(), most in 1_usize..5) {
        let (start, cannot) = named(&clusters);
        let (_, end, ordered) = run(start.clone(), &cannot, most, &[])?;
        for (name, progress) in &start {
            let turns = ordered.get(name).copied().unwrap_or_default();
            let has_a_turn = matches!(progress, Waits | Elsewhere | Unknown) && !cannot.contains(name);
            prop_assert_eq!(turns, usize::from(has_a_turn), "{}", name);
            if has_a_turn || matches!(progress, There | UnderWay) {
                prop_assert_eq!(end[name], There, "{}", name);
            }
        }
    }

    #[test]
    fn whatever_happens_there_are_never_too_many_and_none_is_ordered_twice(
        clusters in clusters(),
        most in 1_usize..5,
        events in prop::collection::vec(
            (any::<usize>(), prop_oneof![
                4 => Just(Event::GetsOn), 1 => Just(Event::LosesRecord), 1 => Just(Event::GoesBack)
            ]),
            0..40,
        ),
    ) {
        let (start, cannot) = named(&clusters);
        let (_, _, ordered) = run(start, &cannot, most, &events)?;
        prop_assert!(ordered.values().all(|&times| times == 1), "{ordered:?}");
    }
}
