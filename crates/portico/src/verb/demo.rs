//! `portico demo`: a gateway and three user clusters, one per expose strategy, on this machine, nothing else
//! needed.
//!
//! It writes manifests into a folder of its own ([`site`]), with certificates ([`pki`]) and kubeconfigs. It
//! starts a stand-in API server for each cluster ([`api_server`]) and a kubelet for one of them ([`nodes`],
//! both on [`stand_in`]). It runs the gateway on that folder exactly as `portico gateway --manifests` does.
//! Beside it runs an agent, as `portico agent` would on a node of the Tunneling cluster, but without an
//! address of its own. A Konnectivity server and agent are the way back to that kubelet. [`mod@guide`] prints
//! what can be tried; [`ports`] steps over ports that are taken. Ctrl-C ends it and removes the folder. With
//! `--kubernetes` nothing of this runs, but the lab ([`kubernetes`]).

mod api_server;
mod guide;
mod kubernetes;
mod nodes;
mod pki;
mod ports;
mod site;
mod stand_in;

use anyhow::Context;
use clap::{Args, Parser};
use portico_agent::StartError as AgentStartError;
use portico_gateway::StartError;
use portico_konnectivity::server::ListenError;
use tokio::sync::oneshot;

use self::guide::{guide, konnectivity_port};
use self::ports::{Ports, WantedPorts};
use self::site::Site;
use super::{agent, gateway, konnectivity};
use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::{Outcome, print};

/// Attempts to start although another process took a port between looking and binding.
const MOST_ATTEMPTS: usize = 5;

// `portico demo`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    ports: WantedPorts,
    /// Real Kubernetes: a seed with the operator, three user clusters, a worker each; as root, on Debian
    #[arg(long, conflicts_with = "WantedPorts")]
    kubernetes: bool,
    /// With --kubernetes: without workers, which takes less memory, and without pods
    #[arg(long, requires = "kubernetes")]
    no_workers: bool,
}

/// The flags of `portico gateway`, as typed on a command line.
#[derive(Debug, Parser)]
struct GatewayLine {
    #[command(flatten)]
    flags: gateway::flags::Flags,
}

/// The flags of `portico agent`, as typed on a command line.
#[derive(Debug, Parser)]
struct AgentLine {
    #[command(flatten)]
    flags: agent::flags::Flags,
}

/// Either half of Konnectivity, as typed on a command line.
#[derive(Debug, Parser)]
struct KonnectivityLine {
    #[command(subcommand)]
    half: konnectivity::Verb,
}

/// Runs the demo until Ctrl-C.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    if flags.kubernetes {
        return kubernetes::become_lab(flags.no_workers);
    }
    daemon::run(demo(flags)).map(|()| Outcome::Done)
}

async fn demo(flags: &Flags) -> anyhow::Result<()> {
    for attempt in 1.. {
        let ports = Ports::find(&flags.ports)?;
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
    let gateway_line = GatewayLine::try_parse_from(site.gateway_arguments(ports))
        .context("the demo's own gateway flags do not parse")?;
    let agent = AgentLine::try_parse_from(site.agent_arguments(ports))
        .context("the demo's own agent flags do not parse")?;
    let konnectivity = KonnectivityLine::try_parse_from(site.konnectivity_server_arguments(ports))
        .context("the demo's own flags of a Konnectivity server do not parse")?;
    let (send_guide, guide_sent) = oneshot::channel();
    let (send_port, port_sent) = oneshot::channel();
    let started = |status: &gateway::status::Status| {
        let plans: Vec<_> = status.pipeline().plans().collect();
        // Fails only if the agents have ended, and the demo with them.
        let _ = send_port.send(konnectivity_port(&plans));
        let _ = send_guide.send(guide(site, ports, &plans));
    };
    let run_agent = async {
        // Before the gateway listens there is nothing to connect to.
        let Ok(text) = guide_sent.await else { return Ok(()) };
        let text = text?;
        let mut printed = Ok(());
        agent::control::run(&agent.flags, Daemon::start(Hangup::Stops)?, |_| printed = print(&text)).await?;
        printed
    };
    let run_konnectivity_agent = async {
        let Ok(port) = port_sent.await else { return Ok(()) };
        let arguments = site.konnectivity_agent_arguments(ports, port?);
        let line = KonnectivityLine::try_parse_from(arguments)
            .context("the demo's own flags of a Konnectivity agent do not parse")?;
        konnectivity::serve(&line.half, Daemon::start(Hangup::Stops)?).await
    };
    let daemon = Daemon::start(Hangup::Stops)?;
    tokio::try_join!(
        gateway::control::run(&gateway_line.flags, daemon, started),
        konnectivity::serve(&konnectivity.half, Daemon::start(Hangup::Stops)?),
        run_agent,
        run_konnectivity_agent,
    )?;
    Ok(())
}

/// Whether another process was quicker.
fn is_taken(error: &anyhow::Error) -> bool {
    let gateway = error.downcast_ref::<StartError>().and_then(|error| match error {
        StartError::Listen { source, .. } => Some(source),
        _ => None,
    });
    let agent = error.downcast_ref::<AgentStartError>().and_then(|error| match error {
        AgentStartError::Listen { source, .. } => Some(source),
        AgentStartError::Thread(_) => None,
    });
    let konnectivity = error.downcast_ref::<ListenError>().map(|error| match error {
        ListenError::Tcp { source, .. } | ListenError::Unix { source, .. } => source,
    });
    let io = gateway.or(agent).or(konnectivity).or_else(|| error.downcast_ref::<std::io::Error>());
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
}
