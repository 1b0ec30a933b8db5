//! `portico front`: the ports of the LoadBalancer Services in front of clusters follow the Services that they
//! publish.
//!
//! A process of its own, because it may write and the gateway may not. The controller is in
//! `portico-operator`; here are its flags and its admin listener.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use portico_admin::controller_pages::ControllerPages;
use portico_admin::readiness::Readiness;
use portico_api::annotations::EXPOSE;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use portico_kube::{Client, client};
use portico_operator::{ControllerStatus, Operator, Settings};

use crate::allocator;
use crate::args::{Listen, Port, annotation_key, object_key};
use crate::daemon::{self, Admin, Daemon, Hangup};
use crate::outcome::Outcome;

mod metrics;

use metrics::front_metrics;

// `portico front`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    front: FrontFlags,
    /// Also keep the ports of the LoadBalancer Service of this name in the namespace of each cluster
    /// (front-loadbalancer, where KKP makes it for the strategy LoadBalancer); not beside KKP's updater
    #[arg(long, value_name = "NAME")]
    cluster_service: Option<String>,
    /// Do not write an ExposedCluster for each Cluster; gateways then need the right to read Clusters
    #[arg(long)]
    without_exposed_clusters: bool,
}

// What every process with the controller of the front Service takes.
#[derive(Debug, Args)]
pub(crate) struct FrontFlags {
    /// The LoadBalancer Service whose ports are kept in line
    #[arg(long, value_name = "NS/NAME", default_value = "portico/portico", value_parser = object_key)]
    pub(crate) service: ObjectKey,
    /// The Seed whose settings --service gets, where there are several
    #[arg(long, value_name = "NAME")]
    seed: Option<String>,
    /// How to reach the Kubernetes API, also by its proxy-url or HTTPS_PROXY; without it, as a pod of that
    /// cluster
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Port of the gateway's SNI listener, to be published; off for none
    #[arg(long, value_name = "PORT", default_value = "6443")]
    pub(crate) sni_port: Port,
    /// Port of the gateway's tunnel listener, to be published; off for none
    #[arg(long, value_name = "PORT", default_value = "8088")]
    pub(crate) tunnel_port: Port,
    /// Most ports the load balancer can have; the newest clusters wait [default: no limit]
    #[arg(long, value_name = "N")]
    listener_limit: Option<usize>,
    /// The annotation by which a Service asks to be exposed
    #[arg(long, value_name = "KEY", default_value = EXPOSE, value_parser = annotation_key)]
    expose_annotation: String,
    /// Name of this replica, different from all others [default: the host's name and a number]
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    identity: Option<String>,
    /// Where /healthz, /readyz, /metrics and /status are served; off for none
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8003")]
    admin_listen: Listen,
}

/// Runs until told to stop.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let settings = Settings {
        cluster_service: flags.cluster_service.clone(),
        exposed_clusters: !flags.without_exposed_clusters,
        ..flags.front.settings()
    };
    daemon::run(flags.front.serve(|client| Operator::front(client, settings))).map(|()| Outcome::Done)
}

impl FrontFlags {
    /// The settings of the controller of the front Service.
    pub(crate) fn settings(&self) -> Settings {
        let plan = FrontSettings {
            front: self.service.clone(),
            sni_port: self.sni_port.0,
            tunnel_port: self.tunnel_port.0,
            listener_limit: self.listener_limit,
            expose_annotation: self.expose_annotation.clone(),
            namespace: None,
        };
        let identity = self.identity.clone().unwrap_or_else(own_name);
        Settings { seed: self.seed.clone(), ..Settings::new(plan, &identity) }
    }

    /// Runs the controllers that `operator` makes, with their admin listener, until told to stop.
    pub(crate) async fn serve(&self, operator: impl FnOnce(Client) -> Operator) -> anyhow::Result<()> {
        let mut daemon = Daemon::start(Hangup::of_terminal())?;
        let operator = operator(client(self.kubeconfig.as_deref()).await?);
        let (status, metrics) = (operator.status(), Arc::new(front_metrics(operator.status())));
        let pages = ControllerPages { status: move || status.get(), readiness, metrics };
        let _admin = Admin::serve(self.admin_listen, Arc::new(pages), false).await?;
        let stopped = async {
            let signal = daemon.asked_to_stop().await;
            tracing::info!(%signal, "told to stop");
        };
        tokio::select! {
            ended = operator.run(stopped) => Ok(ended?),
            // The first look at all objects takes several times what is kept of them.
            never = allocator::give_back_after_bursts() => match never {},
        }
    }
}

/// A name that differs for every process, also for two on one host.
fn own_name() -> String {
    let host = rustix::system::uname();
    format!("{}-{}", host.nodename().to_string_lossy(), std::process::id())
}

