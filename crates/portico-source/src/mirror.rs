//! What an API server has told so far, and what follows from its next word.
//!
//! Pure: [`crate::kubernetes`] brings what the watches hear. Kept per object is its name and in which listing it was seen last, so
//! that a relist after a long absence shows what vanished meanwhile. The rules: nothing is complete before every watched kind has been listed
//! once; a kind that is watched later arrives all at once; silence and errors delete nothing.

use std::collections::{BTreeMap, HashMap};

use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::problem::Severity;

use crate::object::{InvalidObject, Object};
use crate::step::{Event, ManifestProblem};

/// What a watch of one kind hears.
#[derive(Debug)]
pub(crate) enum Heard {
    /// A listing begins.
    Listing,
    /// An object is there, new or changed.
    Present(ObjectRef, Result<Object, InvalidObject>),
    /// An object is gone.
    Gone(ObjectRef),
    /// The listing is whole.
    Listed,
}

/// Everything known of one API server.
#[derive(Debug, Default)]
pub(crate) struct Mirror {
    kinds: BTreeMap<Kind, Mirrored>,
    /// Services without this annotation are passed over.
    annotation: Option<Box<str>>,
    problems: BTreeMap<ObjectRef, ManifestProblem>,
    /// Whether every kind watched from the start has been listed.
    complete: bool,
    events: Vec<Event>,
    problems_changed: bool,
}

/// The objects of one kind.
#[derive(Debug, Default)]
struct Mirrored {
    /// By `namespace/name`, or `name`: the listing, counted modulo 256, in which the object was seen last.
    objects: HashMap<Box<str>, u8>,
    listing: u8,
    listed: bool,
    /// Events of a first listing that must arrive all at once.
    held: Vec<Event>,
}

impl Mirror {
    /// A mirror of nothing yet.
    pub(crate) fn new(annotation: Option<Box<str>>) -> Self {
        Self { annotation, ..Self::default() }
    }

    /// From now on `kind` is watched.
    pub(crate) fn watch(&mut self, kind: Kind) {
        self.kinds.entry(kind).or_default();
    }

    /// The API server does not serve `kind` any more: its objects are gone.
    pub(crate) fn unwatch(&mut self, kind: Kind) {
        let Some(mirrored) = self.kinds.remove(&kind) else { return };
        for name in mirrored.objects.into_keys() {
            let object = reference(kind, &name);
            self.forget_problem(&object);
            self.events.push(Event::Delete(object));
        }
    }

    /// Whether every watched kind has been listed, so that the first complete step may follow.
    pub(crate) fn is_listed(&self) -> bool {
        self.kinds.values().all(|mirrored| mirrored.listed)
    }

    /// Takes in what the watch of `kind` heard.
    pub(crate) fn hear(&mut self, kind: Kind, heard: Heard) {
        let Some(mirrored) = self.kinds.get_mut(&kind) else { return };
        match heard {
            Heard::Listing => {
                mirrored.listing = mirrored.listing.wrapping_add(1);
                if !mirrored.listed {
                    // A first listing that failed half way begins anew, and so does what is held of it.
                    mirrored.held.clear();
                }
            }
            Heard::Present(object, Ok(value)) => {
                let passed_over = match (&value, &self.annotation) {
                    (Object::Service(service), Some(key)) => service.metadata.annotation(key).is_none(),
                    _ => false,
                };
                self.forget_problem(&object);
                if passed_over {
                    return self.gone(kind, object);
                }
                self.mark(kind, &object);
                self.push(kind, Event::Apply(value));
            }
            Heard::Present(object, Err(error)) => {
                let name = name_of(&object);
                if mirrored.objects.contains_key(&name) {
                    self.mark(kind, &object);
                }
                self.problems_changed = true;
                self.problems.insert(object.clone(), invalid(object, &error));
            }
            Heard::Gone(object) => {
                self.forget_problem(&object);
                self.gone(kind, object);
            }
            Heard::Listed => {
                let listing = mirrored.listing;
                let vanished: Vec<_> =
                    mirrored.objects.extract_if(|_, seen| *seen != listing).map(|(name, _)| name).collect();
                mirrored.listed = true;
                let held = std::mem::take(&mut mirrored.held);
                self.events.extend(held);
                for name in vanished {
                    let object = reference(kind, &name);
                    self.forget_problem(&object);
                    self.events.push(Event::Delete(object));
                }
            }
        }
    }

    /// Hands out the events so far, and whether they make the picture whole.
    pub(crate) fn take(&mut self) -> (Vec<Event>, bool) {
        self.complete |= self.is_listed();
        (std::mem::take(&mut self.events), self.complete)
    }

    /// Hands out the events so far, which cannot make the picture whole yet.
    pub(crate) fn take_part(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// How many events wait to be taken.
    pub(crate) fn waiting(&self) -> usize {
        self.events.len()
    }

    /// Whether [`Self::problems`] may say something else than the last time it was asked.
    pub(crate) fn problems_changed(&mut self) -> bool {
        std::mem::take(&mut self.problems_changed)
    }

    /// The objects that do not fit their kind.
    pub(crate) fn problems(&self) -> impl Iterator<Item = &ManifestProblem> {
        self.problems.values()
    }

    fn mark(&mut self, kind: Kind, object: &ObjectRef) {
        if let Some(mirrored) = self.kinds.get_mut(&kind) {
            mirrored.objects.insert(name_of(object), mirrored.listing);
        }
    }

    fn gone(&mut self, kind: Kind, object: ObjectRef) {
        let known = self.kinds.get_mut(&kind).and_then(|kind| kind.objects.remove(&name_of(&object)));
        if known.is_some() {
            self.push(kind, Event::Delete(object));
        }
    }

    fn push(&mut self, kind: Kind, event: Event) {
        match self.kinds.get_mut(&kind) {
            Some(mirrored) if self.complete && !mirrored.listed => mirrored.held.push(event),
            _ => self.events.push(event),
        }
    }

    fn forget_problem(&mut self, object: &ObjectRef) {
        if !self.problems.is_empty() {
            self.problems_changed |= self.problems.remove(object).is_some();
        }
    }
}

/// One allocation an object, where an [`ObjectRef`] has two.
fn name_of(object: &ObjectRef) -> Box<str> {
    object.key.to_string().into()
}

fn reference(kind: Kind, name: &str) -> ObjectRef {
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    ObjectRef { kind, key: ObjectKey::new(namespace, name) }
}

fn invalid(object: ObjectRef, error: &InvalidObject) -> ManifestProblem {
    let field = &error.field;
    ManifestProblem {
        file: None,
        line: 0,
        severity: Severity::Error,
        reason: "invalid",
        object: Some(object),
        message: if field.is_empty() { error.message.clone() } else { format!("{field}: {}", error.message) },
        remedy: "correct it; meanwhile its last good version stays in force".to_owned(),
    }
}

#[cfg(test)]
#[path = "mirror/tests.rs"]
mod tests;
