//! The input of all writers besides the rules, and their output.

use thiserror::Error;

/// What a writer must know besides the rules.
#[derive(Debug, Clone)]
pub struct Writing<'a> {
    /// What is not allowed is refused.
    pub default_deny: bool,
    /// Labels of the pods, or nodes, that policies are for.
    pub selector: &'a [(String, String)],
    /// The namespace of policies.
    pub namespace: &'a str,
}

/// Rules in a language, and notes that its reader must get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The rules.
    pub text: String,
    /// What they cannot say, or say by nature although nobody asked.
    pub notes: Vec<String>,
}

/// Why rules are not written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct CannotWrite(pub(super) String);

/// Rules of a host do not see what it forwards.
pub(super) fn forwarded(writing: &Writing<'_>) -> Vec<String> {
    if !writing.default_deny {
        return Vec::new();
    }
    vec![
        "traffic of pods is forwarded, and is not judged by these rules. What the model does not have (SSH, \
         time, package sources) is refused: docs/firewall-team.md says where to allow it"
            .to_owned(),
    ]
}

/// JSON as people read it, with a line end.
pub(super) fn json_text(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}
