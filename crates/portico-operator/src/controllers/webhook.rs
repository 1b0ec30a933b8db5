//! The admission webhook: mistakes that only a look at other objects shows are refused when they are made, in
//! the words of `portico check`.
//!
//! Every replica serves, from the caches of its controllers. A question comes in by `server`, is read by
//! `message`, and answered by `reviewer`. `review`, which is pure, finds the problems. `register` is the
//! leader's part: the certificate, and the ValidatingWebhookConfiguration that names it.
//!
//! The webhook is a convenience. Where it is away, or in doubt, everything is admitted: controllers tell the
//! same problems by conditions.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use hyper::Uri;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::runtime::reflector::Store;
use portico_api::annotations::{EXPOSE_NAMESPACED, ExposeKeys};
use portico_api::meta::ObjectKey;
use portico_api::service::Service;
use portico_api::text::pem_problem;
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use portico_pki::inventory::WEBHOOK;
use portico_source::served::Served;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch as channel};
use tokio::time::{Instant, sleep};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::warn;

use crate::clock::{CLOCK_OFF, CLOCK_PERIOD};
use crate::follow::pause;
use crate::issued::Issued;
use crate::kkp::KkpWatch;
use crate::managed::{Managed, ManagedObject};
use crate::manager::Manager;
use crate::status::StatusHandle;
use crate::work_counters::WorkCounters;
use crate::write::WriteError;

mod message;
mod register;
mod review;
mod reviewer;
mod server;

use register::State;
use reviewer::Reviewer;

/// The name of the controller on Events.
pub(crate) const CONTROLLER: &str = "portico-webhook";

/// The ValidatingWebhookConfiguration.
const CONFIGURATION: &str = "portico";

/// How often everything is looked at without any change: certificates end by time alone.
const PERIOD: Duration = Duration::from_secs(3_600);

/// The first pause after a failed pass; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// How the webhook is served.
#[derive(Debug)]
pub struct WebhookSettings {
    /// Where this replica listens.
    pub listener: TcpListener,
    /// How the API server reaches it.
    pub reached: Reached,
    /// The namespace of Portico, where the certificate is.
    pub namespace: String,
    /// The annotation by which a Service asks to be exposed.
    pub expose_annotation: String,
    /// Whether the operator is configured with the Seed that the gateway belongs to.
    pub seed_is_named: bool,
    /// What time it is.
    pub clock: fn() -> Timestamp,
}

/// How an API server reaches the replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reached {
    /// By port 443 of a Service.
    Service(ObjectKey),
    /// By a URL, where the operator runs outside its seed.
    Url(Uri),
}

/// The part of the settings that outlives the start of the listener.
struct Registration {
    reached: Reached,
    expose_annotation: String,
    clock: fn() -> Timestamp,
}

/// Everything that the leader needs.
struct Context {
    client: Client,
    settings: Registration,
    issued: Issued,
    certificate: ManagedObject<Secret>,
    authority: ManagedObject<Secret>,
    configuration: ManagedObject<ValidatingWebhookConfiguration>,
    kkp: KkpWatch,
    leads: channel::Receiver<Leads>,
    events: Events,
    status: StatusHandle,
    counters: WorkCounters,
}

/// Serves and, as leader, registers, for ever. Questions are answered by `services` too.
pub(crate) async fn run(manager: Manager, settings: WebhookSettings, services: Store<Served<Service>>) {
    let events = manager.events(CONTROLLER);
    let Manager { client, clusters, installation, kkp, status, leads, .. } = manager;
    let WebhookSettings { listener, reached, namespace, expose_annotation, seed_is_named, clock } = settings;
    let issued = Issued::new(WEBHOOK, &namespace, "portico-operator");
    let (certificate, first) = ManagedObject::new(&client, issued.certificate.clone(), &status);
    let (authority, second) = ManagedObject::new(&client, issued.authority.clone(), &status);
    let (configuration, third) = ManagedObject::new(&client, ObjectKey::new("", CONFIGURATION), &status);
    status.webhook(|_| ());
    let reviewer = Reviewer {
        installation,
        clusters: clusters.store(),
        services,
        expose: ExposeKeys::from_iter([expose_annotation.as_str(), EXPOSE_NAMESPACED]),
        seed_is_named,
        kkp: kkp.clone(),
        status: status.clone(),
        turn: Arc::new(Semaphore::new(1)),
    };
    let triggers = stream::select_all([first, second, third, ticks(kkp.changes()), ticks(leads.clone())]);
    let (serving, served) = channel::channel(None);
    let settings = Registration { reached, expose_annotation, clock };
    let counters = WorkCounters::new(CONTROLLER, &status);
    let context = Context {
        client,
        settings,
        issued,
        certificate,
        authority,
        configuration,
        kkp,
        leads,
        events,
        status,
        counters,
    };
    tokio::select! {
        never = server::serve(listener, served, reviewer) => match never {},
        () = supervise(&context, triggers, &serving) => {}
    }
}

