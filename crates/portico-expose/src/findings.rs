//! What a check of one object found.

use portico_api::meta::{Kind, ObjectMeta, ObjectRef};
use portico_api::problem::{Problem, Severity};

/// What validation found on one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Everything that is wrong, in the order of the checks.
    pub problems: Vec<Problem>,
    /// The object must not be used; the version before it stays in force.
    pub refused: bool,
}

/// Collects what is wrong with one object.
pub struct Findings {
    object: ObjectRef,
    /// What it found.
    pub verdict: Verdict,
}

impl Findings {
    /// Nothing is wrong yet.
    pub fn of(kind: Kind, meta: &ObjectMeta) -> Self {
        let verdict = Verdict { problems: Vec::new(), refused: false };
        Self { object: ObjectRef::new(kind, meta), verdict }
    }

    /// The object must not be used.
    pub fn refuse(&mut self, reason: &'static str, field: &str, message: String, remedy: &str) {
        self.verdict.refused = true;
        self.void(reason, field, message, remedy);
    }

    /// This field does not count; the rest of the object does.
    pub fn void(&mut self, reason: &'static str, field: &str, message: String, remedy: &str) {
        self.push(Severity::Error, reason, field, message, remedy);
    }

    /// It works, probably not as meant.
    pub fn warn(&mut self, reason: &'static str, field: &str, message: String, remedy: &str) {
        self.push(Severity::Warning, reason, field, message, remedy);
    }

    fn push(&mut self, severity: Severity, reason: &'static str, field: &str, message: String, remedy: &str) {
        let (object, field, remedy) = (self.object.clone(), field.into(), remedy.into());
        self.verdict.problems.push(Problem { severity, reason, object, field, message, remedy });
    }
}
