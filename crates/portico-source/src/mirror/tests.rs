use serde_json::json;

use super::*;

const KIND: Kind = Kind::Service;

fn named(kind: Kind, name: &str) -> ObjectRef {
    reference(kind, &format!("n/{name}"))
}

fn present(kind: Kind, name: &str) -> Heard {
    let value = json!({"metadata": {"name": name, "namespace": "n", "annotations": {"x": "y"}}});
    Heard::Present(named(kind, name), Object::from_value(kind, value))
}

fn taken(mirror: &mut Mirror) -> (Vec<String>, bool) {
    let (events, complete) = mirror.take();
    let events = events.iter().map(|event| match event {
        Event::Apply(object) => format!("+{}", object.metadata().name),
        Event::Delete(object) => format!("-{}", object.key.name),
    });
    (events.collect(), complete)
}

/// A mirror in which Services `a` and `b` have been listed.
fn listed() -> Mirror {
    let mut mirror = Mirror::new(None);
    mirror.watch(KIND);
    mirror.hear(KIND, Heard::Listing);
    for name in ["a", "b"] {
        mirror.hear(KIND, present(KIND, name));
    }
    mirror.hear(KIND, Heard::Listed);
    assert_eq!(taken(&mut mirror), (vec!["+a".into(), "+b".into()], true));
    mirror
}

#[test]
fn nothing_is_complete_before_every_kind_is_listed() {
    let mut mirror = Mirror::new(None);
    mirror.watch(KIND);
    mirror.watch(Kind::EndpointSlice);
    mirror.hear(KIND, Heard::Listing);
    mirror.hear(KIND, present(KIND, "a"));
    mirror.hear(KIND, Heard::Listed);
    assert_eq!(taken(&mut mirror), (vec!["+a".into()], false));
    mirror.hear(Kind::EndpointSlice, Heard::Listing);
    assert_eq!(taken(&mut mirror), (vec![], false));
    mirror.hear(Kind::EndpointSlice, Heard::Listed);
    assert_eq!(taken(&mut mirror), (vec![], true));
}

#[test]
fn what_vanished_while_nobody_watched_is_gone_after_the_next_whole_listing() {
    let mut mirror = listed();
    mirror.hear(KIND, Heard::Listing);
    mirror.hear(KIND, present(KIND, "b"));
    // The listing breaks off and begins again: still nothing is gone.
    mirror.hear(KIND, Heard::Listing);
    mirror.hear(KIND, present(KIND, "b"));
    mirror.hear(KIND, present(KIND, "c"));
    assert_eq!(taken(&mut mirror), (vec!["+b".into(), "+b".into(), "+c".into()], true));
    mirror.hear(KIND, Heard::Listed);
    assert_eq!(taken(&mut mirror), (vec!["-a".into()], true));
}

#[test]
fn three_hundred_relists_lose_nothing() {
    let mut mirror = listed();
    for _ in 0..300 {
        mirror.hear(KIND, Heard::Listing);
        for name in ["a", "b"] {
            mirror.hear(KIND, present(KIND, name));
        }
        mirror.hear(KIND, Heard::Listed);
        assert!(!taken(&mut mirror).0.iter().any(|event| event.starts_with('-')));
    }
}

#[test]
fn a_kind_watched_later_arrives_all_at_once_and_holds_up_nobody() {
    let mut mirror = listed();
    mirror.watch(Kind::Seed);
    mirror.hear(Kind::Seed, Heard::Listing);
    mirror.hear(Kind::Seed, present(Kind::Seed, "s"));
    mirror.hear(Kind::Seed, Heard::Listing);
    mirror.hear(Kind::Seed, present(Kind::Seed, "s"));
    mirror.hear(KIND, present(KIND, "c"));
    assert_eq!(taken(&mut mirror), (vec!["+c".into()], true));
    mirror.hear(Kind::Seed, Heard::Listed);
    assert_eq!(taken(&mut mirror), (vec!["+s".into()], true));
    mirror.unwatch(Kind::Seed);
    assert_eq!(taken(&mut mirror), (vec!["-s".into()], true));
}

#[test]
fn an_object_that_no_longer_fits_its_kind_keeps_its_last_good_version() {
    let mut mirror = listed();
    let bad = || {
        let error = InvalidObject { field: "spec".into(), message: "is odd".into() };
        Heard::Present(named(KIND, "a"), Err(error))
    };
    mirror.hear(KIND, bad());
    mirror.hear(KIND, Heard::Listing);
    mirror.hear(KIND, bad());
    mirror.hear(KIND, present(KIND, "b"));
    mirror.hear(KIND, Heard::Listed);
    assert_eq!(taken(&mut mirror).0, ["+b"]);
    assert_eq!(mirror.problems().count(), 1);
    mirror.hear(KIND, present(KIND, "a"));
    assert_eq!(mirror.problems().count(), 0);
}

#[test]
fn a_service_that_loses_the_annotation_is_gone() {
    let mut mirror = Mirror::new(Some("x".into()));
    mirror.watch(KIND);
    mirror.hear(KIND, Heard::Listing);
    mirror.hear(KIND, present(KIND, "a"));
    mirror.hear(KIND, Heard::Listed);
    let plain = |name| {
        let value = json!({"metadata": {"name": name, "namespace": "n"}});
        Heard::Present(named(KIND, name), Object::from_value(KIND, value))
    };
    mirror.hear(KIND, plain("a"));
    mirror.hear(KIND, plain("b"));
    assert_eq!(taken(&mut mirror).0, ["+a", "-a"]);
}
