//! The one place of wiring: source → pipeline → data plane, with the admin listener beside it and the end
//! of the process after it.
//!
//! Everything here runs on one thread. The threads that move bytes are the data plane's own. The order at the
//! start is what makes it safe. The admin listener comes first, so that probes get an answer. Then every
//! object is read. Only then are listeners opened, or taken over: a table with holes would send clients away.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use portico_api::problem::Severity;
use portico_gateway::{AccessLog, Config, Gateway, Offer, take_over};
use portico_source::Step;
use portico_sync::Source;
use tokio::time::sleep;

use super::flags::Flags;
use super::pages::GatewayPages;
use super::status::{Status, Watches};
use super::tunnel_files;
use crate::allocator;
use crate::daemon::{Admin, Daemon};
use crate::memory_limit::MemoryLimit;

/// Between two attempts to bind a NodePort that something else holds: what holds it is usually about to go.
const RETRY_PORTS: Duration = Duration::from_secs(2);
/// Between two attempts to store what must be remembered: a predecessor may hold the lock until it has handed
/// over.
const RETRY_MEMORY: Duration = Duration::from_secs(2);

/// Runs a gateway until it is told to stop, or a successor has taken over. `started` is called once it
/// serves.
pub(crate) async fn run(
    flags: &Flags,
    mut daemon: Daemon,
    started: impl FnOnce(&Status),
) -> anyhow::Result<()> {
    let (mut source, pipeline) = Source::open(&flags.source_settings()).await?;
    let watches = source.status().map(|status| Watches(Box::new(status)));
    let status = Arc::new(Status::new(pipeline, watches));
    let pages = Arc::new(GatewayPages::new(Arc::clone(&status)));
    let waits = flags.lifecycle.take_over.is_some();
    let admin = Admin::serve(flags.listeners.admin_listen, pages, waits).await?;
    let Some(started_up) = daemon.unless_stopped(start(flags, &mut source, &status)).await else {
        return Ok(());
    };
    let (gateway, offer) = started_up?;
    started(&status);
    allocator::give_back();
    let ended = tokio::select! {
        // Until the last connection has ended: what is revoked while they drain is revoked.
        never = tunnel_files::follow(&gateway, &status) => match never {},
        ended = serve(flags, &mut daemon, source, &status, admin, &gateway, offer) => ended,
    };
    gateway.shared().access.flush();
    ended
}

/// Serves until the process is told to stop, or a successor has the listeners; then drains.
async fn serve(
    flags: &Flags,
    daemon: &mut Daemon,
    mut source: Source,
    status: &Status,
    admin: Admin,
    gateway: &Gateway,
    offer: Option<Offer>,
) -> anyhow::Result<()> {
    let why = tokio::select! {
        never = follow(&mut source, status) => match never? {},
        never = retry_ports(gateway) => match never {},
        never = allocator::give_back_after_bursts() => match never {},
        signal = daemon.asked_to_stop() => Ending::Stop(signal),
        () = hand_over(gateway, offer) => Ending::HandedOver,
    };
    status.set_stopping();
    let signals = match why {
        Ending::Stop(signal) => {
            tracing::info!(%signal, delay = ?flags.lifecycle.drain_delay, "told to stop");
            tokio::select! {
                never = follow(&mut source, status) => match never? {},
                () = sleep(flags.lifecycle.drain_delay) => {}
                _ = daemon.asked_to_stop() => {}
            }
            1
        }
        Ending::HandedOver => {
            tracing::info!("a successor has taken the listeners over");
            // It needs the address.
            admin.close();
            2
        }
    };
    // The persisted state is a successor's business from now on.
    drop(source);
    let limit = flags.lifecycle.drain_timeout;
    daemon.drain(gateway.connections().len(), limit, signals, gateway.drain(limit)).await;
    Ok(())
}

