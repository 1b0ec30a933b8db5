//! `portico check`: every problem of a directory of manifests, with file, line and object. For a live seed,
//! or a copy of one, also the differences from KKP's proxy and the remedies.

use portico_admin::listing::OutputFormat;
use portico_api::problem::Severity;
use portico_sync::ReadAs;

use crate::finding::Finding;
use crate::listing::Listing;
use crate::offline::{Flags, Report};
use crate::outcome::{Outcome, print};

/// Prints every problem. The answer is "no" if one of them is an error.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let report = flags.load()?;
    let findings = report.findings_and_differences();
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    let warnings = findings.len() - errors;
    match (flags.output, report.is_live) {
        (OutputFormat::Json, false) => print(&format!("{}\n", serde_json::to_string_pretty(&findings)?))?,
        (OutputFormat::Json, true) => print(&listing(&report, findings, OutputFormat::Json)?)?,
        (OutputFormat::Table, is_live) => {
            let mut text = match is_live {
                true => listing(&report, findings, OutputFormat::Table)? + "\n",
                false => findings.iter().map(Finding::to_line).collect(),
            };
            if !is_live && report.site.read_as == ReadAs::Seed {
                text.push_str("read as a copy of a seed's objects; --read-as directory plans them instead\n");
            }
            text.push_str(&summary(report.site.objects, errors, warnings));
            print(&text)?;
        }
    }
    Ok(if errors == 0 { Outcome::Done } else { Outcome::No })
}

/// What each cluster would get, then the findings.
fn listing(report: &Report, findings: Vec<Finding>, format: OutputFormat) -> anyhow::Result<String> {
    let mut text = Vec::new();
    Listing::of(&report.site.pipeline, findings).write(format, &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn summary(objects: usize, errors: usize, warnings: usize) -> String {
    let count = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    format!("{}: {}, {}\n", count(objects, "object"), count(errors, "error"), count(warnings, "warning"))
}
