//! The one place of wiring: source → pipeline → data plane, with the admin listener beside it and the end of the process after
//! it.
//!
//! Everything here runs on one thread; the threads that move bytes are the data plane's own. The order at the start is what
//! makes it safe: the admin listener first, so that probes get an answer; then every object is read; only then are
//! listeners opened, or taken over, for a table with holes would send clients away.

use std::convert::Infallible;
use std::future::pending;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use portico_api::problem::Severity;
use portico_gateway::{AccessLog, Gateway, take_over};
use portico_source::Step;
use portico_sync::Source;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use crate::admin::{GatewayPages, server};
use crate::gateway_flags::Flags;
use crate::status::{Status, Watches};
use crate::tunnel_files;
use crate::{allocator, text_pages};

/// Between two attempts to bind a NodePort that something else holds: what holds it is usually about to go.
const RETRY_PORTS: Duration = Duration::from_secs(2);
/// Problems written to the log after one step; the rest is counted, and listed by `/readyz?verbose`.
const MOST_PROBLEMS_LOGGED: usize = 20;
/// Between two attempts to store what must be remembered: a predecessor may hold the lock until it has handed over.
const RETRY_MEMORY: Duration = Duration::from_secs(2);

/// Runs a gateway until it is told to stop, or a successor has taken over. `started` is told once it serves.
pub(crate) async fn run(flags: &Flags, hangup: Hangup, started: impl FnOnce(&Status)) -> anyhow::Result<()> {
    let mut stop = Stop::new(hangup)?;
    raise_descriptor_limit();
    let (mut source, pipeline) = Source::open(&flags.source_settings()).await?;
    let watches = source.status().map(|status| Watches(Box::new(status)));
    let status = Arc::new(Status::new(pipeline, watches));
    let pages = Arc::new(GatewayPages::new(Arc::clone(&status)));
    let admin =
        server::start(flags.listeners.admin_listen.0, pages, flags.lifecycle.take_over.is_some()).await?;
    let gateway = tokio::select! {
        gateway = start(flags, &mut source, &status) => gateway?,
        signal = stop.asked() => {
            tracing::info!(%signal, "told to stop before anything was served");
            return Ok(());
        }
    };
    started(&status);
    allocator::give_back();
    text_pages::release();
    let why = tokio::select! {
        never = follow(&mut source, &status) => match never? {},
        never = retry_ports(&gateway) => match never {},
        never = tunnel_files::follow(&gateway, &status) => match never {},
        signal = stop.asked() => Ending::Stop(signal),
        outcome = successor(&gateway, flags.lifecycle.take_over.as_deref()) => { outcome?; Ending::HandedOver }
    };
    status.set_stopping();
    match why {
        Ending::Stop(signal) => {
            tracing::info!(%signal, delay = ?flags.lifecycle.drain_delay, "told to stop");
            tokio::select! {
                never = follow(&mut source, &status) => match never? {},
                () = sleep(flags.lifecycle.drain_delay) => {}
                _ = stop.asked() => {}
            }
        }
        Ending::HandedOver => {
            tracing::info!("a successor has taken the listeners over");
            // It needs the address.
            admin.abort();
        }
    }
    // What is to be remembered is a successor's business from now on.
    drop(source);
    drain(&gateway, flags.lifecycle.drain_timeout, &mut stop).await;
    admin.abort();
    Ok(())
}

/// Asks for as many file descriptors as the system lets this process have: two a connection are soon more than the usual
/// soft limit of 1,024, which is there for programs that use select(2).
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // An unlimited hard limit is not taken at its word: the kernel allows `fs.nr_open`, a million unless it was changed.
    let most = limit.maximum.unwrap_or(1 << 20);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum }) {
        tracing::warn!(%error, current = ?limit.current, "cannot raise the limit of file descriptors; going on with this one");
    }
}

