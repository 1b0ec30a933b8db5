//! Another client that writes the same fields, such as KKP's updater or an admission webhook.
//!
//! Its changes are put back [`TOLERATED`] times. If it goes on, this controller yields. Two writers that
//! overwrite each other cost a cloud load balancer more than missing ports. After [`PAUSE`] it tries once
//! more; if that stands for [`WINDOW`], the other has gone.
//!
//! Pure: the caller passes the time.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use portico_kube::cached::Cached;
use serde_json::Value;
use tokio::time::Instant;

/// Reverts within [`WINDOW`] that are put back. A person with kubectl needs one or two to see what writes.
const TOLERATED: usize = 2;

/// How long a revert counts, and how long a write must stand to count as accepted.
const WINDOW: Duration = Duration::from_mins(10);

/// Pause before the next attempt after yielding.
const PAUSE: Duration = Duration::from_mins(10);

/// When writes were reverted, and what follows.
#[derive(Debug, Default)]
pub(crate) struct Contention {
    /// Reverts within the window.
    reverts: Vec<Instant>,
    yielded: Option<Yielded>,
}

/// The last write to one object that others may write too, and its fate.
#[derive(Debug, Default)]
pub(crate) struct RepairBackoff {
    accepted: Option<Accepted>,
    /// Most objects have none.
    contention: Option<Box<Contention>>,
}

/// What was wanted and accepted, as two digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Accepted {
    /// All but the data.
    fields: u64,
    /// A certificate is another one each time it is issued.
    data: u64,
}

#[derive(Debug)]
struct Yielded {
    to: String,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Nothing is written until then.
    Pausing(Instant),
    /// Writes are allowed again since this time. One revert ends it.
    Trying(Instant),
}

/// The objects of one cluster that others may write too, by kind and name.
#[derive(Debug, Default)]
pub(crate) struct RepairBackoffs(BTreeMap<(&'static str, String), RepairBackoff>);

impl RepairBackoffs {
    /// The back-off of one object.
    pub(crate) fn of(&mut self, kind: &'static str, name: &str) -> &mut RepairBackoff {
        self.0.entry((kind, name.to_owned())).or_default()
    }

    /// When time alone changes something.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.0.values().filter_map(RepairBackoff::due).min()
    }

    /// Whether an object is not left to another writer.
    pub(crate) fn may_write(&mut self, kind: &'static str, name: &str, now: Instant) -> bool {
        self.0.get_mut(&(kind, name.to_owned())).is_none_or(|backoff| backoff.may_write(now))
    }

    /// The first object that is left to another writer, as kind and name, and that writer.
    pub(crate) fn yielded(&mut self, now: Instant) -> Option<String> {
        // Time passes for those after it too: `due` is that of the earliest.
        self.0.values_mut().for_each(|backoff| _ = backoff.may_write(now));
        self.0.iter_mut().find_map(|((kind, name), backoff)| {
            if backoff.may_write(now) {
                return None;
            }
            let writer = backoff.yielded_to().unwrap_or_default();
            Some(format!("{kind} {name} is changed back by {writer} each time it is written"))
        })
    }
}

impl Contention {
    /// What was written last has been changed by `writer`.
    pub(crate) fn reverted(&mut self, writer: String, now: Instant) {
        self.forget(now);
        self.reverts.push(now);
        if self.yielded.is_some() || self.reverts.len() > TOLERATED {
            self.yielded = Some(Yielded { to: writer, phase: Phase::Pausing(now + PAUSE) });
        }
    }

    /// Lets time pass. Returns whether writes are allowed.
    pub(crate) fn may_write(&mut self, now: Instant) -> bool {
        self.forget(now);
        let Some(yielded) = &mut self.yielded else { return true };
        match yielded.phase {
            Phase::Pausing(until) if now < until => return false,
            Phase::Pausing(_) => yielded.phase = Phase::Trying(now),
            Phase::Trying(since) if now.duration_since(since) >= WINDOW => {
                self.yielded = None;
                self.reverts.clear();
            }
            Phase::Trying(_) => {}
        }
        true
    }

    fn forget(&mut self, now: Instant) {
        self.reverts.retain(|&at| now.duration_since(at) < WINDOW);
    }

    /// The client that this controller yields to, until it is gone.
    pub(crate) fn yielded_to(&self) -> Option<&str> {
        self.yielded.as_ref().map(|yielded| yielded.to.as_str())
    }

    /// When time alone changes something.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.yielded.as_ref().map(|yielded| match yielded.phase {
            Phase::Pausing(until) => until,
            Phase::Trying(since) => since + WINDOW,
        })
    }
}

