//! Authorities that cannot be used, and certificates that have to be issued again.

use jiff::SignedDuration;
use portico_pki::{Authority, IssueError, KeyKind, Pair, Reason, Unusable, Usage, unfit, wants_renewal};
use proptest::prelude::*;

use crate::{authority, days, names, now, profile};

fn issue(authority: &Authority, usage: Usage) -> Pair {
    authority.issue(&profile(usage), KeyKind::EcdsaP256, now()).unwrap()
}

fn unusable(pair: &Pair) -> Unusable {
    Authority::read(pair, now()).err().unwrap()
}

#[test]
fn each_reason_why_an_authority_cannot_sign_is_named() {
    let (pair, authority) = authority("ca");
    let (other, _) = crate::authority("ca");
    let leaf = issue(&authority, Usage::ServerAndClient);
    assert_eq!(unusable(&leaf), Unusable::NotAuthority);
    let both = pair.certificate.clone() + &other.certificate;
    assert_eq!(unusable(&Pair { certificate: both, ..pair.clone() }), Unusable::Several);
    assert_eq!(unusable(&Pair { key: other.key, ..pair.clone() }), Unusable::KeyMismatch);
    for (certificate, key) in [("", &*pair.key), (&*pair.certificate, ""), (&pair.key, &pair.certificate)] {
        let pair = Pair { certificate: certificate.to_owned(), key: key.to_owned() };
        assert!(matches!(unusable(&pair), Unusable::Unreadable(_)), "{pair:?}");
    }
    let at = |time| Authority::read(&pair, time).err().map(|error| error.to_string());
    assert_eq!(at(now() - SignedDuration::from_hours(1)), None, "a clock that is an hour late");
    assert_eq!(
        at(now() - SignedDuration::from_hours(3)).unwrap(),
        "it is not valid before 2026-11-22T10:30:00Z; correct the clock of this machine"
    );
    assert_eq!(at(now() + days(3649)), None);
    assert_eq!(
        at(now() + days(3651)).unwrap(),
        "it expired on 2036-11-19T12:30:00Z, and so did everything that it signed; replace it, and what \
         trusts it"
    );
}

#[test]
fn a_certificate_stays_until_thirty_days_before_its_end() {
    let (_, authority) = authority("ca");
    for usage in [Usage::Server, Usage::Client, Usage::ServerAndClient] {
        let leaf = issue(&authority, usage);
        let at = |time| wants_renewal(&leaf, &profile(usage), &authority, time);
        assert_eq!(at(now()), None);
        assert_eq!(at(now() - SignedDuration::from_hours(2)), None);
        assert_eq!(at(now() + days(335)), None);
        let end = now() + days(365);
        assert_eq!(at(now() + days(335) + SignedDuration::from_secs(1)), Some(Reason::Expiring(end)));
        assert_eq!(at(now() + days(1000)), Some(Reason::Expiring(end)));
    }
}

#[test]
fn one_that_a_clock_ahead_has_made_is_issued_again() {
    let (_, authority) = authority("ca");
    let leaf = issue(&authority, Usage::Server);
    let reason =
        wants_renewal(&leaf, &profile(Usage::Server), &authority, now() - SignedDuration::from_hours(5));
    assert_eq!(
        reason.unwrap().to_string(),
        "it is not valid before 2026-11-22T10:30:00Z: it was made while a clock was ahead"
    );
}

#[test]
fn names_that_are_too_few_or_too_many_are_reported() {
    let (_, authority) = authority("ca");
    let leaf = issue(&authority, Usage::Server);
    let with = |dns: &[&str], ips: &[&str]| {
        let profile = portico_pki::Profile { names: names(dns, ips), ..profile(Usage::Server) };
        wants_renewal(&leaf, &profile, &authority, now()).map(|why| why.to_string())
    };
    assert_eq!(with(&["API.example.com", "kubernetes"], &["192.0.2.7", "2001:db8::7"]), None);
    assert_eq!(
        with(&["api.example.com", "b.example.com"], &["2001:db8::7"]).unwrap(),
        "its names differ: it lacks b.example.com; nobody needs 192.0.2.7, kubernetes"
    );
    let many: Vec<String> = (10..20).map(|number| format!("192.0.2.{number}")).collect();
    let many: Vec<&str> = many.iter().map(|ip| &**ip).collect();
    let reason = with(&["api.example.com", "kubernetes"], &[&["192.0.2.7", "2001:db8::7"], &*many].concat());
    assert!(reason.unwrap().ends_with("192.0.2.17 and 2 more"));
    let mut renamed = profile(Usage::Client);
    let client = issue(&authority, Usage::Client);
    renamed.organisation = Some("viewers".to_owned());
    assert_eq!(
        wants_renewal(&client, &renamed, &authority, now()).unwrap().to_string(),
        "its names differ: it lacks O=viewers; nobody needs O=system:masters"
    );
}

