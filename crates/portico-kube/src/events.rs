//! Kubernetes Events on the objects a controller works on (events.k8s.io/v1).
//!
//! An Event tells users of `kubectl describe` what waits and why. Publishing one never fails a
//! reconciliation: what goes wrong is in the log. Repeated Events are merged into a series by
//! [`kube::runtime::events::Recorder`]. Bounded: notes have the length that the API allows, a request has a
//! time limit, and each object has a budget, as in client-go.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use crate::error::describe;

/// Longest note that the API accepts, in bytes.
const MAX_NOTE: usize = 1_024;

/// Events that one object may have in a burst, as in client-go.
const BURST: u32 = 25;

/// After a burst, an object may have one more Event each time this has passed, as in client-go.
const REFILL: Duration = Duration::from_secs(300);

/// Objects with a budget that is not full. Beyond it, objects without a budget have none: no Event is worth
/// the memory.
const MAX_OBJECTS: usize = 4_096;

/// Events after which a recorder is left for another one. It keeps each for six minutes, and at rest for
/// ever, to merge repeated ones. For a thousand objects that have just been made that is several megabytes.
const MAX_MERGED: u32 = 256;

/// An Event that is not accepted by then is given up.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How an Event is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Information.
    Normal,
    /// Needs attention.
    Warning,
}

/// One Event about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note<'a> {
    /// How it is marked.
    pub severity: Severity,
    /// One word for programs, in CamelCase: `ListenerLimitReached`. At most 128 bytes.
    pub reason: &'a str,
    /// What the controller was doing, in CamelCase: `PublishPorts`. At most 128 bytes.
    pub action: &'a str,
    /// A sentence for people. Shortened to what the API allows.
    pub text: &'a str,
}

/// Publishes Events of one controller.
pub struct Events {
    client: Client,
    reporter: Reporter,
    /// With the number of Events that it has published.
    recorder: Mutex<(Recorder, u32)>,
    budgets: Mutex<Budgets>,
}

impl Events {
    /// Events reported by `controller`, replica `instance`.
    pub fn new(client: Client, controller: &str, instance: &str) -> Self {
        let reporter = Reporter { controller: controller.to_owned(), instance: Some(instance.to_owned()) };
        let recorder = Mutex::new((Recorder::new(client.clone(), reporter.clone()), 0));
        Self { client, reporter, recorder, budgets: Mutex::default() }
    }

    /// What publishes the next Event. Clones share what they remember.
    fn recorder(&self) -> Recorder {
        let mut current = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        if current.1 >= MAX_MERGED {
            *current = (Recorder::new(self.client.clone(), self.reporter.clone()), 0);
        }
        current.1 += 1;
        current.0.clone()
    }

    /// Publishes `note` on the object. Waits until the API server has it, but no longer than ten seconds.
    pub async fn publish(&self, object: &ObjectReference, note: Note<'_>) {
        self.send(object, None, note).await;
    }

    /// Publishes `note` on `object`, about `part`, another object that belongs to it. Events about different
    /// parts are not merged: of a series only the first text is kept.
    pub async fn publish_about(&self, object: &ObjectReference, part: ObjectReference, note: Note<'_>) {
        self.send(object, Some(part), note).await;
    }

    async fn send(&self, object: &ObjectReference, part: Option<ObjectReference>, note: Note<'_>) {
        let name = object.name.as_deref().unwrap_or_default();
        if !self.budgets.lock().unwrap_or_else(PoisonError::into_inner).take(object, Instant::now()) {
            debug!(
                object = name,
                reason = note.reason,
                "too many Events on this object; this one is left out"
            );
            return;
        }
        let event = Event {
            type_: match note.severity {
                Severity::Normal => EventType::Normal,
                Severity::Warning => EventType::Warning,
            },
            reason: note.reason.to_owned(),
            note: Some(shortened(note.text).to_owned()),
            action: note.action.to_owned(),
            secondary: part,
        };
        let error = match timeout(REQUEST_TIMEOUT, self.recorder().publish(&event, object)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => describe(&error),
            Err(_) => format!("no answer within {REQUEST_TIMEOUT:?}"),
        };
        warn!(object = name, reason = note.reason, error, "cannot put an Event on the object");
    }
}

/// Token buckets, one per object.
#[derive(Debug, Default)]
struct Budgets {
    /// Tokens spent, and the time from which they refill. A full bucket is not kept.
    spent: HashMap<Box<str>, (u32, Instant)>,
}

impl Budgets {
    /// Returns whether the object may have another Event now, and counts it.
    fn take(&mut self, object: &ObjectReference, now: Instant) -> bool {
        if self.spent.len() >= MAX_OBJECTS {
            self.spent.retain(|_, (spent, since)| *spent > refilled(*since, now));
        }
        let key = object_key(object);
        if let Some((spent, since)) = self.spent.get_mut(&key) {
            let back = refilled(*since, now).min(*spent);
            *spent -= back;
            *since = if *spent == 0 { now } else { *since + REFILL * back };
            let allowed = *spent < BURST;
            *spent += u32::from(allowed);
            return allowed;
        }
        let allowed = self.spent.len() < MAX_OBJECTS;
        if allowed {
            self.spent.insert(key, (1, now));
        }
        allowed
    }
}

/// Tokens that come back between two times.
fn refilled(since: Instant, now: Instant) -> u32 {
    u32::try_from(now.duration_since(since).as_secs() / REFILL.as_secs()).unwrap_or(u32::MAX)
}

fn object_key(object: &ObjectReference) -> Box<str> {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}/{}", part(&object.kind), part(&object.namespace), part(&object.name)).into()
}

/// The text, cut at a character so that it fits.
fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_NOTE)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str) -> ObjectReference {
        ObjectReference { name: Some(name.into()), ..ObjectReference::default() }
    }

    #[test]
    fn one_object_has_a_burst_of_events_and_then_one_now_and_then() {
        let (mut budgets, start) = (Budgets::default(), Instant::now());
        let burst = (0..100).filter(|_| budgets.take(&object("a"), start)).count();
        assert_eq!(burst, BURST as usize);
        assert!(!budgets.take(&object("a"), start + REFILL - Duration::from_secs(1)));
        assert!(budgets.take(&object("a"), start + REFILL));
        assert!(!budgets.take(&object("a"), start + REFILL));
        let later = (0..100).filter(|_| budgets.take(&object("a"), start + REFILL * 3)).count();
        assert_eq!(later, 2);
    }

    #[test]
    fn a_noisy_object_takes_nothing_from_another() {
        let (mut budgets, start) = (Budgets::default(), Instant::now());
        while budgets.take(&object("a"), start) {}
        assert!(budgets.take(&object("b"), start));
    }

    #[test]
    fn budgets_have_a_bound_and_full_ones_make_room() {
        let (mut budgets, start) = (Budgets::default(), Instant::now());
        for index in 0..MAX_OBJECTS {
            assert!(budgets.take(&object(&index.to_string()), start));
        }
        assert!(!budgets.take(&object("new"), start));
        assert_eq!(budgets.spent.len(), MAX_OBJECTS);
        assert!(budgets.take(&object("new"), start + REFILL));
        assert_eq!(budgets.spent.len(), 1);
    }

    #[test]
    fn a_long_note_is_cut_at_a_character() {
        let text = "ä".repeat(MAX_NOTE);
        assert_eq!(shortened(&text).len(), MAX_NOTE);
        let text = format!("a{text}");
        assert_eq!(shortened(&text).len(), MAX_NOTE - 1);
        assert_eq!(shortened("short"), "short");
    }
}
