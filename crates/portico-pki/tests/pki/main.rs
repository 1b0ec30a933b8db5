//! Certificates as their users see them: openssl, controllers, readers of the manual.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod cluster;
mod inventory;
mod kubeconfig;
mod openssl;
mod renewal;
mod succession;

use jiff::{SignedDuration, Timestamp};
use portico_pki::{Authority, KeyKind, LIFETIME, Names, Pair, Profile, Usage};

/// Half past noon on a day of 2026.
fn now() -> Timestamp {
    "2026-11-22T12:30:00Z".parse().unwrap()
}

fn days(number: i64) -> SignedDuration {
    SignedDuration::from_hours(number * 24)
}

fn names(dns: &[&str], ips: &[&str]) -> Names {
    Names {
        dns: dns.iter().map(ToString::to_string).collect(),
        ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
    }
}

/// That of a server with two names, or of a client of a group.
fn profile(usage: Usage) -> Profile {
    let (organisation, names) = match usage {
        Usage::Client => (Some("system:masters".to_owned()), Names::default()),
        _ => (None, names(&["api.example.com", "kubernetes"], &["192.0.2.7", "2001:db8::7"])),
    };
    Profile { common_name: "subject".to_owned(), organisation, names, usage, lifetime: LIFETIME }
}

fn authority(name: &str) -> (Pair, Authority) {
    let pair = Authority::create(name, KeyKind::EcdsaP256, now()).unwrap();
    let authority = Authority::read(&pair, now()).unwrap();
    (pair, authority)
}