impl RepairBackoff {
    /// `wanted` was applied to the object that was `current`, and changed it or did not. Returns what
    /// somebody else had done to it, if that was put right.
    pub(crate) fn applied<K>(
        &mut self,
        wanted: &Value,
        current: Option<&Cached<K>>,
        changed: bool,
        now: Instant,
    ) -> Option<String> {
        let accepted = Accepted::of(wanted);
        let before = self.accepted.replace(accepted);
        let puts_back = |before: Accepted| {
            let found = || current.map(|seen| Accepted::of(&seen.value()).data);
            // If the wanted data is new, the object decides. Another client changed it if its data is not the
            // data applied last.
            before.fields == accepted.fields
                && (before.data == accepted.data || found().is_none_or(|found| found != before.data))
        };
        let before = before.filter(|_| changed)?;
        if puts_back(before) {
            self.contention.get_or_insert_default().reverted(reverted_by(current), now);
        } else if current.is_some() {
            return None;
        }
        // A deleted object may be wanted with one more field, its former NodePort. That is reported, and is
        // no contention.
        Some(match current {
            None => "was deleted, and is made anew".to_owned(),
            Some(_) => format!("was changed by {}, and is put back", reverted_by(current)),
        })
    }

    /// Lets time pass. Returns whether writes are allowed.
    pub(crate) fn may_write(&mut self, now: Instant) -> bool {
        self.contention.as_mut().is_none_or(|contention| contention.may_write(now))
    }

    /// The client that the object is left to, until it is gone.
    pub(crate) fn yielded_to(&self) -> Option<&str> {
        self.contention.as_ref().and_then(|contention| contention.yielded_to())
    }

    /// When time alone changes something.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.contention.as_ref().and_then(|contention| contention.due())
    }

    /// The object was deleted: what comes next is new.
    pub(crate) fn deleted(&mut self) {
        self.accepted = None;
    }
}

impl Accepted {
    fn of(object: &Value) -> Self {
        let digest = |is_data: bool| {
            let mut hasher = DefaultHasher::new();
            let fields = object.as_object().into_iter().flatten();
            for (key, value) in fields.filter(|(key, _)| (*key == "data") == is_data) {
                (key, value.to_string()).hash(&mut hasher);
            }
            hasher.finish()
        };
        Self { fields: digest(false), data: digest(true) }
    }
}

