//! `portico capacity`: how many clusters still fit on a seed.

use anyhow::bail;
use clap::Args;
use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_ports::capacity::{Capacity, Question, capacity};
use portico_ports::model;
use portico_ports::nearest::UnknownWord;
use portico_ports::site::Site as Needs;

use crate::offline::Source;
use crate::outcome::{Outcome, print};
use crate::requirements::needs;

// `portico capacity`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    source: Source,
    /// Whether so many clusters more fit; exit code 1 if not
    #[arg(long, value_name = "N", requires = "strategy")]
    add: Option<u32>,
    /// The strategy of the clusters to add
    #[arg(long, value_name = "STRATEGY", requires = "add")]
    strategy: Option<String>,
    /// The load balancer before the seed, such as aws-nlb; docs/ports.md lists those whose limits are known
    #[arg(long, value_name = "LB")]
    lb: Option<String>,
    /// How many addresses load balancers can have, where they come from a pool
    #[arg(long, value_name = "N")]
    addresses: Option<u32>,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// Prints what is left.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let strategy = flags.strategy.as_deref().map(strategy).transpose()?;
    let question = Question {
        load_balancer: flags.lb.as_deref().map(model::load_balancer).transpose()?,
        addresses: flags.addresses,
        add: flags.add.zip(strategy),
    };
    let site = match flags.source.load()? {
        Some(site) => needs(&site, None)?,
        None => Needs::default(),
    };
    let answer = capacity(&site, &question);
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&answer)?))?,
        OutputFormat::Table => print(&tables(&answer))?,
    }
    Ok(if answer.fits == Some(false) { Outcome::No } else { Outcome::Done })
}

fn strategy(word: &str) -> anyhow::Result<&'static str> {
    let fact = model::fact("strategy")?;
    match fact.values().iter().find(|value| value.eq_ignore_ascii_case(word)) {
        Some(strategy) => Ok(strategy),
        None => bail!(UnknownWord::new("strategy", word, fact.values().iter().copied())),
    }
}

fn tables(answer: &Capacity) -> String {
    let limits: Vec<[String; 5]> = answer
        .limits
        .iter()
        .map(|limit| {
            let number = |number: u32| number.to_string();
            [
                limit.name.to_owned(),
                number(limit.size),
                number(limit.used),
                number(limit.left),
                limit.origin.clone(),
            ]
        })
        .collect();
    let rooms: Vec<[String; 5]> = answer
        .strategies
        .iter()
        .map(|room| {
            [
                room.strategy.to_owned(),
                room.clusters.to_string(),
                room.room.map_or_else(|| "no known limit".to_owned(), |room| room.to_string()),
                room.first_limit.unwrap_or("-").to_owned(),
                room.origin.to_owned(),
            ]
        })
        .collect();
    format!(
        "{}\n{}\n{}\n",
        table::render(["LIMIT", "SIZE", "USED", "LEFT", "ORIGIN"], &limits),
        table::render(["STRATEGY", "CLUSTERS", "ROOM FOR", "FIRST LIMIT", "ORIGIN"], &rooms),
        answer.conclusion
    )
}
