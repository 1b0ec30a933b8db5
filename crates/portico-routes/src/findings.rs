//! Collects what is wrong with one object while it is read.

use std::borrow::Cow;

use portico_api::meta::ObjectRef;
use portico_api::problem::{Problem, Severity};

/// Most problems reported of one object. An annotation may hold 256 KiB of mistakes; the first few say
/// enough.
pub(crate) const MAX_PER_OBJECT: usize = 16;

/// Characters of a found value that a message repeats.
const MAX_SHOWN: usize = 120;

/// The problems of one object, in the order found.
#[derive(Debug)]
pub(crate) struct Findings {
    object: ObjectRef,
    problems: Vec<Problem>,
}

impl Findings {
    /// No problems of `object` yet.
    pub(crate) fn of(object: ObjectRef) -> Self {
        Self { object, problems: Vec::new() }
    }

    /// Adds an error: a part of the object that is not used as written.
    pub(crate) fn error(
        &mut self,
        reason: &'static str,
        field: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        if self.problems.len() < MAX_PER_OBJECT {
            self.problems.push(Problem {
                severity: Severity::Error,
                reason,
                object: self.object.clone(),
                field: field.into(),
                message: message.into(),
                remedy: remedy.into(),
            });
        }
    }

    /// The problems, at most [`MAX_PER_OBJECT`].
    pub(crate) fn into_problems(self) -> Box<[Problem]> {
        self.problems.into()
    }
}

/// The path of an annotation in messages, spelled as Kubernetes spells it.
pub(crate) fn annotation_field(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}

/// `text` quoted for a message, cut where it becomes too long to read.
pub(crate) fn shown(text: &str) -> String {
    format!("{:?}", clipped(text))
}

/// `text` cut where it becomes too long to read.
pub(crate) fn clipped(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_SHOWN) {
        None => text.into(),
        Some((end, _)) => format!("{}...", &text[..end]).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_cut_between_characters() {
        assert_eq!(shown("a\"b"), r#""a\"b""#);
        let long = shown(&"ä".repeat(1000));
        assert_eq!(long.chars().count(), MAX_SHOWN + 5);
    }
}
