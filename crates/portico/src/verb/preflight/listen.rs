//! `portico preflight --listen`: the other end of the checks, until signalled to stop.

use std::sync::atomic::Ordering::Relaxed;

use anyhow::bail;
use portico_preflight::responder::{Opened, Responder};

use crate::daemon::{Daemon, Hangup};

/// Answers until told to stop.
pub(super) async fn listen(responder: Responder) -> anyhow::Result<()> {
    let mut daemon = Daemon::start(Hangup::of_terminal())?;
    if responder.opened().is_empty() {
        bail!("no flow of the model leads to this role: there is nothing to answer");
    }
    let mut own = 0;
    for (address, transport, how) in responder.opened() {
        match how {
            Opened::Bound => own += 1,
            Opened::Raw => {
                own += 1;
                tracing::info!(%address, %transport, "answering by a raw socket");
            }
            Opened::InUse => {
                tracing::info!(%address, %transport, "in use here; the program that has it answers")
            }
            Opened::Silent { why } => tracing::warn!(%address, %transport, %why, "cannot be answered here"),
        }
    }
    tracing::info!(
        sockets = own,
        "answering preflight checks of the machines in the inventory; SIGTERM stops"
    );
    let counts = responder.counts();
    tokio::select! {
        error = responder.serve() => return Err(error.into()),
        signal = daemon.asked_to_stop() => tracing::info!(
            %signal,
            answered = counts.answered.load(Relaxed),
            strangers = counts.strangers.load(Relaxed),
            over_bounds = counts.over_bounds.load(Relaxed),
            "stopped"
        ),
    }
    Ok(())
}
