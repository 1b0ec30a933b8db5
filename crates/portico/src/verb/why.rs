//! `portico why CLUSTER|HOST|CLUSTER/NODE`: the way to one cluster, and to a node of it, link by link, up to
//! the first that is broken.

use anyhow::{Context, bail, ensure};
use clap::Args;
use portico_admin::listing::OutputFormat;
use portico_api::names::{ClusterName, is_object_name};
use portico_reach::SeedSnapshot;

use crate::daemon;
use crate::outcome::{Outcome, print};
use crate::seed::{SeedFlags, text_of};

// `portico why`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Name of a Cluster, a host name by which clients come, or a node of a cluster
    #[arg(value_name = "CLUSTER|HOST|CLUSTER/NODE")]
    what: String,
    #[command(flatten)]
    seed: SeedFlags,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// Prints the chain. The answer is "no" if a link of it is broken.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let (what, node) = match flags.what.split_once('/') {
        Some((cluster, node)) => (cluster, Some(node_name(node)?)),
        None => (&*flags.what, None),
    };
    let (name, chain) = daemon::run(async {
        let seed = flags.seed.read().await?;
        let name = cluster_of(&seed, what)?;
        let chain = match node {
            Some(node) => seed.chain_to_node(&name, node).await,
            None => seed.whole_chain(&name).await,
        };
        anyhow::Ok((name, chain))
    })?;
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&chain.links)?))?,
        OutputFormat::Table => print(&text_of(&chain, name.as_str()))?,
    }
    Ok(if chain.broken().is_some() { Outcome::No } else { Outcome::Done })
}

/// A name that a node can have, which becomes part of a path.
fn node_name(name: &str) -> anyhow::Result<&str> {
    ensure!(is_object_name(name), "{name:?} is no name of a node; give CLUSTER/NODE");
    Ok(name)
}

/// The cluster that is meant: by its name, or by a host that leads to it.
fn cluster_of(seed: &SeedSnapshot, what: &str) -> anyhow::Result<ClusterName> {
    if !what.contains('.') {
        return Ok(ClusterName::new(what));
    }
    let wanted = what.trim_end_matches('.').to_ascii_lowercase();
    let Some(row) = seed.by_host(&wanted) else {
        bail!(
            "no Service asks for the host {wanted}; `portico routes --kubeconfig` lists all, and a cluster \
             can be asked for by its name"
        )
    };
    let service = &row.backend.service;
    ClusterName::of_namespace(&service.namespace)
        .with_context(|| format!("{wanted} belongs to Service {service}, which is of no Cluster"))
}
