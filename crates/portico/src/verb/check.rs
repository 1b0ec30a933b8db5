//! `portico check`: every problem in a directory of manifests, with file, line and object.

use portico_api::problem::Severity;

use crate::finding::Finding;
use crate::offline::Flags;
use portico_admin::listing::OutputFormat;

use crate::outcome::{Outcome, print};

/// Prints every problem. The answer is "no" if one of them is an error.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let report = flags.load()?;
    let findings = report.findings();
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&findings)?))?,
        OutputFormat::Table => {
            let mut text: String = findings.iter().map(Finding::to_line).collect();
            let warnings = findings.len() - errors;
            text.push_str(&summary(report.site.objects, errors, warnings));
            print(&text)?;
        }
    }
    Ok(if errors == 0 { Outcome::Done } else { Outcome::No })
}

fn summary(objects: usize, errors: usize, warnings: usize) -> String {
    let count = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    format!("{}: {}, {}\n", count(objects, "object"), count(errors, "error"), count(warnings, "warning"))
}
