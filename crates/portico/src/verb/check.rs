//! `portico check`: every problem in a directory of manifests, with file, line and object.

use portico_api::meta::ObjectRef;
use portico_api::problem::{Problem, Severity};
use portico_source::{Loaded, ManifestProblem};
use serde::Serialize;

use crate::offline::{Flags, Site};
use crate::outcome::{Outcome, OutputFormat, print};

/// One problem and where it stands, in the order in which they are listed. The names of the fields are stable.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Finding {
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    /// Counted from 1; 0 where no line is to blame.
    line: u32,
    severity: Severity,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<ObjectRef>,
    #[serde(skip_serializing_if = "String::is_empty")]
    field: String,
    message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

/// Prints every problem. The answer is "no" if one of them is an error.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let site = flags.load()?;
    let findings = findings(&site);
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&findings)?))?,
        OutputFormat::Table => {
            let mut text: String = findings.iter().map(Finding::to_line).collect();
            let warnings = findings.len() - errors;
            text.push_str(&summary(site.objects, errors, warnings));
            print(&text)?;
        }
    }
    Ok(if errors == 0 { Outcome::Done } else { Outcome::No })
}

fn findings(site: &Site) -> Vec<Finding> {
    let manifest = site.loaded.problems.iter().map(Finding::of_manifest);
    let objects = site.pipeline.problems();
    let objects = objects.iter().map(|problem| Finding::of_object(problem, &site.loaded));
    let mut findings: Vec<Finding> = manifest.chain(objects).collect();
    findings.sort();
    findings
}

fn summary(objects: usize, errors: usize, warnings: usize) -> String {
    let count = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    format!("{}: {}, {}\n", count(objects, "object"), count(errors, "error"), count(warnings, "warning"))
}

impl Finding {
    fn of_manifest(problem: &ManifestProblem) -> Self {
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

    fn of_object(problem: &Problem, loaded: &Loaded) -> Self {
        let place = loaded.line_of(&problem.object, &problem.field);
        Self {
            file: place.as_ref().map(|place| place.file.display().to_string()),
            line: place.map_or(0, |place| place.line),
            severity: problem.severity,
            reason: problem.reason,
            object: Some(problem.object.clone()),
            field: problem.field.clone(),
            message: problem.message.clone(),
            remedy: problem.remedy.clone(),
        }
    }

    /// `dir/a.yaml:12: error: Cluster a: spec.field: what is wrong; what to do`, which editors can jump to.
    fn to_line(&self) -> String {
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
}