/// Why a gateway stops to accept connections.
enum Ending {
    /// A signal, by its name.
    Stop(&'static str),
    /// Another process accepts them.
    HandedOver,
}

/// Reads every object, then starts the data plane with what follows from them, in place of the predecessor if
/// there is one; then offers the listeners to a successor.
async fn start(
    flags: &Flags,
    source: &mut Source,
    status: &Arc<Status>,
) -> anyhow::Result<(Arc<Gateway>, Option<Offer>)> {
    let all_readable = loop {
        let step = next(source).await?;
        let all_readable = step.problems.iter().all(|problem| problem.severity != Severity::Error);
        if note(source, status, step) {
            break all_readable;
        }
    };
    status.pipeline().initial_sync_complete(all_readable);
    source.persist(&status.pipeline());
    let timeouts = status.pipeline().timeouts();
    let config = flags.config(&timeouts)?;
    log_bounds(flags, &config);
    let access = AccessLog::start(flags.records.access_log.into()).context("cannot start the access log")?;
    let mut predecessor = match &flags.lifecycle.take_over {
        Some(path) => take_over(path).await?,
        None => None,
    };
    let first = status.pipeline().commit();
    let gateway = Arc::new(Gateway::start(config, access, first.as_ref(), predecessor.as_mut())?);
    drop(first);
    report(status);
    status.set_gateway(Arc::clone(&gateway));
    let take_over = flags.lifecycle.take_over.as_deref();
    let offer = take_over.map(|path| Offer::in_place_of(predecessor, path)).transpose()?;
    for (listener, address) in gateway.listen_addresses() {
        tracing::info!(%listener, %address, "listening");
    }
    let store = &gateway.shared().route_store;
    let (clusters, routes) = (store.clusters().len(), store.routes());
    let (ports, hosts, authorities) =
        (routes.ports.len(), routes.hosts.len() + routes.wildcards.len(), routes.authorities.len());
    tracing::info!(clusters, ports, hosts, authorities, "routes in force");
    Ok((gateway, offer))
}

/// Writes down what this process may hold, and where that comes from.
fn log_bounds(flags: &Flags, config: &Config) {
    tracing::info!(
        memory_limit = config.memory_limit,
        set_by = %MemoryLimit::find(flags.budgets.memory_limit).set_by,
        max_handshakes = config.max_handshakes,
        max_unauthenticated = config.max_unauthenticated,
        tunnel_held_bytes = config.tunnel.memory.limit(),
        max_reviews = config.max_reviews,
        reviews_waiting_bytes = config.review_memory,
        connection_memory = config.connection_memory,
        connection_descriptors = config.connection_descriptors,
        "what this gateway may hold"
    );
}

/// Keeps the data plane in line with the objects.
async fn follow(source: &mut Source, status: &Status) -> anyhow::Result<Infallible> {
    loop {
        let step = tokio::select! {
            step = next(source) => step?,
            () = sleep(RETRY_MEMORY), if source.is_failing_to_persist() => {
                source.persist(&status.pipeline());
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
    if step.policies_required {
        pipeline.require_policies();
    }
    pipeline.apply_cluster_ips(step.cluster_ips);
    pipeline.apply(step.changes, step.complete);
    status.set_manifest_problems(step.problems);
    if step.complete {
        source.persist(&pipeline);
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
    status.problem_log().write(new.iter().map(|problem| (problem.severity, problem.reason, problem)));
}

async fn retry_ports(gateway: &Gateway) -> Infallible {
    loop {
        sleep(RETRY_PORTS).await;
        gateway.retry_failed_ports();
    }
}

/// Returns once a successor has the listeners.
async fn hand_over(gateway: &Gateway, offer: Option<Offer>) {
    match offer {
        Some(offer) => gateway.hand_over(&offer).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use portico_api::change::Change;
    use portico_lab::log_lines::LogLines;
    use portico_source::Object;
    use portico_source::load::read_text_as;
    use portico_sync::SourceSettings;
    use tokio::time::Instant;
    use tracing::Level;

    use super::*;

    /// As many Services, each with an annotation that is void in this `version`.
    fn services(count: usize, version: usize) -> Vec<Change<Object>> {
        let one = |number: usize| {
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: x, annotations: \
                 {{nodeport-proxy.k8s.io/expose: 'v{version}'}}}}\nspec: {{ports: [{{port: 1}}]}}\n"
            )
        };
        let text: String = (0..count).map(one).collect();
        read_text_as(Path::new("x.yaml"), &text).objects.into_iter().map(Change::Apply).collect()
    }

    #[tokio::test]
    async fn problems_of_objects_that_change_all_the_time_are_few_lines() {
        let folder = tempfile::tempdir().unwrap();
        let folder = Some(folder.path().to_owned());
        let settings =
            SourceSettings { manifests: folder.clone(), state_dir: folder, ..SourceSettings::default() };
        let (_, pipeline) = Source::open(&settings).await.unwrap();
        let begun = Instant::now();
        let status = Status::new(pipeline, None);
        let (errors, _collecting) = LogLines::collect(|line| *line.level() == Level::ERROR);
        for version in 0..200 {
            status.pipeline().apply(services(25, version), true);
            assert_eq!(status.object_problems().len(), 25);
            report(&status);
        }
        let (lines, seconds) = (errors.messages(), begun.elapsed().as_secs());
        assert!((20..=20 + seconds).contains(&(lines.len() as u64)), "{} in {seconds} s", lines.len());
        assert!(lines[..20].iter().all(|line| line.contains("v0")), "the first ones are written: {lines:?}");
    }
}
