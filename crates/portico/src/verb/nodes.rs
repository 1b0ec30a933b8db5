//! `portico nodes CLUSTER`: the nodes of a cluster, and by which path each of them speaks.

use anyhow::Context;
use clap::Args;
use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_reach::admin::enter;
use portico_reach::nodes::{Row, Said};
use serde::Serialize;

use crate::daemon;
use crate::outcome::{Outcome, print};
use crate::verb::kubeconfig::AdminFlags;

// `portico nodes`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    cluster: AdminFlags,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// The nodes of a cluster.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Nodes {
    /// Where kubelets and users find the API server.
    server: String,
    /// Where the Service `kubernetes` leads pods.
    endpoints: Vec<String>,
    nodes: Vec<Row>,
    /// Whether there are more than were read.
    more: bool,
}

/// Prints the table. The answer is "no" if a node is not ready, or lacks its path.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let nodes = daemon::run(ask(&flags.cluster))?;
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&nodes)?))?,
        OutputFormat::Table => print(&nodes.table())?,
    }
    Ok(if nodes.nodes.iter().all(|node| node.ok) { Outcome::Done } else { Outcome::No })
}

async fn ask(flags: &AdminFlags) -> anyhow::Result<Nodes> {
    let admin = flags.read().await?;
    let said = Said::read(&enter(&admin).await?).await.with_context(|| format!("at {}", admin.server))?;
    Ok(Nodes { nodes: said.rows(), endpoints: said.endpoints, more: said.more, server: admin.server })
}

impl Nodes {
    fn table(&self) -> String {
        let row = |node: &Row| {
            let Row { name, status, version, address, pods, way_back, problems, .. } = node;
            [name, status, version, address, pods, way_back, &problems.join("; ")].map(Clone::clone)
        };
        if self.nodes.is_empty() {
            return format!(
                "the cluster at {} has no node yet: portico join token prints what a machine needs\n",
                self.server
            );
        }
        let rows: Vec<[String; 7]> = self.nodes.iter().map(row).collect();
        let header = ["NODE", "STATUS", "VERSION", "ADDRESS", "PODS TO API", "API TO NODE", "PROBLEM"];
        let bad = self.nodes.iter().filter(|node| !node.ok).count();
        let count = self.nodes.len();
        let more = if self.more { ", and there are more" } else { "" };
        let pods = match &self.endpoints[..] {
            [] => "pods nowhere: the Service kubernetes has no endpoint".to_owned(),
            endpoints => format!("pods to {}", endpoints.join(", ")),
        };
        format!(
            "{}\n{count} nodes, {bad} of them with a problem{more}; kubelets connect to {}, {pods}\n",
            table::render(header, &rows),
            self.server
        )
    }
}
