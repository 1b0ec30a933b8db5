//! `portico agent check`: whether the address could be held here. The answer has the places that were looked
//! at, and evidence if it could not.

use anyhow::bail;
use clap::Args;
use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_agent::address::{Collision, Report, check};
use serde::Serialize;

use super::flags::{AddressFlags, NO_ARP_CHECK};
use crate::daemon;
use crate::outcome::{Outcome, print};

// `portico agent check`.
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
    looked_at: LookedAt,
}

#[derive(Debug, Serialize)]
struct Finding {
    kind: &'static str,
    message: String,
}

/// What the answer rests on.
#[derive(Debug, Serialize)]
struct LookedAt {
    interfaces: Vec<Box<str>>,
    addresses: Vec<InterfaceAddress>,
    routes: Vec<Table>,
}

#[derive(Debug, Serialize)]
struct InterfaceAddress {
    address: Box<str>,
    interface: Box<str>,
}

/// A routing table, and how many routes of the address's family it has.
#[derive(Debug, Serialize)]
struct Table {
    table: Box<str>,
    routes: usize,
}

/// Looks, and prints what it has found.
pub(super) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let Some(settings) = flags.address.settings() else {
        bail!("--address is off: there is nothing to check; name the address an agent would hold");
    };
    let report = daemon::run(async { Ok(check(&settings).await?) })?;
    let mut answer = Answer::new(settings.address.to_string(), report);
    if flags.address.no_arp_check {
        answer.warnings.push(Finding { kind: "warning", message: NO_ARP_CHECK.to_owned() });
    }
    print(&match flags.output {
        OutputFormat::Json => serde_json::to_string_pretty(&answer)? + "\n",
        OutputFormat::Table => answer.table(),
    })?;
    Ok(if answer.free { Outcome::Done } else { Outcome::No })
}

impl Answer {
    fn new(address: String, report: Report) -> Self {
        let Report { collisions, interfaces, addresses, routes } = report;
        let finding =
            |collision: &Collision| Finding { kind: kind(collision), message: collision.to_string() };
        let address_of = |(address, interface)| InterfaceAddress { address, interface };
        Self {
            address,
            free: collisions.is_empty(),
            collisions: collisions.iter().map(finding).collect(),
            warnings: Vec::new(),
            looked_at: LookedAt {
                interfaces,
                addresses: addresses.into_iter().map(address_of).collect(),
                routes: routes.into_iter().map(|(table, routes)| Table { table, routes }).collect(),
            },
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
        text.push_str(&self.looked_at.text());
        text.push_str(&if self.free {
            format!("{address} can be held on this node.\n")
        } else {
            format!("{address} cannot be held on this node.\n")
        });
        text
    }
}

impl LookedAt {
    fn text(&self) -> String {
        let each_address = self.addresses.iter();
        let addresses: Vec<_> =
            each_address.map(|held| format!("{} on {}", held.address, held.interface)).collect();
        let tables: Vec<_> =
            self.routes.iter().map(|table| format!("{} in table {}", table.routes, table.table)).collect();
        format!(
            "Looked at interfaces: {}\nLooked at addresses: {}\nLooked at routes: {}\n",
            list(&self.interfaces),
            list(&addresses),
            list(&tables),
        )
    }
}

fn list<T: AsRef<str>>(items: &[T]) -> String {
    let items: Vec<&str> = items.iter().map(AsRef::as_ref).collect();
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

/// The word for a collision. Stable.
fn kind(collision: &Collision) -> &'static str {
    match collision {
        Collision::NameTaken { .. } => "interface-taken",
        Collision::OnInterface { .. } => "on-interface",
        Collision::InNetwork { .. } => "in-network",
        Collision::InRoute { .. } => "in-route",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            collisions: vec![Collision::InNetwork {
                address: [100, 64, 30, 10].into(),
                interface: "eth0".into(),
                network: "100.64.0.0/16".into(),
            }],
            interfaces: vec!["lo".into(), "eth0".into()],
            addresses: vec![("127.0.0.1/8".into(), "lo".into()), ("100.64.7.1/16".into(), "eth0".into())],
            routes: vec![("main".into(), 2), ("local".into(), 4)],
        }
    }

    #[test]
    fn the_text_names_the_evidence_and_what_was_looked_at() {
        let text = Answer::new("100.64.30.10".to_owned(), report()).table();
        for line in [
            "Looked at interfaces: lo, eth0",
            "Looked at addresses: 127.0.0.1/8 on lo, 100.64.7.1/16 on eth0",
            "Looked at routes: 2 in table main, 4 in table local",
            "100.64.30.10 cannot be held on this node.",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
        assert!(text.contains("in-network"), "{text}");
    }

    #[test]
    fn json_says_the_same() {
        let answer = Answer::new("100.64.30.10".to_owned(), report());
        let json = serde_json::to_value(answer).unwrap();
        assert_eq!(json["free"], false);
        assert_eq!(json["collisions"][0]["kind"], "in-network");
        assert_eq!(json["looked_at"]["interfaces"], serde_json::json!(["lo", "eth0"]));
        assert_eq!(json["looked_at"]["addresses"][1]["interface"], "eth0");
        assert_eq!(json["looked_at"]["routes"][0], serde_json::json!({"table": "main", "routes": 2}));
    }
}
