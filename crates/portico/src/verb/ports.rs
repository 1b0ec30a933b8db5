//! `portico ports`: network requirements, of a product or of a running installation, and what changes between
//! two.

use std::fs;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use portico_admin::table;
use portico_ports::diff::{Difference, Way, Written, difference};
use portico_ports::model::{self, FactKind};
use portico_ports::render;
use portico_ports::site::NodePorts;
use portico_ports::{Facts, Flow, Query};
use serde::Serialize;

use crate::offline::Source;
use crate::outcome::{Outcome, print};
use crate::requirements::{Asked, needs};

/// Most reasons shown in the note below the table; JSON has all.
const MOST_REASONS: usize = 4;

// `portico ports`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Command {
    #[command(subcommand)]
    diff: Option<Sub>,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    source: Source,
    /// Of a running installation, list the whole NodePort range instead of the ports that are allocated: one
    /// rule for clusters to come
    #[arg(long)]
    whole_range: bool,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
}

// `portico ports diff`.
#[derive(Debug, Subcommand)]
enum Sub {
    /// What to open, and what can be closed, on the way from one installation to another
    #[command(after_help = "\
FROM and TO are each a value (NodePort, Cilium), facts (strategy=NodePort,cni=Canal), or a file that `portico
ports -o json` of this or another version has written. Facts that neither names have their defaults.

Examples:
  portico ports diff NodePort Tunneling --product kkp
  portico ports diff cni=Canal cni=Calico -o json
  portico ports diff before.json strategy=Tunneling")]
    Diff(Diff),
}

#[derive(Debug, Args)]
struct Diff {
    /// What is open now: a value, facts or a file
    from: String,
    /// What will be needed: a value, facts or a file
    to: String,
    #[command(flatten)]
    asked: Asked,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
}

/// How flows are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Table,
    /// For programs; the names of the fields are stable
    Json,
    /// The same as YAML
    Yaml,
    /// For spreadsheets
    Csv,
    /// A Markdown table
    Md,
}

/// Prints the requirements, or what changes in them.
pub(crate) fn run(command: &Command) -> anyhow::Result<Outcome> {
    if let Some(Sub::Diff(diff)) = &command.diff {
        return run_diff(diff);
    }
    let query = command.asked.query()?;
    let flows = match command.source.load()? {
        None => query.flows()?,
        Some(site) => {
            let node_ports = if command.whole_range { NodePorts::WholeRange } else { NodePorts::Allocated };
            needs(&site, command.source.kubeconfig.as_deref())?.flows(&query, node_ports)?
        }
    };
    print(&match command.output {
        Format::Table => flow_table(&flows),
        Format::Json => json(&flows)?,
        Format::Yaml => portico_yaml::write(&serde_json::to_value(&flows)?),
        Format::Csv => render::csv(&flows),
        Format::Md => render::markdown(&flows),
    })?;
    Ok(Outcome::Done)
}

fn json(value: &impl Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

fn flow_table(flows: &[Flow]) -> String {
    // A reference is long, and no help on a terminal: every other format has it.
    let rows: Vec<[String; 9]> = flows
        .iter()
        .map(|flow| {
            let [id, source, component, destination, protocol, ports, conditions, overridable, purpose, _] =
                render::cells(flow);
            [id, source, component, destination, protocol, ports, conditions, overridable, purpose]
        })
        .collect();
    let [header @ .., _] = render::COLUMNS;
    let mut text = table::render(header, &rows);
    if flows.iter().any(|flow| !flow.reasons.is_empty()) {
        text.push_str("\nREASONS\n");
    }
    for flow in flows.iter().filter(|flow| !flow.reasons.is_empty()) {
        let shown = flow.reasons.iter().take(MOST_REASONS).cloned().collect::<Vec<_>>().join("; ");
        let more = match flow.reasons.len().saturating_sub(MOST_REASONS) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        text.push_str(&format!("{}: {shown}{more}\n", flow.row.id));
    }
    text
}

fn run_diff(diff: &Diff) -> anyhow::Result<Outcome> {
    let query = diff.asked.query()?;
    let change = difference(&side(&diff.from, &query)?, &side(&diff.to, &query)?)?;
    print(&match diff.output {
        Format::Table => change_table(&change),
        Format::Json => json(&change)?,
        Format::Yaml => portico_yaml::write(&serde_json::to_value(&change)?),
        Format::Csv | Format::Md => bail!("a difference is printed as table, json or yaml"),
    })?;
    Ok(Outcome::Done)
}

/// The flows of one side: by facts with their defaults, or as a file has them.
fn side(word: &str, query: &Query) -> anyhow::Result<Vec<Written>> {
    if !word.contains('=') && word.ends_with(".json") {
        let text = fs::read_to_string(word).with_context(|| format!("reading {word}"))?;
        return serde_json::from_str(&text)
            .with_context(|| format!("{word} is not what `portico ports -o json` writes"));
    }
    if let Some(role) = &query.role {
        model::role(&query.products(), role)?;
    }
    let mut flows = Vec::new();
    for product in query.products() {
        let mut facts = query.facts.clone();
        word.split(',').try_for_each(|part| take(&mut facts, part))?;
        let own =
            Query { products: vec![product], facts: facts.or_defaults(product), role: query.role.clone() };
        if own.role.as_ref().is_none_or(|role| product.role(role).is_some()) {
            flows.extend(own.flows()?.iter().map(Written::from));
        }
    }
    Ok(flows)
}

/// Takes `KEY=VALUE`, or a value that only one fact has.
fn take(facts: &mut Facts, word: &str) -> anyhow::Result<()> {
    if word.contains('=') {
        return Ok(facts.assign(word)?);
    }
    let is_it = |value: &&str| value.eq_ignore_ascii_case(word);
    let has =
        |fact: &&model::Fact| matches!(fact.kind, FactKind::Choice(_)) && fact.values().iter().any(is_it);
    let mut owners = model::facts().iter().filter(has);
    match (owners.next(), owners.next()) {
        (Some(fact), None) => Ok(facts.set(fact.key, word)?),
        (Some(one), Some(other)) => {
            bail!("{word:?} may be {} or {}; write {}={word}", one.key, other.key, one.key)
        }
        (None, _) => {
            let values = model::facts().iter().filter(|fact| ["strategy", "cni"].contains(&fact.key));
            let values = values.flat_map(|fact| fact.values().iter().copied());
            Err(portico_ports::nearest::UnknownWord::new("strategy, CNI or file", word, values).into())
        }
    }
}

fn change_table(change: &Difference) -> String {
    let rows = |what: &'static str, ways: &[Way]| -> Vec<[String; 6]> {
        let row = |way: &Way| {
            let ports = if way.ports.is_empty() { "-".to_owned() } else { way.ports.join(", ") };
            [
                what.to_owned(),
                way.source.clone(),
                way.destination.clone(),
                way.protocol.clone(),
                ports,
                way.rows.join(" "),
            ]
        };
        ways.iter().map(row).collect()
    };
    let mut all = rows("open", &change.open);
    all.extend(rows("close", &change.close));
    if all.is_empty() {
        return "Nothing to open, nothing to close.\n".to_owned();
    }
    table::render(["CHANGE", "SOURCE", "DESTINATION", "PROTOCOL", "PORTS", "ROWS"], &all)
}
