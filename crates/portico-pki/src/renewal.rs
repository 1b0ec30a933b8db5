//! Whether a certificate that exists has to be issued again.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use thiserror::Error;
use x509_parser::prelude::X509Certificate;

use crate::authority::Authority;
use crate::certificate;
use crate::pair::Pair;
use crate::profile::Profile;

/// A certificate is renewed when less than this is left, as in KKP. One with a lifetime below three times
/// this is renewed when less than a third is left. So one for a day is not renewed at once.
const RENEWED_BEFORE: SignedDuration = SignedDuration::from_hours(30 * 24);

/// A certificate that something else issues is late when less than this part of its lifetime is left.
/// cert-manager renews when a third is left.
const RENEWED_LATE: i32 = 6;

/// Most names that a reason lists. They come from a Secret that anybody may have edited.
const SHOWN: usize = 8;

/// Why a certificate has to be issued again. The text goes into an Event.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Reason {
    /// Certificate or key cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The key belongs to another certificate.
    #[error("its private key belongs to another certificate")]
    KeyMismatch,
    /// The authority in force did not sign it.
    #[error("its authority has another key or another name now")]
    OtherAuthority,
    /// Subject or alternative names are others.
    #[error("its names differ: {}", difference(.lacking, .surplus))]
    NamesDiffer {
        /// What it should have.
        lacking: Vec<String>,
        /// What it should not have.
        surplus: Vec<String>,
    },
    /// It is for servers and should be for clients, or the other way round.
    #[error("it is not for what it is used for")]
    UsageDiffers,
    /// It was made by a machine whose clock was ahead.
    #[error("it is not valid before {0}: it was made while a clock was ahead")]
    NotYetValid(Timestamp),
    /// It ends soon, or has ended.
    #[error("it ends on {0}")]
    Expiring(Timestamp),
}

/// Why `pair` has to be issued again: it differs from `profile`, `authority` did not sign it, or it ends
/// soon. `None` if it can stay.
pub fn wants_renewal(
    pair: &Pair,
    profile: &Profile,
    authority: &Authority,
    now: Timestamp,
) -> Option<Reason> {
    match examine(pair, profile, authority, now) {
        Ok(reason) => reason,
        Err(why) => Some(Reason::Unreadable(why)),
    }
}

/// When a certificate with this validity is renewed, unless something else changes before.
pub(crate) fn renewed_at(end: Timestamp, lifetime: SignedDuration) -> Timestamp {
    end.checked_sub(renewed_before(lifetime)).unwrap_or(end)
}

fn renewed_before(lifetime: SignedDuration) -> SignedDuration {
    RENEWED_BEFORE.min(lifetime / 3)
}

/// Why a server's certificate does not suit clients that ask for the names of `profile`. Something else
/// issues it, such as cert-manager. `None` if they accept it. Its signer is not known here, and it may have
/// more names.
pub fn unfit(pair: &Pair, profile: &Profile, now: Timestamp) -> Option<Reason> {
    match examine_provided(pair, profile, now) {
        Ok(reason) => reason,
        Err(why) => Some(Reason::Unreadable(why)),
    }
}

fn examine_provided(pair: &Pair, profile: &Profile, now: Timestamp) -> Result<Option<Reason>, String> {
    let (der, _) = certificate::first(&pair.certificate)?;
    let found = certificate::parse(&der)?;
    if !certificate::fits(&found, &certificate::key(&pair.key)?) {
        return Ok(Some(Reason::KeyMismatch));
    }
    let present = certificate::alternative_names(&found)?;
    let lacking: Vec<String> =
        server_names(profile).into_iter().filter(|name| !is_covered(name, &present)).collect();
    if !lacking.is_empty() {
        return Ok(Some(Reason::NamesDiffer { lacking, surplus: Vec::new() }));
    }
    let usage = found.extended_key_usage().map_err(|error| format!("its usage cannot be read: {error}"))?;
    // Without any it is for everything.
    if usage.is_some_and(|usage| !usage.value.server_auth && !usage.value.any) {
        return Ok(Some(Reason::UsageDiffers));
    }
    let (from, end) = certificate::validity(&found);
    if now < from {
        return Ok(Some(Reason::NotYetValid(from)));
    }
    let late = end.duration_since(from) / RENEWED_LATE;
    Ok((end.duration_since(now) < late).then_some(Reason::Expiring(end)))
}

