//! Values as the types of a program, with errors that name the field.

use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

use crate::{Node, YamlError};

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
pub fn typed<T: DeserializeOwned>(value: Value) -> Result<T, InvalidField> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        InvalidField {
            field: if field == "." { String::new() } else { field },
            message: readable(&error.into_inner().to_string()),
        }
    })
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
