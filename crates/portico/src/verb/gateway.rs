//! `portico gateway`: serves what is exposed until it is signalled to stop.
//!
//! [`flags`] has the settings, and [`capacity`] divides memory and descriptors. [`control`] wires source,
//! pipeline and data plane. [`status`] is what the process knows of itself, shown by [`pages`], [`health`],
//! [`metrics`], [`connections`] and [`doors`]. [`tunnel_files`] reads certificates, CAs and tokens again when
//! they change.

mod capacity;
mod connections;
pub(crate) mod control;
mod doors;
pub(crate) mod flags;
mod health;
mod metrics;
mod pages;
pub(crate) mod status;
mod tunnel_files;

use self::flags::Flags;
use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::Outcome;

/// Runs the gateway on the flags.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    flags.check()?;
    if flags.tunnel_is_silent() {
        tracing::warn!(
            "the tunnel listener is off: no flag says whether it serves TLS (--tunnel-tls-cert, \
             --tunnel-tls-key) or plain text (--tunnel-plaintext); say --tunnel-listen off if that is meant"
        );
    }
    match flags.tunnel_is_open_to_anyone() {
        Some("--tunnel-plaintext") if flags.plaintext_passes_identity() => tracing::warn!(
            "--tunnel-plaintext serves clients without TLS, and asks them for nothing: each of them reaches \
             every cluster; certificates and tokens bind the others only. Leave \
             --tunnel-plaintext out once all agents speak TLS"
        ),
        Some(flag) => tracing::warn!(
            "the tunnel is open to anyone: with {flag} alone, every client of its port reaches every \
             exposed cluster. Ask clients for an identity (--tunnel-tls-cert with --tunnel-client-ca, \
             --tunnel-tokens or --tunnel-token-review)"
        ),
        None => {}
    }
    daemon::run(async { control::run(flags, Daemon::start(Hangup::of_terminal())?, |_| ()).await })
        .map(|()| Outcome::Done)
}
