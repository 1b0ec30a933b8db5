//! Everything wrong, by object.

use std::collections::BTreeMap;

use portico_api::meta::ObjectRef;
use portico_api::problem::Problem;

use crate::change::Output;

/// The problems of each object; objects without problems are not in it.
#[derive(Debug, Default)]
pub(super) struct ProblemIndex(BTreeMap<ObjectRef, Vec<Problem>>);

impl ProblemIndex {
    /// Replaces the problems of an object. Returns what to hand out, if they differ.
    pub(super) fn set(&mut self, object: ObjectRef, problems: Vec<Problem>) -> Option<Output> {
        if *self.of(&object) == *problems {
            return None;
        }
        if problems.is_empty() {
            self.0.remove(&object);
        } else {
            self.0.insert(object.clone(), problems.clone());
        }
        Some(Output::Problems(object, problems))
    }

    /// The problems of one object.
    pub(super) fn of(&self, object: &ObjectRef) -> &[Problem] {
        self.0.get(object).map_or(&[], Vec::as_slice)
    }

    /// All problems, by object.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.values().flatten()
    }
}
