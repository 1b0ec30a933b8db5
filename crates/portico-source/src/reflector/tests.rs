use kube::runtime::watcher::Event;
use serde_json::json;

use super::*;

const KIND: Kind = Kind::Service;

fn named(kind: Kind, name: &str) -> ObjectRef {
    reference(kind, &format!("n/{name}"))
}

fn received(kind: Kind, name: &str, object: Result<Object, InvalidObject>) -> Event<Received> {
    Event::Apply(Received { reference: named(kind, name), object, cluster_ips: Vec::new() })
}

fn present(kind: Kind, name: &str) -> Event<Received> {
    let value = json!({"metadata": {"name": name, "namespace": "n", "annotations": {"x": "y"}}});
    received(kind, name, Object::from_value(kind, value))
}

fn taken(reflector: &mut Reflector) -> (Vec<String>, bool) {
    let (changes, synced) = reflector.take();
    let changes = changes.iter().map(|change| match change {
        Change::Apply(object) => format!("+{}", object.metadata().name),
        Change::Delete(object) => format!("-{}", object.key.name),
    });
    (changes.collect(), synced)
}

/// A reflector in which Services `a` and `b` have been listed.
fn listed() -> Reflector {
    let mut reflector = Reflector::new(None);
    reflector.watch(KIND);
    reflector.apply(KIND, Event::Init);
    for name in ["a", "b"] {
        reflector.apply(KIND, present(KIND, name));
    }
    reflector.apply(KIND, Event::InitDone);
    assert_eq!(taken(&mut reflector), (vec!["+a".into(), "+b".into()], true));
    reflector
}

#[test]
fn nothing_is_synced_before_every_kind_is_listed() {
    let mut reflector = Reflector::new(None);
    reflector.watch(KIND);
    reflector.watch(Kind::EndpointSlice);
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, present(KIND, "a"));
    reflector.apply(KIND, Event::InitDone);
    assert_eq!(taken(&mut reflector), (vec!["+a".into()], false));
    reflector.apply(Kind::EndpointSlice, Event::Init);
    assert_eq!(taken(&mut reflector), (vec![], false));
    reflector.apply(Kind::EndpointSlice, Event::InitDone);
    assert_eq!(taken(&mut reflector), (vec![], true));
}

#[test]
fn an_object_that_vanished_while_the_watch_was_broken_is_gone_after_the_next_listing() {
    let mut reflector = listed();
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, present(KIND, "b"));
    // The listing breaks off and starts again: still nothing is gone.
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, present(KIND, "b"));
    reflector.apply(KIND, present(KIND, "c"));
    assert_eq!(taken(&mut reflector), (vec!["+b".into(), "+b".into(), "+c".into()], true));
    reflector.apply(KIND, Event::InitDone);
    assert_eq!(taken(&mut reflector), (vec!["-a".into()], true));
}

#[test]
fn three_hundred_relists_lose_nothing() {
    let mut reflector = listed();
    for _ in 0..300 {
        reflector.apply(KIND, Event::Init);
        for name in ["a", "b"] {
            reflector.apply(KIND, present(KIND, name));
        }
        reflector.apply(KIND, Event::InitDone);
        assert!(!taken(&mut reflector).0.iter().any(|event| event.starts_with('-')));
    }
}

#[test]
fn an_object_that_vanished_is_gone_however_many_listings_failed_meanwhile() {
    for failed in [255, 256] {
        let mut reflector = listed();
        (0..failed).for_each(|_| reflector.apply(KIND, Event::Init));
        reflector.apply(KIND, Event::Init);
        reflector.apply(KIND, present(KIND, "b"));
        reflector.apply(KIND, Event::InitDone);
        assert_eq!(taken(&mut reflector), (vec!["+b".into(), "-a".into()], true));
    }
}

#[test]
fn a_kind_watched_later_arrives_all_at_once_and_delays_no_other() {
    let mut reflector = listed();
    reflector.watch(Kind::Seed);
    reflector.apply(Kind::Seed, Event::Init);
    reflector.apply(Kind::Seed, present(Kind::Seed, "s"));
    reflector.apply(Kind::Seed, Event::Init);
    reflector.apply(Kind::Seed, present(Kind::Seed, "s"));
    reflector.apply(KIND, present(KIND, "c"));
    assert_eq!(taken(&mut reflector), (vec!["+c".into()], true));
    reflector.apply(Kind::Seed, Event::InitDone);
    assert_eq!(taken(&mut reflector), (vec!["+s".into()], true));
}

#[test]
fn an_object_that_no_longer_fits_its_kind_keeps_its_last_good_version() {
    let mut reflector = listed();
    let bad = || {
        let error = InvalidObject { field: "spec".into(), message: "is odd".into() };
        received(KIND, "a", Err(error))
    };
    reflector.apply(KIND, bad());
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, bad());
    reflector.apply(KIND, present(KIND, "b"));
    reflector.apply(KIND, Event::InitDone);
    assert_eq!(taken(&mut reflector).0, ["+b"]);
    assert_eq!(reflector.problems().count(), 1);
    reflector.apply(KIND, present(KIND, "a"));
    assert_eq!(reflector.problems().count(), 0);
}

#[test]
fn an_object_that_was_never_read_is_no_problem_any_more_once_a_listing_is_without_it() {
    let mut reflector = listed();
    reflector.watch(Kind::Seed);
    let bad = |kind, name| {
        let error = InvalidObject { field: "spec".into(), message: "is odd".into() };
        received(kind, name, Err(error))
    };
    reflector.apply(Kind::Seed, bad(Kind::Seed, "s"));
    reflector.apply(KIND, bad(KIND, "gone"));
    reflector.apply(KIND, bad(KIND, "stays"));
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, bad(KIND, "stays"));
    assert_eq!(reflector.problems().count(), 3, "the listing may break off");
    assert!(reflector.problems_changed());
    reflector.apply(KIND, Event::InitDone);
    assert!(reflector.problems_changed());
    let left: Vec<_> = reflector.problems().filter_map(|problem| problem.object.clone()).collect();
    assert_eq!(left, [named(KIND, "stays"), named(Kind::Seed, "s")]);
}

