//! How every part of Portico reports what is wrong with an object: what, where, and what to do next.

use std::fmt;

use serde::Serialize;

use crate::meta::ObjectRef;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object is not used as written: refused, or a part of it is void.
    Error,
    /// It works, but probably not as meant.
    Warning,
}

/// One thing wrong with one object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// A stable word for metrics and tests, in kebab case: `host-conflict`, `void-annotation`.
    pub reason: &'static str,
    /// The object.
    pub object: ObjectRef,
    /// The field as a path with dots, `spec.exposeStrategy`; empty if the object as a whole is meant.
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
