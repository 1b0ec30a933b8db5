//! `portico agent left`: whether anything on this machine still uses an address of its API server. The kernel
//! tells which connections there are, of every program that shares the machine's network.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use http::Uri;
use portico_net::connections::connections_to;
use tokio::net::lookup_host;

use super::observe::{self, Observation};
use super::reach::Server;
use crate::args::positive_duration;
use crate::outcome::Outcome;

/// The port of a URL without one.
const HTTPS: u16 = 443;

/// Most connections that are listed.
const NAMED: usize = 3;

// `portico agent left`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// The address that should be in use no more
    #[arg(value_name = "URL")]
    url: Server,
    /// Go on, with this time between two looks, and print a line for each change
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    every: Option<Duration>,
}

/// Looks once, or again and again until it is told to stop.
pub(super) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    observe::run(flags.every, async || Ok(vec![observe(&flags.url.0).await?]))
}

async fn observe(url: &str) -> anyhow::Result<Observation> {
    let targets = match targets(url).await {
        Ok(targets) => targets,
        Err(why) => return Ok(Observation { line: format!("{url}: unknown: {why:#}"), good: false }),
    };
    let found = connections_to(&targets).context("cannot read the connections of this machine")?;
    let Some((_, target)) = found.first() else {
        return Ok(Observation { line: format!("{url}: nothing here is connected to it"), good: true });
    };
    let ports: Vec<String> = found.iter().take(NAMED).map(|(local, _)| local.port().to_string()).collect();
    let more = found.len().saturating_sub(NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let line = format!(
        "{url}: connected to from here, by port {}{more}: `ss -tnp dst {target}` names the program. A \
         kubelet is moved by `portico join move`; Cilium has the address in k8sServiceHost",
        ports.join(", ")
    );
    Ok(Observation { line, good: false })
}

/// Where the URL leads.
async fn targets(url: &str) -> anyhow::Result<BTreeSet<SocketAddr>> {
    let uri: Uri = url.parse().context("it is no URL")?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let found = lookup_host((host, uri.port_u16().unwrap_or(HTTPS))).await;
    Ok(found.with_context(|| format!("{host} does not resolve"))?.collect())
}