#[test]
fn a_service_is_kept_while_it_has_any_of_the_annotations() {
    let mut reflector = Reflector::new(Some(ExposeKeys::from_iter(["x", "y"])));
    reflector.watch(KIND);
    reflector.apply(KIND, Event::Init);
    let with = |key: &str| {
        let value = json!({"metadata": {"name": "a", "namespace": "n", "annotations": {key: "true"}}});
        received(KIND, "a", Object::from_value(KIND, value))
    };
    reflector.apply(KIND, with("x"));
    reflector.apply(KIND, Event::InitDone);
    reflector.apply(KIND, with("y"));
    reflector.apply(KIND, with("z"));
    assert_eq!(taken(&mut reflector).0, ["+a", "+a", "-a"]);
}

#[test]
fn a_service_that_loses_the_annotation_is_gone() {
    let mut reflector = Reflector::new(Some(ExposeKeys::from_iter(["x"])));
    reflector.watch(KIND);
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, present(KIND, "a"));
    reflector.apply(KIND, Event::InitDone);
    let plain = |name| {
        let value = json!({"metadata": {"name": name, "namespace": "n"}});
        received(KIND, name, Object::from_value(KIND, value))
    };
    reflector.apply(KIND, plain("a"));
    reflector.apply(KIND, plain("b"));
    assert_eq!(taken(&mut reflector).0, ["+a", "-a"]);
}

/// A Service as an API server has it.
fn service(name: &str, kind: &str, ip: &str) -> Event<Received> {
    let value = json!({
        "metadata": {"name": name, "namespace": "n"},
        "spec": {"type": kind, "clusterIP": ip, "clusterIPs": [ip]},
    });
    Event::Apply(serde_json::from_value::<Served<Service>>(value).unwrap().into())
}

#[test]
fn of_a_service_that_is_not_exposed_the_cluster_ip_is_known_and_what_nodes_lead_to_is_an_object() {
    let mut reflector = Reflector::new(Some(ExposeKeys::from_iter(["expose"])));
    reflector.watch(KIND);
    reflector.apply(KIND, Event::Init);
    for (name, kind, ip) in [
        ("plain", "ClusterIP", "10.0.0.1"),
        ("front", "LoadBalancer", "10.0.0.2"),
        ("port", "NodePort", "fd00::3"),
        ("headless", "ClusterIP", "None"),
    ] {
        reflector.apply(KIND, service(name, kind, ip));
    }
    reflector.apply(KIND, Event::InitDone);
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    assert_eq!(
        reflector.take_cluster_ips(),
        [Change::Apply(ip("10.0.0.1")), Change::Apply(ip("10.0.0.2")), Change::Apply(ip("fd00::3"))]
    );
    assert_eq!(taken(&mut reflector).0, ["+front", "+port"]);
    // An event of one, and a listing without another.
    let Event::Apply(plain) = service("plain", "ClusterIP", "10.0.0.1") else { panic!("it is one") };
    reflector.apply(KIND, Event::Delete(plain));
    assert_eq!(reflector.take_cluster_ips(), [Change::Delete(ip("10.0.0.1"))]);
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, service("port", "NodePort", "fd00::3"));
    reflector.apply(KIND, Event::InitDone);
    assert_eq!(reflector.take_cluster_ips(), [Change::Delete(ip("10.0.0.2"))]);
    assert_eq!(taken(&mut reflector).0, ["+port", "-front"]);
}

#[test]
fn the_cluster_ip_of_a_service_that_cannot_be_read_is_known_until_the_service_is_gone() {
    let mut reflector = Reflector::new(Some(ExposeKeys::from_iter(["expose"])));
    reflector.watch(KIND);
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    // Of one that was read, exposed or not, and of one that never was.
    let services = [("port", "NodePort", "10.0.0.1"), ("plain", "ClusterIP", "10.0.0.2")];
    reflector.apply(KIND, Event::Init);
    for (name, kind, ip) in services {
        reflector.apply(KIND, service(name, kind, ip));
    }
    reflector.apply(KIND, service("never", "odd", "10.0.0.3"));
    reflector.apply(KIND, Event::InitDone);
    let known = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|text| Change::Apply(ip(text)));
    assert_eq!(reflector.take_cluster_ips(), known);
    reflector.apply(KIND, Event::Init);
    for (name, ip) in [("port", "10.0.0.1"), ("plain", "10.0.0.2"), ("never", "10.0.0.3")] {
        reflector.apply(KIND, service(name, "odd", ip));
    }
    reflector.apply(KIND, Event::InitDone);
    assert_eq!(reflector.take_cluster_ips(), []);
    let Event::Apply(never) = service("never", "odd", "10.0.0.3") else { panic!("it is one") };
    reflector.apply(KIND, Event::Delete(never));
    assert_eq!(reflector.take_cluster_ips(), [Change::Delete(ip("10.0.0.3"))]);
    reflector.apply(KIND, Event::Init);
    reflector.apply(KIND, Event::InitDone);
    let mut gone = reflector.take_cluster_ips();
    gone.sort_by_key(|change| format!("{change:?}"));
    assert_eq!(gone, ["10.0.0.1", "10.0.0.2"].map(|text| Change::Delete(ip(text))));
}
