//! `portico agent check`: whether the address could be held here, with the evidence if not.

use anyhow::bail;
use clap::Args;
use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_agent::address::{Collision, Report, check};
use serde::Serialize;

use super::flags::AddressFlags;
use super::runtime;
use crate::outcome::{Outcome, print};

/// `portico agent check`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    address: AddressFlags,
    /// How to print the answer
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// The answer as JSON.
#[derive(Debug, Serialize)]
struct Answer {
    address: String,
    free: bool,
    collisions: Vec<Finding>,
    warnings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Finding {
    kind: &'static str,
    message: String,
}

/// Looks, and says what it has found.
pub(super) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let Some(settings) = flags.address.settings() else {
        bail!("--address is off: there is nothing to check; name the address an agent would hold");
    };
    let report = runtime()?.block_on(check(&settings))?;
    let answer = Answer::new(settings.address.to_string(), &report);
    print(&match flags.output {
        OutputFormat::Json => serde_json::to_string_pretty(&answer)? + "\n",
        OutputFormat::Table => answer.table(),
    })?;
    Ok(if answer.free { Outcome::Done } else { Outcome::No })
}

impl Answer {
    fn new(address: String, report: &Report) -> Self {
        let collisions = report.collisions.iter();
        let collisions =
            collisions.map(|collision| Finding { kind: kind(collision), message: collision.to_string() });
        let warnings = report.warnings.iter();
        let warnings = warnings.map(|warning| Finding { kind: "warning", message: warning.to_string() });
        Self {
            address,
            free: report.collisions.is_empty(),
            collisions: collisions.collect(),
            warnings: warnings.collect(),
        }
    }

    fn table(&self) -> String {
        let all: Vec<_> = self
            .collisions
            .iter()
            .chain(&self.warnings)
            .map(|finding| [finding.kind.to_owned(), finding.message.clone()])
            .collect();
        let address = &self.address;
        let mut text =
            if all.is_empty() { String::new() } else { table::render(["FOUND", "EVIDENCE"], &all) + "\n" };
        text.push_str(&if self.free {
            format!("{address} can be held on this node.\n")
        } else {
            format!("{address} cannot be held on this node.\n")
        });
        text
    }
}

/// The word for a collision. Stable.
fn kind(collision: &Collision) -> &'static str {
    match collision {
        Collision::NameTaken { .. } => "interface-taken",
        Collision::OnInterface { .. } => "on-interface",
        Collision::InNetwork { .. } => "in-network",
        Collision::InRoute { .. } => "in-route",
        Collision::Answered { .. } => "answered",
    }
}
