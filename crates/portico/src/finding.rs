//! One problem with its place, as `portico check`, `portico routes` and `/routes` print it.

use std::path::Path;

use portico_api::meta::{Kind, ObjectRef};
use portico_api::names::{ClusterName, Tenant};
use portico_api::problem::{Problem, Severity};
use portico_source::{Location, ManifestProblem};
use serde::Serialize;

/// One problem and where it stands, in the order in which they are listed. The names of the fields are
/// stable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Finding {
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    /// Counted from 1; 0 where no line is to blame.
    line: u32,
    pub(crate) severity: Severity,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<ObjectRef>,
    #[serde(skip_serializing_if = "String::is_empty")]
    field: String,
    message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

impl Finding {
    /// A finding about a file.
    pub(crate) fn of_manifest(problem: &ManifestProblem) -> Self {
        Self {
            file: problem.file.as_ref().map(|file| file.display().to_string()),
            line: problem.line,
            severity: problem.severity,
            reason: problem.reason,
            object: problem.object.clone(),
            field: String::new(),
            message: problem.message.clone(),
            remedy: problem.remedy.clone(),
        }
    }

    /// A finding about an object. `location` is where it is in a file, if that is known.
    pub(crate) fn of_object(problem: &Problem, location: Option<Location>) -> Self {
        Self {
            file: location.as_ref().map(|location| location.file.display().to_string()),
            line: location.map_or(0, |location| location.line),
            severity: problem.severity,
            reason: problem.reason,
            object: Some(problem.object.clone()),
            field: problem.field.clone(),
            message: problem.message.clone(),
            remedy: problem.remedy.clone(),
        }
    }

    /// `dir/a.yaml:12: error: Cluster a: spec.field: what is wrong; what to do`, which editors can jump to.
    pub(crate) fn to_line(&self) -> String {
        let mut text = String::new();
        if let Some(file) = &self.file {
            text.push_str(file);
            if self.line != 0 {
                text.push_str(&format!(":{}", self.line));
            }
            text.push_str(": ");
        }
        text.push_str(match self.severity {
            Severity::Error => "error: ",
            Severity::Warning => "warning: ",
        });
        if let Some(object) = &self.object {
            text.push_str(&format!("{object}: "));
        }
        if !self.field.is_empty() {
            text.push_str(&format!("{}: ", self.field));
        }
        text.push_str(&self.message);
        if !self.remedy.is_empty() {
            text.push_str(&format!("; {}", self.remedy));
        }
        text.push('\n');
        text
    }

    /// A finding about a question as a whole.
    pub(crate) fn of_question(
        severity: Severity,
        reason: &'static str,
        file: Option<&Path>,
        message: String,
        remedy: &str,
    ) -> Self {
        Self {
            file: file.map(|file| file.display().to_string()),
            line: 0,
            severity,
            reason,
            object: None,
            field: String::new(),
            message,
            remedy: remedy.to_owned(),
        }
    }

    /// Whether it concerns `tenant` and no other.
    pub(crate) fn is_of(&self, tenant: &Tenant) -> bool {
        self.object.as_ref().is_some_and(|object| match object.kind {
            Kind::Cluster | Kind::ExposedCluster => {
                Tenant::from(ClusterName::new(&object.key.name)) == *tenant
            }
            Kind::Service | Kind::EndpointSlice => Tenant::of_namespace(&object.key.namespace) == *tenant,
            Kind::Seed | Kind::KubermaticConfiguration => false,
        })
    }
}