/// The client that changed an object back. `before` is the object as it was when it was applied once more.
fn reverted_by<K>(before: Option<&Cached<K>>) -> String {
    let unnamed = || "a client that deletes it, or a second operator on this seed".to_owned();
    before.and_then(Cached::other_writer).map_or_else(unnamed, |name| format!("{name:?}"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;
    use serde_json::json;

    use super::*;

    /// An object of these labels and this data.
    fn object(label: &str, data: &str) -> Value {
        json!({"metadata": {"labels": {"a": label}}, "data": {"tls.crt": data}})
    }

    /// Applies what is wanted to what is there, four times. Returns whether the object is left alone by then.
    fn yields(steps: impl Fn(usize) -> (Value, Value)) -> bool {
        let (mut backoff, now) = (RepairBackoff::default(), Instant::now());
        for number in 0..4 {
            let (current, wanted) = steps(number);
            let current: Cached<Secret> = serde_json::from_value(current).unwrap();
            backoff.applied(&wanted, Some(&current), true, now);
        }
        !backoff.may_write(now)
    }

    #[test]
    fn certificates_that_are_issued_again_are_no_contention() {
        let issued = |number: usize| object("own", &format!("certificate {number}"));
        assert!(!yields(|number| (issued(number), issued(number + 1))));
    }

    #[test]
    fn data_that_somebody_replaces_is_contention() {
        let issued = |number: usize| object("own", &format!("certificate {number}"));
        assert!(yields(|number| (object("own", "another"), issued(number))));
        assert!(yields(|_| (object("own", "another"), issued(0))));
    }

    #[test]
    fn fields_that_somebody_changes_are_contention_and_fields_that_are_wanted_otherwise_are_not() {
        assert!(yields(|_| (object("another", ""), object("own", ""))));
        let wanted = |number: usize| object(&format!("{number}"), "");
        assert!(!yields(|number| (wanted(number), wanted(number + 1))));
    }

    #[test]
    fn what_changes_nothing_is_no_contention() {
        let (mut backoff, now) = (RepairBackoff::default(), Instant::now());
        (0..4).for_each(|_| drop(backoff.applied::<Secret>(&object("own", ""), None, false, now)));
        assert!(backoff.may_write(now));
        (0..4).for_each(|_| drop(backoff.applied::<Secret>(&object("own", ""), None, true, now)));
        assert!(!backoff.may_write(now), "it was deleted each time");
        assert!(backoff.yielded_to().unwrap().contains("a client that deletes it"));
    }

    #[test]
    fn the_pause_of_one_object_ends_while_another_one_is_left_alone() {
        let (mut backoffs, start) = (RepairBackoffs::default(), Instant::now());
        for (name, at) in [("a", start + PAUSE / 2), ("b", start)] {
            let backoff = backoffs.of("Secret", name);
            (0..4).for_each(|_| drop(backoff.applied::<Secret>(&object("own", ""), None, true, at)));
        }
        let now = start + PAUSE;
        assert_eq!(backoffs.due(), Some(now));
        assert!(backoffs.yielded(now).unwrap().contains("Secret a"));
        assert_eq!(backoffs.due(), Some(now + PAUSE / 2));
    }

    fn yielded() -> (Contention, Instant) {
        let (mut contention, now) = (Contention::default(), Instant::now());
        for _ in 0..=TOLERATED {
            assert!(contention.may_write(now) && contention.yielded_to().is_none());
            contention.reverted("updater".into(), now);
        }
        (contention, now)
    }

    #[test]
    fn a_writer_that_goes_on_is_yielded_to() {
        let (mut contention, now) = yielded();
        assert_eq!(contention.yielded_to(), Some("updater"));
        assert!(!contention.may_write(now));
        assert!(!contention.may_write(now + PAUSE - Duration::from_secs(1)));
    }

    #[test]
    fn changes_of_now_and_then_are_put_back() {
        let (mut contention, mut now) = (Contention::default(), Instant::now());
        for _ in 0..100 {
            contention.reverted("kubectl".into(), now);
            assert!(contention.may_write(now));
            now += WINDOW / 2;
        }
        assert!(contention.reverts.len() <= TOLERATED);
    }

    #[test]
    fn after_a_pause_one_attempt_is_made_and_one_revert_ends_it() {
        let (mut contention, start) = yielded();
        let again = contention.due().unwrap();
        assert_eq!(again, start + PAUSE);
        assert!(contention.may_write(again));
        assert_eq!(contention.yielded_to(), Some("updater"));
        contention.reverted("updater".into(), again);
        assert!(!contention.may_write(again));
        assert_eq!(contention.due(), Some(again + PAUSE));
    }

    #[test]
    fn an_attempt_that_stands_ends_the_contention() {
        let (mut contention, _) = yielded();
        let again = contention.due().unwrap();
        assert!(contention.may_write(again));
        let over = contention.due().unwrap();
        assert_eq!(over, again + WINDOW);
        assert!(contention.may_write(over) && contention.yielded_to().is_none());
        assert_eq!(contention.due(), None);
        contention.reverted("kubectl".into(), over);
        assert!(contention.may_write(over), "one revert is tolerated again");
    }
}