#[test]
fn another_authority_key_or_usage_is_a_reason_of_its_own() {
    let (_, authority) = authority("ca");
    let leaf = issue(&authority, Usage::Server);
    let server = profile(Usage::Server);
    // One with the same name has another key, as after a Secret was deleted and made anew.
    for name in ["ca", "other"] {
        let (_, other) = crate::authority(name);
        assert_eq!(wants_renewal(&leaf, &server, &other, now()), Some(Reason::OtherAuthority));
    }
    let key = issue(&authority, Usage::Server).key;
    let mixed = Pair { key, ..leaf.clone() };
    assert_eq!(wants_renewal(&mixed, &server, &authority, now()), Some(Reason::KeyMismatch));
    let both = portico_pki::Profile { usage: Usage::ServerAndClient, ..server.clone() };
    assert_eq!(wants_renewal(&leaf, &both, &authority, now()), Some(Reason::UsageDiffers));
    for broken in [Pair { certificate: String::new(), ..leaf.clone() }, Pair { key: String::new(), ..leaf }] {
        assert!(matches!(wants_renewal(&broken, &server, &authority, now()), Some(Reason::Unreadable(_))));
    }
}

#[test]
fn what_something_else_issues_fits_if_clients_accept_it() {
    let (_, authority) = authority("theirs");
    let wanted = |dns: &[&str]| portico_pki::Profile { names: names(dns, &[]), ..profile(Usage::Server) };
    let wide = wanted(&["*.north.example.com", "front.example.com"]);
    let leaf = authority.issue(&wide, KeyKind::EcdsaP256, now()).unwrap();
    let reason = |pair: &Pair, dns: &[&str], at| unfit(pair, &wanted(dns), at).map(|why| why.to_string());
    assert_eq!(reason(&leaf, &["*.north.example.com"], now()), None, "it may have more names");
    assert_eq!(reason(&leaf, &["a.north.example.com", "FRONT.example.com"], now()), None);
    assert_eq!(
        reason(&leaf, &["*.south.example.com", "b.a.north.example.com"], now()).unwrap(),
        "its names differ: it lacks *.south.example.com, b.a.north.example.com"
    );
    assert_eq!(reason(&leaf, &["front.example.com"], now() + days(300)), None);
    assert!(reason(&leaf, &["front.example.com"], now() + days(306)).unwrap().starts_with("it ends on"));
    assert!(reason(&leaf, &["front.example.com"], now() - days(1)).unwrap().contains("not valid before"));
    let client = authority.issue(&profile(Usage::Client), KeyKind::EcdsaP256, now()).unwrap();
    assert_eq!(unfit(&client, &wanted(&[]), now()), Some(Reason::UsageDiffers));
    let mixed = Pair { key: client.key, ..leaf.clone() };
    assert_eq!(unfit(&mixed, &wide, now()), Some(Reason::KeyMismatch));
    let broken = Pair { certificate: "none".into(), ..leaf };
    assert!(matches!(unfit(&broken, &wide, now()), Some(Reason::Unreadable(_))));
}

#[test]
fn a_name_that_no_certificate_can_hold_is_refused_with_the_name() {
    let (_, authority) = authority("ca");
    let profile = portico_pki::Profile { names: names(&["bücher.example"], &[]), ..profile(Usage::Server) };
    let error = authority.issue(&profile, KeyKind::EcdsaP256, now()).unwrap_err();
    assert!(matches!(&error, IssueError::Name { name, .. } if name == "bücher.example"), "{error}");
    assert!(!format!("{:?}", issue(&authority, Usage::Server)).contains("PRIVATE KEY"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Otherwise every pass over a cluster would write a Secret and roll its pods.
    #[test]
    fn what_was_just_issued_is_never_issued_again(
        dns in proptest::collection::btree_set("[a-zA-Z0-9*]([a-zA-Z0-9.-]{0,40}[a-z])?", 0..6),
        ips in proptest::collection::btree_set(any::<std::net::IpAddr>(), 0..6),
        organisation in proptest::option::of("[a-z:]{1,20}"),
        common_name in "[ -~]{1,40}",
        hours in 1_i64..20_000,
        usage in prop_oneof![Just(Usage::Server), Just(Usage::Client), Just(Usage::ServerAndClient)],
    ) {
        let (_, authority) = authority("ca");
        let names = portico_pki::Names { dns, ips };
        let lifetime = SignedDuration::from_hours(hours);
        let profile = portico_pki::Profile { common_name, organisation, names, usage, lifetime };
        let leaf = authority.issue(&profile, KeyKind::EcdsaP256, now()).unwrap();
        prop_assert_eq!(wants_renewal(&leaf, &profile, &authority, now()), None);
    }

    #[test]
    fn no_text_in_a_secret_is_worse_than_unreadable(text in "(-----BEGIN CERTIFICATE-----\n)?.{0,200}") {
        let (pair, authority) = authority("ca");
        let broken = Pair { certificate: text, key: pair.key };
        let reason = wants_renewal(&broken, &profile(Usage::Server), &authority, now());
        prop_assert!(matches!(reason, Some(Reason::Unreadable(_))), "{reason:?}");
    }
}