/// Whether a certificate with the names `present` is accepted for `name`, which may be a wildcard itself.
fn is_covered(name: &str, present: &BTreeSet<String>) -> bool {
    let wildcard = || name.split_once('.').map(|(_, parent)| format!("*.{parent}"));
    present.contains(name) || wildcard().is_some_and(|wildcard| present.contains(&wildcard))
}

fn examine(
    pair: &Pair,
    profile: &Profile,
    authority: &Authority,
    now: Timestamp,
) -> Result<Option<Reason>, String> {
    let (der, _) = certificate::first(&pair.certificate)?;
    let found = certificate::parse(&der)?;
    let key = certificate::key(&pair.key)?;
    if !certificate::fits(&found, &key) {
        return Ok(Some(Reason::KeyMismatch));
    }
    let signer = certificate::parse(&authority.der)?;
    let same_name = found.issuer().as_raw() == signer.subject().as_raw();
    if !same_name || found.verify_signature(Some(signer.public_key())).is_err() {
        return Ok(Some(Reason::OtherAuthority));
    }
    let (expected, present) = (expected_names(profile), present_names(&found)?);
    if expected != present {
        let lacking = expected.difference(&present).cloned().collect();
        let surplus = present.difference(&expected).cloned().collect();
        return Ok(Some(Reason::NamesDiffer { lacking, surplus }));
    }
    if !usage_is(&found, profile) {
        return Ok(Some(Reason::UsageDiffers));
    }
    let (from, end) = certificate::validity(&found);
    if now < from {
        return Ok(Some(Reason::NotYetValid(from)));
    }
    let left = end.duration_since(now);
    Ok((left < renewed_before(profile.lifetime)).then_some(Reason::Expiring(end)))
}

fn server_names(profile: &Profile) -> BTreeSet<String> {
    let mut names: BTreeSet<String> =
        profile.names.dns.iter().map(|name| name.to_ascii_lowercase()).collect();
    names.extend(profile.names.ips.iter().map(ToString::to_string));
    names
}

fn expected_names(profile: &Profile) -> BTreeSet<String> {
    let mut names = server_names(profile);
    names.insert(format!("CN={}", profile.common_name));
    names.extend(profile.organisation.iter().map(|name| format!("O={name}")));
    names
}

fn present_names(certificate: &X509Certificate<'_>) -> Result<BTreeSet<String>, String> {
    let mut names = certificate::alternative_names(certificate)?;
    let text = |value: Result<&str, _>| value.unwrap_or("?").to_owned();
    let subject = certificate.subject();
    names.extend(subject.iter_common_name().map(|name| format!("CN={}", text(name.as_str()))));
    names.extend(subject.iter_organization().map(|name| format!("O={}", text(name.as_str()))));
    Ok(names)
}

fn usage_is(certificate: &X509Certificate<'_>, profile: &Profile) -> bool {
    let Ok(Some(usage)) = certificate.extended_key_usage() else { return false };
    let (server, client) = (usage.value.server_auth, usage.value.client_auth);
    server == profile.usage.is_server() && client == profile.usage.is_client()
}

/// The difference between two sets of names, in words.
fn difference(lacking: &[String], surplus: &[String]) -> String {
    let parts = [("it lacks", lacking), ("nobody needs", surplus)];
    let parts = parts.iter().filter(|(_, names)| !names.is_empty());
    parts.map(|(what, names)| format!("{what} {}", listed(names))).collect::<Vec<_>>().join("; ")
}

/// The first of these names, each no longer than a DNS name can be.
fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:.253}")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
