//! A problem with an object: its cause, its place, and the remedy.

use std::fmt;

use serde::Serialize;

use crate::meta::ObjectRef;

/// The severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object is not used as written: it is refused, or a part of it is void.
    Error,
    /// It works, but probably not as meant.
    Warning,
}

/// One thing wrong with one object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Problem {
    /// Its severity.
    pub severity: Severity,
    /// A stable name for metrics and tests, in kebab case: `host-conflict`, `void-annotation`.
    pub reason: &'static str,
    /// The object.
    pub object: ObjectRef,
    /// The field as a path with dots, `spec.exposeStrategy`; empty for the object as a whole.
    pub field: String,
    /// What is wrong, with the value found.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.object)?;
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}
