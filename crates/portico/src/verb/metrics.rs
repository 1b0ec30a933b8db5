//! `portico metrics`: gives a seed's Prometheus the control planes as targets, and of their metrics what is
//! kept.
//!
//! A process of its own, because it reads metrics and nothing else: of each cluster it has a certificate for
//! that alone.

mod counts;
mod pages;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use portico_admin::readiness::Readiness;
use portico_kube::client;
use portico_operator::monitored::Monitored;

use self::pages::MetricsPages;
use crate::args::Listen;
use crate::daemon::{self, Admin, Daemon, Hangup};
use crate::outcome::Outcome;

// `portico metrics`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// How to reach the Kubernetes API of the seed, also by its proxy-url or HTTPS_PROXY; without it, as a
    /// pod of that cluster
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Where /targets and /scrape are served, beside /healthz, /readyz and /metrics; off for none
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8007")]
    admin_listen: Listen,
}

/// Runs until told to stop.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    daemon::run(async {
        let mut daemon = Daemon::start(Hangup::of_terminal())?;
        let client = client(flags.kubeconfig.as_deref()).await?;
        let (known, watches) = Monitored::new(&client);
        let pages = MetricsPages::new(known);
        let _admin = Admin::serve(flags.admin_listen, Arc::new(pages), false).await?;
        tokio::select! {
            () = watches => {}
            signal = daemon.asked_to_stop() => tracing::info!(%signal, "told to stop"),
        }
        Ok(Outcome::Done)
    })
}

/// Ready once everything is known. A watch that fails later leaves what is known: those targets are good.
fn readiness(known: &Monitored, verbose: bool) -> Readiness {
    let mut readiness = Readiness::new(verbose);
    let is_known = known.is_known();
    let listed = if is_known { "every pod is known" } else { "waiting for the list of pods and Secrets" };
    readiness.check("source", is_known, listed);
    for (kind, watch) in &known.status().get().watches {
        match &watch.error {
            None => readiness.fine(format_args!("watch {kind}: works")),
            Some(error) => readiness.warn(format_args!("watch {kind}: {error}")),
        }
    }
    readiness
}