/// Keeps certificate and configuration as they should be, for ever, and serves the certificate.
async fn supervise(
    context: &Context,
    mut triggers: BoxStreams,
    serving: &channel::Sender<Option<Arc<ServerConfig>>>,
) {
    let mut failures = 0;
    loop {
        context.serve_certificate(serving);
        let next = if context.is_ready() {
            let started = Instant::now();
            let outcome = context.pass().await;
            context.counters.passed(started.elapsed());
            match outcome {
                Ok(state) => {
                    let is_off = matches!(state, Some(State::Trouble(CLOCK_OFF, _)));
                    if let Some(state) = state {
                        context.report(state).await;
                    }
                    failures = 0;
                    if is_off { CLOCK_PERIOD } else { context.next() }
                }
                // The new leader begins anew.
                Err(WriteError::NotLeading) => PERIOD,
                Err(error) => {
                    failures += 1;
                    context.counters.failed(error.reason());
                    context.report(State::Trouble(error.reason(), error.to_string())).await;
                    pause(failures, FIRST_RETRY, LAST_RETRY)
                }
            }
        } else {
            if !context.leads.borrow().now() {
                context.forget();
            }
            PERIOD
        };
        tokio::select! {
            Some(()) = triggers.next() => {}
            () = sleep(next) => {}
        }
    }
}

type BoxStreams = stream::SelectAll<BoxStream<'static, ()>>;

/// One item for each change.
fn ticks<T: Send + Sync + 'static>(receiver: channel::Receiver<T>) -> BoxStream<'static, ()> {
    let changes = stream::unfold(receiver, async |mut receiver| {
        receiver.changed().await.ok()?;
        Some(((), receiver))
    });
    changes.boxed()
}

impl Context {
    /// All objects.
    fn held(&self) -> [&dyn Managed; 3] {
        [&self.certificate, &self.authority, &self.configuration]
    }

    /// Whether this replica writes, and knows what is there.
    fn is_ready(&self) -> bool {
        self.leads.borrow().now() && self.held().into_iter().all(Managed::is_known)
    }

    /// When to look again without any change.
    fn next(&self) -> Duration {
        let now = Instant::now();
        let due = self.held().into_iter().filter_map(Managed::due);
        due.map(|due| due.saturating_duration_since(now)).min().map_or(PERIOD, |due| due.max(FIRST_RETRY))
    }

    /// Another replica writes.
    fn forget(&self) {
        self.held().into_iter().for_each(Managed::forget);
        self.status.webhook(|webhook| {
            webhook.registered = false;
            webhook.trouble = None;
            webhook.observing = None;
        });
    }

    /// Serves the certificate that is in the Secret now. One that cannot be used changes nothing.
    fn serve_certificate(&self, serving: &channel::Sender<Option<Arc<ServerConfig>>>) {
        let Some(secret) = self.certificate.value() else { return };
        let pair = self.issued.pair(&secret);
        match server_config(&pair.certificate, &pair.key) {
            Ok(config) => {
                self.note_end();
                serving.send_replace(Some(Arc::new(config)));
            }
            Err(error) => {
                warn!(secret = %self.issued.certificate, error, "cannot be served; what was before stays");
            }
        }
    }
}

fn server_config(certificate: &str, key: &str) -> Result<ServerConfig, String> {
    let unreadable = |error| pem_problem(&error);
    let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(unreadable)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(unreadable)?;
    let builder = ServerConfig::builder_with_provider(portico_dial::provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let config = builder.with_no_client_auth().with_single_cert(chain, key);
    let mut config = config.map_err(|error| error.to_string())?;
    // A connection for each request: what HTTP/2 would multiplex needs bounds of its own.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
