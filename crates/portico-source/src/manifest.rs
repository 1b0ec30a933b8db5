//! From the text of one file to objects with their lines, and everything that is wrong with the file.
//!
//! A file may hold many documents, and a document may be a `List`. Each object is read for itself: a broken
//! document does not affect another document of the same file. An unreadable part is reported with
//! [`Missing`]. It tells the caller the objects whose last good version must stay in force.
//!
//! Called by [`crate::directory`] for every file that changed, and by [`crate::load`] once.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::problem::Severity;
use portico_api::text::is_obeyed;

use crate::object::Object;
use crate::step::ManifestProblem;
use portico_yaml::{Content, Documents, Node};

/// Most problems reported for one file. A file of another format would otherwise be reported line by line.
const MAX_PROBLEMS_PER_FILE: usize = 100;

/// The remedy for an unreadable document, and the effect meanwhile.
const REMEDY_BROKEN: &str = "correct it; a running gateway keeps the last good version of what it held";

/// One object of a file.
pub(crate) struct Found<'a> {
    /// The object.
    pub(crate) object: Object,
    /// The text as a tree with lines.
    pub(crate) node: &'a Node,
    /// Equal for equal objects, in any file.
    pub(crate) hash: u64,
}

/// What a file says beside its objects.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// What is wrong, in the order of lines.
    pub(crate) problems: Vec<ManifestProblem>,
    /// Objects that may be missing only because they could not be read.
    pub(crate) missing: Missing,
}

/// Objects that a file may hold although they could not be read from it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) enum Missing {
    /// None: an object that is not in the file was removed from it.
    #[default]
    None,
    /// These: each is named by a document that does not fit its kind.
    Some(Vec<ObjectRef>),
    /// Any: a document could not be read at all.
    Any,
}

/// Reads `text`, the content of `file`, and passes every object to `found`, in the order of the text.
pub(crate) fn read(file: &Arc<Path>, text: &str, mut found: impl FnMut(Found<'_>)) -> Reading {
    let mut reader = Reader { file, reading: Reading::default(), found: &mut found };
    if text.trim_ascii().is_empty() {
        // Some editors truncate before they write. A file that is to hold nothing is deleted, or holds a
        // comment.
        reader.reading.missing = Missing::Any;
        return reader.reading;
    }
    for document in Documents::new(text) {
        match document {
            Ok(node) => reader.document(&node),
            Err(error) => {
                reader.reading.missing = Missing::Any;
                reader.problem(error.line, "syntax", None, error.message, REMEDY_BROKEN);
            }
        }
    }
    reader.reading
}

struct Reader<'a> {
    file: &'a Arc<Path>,
    reading: Reading,
    found: &'a mut dyn FnMut(Found<'_>),
}

impl Reader<'_> {
    fn document(&mut self, node: &Node) {
        match &node.content {
            Content::Scalar(value) if value.is_null() => {}
            Content::Map(_) => self.object(node, None),
            _ => {
                self.reading.missing = Missing::Any;
                self.problem(
                    node.line,
                    "no-object",
                    None,
                    "this is no Kubernetes object".into(),
                    REMEDY_BROKEN,
                );
            }
        }
    }

    /// An object, or a list of them. Items of a typed list may leave out what the list's kind already says.
    fn object(&mut self, node: &Node, default: Option<(&str, &str)>) {
        let text = |field| node.get(field).and_then(Node::as_str);
        let (Some(api_version), Some(name)) =
            (text("apiVersion").or(default.map(|d| d.0)), text("kind").or(default.map(|d| d.1)))
        else {
            self.reading.missing = Missing::Any;
            let message = "apiVersion and kind are missing, or are no text".into();
            self.problem(node.line, "no-object", None, message, REMEDY_BROKEN);
            return;
        };
        if let Some(kind) = Kind::from_manifest(api_version, name) {
            return self.known(kind, node);
        }
        if let (Some(item_kind), Some(Content::List(items))) =
            (name.strip_suffix("List"), node.get("items").map(|items| &items.content))
        {
            let default = (!item_kind.is_empty()).then_some((api_version, item_kind));
            for item in items {
                self.object(item, default);
            }
            return;
        }
        let severity = Severity::Warning;
        let message = format!("{name} ({api_version}) is not a kind Portico reads");
        let remedy = match kind_by_name(name) {
            Some(version) => format!("it is skipped; did you mean apiVersion: {version}?"),
            None => "it is skipped".to_owned(),
        };
        self.push(ManifestProblem {
            file: Some(self.file.clone()),
            line: node.line,
            severity,
            reason: "unknown-kind",
            object: None,
            message,
            remedy,
        });
    }

    fn known(&mut self, kind: Kind, node: &Node) {
        let value = node.to_value();
        let mut hasher = DefaultHasher::new();
        (kind, &value).hash(&mut hasher);
        match Object::from_value(kind, value) {
            Ok(object) => (self.found)(Found { object, node, hash: hasher.finish() }),
            Err(error) => {
                let object = named(kind, node);
                match (&mut self.reading.missing, &object) {
                    (Missing::Any, _) => {}
                    (missing, None) => *missing = Missing::Any,
                    (Missing::Some(objects), Some(object)) => objects.push(object.clone()),
                    (missing, Some(object)) => *missing = Missing::Some(vec![object.clone()]),
                }
                let line = node.line_of(&error.field);
                let message = if error.field.is_empty() {
                    error.message
                } else {
                    format!("{}: {}", error.field, error.message)
                };
                self.problem(line, "invalid", object, message, REMEDY_BROKEN);
            }
        }
    }

    fn problem(
        &mut self,
        line: u32,
        reason: &'static str,
        object: Option<ObjectRef>,
        message: String,
        remedy: &str,
    ) {
        self.push(ManifestProblem {
            file: Some(self.file.clone()),
            line,
            severity: Severity::Error,
            reason,
            object,
            message,
            remedy: remedy.to_owned(),
        });
    }

    fn push(&mut self, problem: ManifestProblem) {
        if self.reading.problems.len() < MAX_PROBLEMS_PER_FILE {
            self.reading.problems.push(problem);
        }
    }
}

/// The name of an object that does not fit its kind, if it has one that can be shown.
fn named(kind: Kind, node: &Node) -> Option<ObjectRef> {
    let metadata = node.get("metadata")?;
    let name = metadata.get("name")?.as_str()?;
    let namespace = match kind {
        Kind::Cluster => "",
        _ => metadata.get("namespace").and_then(Node::as_str).unwrap_or("default"),
    };
    // In a log, lines of a name would pass for lines of the log.
    if [namespace, name].iter().any(|text| text.contains(is_obeyed)) {
        return None;
    }
    Some(ObjectRef { kind, key: ObjectKey::new(namespace, name) })
}

/// The apiVersion in which Portico reads a kind of this name.
fn kind_by_name(name: &str) -> Option<&'static str> {
    ["v1", "discovery.k8s.io/v1", "kubermatic.k8c.io/v1"]
        .into_iter()
        .find(|version| Kind::from_manifest(version, name).is_some())
}

#[cfg(test)]
#[path = "manifest/tests.rs"]
mod tests;
