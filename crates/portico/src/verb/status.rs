//! `portico status [CLUSTER]`: how each cluster of a seed stands, on one line each.

use clap::Args;
use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_api::names::ClusterName;
use portico_reach::{Chain, Link, Migration, Orphan, SeedSnapshot};
use serde::Serialize;

use crate::daemon;
use crate::outcome::{Outcome, print};
use crate::seed::{SeedFlags, text_of};

// `portico status`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Name of a Cluster; without it, all of them, and what this machine sees of their addresses is left out
    #[arg(value_name = "CLUSTER")]
    cluster: Option<String>,
    #[command(flatten)]
    seed: SeedFlags,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// How it stands with a seed.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    gateways: Gateways,
    clusters: Vec<Row>,
    /// What Clusters that are gone have left; not looked for if one CLUSTER is asked for.
    orphans: Vec<Orphan>,
}

#[derive(Serialize)]
struct Gateways {
    ready: usize,
    total: usize,
}

/// How it stands with one cluster.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    name: String,
    /// That of the door that users have been told of.
    strategy: String,
    /// What is under way between it and another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    migration: Option<Migration>,
    /// Where users find it; empty while nobody knows.
    address: String,
    ok: bool,
    /// Every link that was tried.
    links: Vec<Link>,
}

/// Prints the table. The answer is "no" if a cluster cannot be reached.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let (status, text) = daemon::run(status(flags))?;
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&status)?))?,
        OutputFormat::Table => print(&(status.table() + &text))?,
    }
    let all_ok = status.clusters.iter().all(|cluster| cluster.ok);
    Ok(if all_ok { Outcome::Done } else { Outcome::No })
}

/// How it stands, and what more there is to say of the one CLUSTER.
async fn status(flags: &Flags) -> anyhow::Result<(Status, String)> {
    let seed = flags.seed.read().await?;
    let (mut clusters, mut orphans) = (Vec::new(), Vec::new());
    let text;
    if let Some(name) = &flags.cluster {
        let chain = seed.whole_chain(&ClusterName::new(name)).await;
        text = text_of(&chain, name);
        clusters.push(row(&seed, name, chain));
    } else {
        let all = seed.chains().await.into_iter();
        clusters.extend(all.map(|(name, chain)| row(&seed, name, chain)));
        match seed.orphans().await {
            Ok(found) => orphans = found,
            Err(error) => tracing::warn!("what Clusters that are gone have left is not known: {error:#}"),
        }
        text = left(&orphans);
    }
    let (ready, total) = seed.gateways();
    Ok((Status { gateways: Gateways { ready, total }, clusters, orphans }, text))
}

/// Names what Clusters that are gone have left.
fn left(orphans: &[Orphan]) -> String {
    if orphans.is_empty() {
        return String::new();
    }
    let line = |one: &Orphan| format!("  {} {}, of Cluster {}\n", one.kind, one.name, one.cluster);
    let lines: String = orphans.iter().map(line).collect();
    format!("Left by Clusters that are gone; where nobody needs it, kubectl delete:\n{lines}")
}

fn row(seed: &SeedSnapshot, name: &str, chain: Chain) -> Row {
    let cluster = seed.clusters().get(name);
    let strategy = cluster.and_then(|cluster| seed.in_force(cluster));
    Row {
        name: name.to_owned(),
        strategy: strategy.map(|strategy| strategy.to_string()).unwrap_or_default(),
        migration: cluster.and_then(|cluster| seed.migration(cluster)),
        address: cluster.map(|cluster| cluster.status.address.url.to_string()).unwrap_or_default(),
        ok: chain.broken().is_none(),
        links: chain.links,
    }
}

impl Status {
    fn table(&self) -> String {
        let row = |cluster: &Row| {
            let broken = cluster.links.iter().find(|link| link.is_broken());
            let state = if cluster.ok { "ok" } else { "BROKEN" };
            let broken = broken.map(|link| format!("{}: {}", link.link, link.evidence));
            let migration = cluster.migration.as_ref();
            let text = migration.map(|migration| format!("({})", migration.describe()));
            let why = broken.into_iter().chain(text).collect::<Vec<_>>().join(" ");
            let strategy = migration.map_or_else(|| cluster.strategy.clone(), Migration::doors);
            [cluster.name.clone(), strategy, cluster.address.clone(), state.to_owned(), why]
        };
        let rows: Vec<[String; 5]> = self.clusters.iter().map(row).collect();
        let broken = self.clusters.iter().filter(|cluster| !cluster.ok).count();
        let Gateways { ready, total } = self.gateways;
        let table = table::render(["CLUSTER", "STRATEGY", "ADDRESS", "STATE", "FIRST BROKEN LINK"], &rows);
        let count = self.clusters.len();
        format!("{table}\n{count} clusters, {broken} of them broken; {ready} of {total} gateways ready\n\n")
    }
}
