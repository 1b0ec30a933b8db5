//! `portico preflight --mesh`: node to node, round after round, as a DaemonSet.
//!
//! Each round lists the members, and checks the required flows between workers towards some of them. It puts
//! the result on this node as the condition `PorticoMesh`, and into metrics. Between rounds only the
//! responder works. The other direction is the other node's: its member checks it.

mod metrics;
mod verdict;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use portico_admin::controller_pages::ControllerPages;
use portico_admin::readiness::Readiness;
use portico_kube::client;
use portico_operator::mesh::{Members, members, set_condition};
use portico_ports::{Facts, Inventory, Product};
use portico_preflight::plan::{Direction, Plan, Site, TlsTrust, plan};
use portico_preflight::runner::{self, Tools, What};
use portico_preflight::verdict::{Expectations, Finding, judge};
use serde::Serialize;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::flags::Flags;
use super::respond;
use crate::daemon::{Admin, Daemon, Hangup};

/// The role that nodes have in the model.
const ROLE: &str = "worker";

/// What the mesh knows. Shared with the admin listener.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct MeshStatus {
    /// Rounds that have ended, and those that could not be done.
    rounds: u64,
    failed_rounds: u64,
    /// Other nodes with a member, and those of them that were checked in the last round.
    peers: usize,
    checked: usize,
    /// When the last round ended, in seconds since 1970.
    ended: Option<i64>,
    /// Why the last round could not be done, or reported.
    error: Option<String>,
    /// Of the last round.
    findings: Vec<Finding>,
}

/// What stays the same from round to round.
struct Mesh<'a> {
    flags: &'a Flags,
    node: &'a str,
    products: Vec<&'static Product>,
    facts: Facts,
    trust: TlsTrust,
    tools: Tools,
    client: portico_kube::Client,
}

/// Checks until told to stop.
pub(super) async fn run(flags: &Flags) -> anyhow::Result<()> {
    let mut daemon = Daemon::start(Hangup::of_terminal())?;
    let status = Arc::new(Mutex::new(MeshStatus::default()));
    let mesh = Mesh {
        flags,
        node: flags.mesh.node.as_deref().context("--node is missing")?,
        products: flags.products()?,
        facts: flags.facts()?,
        trust: flags.trust()?,
        tools: flags.tools()?,
        client: client(flags.mesh.kubeconfig.as_deref()).await?,
    };
    // A fact that is missing ends the process, and not each round.
    mesh.plan(&BTreeMap::from([(mesh.node.to_owned(), vec![IpAddr::from([127, 0, 0, 1])])]))?;
    let (shown, metrics) = (Arc::clone(&status), Arc::new(metrics::of(Arc::clone(&status))));
    let shown = move || shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let pages = ControllerPages { status: shown, readiness, metrics };
    let _admin = Admin::serve(flags.mesh.admin_listen, Arc::new(pages), false).await?;
    tokio::select! {
        () = mesh.rounds(&status) => {}
        signal = daemon.asked_to_stop() => tracing::info!(%signal, "told to stop"),
    }
    Ok(())
}

