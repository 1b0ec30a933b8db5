//! `portico gateway`: serves what is exposed until it is told to stop.

use anyhow::Context;

use crate::control;
use crate::gateway_flags::Flags;
use crate::outcome::Outcome;

/// Runs the gateway on the flags.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    flags.check()?;
    if flags.tunnel_is_silent() {
        tracing::warn!(
            "the tunnel listener is off: nobody said whether it serves TLS (--tunnel-tls-cert, --tunnel-tls-key) or plain \
             text (--tunnel-plaintext); say --tunnel-listen off if that is meant"
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the control thread")?;
    runtime.block_on(control::run(flags, |_| ()))?;
    Ok(Outcome::Done)
}