/// Why a gateway stops to accept connections.
enum Ending {
    /// A signal, by its name.
    Stop(&'static str),
    /// Another process accepts them.
    HandedOver,
}

/// Reads every object, then starts the data plane with what follows from them.
async fn start(flags: &Flags, source: &mut Source, status: &Arc<Status>) -> anyhow::Result<Arc<Gateway>> {
    let all_readable = loop {
        let step = next(source).await?;
        let all_readable = step.problems.iter().all(|problem| problem.severity != Severity::Error);
        if note(source, status, step) {
            break all_readable;
        }
    };
    status.pipeline().initial_sync_complete(all_readable);
    source.remember(&status.pipeline());
    let timeouts = *status.pipeline().timeouts();
    let config = flags.config(&timeouts)?;
    let access = AccessLog::start(flags.records.access_log.into()).context("cannot start the access log")?;
    let mut predecessor = match &flags.lifecycle.take_over {
        Some(path) => take_over(path)?,
        None => None,
    };
    let first = status.pipeline().commit();
    let gateway = Arc::new(Gateway::start(config, access, first.as_ref(), predecessor.as_mut())?);
    drop(first);
    report(status);
    status.set_gateway(Arc::clone(&gateway));
    if let Some(predecessor) = predecessor {
        predecessor.ready()?;
    }
    for (listener, address) in gateway.listen_addresses() {
        tracing::info!(%listener, %address, "listening");
    }
    let live = &gateway.shared().live;
    let (clusters, routes) = (live.clusters().len(), live.routes());
    let (ports, hosts, authorities) = (routes.ports.len(), routes.hosts.len(), routes.authorities.len());
    tracing::info!(clusters, ports, hosts, authorities, "routes in force");
    Ok(gateway)
}

/// Keeps the data plane in line with the objects.
async fn follow(source: &mut Source, status: &Status) -> anyhow::Result<Infallible> {
    loop {
        let step = tokio::select! {
            step = next(source) => step?,
            () = sleep(RETRY_MEMORY), if source.is_failing_to_remember() => {
                source.remember(&status.pipeline());
                continue;
            }
        };
        if note(source, status, step)
            && let Some(gateway) = status.gateway()
        {
            publish(gateway, status);
        }
    }
}

async fn next(source: &mut Source) -> anyhow::Result<Step> {
    match source.next().await {
        Some(step) => Ok(step),
        None => bail!("the source of objects has ended; this is a defect, please report it with the log"),
    }
}

/// Applies one step. Returns true once the initial sync is complete.
fn note(source: &mut Source, status: &Status, step: Step) -> bool {
    let mut pipeline = status.pipeline();
    pipeline.apply(step.changes, step.complete);
    status.set_manifest_problems(step.problems);
    if step.complete {
        source.remember(&pipeline);
    }
    step.complete
}

fn publish(gateway: &Gateway, status: &Status) {
    let update = status.pipeline().commit();
    report(status);
    if let Some(update) = update {
        tracing::debug!(changes = update.changes.len(), "routes changed");
        gateway.apply(&update);
    }
}

/// Writes down what is newly wrong with objects. (What is wrong with files, the source says.)
fn report(status: &Status) {
    let new = status.new_problems();
    for problem in new.iter().take(MOST_PROBLEMS_LOGGED) {
        match problem.severity {
            Severity::Error => tracing::error!(reason = problem.reason, "{problem}"),
            Severity::Warning => tracing::warn!(reason = problem.reason, "{problem}"),
        }
    }
    let more = new.len().saturating_sub(MOST_PROBLEMS_LOGGED);
    if more > 0 {
        tracing::warn!(more, "more problems than are written here; /readyz?verbose lists them");
    }
}

async fn retry_ports(gateway: &Gateway) -> Infallible {
    loop {
        sleep(RETRY_PORTS).await;
        gateway.retry_failed_ports();
    }
}

/// Offers the listeners to a successor; returns once one has them.
async fn successor(gateway: &Arc<Gateway>, path: Option<&Path>) -> anyhow::Result<()> {
    match path {
        Some(path) => Ok(gateway.hand_over(path).await?),
        None => pending().await,
    }
}

/// Lets connections finish. A second signal ends them.
async fn drain(gateway: &Gateway, limit: Duration, stop: &mut Stop) {
    let open = gateway.connections().len();
    tracing::info!(open, ?limit, "draining; a second signal ends it");
    tokio::select! {
        cut = gateway.drain(limit) => tracing::info!(cut, "drained"),
        signal = stop.asked() => {
            tracing::warn!(%signal, open = gateway.connections().len(), "told to stop again; ending at once");
        }
    }
}

/// What SIGHUP means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hangup {
    /// The terminal is gone, and whoever started this with it: a request to stop.
    Stops,
    /// A habit of service managers and log rotation, for programs that must be told to read again. Nothing is to be done, and
    /// least of all to stop.
    IsIgnored,
}

impl Hangup {
    /// It stops what was started at a terminal, and nothing else.
    pub(crate) fn of_terminal() -> Self {
        if io::stdin().is_terminal() || io::stderr().is_terminal() { Self::Stops } else { Self::IsIgnored }
    }
}

/// The signals that ask a process to end.
pub(crate) struct Stop {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    hangup_means: Hangup,
}

impl Stop {
    pub(crate) fn new(hangup_means: Hangup) -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("cannot receive signals");
        Ok(Self {
            terminate: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
            hangup: on(SignalKind::hangup())?,
            hangup_means,
        })
    }

    /// Returns with the next signal that asks for an end; its name.
    pub(crate) async fn asked(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => match self.hangup_means {
                    Hangup::Stops => return "SIGHUP",
                    Hangup::IsIgnored => tracing::info!(
                        "SIGHUP: nothing to do; what changes is read by itself, and SIGTERM stops"
                    ),
                },
            }
        }
    }
}