/// Ready means: everything is known, watches work, and no write is refused. A replica that waits to lead is
/// ready too. What another client or a limit keeps from being published is shown, and does not decide.
fn readiness(status: &ControllerStatus, verbose: bool) -> Readiness {
    let mut readiness = Readiness::new(verbose);
    let read = if status.complete { "every Service is known" } else { "waiting for the list of Services" };
    readiness.check("source", status.complete, read);
    for (kind, watch) in &status.watches {
        let detail = watch.error.as_deref().unwrap_or(if watch.not_served { "not served" } else { "works" });
        readiness.check(&format!("watch {kind}"), watch.error.is_none(), detail);
        if let Some(text) = &watch.unreadable {
            readiness.warn(format_args!("{text}; nothing is written that may follow from it"));
        }
    }
    if let Some(text) = status.operator.as_ref().and_then(|operator| operator.waits_for.as_ref()) {
        readiness.warn(format_args!("leadership: {text}"));
    }
    for (service, state) in &status.services {
        let (name, published) = (format!("front Service {service}"), state.published);
        match &state.error {
            Some(error) => readiness.check(&name, false, error),
            None if !state.found => readiness.warn(format_args!("{name}: it does not exist")),
            None => readiness.fine(format_args!("{name}: {published} of {} ports published", state.used)),
        }
        for (reason, text) in state.troubles.iter().filter(|_| state.error.is_none()) {
            readiness.warn(format_args!("{name}: {reason}: {text}"));
        }
    }
    let clusters = &status.exposed_clusters;
    let some = clusters.troubles.iter().next();
    let trouble = some.map(|(name, text)| format!("; {name}: {text}")).unwrap_or_default();
    let written = format!("{} written, {} failed{trouble}", clusters.written, clusters.failed);
    readiness.check("ExposedClusters", clusters.failed == 0, written);
    if clusters.refused > 0 {
        readiness.warn(format_args!(
            "ExposedClusters: {} are not written, and stay as they were; /status says why",
            clusters.refused
        ));
    }
    if let Some(clusters) = &status.clusters {
        let troubled = || clusters.reports.iter().filter(|(_, report)| !report.exposed);
        let (all, count) = (clusters.reports.len(), troubled().count());
        match (&clusters.observing, troubled().next()) {
            (Some(text), _) => readiness.warn(format_args!("Clusters: {text}")),
            (None, None) => readiness.fine(format_args!("Clusters: {all} exposed")),
            (None, Some((name, report))) => readiness.warn(format_args!(
                "Clusters: {count} of {all} not exposed; {name}: {}: {}",
                report.reason, report.message
            )),
        }
    }
    for (part, clusters) in &status.parts {
        let what = part.title;
        let troubled = || clusters.reports.iter().filter(|(_, report)| !report.ready);
        let (all, count) = (clusters.reports.len(), troubled().count());
        match troubled().next() {
            None => readiness.fine(format_args!("{what}: {all} as they should be")),
            Some((name, report)) => readiness.warn(format_args!(
                "{what}: {count} of {all} not as they should be; {name}: {}: {}",
                report.reason, report.message
            )),
        }
    }
    if let Some(seeds) = &status.seeds {
        for (seed, report) in &seeds.reports {
            let text = format!("Seed {seed}: {}: {}", report.reason, report.message);
            if report.ready {
                readiness.fine(format_args!("{text}"))
            } else {
                readiness.warn(format_args!("{text}"))
            }
        }
        if let Some(text) = &seeds.observing {
            readiness.warn(format_args!("Seeds: {text}"));
        }
    }
    if let Some(webhook) = &status.webhook {
        match webhook.trouble.as_ref().or(webhook.observing.as_ref()) {
            Some(text) => readiness.warn(format_args!("webhook: {text}")),
            None if webhook.registered => readiness.fine(format_args!("webhook: the API server asks")),
            None => readiness.fine(format_args!("webhook: answers; the leader registers it")),
        }
    }
    readiness
}

#[cfg(test)]
mod tests {
    use portico_operator::{ServiceStatus, WatchStatus};

    use super::*;

    fn ready(status: &ControllerStatus) -> bool {
        readiness(status, false).into_text() == "ready\n"
    }

    #[test]
    fn a_refused_write_and_a_failing_watch_are_not_ready_and_other_troubles_are_shown() {
        let mut status = ControllerStatus::default();
        assert!(!ready(&status));
        status.complete = true;
        let key = ObjectKey::new("portico", "portico");
        let mut front = ServiceStatus { found: true, ..ServiceStatus::default() };
        front.troubles.insert("ForeignWriter", "somebody".into());
        status.services.insert(key.clone(), front.clone());
        assert!(ready(&status));
        let shown = readiness(&status, true).into_text();
        assert!(shown.contains("[!] front Service portico/portico: ForeignWriter: somebody"), "{shown}");
        front.error = Some("403".into());
        status.services.insert(key, front);
        assert!(!ready(&status));
        status.services.clear();
        let mut watch = WatchStatus::default();
        watch.not_served = true;
        status.watches.insert("Seed", watch.clone());
        assert!(ready(&status));
        watch.error = Some("away".into());
        status.watches.insert("Seed", watch);
        assert!(!ready(&status));
        status.watches.clear();
        status.exposed_clusters.refused = 1;
        assert!(ready(&status));
        status.exposed_clusters.failed = 1;
        assert!(!ready(&status));
    }
}
