//! Values as the types of a program, with errors that name the field.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::{Path, Segment};
use thiserror::Error;

use crate::{Node, YamlError};

/// Most fields of one part that are tried one by one, each time with the whole value.
const MOST_TRIED: usize = 128;

/// Why a value does not fit its type.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}{}{message}", field, if field.is_empty() { "" } else { ": " })]
pub struct InvalidField {
    /// The path of the field (`spec.ports[1].port`), empty for the whole value.
    pub field: String,
    /// What is wrong.
    pub message: String,
}

/// Reads `value` as a `T`; an error names the field.
pub fn typed<T: DeserializeOwned>(mut value: Value) -> Result<T, InvalidField> {
    read(&value).map_err(|(path, message)| {
        let field = Some(path.to_string()).filter(|field| field != ".");
        let fields = field.into_iter().chain(flattened::<T>(&mut value, &path, &message));
        InvalidField { field: fields.collect::<Vec<_>>().join("."), message: readable(&message) }
    })
}

/// Reads `value`, or says where it cannot be read, and why.
fn read<T: DeserializeOwned>(value: &Value) -> Result<T, (Path, String)> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| (error.path().clone(), error.into_inner().to_string()))
}

/// The one field below `path` without which the error is not that of `message`. The path of serde ends above
/// fields that are flattened.
fn flattened<T: DeserializeOwned>(value: &mut Value, path: &Path, message: &str) -> Option<String> {
    let fields = fields_at(value, path).filter(|fields| fields.len() <= MOST_TRIED)?;
    let names: Vec<String> = fields.keys().cloned().collect();
    let mut found = names.into_iter().filter(|name| {
        let taken = fields_at(value, path).and_then(|fields| fields.remove(name));
        let other = read::<T>(value).err().is_none_or(|(_, other)| other != message);
        if let (Some(fields), Some(taken)) = (fields_at(value, path), taken) {
            fields.insert(name.clone(), taken);
        }
        other
    });
    found.next().filter(|_| found.next().is_none())
}

fn fields_at<'v>(value: &'v mut Value, path: &Path) -> Option<&'v mut Map<String, Value>> {
    let part = path.iter().try_fold(value, |value, segment| match segment {
        Segment::Map { key } => value.get_mut(key),
        Segment::Seq { index } => value.get_mut(*index),
        Segment::Enum { .. } | Segment::Unknown => None,
    });
    part?.as_object_mut()
}

/// The message of serde, in the terms of a manifest.
fn readable(message: &str) -> String {
    let message = message.replace("expected u16", "expected a whole number from 0 to 65535");
    match message.strip_prefix("unknown variant ").and_then(|text| text.split_once(", expected ")) {
        Some((found, expected)) => format!("{found} is not known, expected {expected}"),
        None => message,
    }
}

impl Node {
    /// Reads the tree as a `T`; an error has the line and the name of the field.
    pub fn typed<T: DeserializeOwned>(&self) -> Result<T, YamlError> {
        typed(self.to_value())
            .map_err(|invalid| YamlError { line: self.line_of(&invalid.field), message: invalid.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only what cannot be read counts here")]
    struct Whole {
        spec: Spec,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    #[expect(dead_code, reason = "only what cannot be read counts here")]
    struct Spec {
        pause: bool,
        #[serde(flatten)]
        rest: Rest,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Rest {
        size: u16,
        names: Vec<String>,
    }

    #[test]
    fn an_error_names_the_field_also_where_that_is_flattened() {
        let field = |spec: Value| typed::<Whole>(json!({"spec": spec})).unwrap_err().field;
        assert_eq!(field(json!({"pause": "no", "size": 1, "names": []})), "spec.pause");
        assert_eq!(field(json!({"pause": true, "size": "large", "names": []})), "spec.size");
        assert_eq!(field(json!({"pause": true, "size": 1, "names": {"a": 1}})), "spec.names");
        assert_eq!(field(json!({"names": "b", "size": 1, "others": "b"})), "spec.names");
        assert_eq!(field(json!("nonsense")), "spec");
        assert_eq!(typed::<Whole>(json!("nonsense")).unwrap_err().field, "");
    }
}
