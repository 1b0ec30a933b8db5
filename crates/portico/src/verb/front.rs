//! `portico front`: the ports of the LoadBalancer Services in front of clusters follow the Services that they
//! publish.
//!
//! A process of its own, because it may write and the gateway may not. The controller is in
//! `portico-operator`; here are its flags and its admin listener.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use portico_admin::body::stream;
use portico_admin::exposition::Exposition;
use portico_admin::listing::Query;
use portico_admin::readiness::Readiness;
use portico_admin::server::{Answer, Pages, text, typed};
use portico_api::annotations::EXPOSE;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use portico_kube::client;
use portico_operator::{Front, FrontStatus, Settings, StatusHandle};

use crate::args::{Listen, Port, annotation_key, object_key};
use crate::daemon::{self, Admin, Daemon, Hangup};
use crate::outcome::Outcome;

mod metrics;

use metrics::front_metrics;

/// `portico front`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// The LoadBalancer Service whose ports are kept in line
    #[arg(long, value_name = "NS/NAME", value_parser = object_key)]
    service: ObjectKey,
    /// Also keep the ports of the LoadBalancer Service of this name in the namespace of each cluster
    /// (front-loadbalancer, where KKP makes it for the strategy LoadBalancer); not beside KKP's updater
    #[arg(long, value_name = "NAME")]
    cluster_service: Option<String>,
    /// The Seed whose settings --service gets, where there are several
    #[arg(long, value_name = "NAME")]
    seed: Option<String>,
    /// Do not write an ExposedCluster for each Cluster; gateways then need the right to read Clusters
    #[arg(long)]
    without_exposed_clusters: bool,
    /// How to reach the Kubernetes API, also by its proxy-url or HTTPS_PROXY; without it, as a pod of that
    /// cluster
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Port of the gateway's SNI listener, to be published; off for none
    #[arg(long, value_name = "PORT", default_value = "6443")]
    sni_port: Port,
    /// Port of the gateway's tunnel listener, to be published; off for none
    #[arg(long, value_name = "PORT", default_value = "8088")]
    tunnel_port: Port,
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
    daemon::run(control(flags))
}

async fn control(flags: &Flags) -> anyhow::Result<()> {
    let mut daemon = Daemon::start(Hangup::of_terminal())?;
    let client = client(flags.kubeconfig.as_deref()).await?;
    let front = Front::new(client, flags.settings());
    let _admin = Admin::serve(flags.admin_listen, Arc::new(FrontPages::new(front.status())), false).await?;
    let stopped = async {
        let signal = daemon.asked_to_stop().await;
        tracing::info!(%signal, "told to stop");
    };
    Ok(front.run(stopped).await?)
}

impl Flags {
    fn settings(&self) -> Settings {
        let plan = FrontSettings {
            front: self.service.clone(),
            sni_port: self.sni_port.0,
            tunnel_port: self.tunnel_port.0,
            listener_limit: self.listener_limit,
            expose_annotation: self.expose_annotation.clone(),
            namespace: None,
        };
        let identity = self.identity.clone().unwrap_or_else(own_name);
        Settings {
            cluster_service: self.cluster_service.clone(),
            seed: self.seed.clone(),
            exposed_clusters: !self.without_exposed_clusters,
            ..Settings::new(plan, &identity)
        }
    }
}

/// A name that differs for every process, also for two on one host.
fn own_name() -> String {
    let host = rustix::system::uname();
    format!("{}-{}", host.nodename().to_string_lossy(), std::process::id())
}

/// The pages of the admin listener.
#[derive(Debug)]
struct FrontPages {
    status: StatusHandle,
    metrics: Arc<Exposition>,
}

impl FrontPages {
    fn new(status: StatusHandle) -> Self {
        Self { metrics: Arc::new(front_metrics(status.clone())), status }
    }
}

impl Pages for FrontPages {
    fn answer(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path() {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" => readiness(&self.status.get(), Query::of(request.uri()).has("verbose")).answer(),
            "/metrics" => Arc::clone(&self.metrics).page(),
            "/status" => {
                let status = self.status.get();
                typed("application/json", stream(move |out| Ok(serde_json::to_writer_pretty(out, &status)?)))
            }
            path => text(
                StatusCode::NOT_FOUND,
                format!("nothing is served at {path:?}; there are /healthz, /readyz, /metrics and /status\n"),
            ),
        }
    }
}

/// Ready means: everything is known, watches work, and no write is refused. A replica that waits to lead is
/// ready too. What another client or a limit keeps from being published is shown, and does not decide.
fn readiness(status: &FrontStatus, verbose: bool) -> Readiness {
    let mut readiness = Readiness::new(verbose);
    let read = if status.complete { "every Service is known" } else { "waiting for the list of Services" };
    readiness.check("source", status.complete, read);
    for (kind, watch) in &status.watches {
        let detail = watch.error.as_deref().unwrap_or(if watch.not_served { "not served" } else { "works" });
        readiness.check(&format!("watch {kind}"), watch.error.is_none(), detail);
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
            "ExposedClusters: {} Clusters cannot be used as written; /status names them",
            clusters.refused
        ));
    }
    readiness
}

#[cfg(test)]
mod tests {
    use portico_operator::{ServiceStatus, WatchStatus};

    use super::*;

    fn ready(status: &FrontStatus) -> bool {
        readiness(status, false).into_text() == "ready\n"
    }

    #[test]
    fn a_refused_write_and_a_failing_watch_are_not_ready_and_other_troubles_are_shown() {
        let mut status = FrontStatus::default();
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
