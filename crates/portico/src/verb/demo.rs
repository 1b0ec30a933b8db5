//! `portico demo`: a gateway and three user clusters, one per expose strategy, on this machine, nothing else needed.
//!
//! It writes manifests into a folder of its own ([`site`]), with certificates ([`pki`]) and kubeconfigs, starts a stand-in API
//! server for each cluster ([`api_server`]), and runs the gateway on that folder exactly as `portico gateway --manifests` does.
//! [`mod@guide`] prints what can be tried; [`ports`] steps over ports that are taken. Ctrl-C ends it and removes the folder.

mod api_server;
mod guide;
mod pki;
mod ports;
mod site;

use anyhow::Context;
use clap::{Args, Parser};
use portico_gateway::StartError;

use self::guide::guide;
use self::ports::Ports;
use self::site::Site;
use crate::control::{self, Hangup};
use crate::gateway_flags;
use crate::outcome::{Outcome, print};

/// Attempts to start although another process took a port between looking and binding.
const MOST_ATTEMPTS: usize = 5;

/// `portico demo`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// First port to try for clients by server name
    #[arg(long, value_name = "PORT", default_value_t = 6443)]
    sni_port: u16,
    /// First port to try for CONNECT
    #[arg(long, value_name = "PORT", default_value_t = 8088)]
    tunnel_port: u16,
    /// First port to try for /routes, /connections, /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8002)]
    admin_port: u16,
    /// First NodePort to try
    #[arg(long, value_name = "PORT", default_value_t = 31000)]
    node_port: u16,
}

/// The flags of `portico gateway`, as somebody would type them.
#[derive(Debug, Parser)]
struct GatewayLine {
    #[command(flatten)]
    flags: gateway_flags::Flags,
}

/// Runs the demo until Ctrl-C.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the control thread")?;
    runtime.block_on(demo(flags))?;
    Ok(Outcome::Done)
}

async fn demo(flags: &Flags) -> anyhow::Result<()> {
    for attempt in 1.. {
        let ports = Ports::find(flags)?;
        let site = Site::build(&ports).await?;
        match serve(&site, &ports).await {
            Err(error) if attempt < MOST_ATTEMPTS && is_taken(&error) => {
                print(&format!("{error}; looking for other ports\n"))?;
            }
            outcome => {
                let folder = site.folder().to_owned();
                site.remove()?;
                print(&format!("\nStopped; {} is gone.\n", folder.display()))?;
                return outcome;
            }
        }
    }
    Ok(())
}

async fn serve(site: &Site, ports: &Ports) -> anyhow::Result<()> {
    let line = GatewayLine::try_parse_from(site.gateway_arguments(ports))
        .context("the demo's own gateway flags do not parse")?;
    let mut printed = Ok(());
    let started = |status: &crate::status::Status| {
        let plans: Vec<_> = status.pipeline().plans().collect();
        printed = guide(site, ports, &plans).and_then(|text| print(&text));
    };
    control::run(&line.flags, Hangup::Stops, started).await?;
    printed
}

/// Whether another process was quicker.
fn is_taken(error: &anyhow::Error) -> bool {
    let start = error.downcast_ref::<StartError>();
    let start = start.and_then(|error| match error {
        StartError::Listen { source, .. } => Some(source),
        _ => None,
    });
    let io = start.or_else(|| error.downcast_ref::<std::io::Error>());
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
}
