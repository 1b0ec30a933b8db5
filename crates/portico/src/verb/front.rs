//! `portico front`: the ports of the one LoadBalancer Service of a seed follow the Services exposed by
//! NodePort.
//!
//! A process of its own, because it may write and the gateway may not. The controller is in
//! `portico-operator`; here are its flags and its admin listener.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use portico_admin::body::stream;
use portico_admin::exposition::{Exposition, Families};
use portico_admin::server::{Answer, Pages, text, typed};
use portico_api::annotations::EXPOSE;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use portico_kube::client;
use portico_operator::{Front, FrontStatus, Settings, StatusHandle};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use crate::args::{Listen, Port, annotation_key, object_key};
use crate::daemon::{self, Admin, Daemon, Hangup};
use crate::outcome::Outcome;

/// `portico front`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// The LoadBalancer Service whose ports are kept in line
    #[arg(long, value_name = "NS/NAME", value_parser = object_key)]
    service: ObjectKey,
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
        };
        Settings::new(plan, &self.identity.clone().unwrap_or_else(own_name))
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
        Self { metrics: Arc::new(Exposition::of(FrontMetrics(status.clone()))), status }
    }
}

impl Pages for FrontPages {
    fn answer(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path() {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" if self.status.get().complete => text(StatusCode::OK, "ready\n".into()),
            "/readyz" => {
                text(StatusCode::SERVICE_UNAVAILABLE, "not ready: waiting for the list of Services\n".into())
            }
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

/// The metrics of the controller.
#[derive(Debug)]
struct FrontMetrics(StatusHandle);

impl Collector for FrontMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let FrontStatus { complete, leader, found, used, limit, waiting, writes, failed_writes, .. } =
            self.0.get();
        let mut out = Families(encoder);
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        out.one_gauge("front_ready", "1 once all Services are known.", None, complete.into())?;
        out.one_gauge("front_leader", "1 if this replica is the one that writes.", None, leader.into())?;
        out.one_gauge("front_service_found", "1 if the front Service exists.", None, found.into())?;
        out.one_gauge("front_listeners", "Ports of the front Service.", None, used as u64)?;
        if let Some(limit) = limit {
            out.one_gauge("front_listener_limit", "Most ports it may have.", None, limit as u64)?;
        }
        let help =
            "NodePorts that are not published, because of the limit or for another reason /status names.";
        out.one_gauge("front_waiting", help, None, waiting.len() as u64)?;
        out.one_counter("front_writes", "Updates of the front Service.", writes)?;
        out.one_counter("front_failed_writes", "Updates that were refused or not answered.", failed_writes)
    }
}