impl Mesh<'_> {
    async fn rounds(&self, status: &Mutex<MeshStatus>) {
        let mut ticks = interval(self.flags.mesh.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut responder = Responding::default();
        for round in 0_usize.. {
            ticks.tick().await;
            let outcome = self.round(round, &mut responder, status).await;
            let mut status = status.lock().unwrap_or_else(PoisonError::into_inner);
            status.rounds += 1;
            status.ended = Some(jiff::Timestamp::now().as_second());
            status.error = outcome.err().map(|error| format!("{error:#}"));
            status.failed_rounds += u64::from(status.error.is_some());
            if let Some(error) = &status.error {
                tracing::warn!(%error, "a round of the mesh failed; the next one tries again");
            }
        }
    }

    async fn round(
        &self,
        round: usize,
        responder: &mut Responding,
        status: &Mutex<MeshStatus>,
    ) -> anyhow::Result<()> {
        let service = &self.flags.mesh.mesh_service;
        let members = members(&self.client, &service.namespace, &service.name)
            .await
            .with_context(|| format!("listing the EndpointSlices of {service}"))?;
        let own = members.get(self.node).map(|own| own.addresses.clone()).unwrap_or_default();
        anyhow::ensure!(!own.is_empty(), "{service} has no endpoint on the node {}", self.node);
        responder.keep(self, &members).await?;
        let peers = verdict::some(&members, self.node, round, self.flags.mesh.most_peers);
        let mut addresses: BTreeMap<String, Vec<IpAddr>> = peers.clone();
        addresses.insert(self.node.to_owned(), own);
        let mut plan = self.plan(&addresses)?;
        plan.checks.retain(|planned| planned.direction == Direction::Out && planned.peer.is_some());
        let checks: Vec<What> = plan.checks.iter().map(|planned| planned.what.clone()).collect();
        let outcomes = runner::run(&checks, &self.tools, self.flags.pace(), |_, _| {}).await;
        let expected =
            Expectations { pod_mtu: self.flags.pod_mtu, peers_listen: true, ..Expectations::default() };
        let findings = judge(&plan.checks, &outcomes, &expected);
        let verdict = verdict::of(&findings, &peers);
        {
            let mut status = status.lock().unwrap_or_else(PoisonError::into_inner);
            (status.peers, status.checked) = (members.len() - 1, peers.len());
            status.findings = findings;
        }
        let written = set_condition(&self.client, self.node, &verdict).await;
        written.with_context(|| format!("writing the condition {} of node {}", verdict.kind, self.node))
    }

    /// The plan of this node among others.
    fn plan(&self, addresses: &BTreeMap<String, Vec<IpAddr>>) -> anyhow::Result<Plan> {
        let mut inventory = Inventory::default();
        for address in addresses.values().flatten() {
            inventory.add(ROLE, (*address).into());
        }
        let here = addresses.get(self.node).map(Vec::as_slice).unwrap_or_default();
        let (products, roles, tls) = (self.products.as_slice(), [ROLE.to_owned()], &self.trust);
        let (roles, facts, inventory) = (roles.as_slice(), &self.facts, &inventory);
        Ok(plan(&Site { products, roles, facts, inventory, needs: None, here, tls })?)
    }
}

/// The responder, opened again when members come or go.
#[derive(Debug, Default)]
struct Responding {
    members: BTreeMap<String, Vec<IpAddr>>,
    /// What stops it when dropped, and its task.
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Responding {
    async fn keep(&mut self, mesh: &Mesh<'_>, members: &Members) -> anyhow::Result<()> {
        let addresses: BTreeMap<String, Vec<IpAddr>> =
            members.iter().map(|(node, member)| (node.clone(), member.addresses.clone())).collect();
        let runs = self.running.as_ref().is_some_and(|(_, task)| !task.is_finished());
        if runs && addresses == self.members {
            return Ok(());
        }
        let plan = mesh.plan(&addresses)?;
        if let Some((stop, task)) = self.running.take() {
            drop(stop);
            // Its ports are free only then. If it failed, it has reported so.
            let _ = task.await;
        }
        let responder = respond(mesh.flags, &plan);
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let failed = responder.serve_until(async { drop(stopped.await) }).await;
            if let Some(error) = failed {
                tracing::warn!(%error, "the responder ended; the next round opens it again");
            }
        });
        self.running = Some((stop, task));
        self.members = addresses;
        Ok(())
    }
}

/// Ready means that others may expect answers: the first round has begun the responder. Flows that fail are
/// the network's matter, and do not make a member unready.
fn readiness(status: &MeshStatus, verbose: bool) -> Readiness {
    let mut readiness = Readiness::new(verbose);
    let detail = status.error.as_deref().unwrap_or("the members are known, and the condition is written");
    readiness.check("round", status.rounds > status.failed_rounds, detail);
    readiness
}
