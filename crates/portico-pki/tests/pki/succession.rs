//! An authority is followed by another long before it ends.

use portico_pki::{Authority, KeyKind, Step, Succession, Usage, wants_renewal};

use crate::{days, now, profile};

const NAME: &str = "portico-tunnel-ca";

#[test]
fn a_successor_is_announced_takes_over_and_the_former_is_forgotten_once_it_has_ended() {
    let mut authority = Succession::first(NAME, now()).unwrap();
    let first = authority.current.clone();
    let mut at = |day: i64| {
        let step = authority.advance(NAME, now() + days(day)).unwrap();
        (step, authority.clone())
    };
    assert_eq!(at(3_284).0, None);
    let (step, announced) = at(3_286);
    assert_eq!(step, Some(Step::Announced));
    assert_eq!(announced.current, first, "it signs nothing yet");
    let next = announced.next.clone().unwrap();
    assert_eq!(announced.trusted(), first.certificate.clone() + &next.certificate);
    assert_eq!(at(3_467).0, None);
    let (step, succeeded) = at(3_469);
    assert_eq!((step, &succeeded.current, &succeeded.next), (Some(Step::Succeeded), &next, &None));
    assert_eq!(succeeded.trusted(), next.certificate.clone() + &first.certificate);
    assert_eq!(at(3_649).0, None);
    let (step, alone) = at(3_651);
    assert_eq!((step, alone.trusted()), (Some(Step::Forgotten), next.certificate));
}

#[test]
fn a_certificate_without_a_last_line_break_does_not_swallow_the_next() {
    let mut authority = Succession::first(NAME, now()).unwrap();
    authority.advance(NAME, now() + days(3_300)).unwrap();
    let whole = authority.trusted();
    let current = &mut authority.current.certificate;
    current.truncate(current.trim_end().len());
    assert_eq!(authority.trusted(), whole);
}

#[test]
fn a_successor_that_was_announced_late_is_waited_for_unless_the_authority_has_ended() {
    for (late, waits) in [(3_500, true), (3_651, false)] {
        let mut authority = Succession::first(NAME, now()).unwrap();
        let late = now() + days(late);
        assert_eq!(authority.advance(NAME, late).unwrap(), Some(Step::Announced));
        assert_eq!(authority.advance(NAME, late).unwrap(), (!waits).then_some(Step::Succeeded));
        let step = authority.advance(NAME, late + days(30)).unwrap();
        assert_eq!(step, if waits { Some(Step::Succeeded) } else { Some(Step::Forgotten) });
    }
}

#[test]
fn what_the_former_signed_is_issued_again_by_the_successor() {
    let mut authority = Succession::first(NAME, now()).unwrap();
    let signer = Authority::read(&authority.current, now()).unwrap();
    let profile = profile(Usage::Server);
    let (announced, after) = (now() + days(3_300), now() + days(3_500));
    let leaf = signer.issue(&profile, KeyKind::default(), announced).unwrap();
    authority.advance(NAME, announced).unwrap();
    let signer = Authority::read(&authority.current, announced).unwrap();
    assert_eq!(wants_renewal(&leaf, &profile, &signer, announced), None, "nothing changes for it");
    authority.advance(NAME, after).unwrap();
    let signer = Authority::read(&authority.current, after).unwrap();
    assert!(wants_renewal(&leaf, &profile, &signer, after).is_some());
}

#[test]
fn a_damaged_successor_is_made_anew_and_a_damaged_authority_is_left_alone() {
    let mut authority = Succession::first(NAME, now()).unwrap();
    let then = now() + days(3_400);
    authority.advance(NAME, then).unwrap();
    authority.next.as_mut().unwrap().key.clear();
    assert_eq!(authority.advance(NAME, then).unwrap(), Some(Step::Announced));
    authority.current.certificate = "nonsense".into();
    let before = authority.clone();
    assert_eq!(authority.advance(NAME, then).unwrap(), None);
    assert_eq!(authority, before);
}
