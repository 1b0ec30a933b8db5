//! One pass over one cluster: what the seed says about it, its kubeconfig, and its inside.

use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, Service};
use kube::Api;
use portico_api::annotations::API_SERVER_CA;
use portico_api::api_server_ca::ApiServerCa;
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::{ExposedCluster, MigrationState};
use portico_expose::migration::{Fact, Proof};
use portico_expose::services::KONNECTIVITY;
use portico_expose::strategy;
use portico_expose::user_cluster::{BAD_KUBECONFIG, Konnectivity, NO_KUBECONFIG};
use portico_kube::apply::{Applied, ApplyError, apply};
use portico_kube::cached::Cached;
use portico_kube::error::describe;
use portico_pki::Kubeconfig;
use portico_pki::inventory::{self, INTERNAL_KUBECONFIG};
use serde_json::{Value, json};
use thiserror::Error;

use super::context::Context;
use super::subject::{Clusters, Known, NOT_EXPOSED, Readiness, Subject, text};
use crate::cache::api;
use crate::controllers::exposed::Written;
use crate::controllers::exposure::belongs_to;
use crate::write::{RequestError, is_terminating, request, status};

/// The object with the authorities that agents must trust, by the controller of seed components. During a
/// change of CA it has both.
const TUNNEL_TRUST: &str = inventory::Signer::Tunnel.secret();

/// The Secret of a tunnel certificate that something else made, with its CA beside it.
const TUNNEL_CERTIFICATE: &str = inventory::LEAVES[0].secret;

/// The reason of what the seed does not do as it is asked to.
const SEED_UNAVAILABLE: &str = "SeedUnavailable";

/// A pass did not do what it should; the report says why. Retried with back-off.
#[derive(Debug, Error)]
#[error("the pass over a user cluster failed")]
pub(super) struct Failed;

impl Context {
    /// Makes kubeconfig and inside of one cluster as they should be, and reports the status of the inside.
    pub(super) async fn pass(&self, name: &str, exposed: &Cached<Written>) -> Result<(), Failed> {
        let Ok(exposed) = serde_json::from_value::<ExposedCluster>(exposed.value()) else {
            self.observed.forget(name);
            self.record(name, &not_exposed(), false);
            return Ok(());
        };
        if exposed.spec.address.url.is_empty() {
            let readiness = not_exposed();
            self.observe(&exposed, Known::new(), &readiness);
            self.record(name, &readiness, false);
            return Ok(());
        }
        let (seen, cluster) = match self.cluster(name).await {
            Ok(Some(found)) => found,
            Ok(None) => {
                self.observed.forget(name);
                self.approvers.end(name);
                return Ok(());
            }
            Err(error) => {
                let readiness = Readiness::failed(SEED_UNAVAILABLE, error.to_string());
                self.observe(&exposed, Known::new(), &readiness);
                self.record(name, &readiness, true);
                return Err(Failed);
            }
        };
        if cluster.metadata.deletion_timestamp.is_some() || cluster.spec.pause {
            self.approvers.end(name);
        }
        if cluster.metadata.deletion_timestamp.is_some() {
            self.observed.forget(name);
            return Ok(());
        }
        if cluster.spec.pause {
            // Its status stays too.
            let message = "the Cluster is paused: everything stays as it is".to_owned();
            let paused = Readiness { ready: true, reason: "Paused", message, failed: false };
            self.observe(&exposed, Known::new(), &paused);
            self.record(name, &paused, false);
            return Ok(());
        }
        let namespace = cluster.name().namespace().to_string();
        let second = exposed.by_second();
        let subject = Subject { cluster, seen, exposed, second, namespace };
        let mut known = Known::new();
        let readiness = match self.steps(&subject, &mut known).await {
            Ok(readiness) => readiness,
            Err(error) => Readiness::failed(SEED_UNAVAILABLE, error.to_string()),
        };
        self.observe(&subject.exposed, known, &readiness);
        if self.mark(&subject.cluster, &readiness).await { Err(Failed) } else { Ok(()) }
    }

    async fn steps(&self, subject: &Subject, known: &mut Known) -> Result<Readiness, RequestError> {
        let namespaces = api::<Namespace>(&self.client, "");
        let namespace = self.read(namespaces, "Namespace", &subject.namespace).await?;
        let own = namespace.is_some_and(|namespace| {
            let ends = is_terminating(&namespace.value());
            belongs_to(&namespace, &subject.cluster) && !ends
        });
        if !own {
            self.approvers.end(&subject.cluster.metadata.name);
            return Ok(not_exposed());
        }
        let forgotten = if subject.has_tunnel() { Ok(()) } else { self.forget_authority(subject).await? };
        let issued = self.issue(subject).await?;
        self.prove_issued(subject, known).await?;
        let readiness = with_write(self.inner(subject, known).await?, SEED_UNAVAILABLE, forgotten);
        Ok(with_write(readiness, "NoAdminKubeconfig", issued))
    }

    /// The inside, with the kubeconfig that leads there.
    async fn inner(&self, subject: &Subject, known: &mut Known) -> Result<Readiness, RequestError> {
        let namespace = &subject.namespace;
        let Some(secret) = self.secret(namespace, INTERNAL_KUBECONFIG).await? else {
            let message = format!(
                "there is no Secret {namespace}/{INTERNAL_KUBECONFIG}: nothing is written inside the \
                 cluster. Put a kubeconfig of an administrator there, under the key {:?}, with all \
                 certificates in it",
                inventory::KUBECONFIG
            );
            self.approvers.end(&subject.cluster.metadata.name);
            if !subject.cluster.is_hosted() && subject.state() == Some(MigrationState::Closing) {
                // Without a kubeconfig the inside cannot be checked. What is left there cuts nobody off, so
                // closing does not wait for it. It goes once the Secret exists.
                known.insert(Proof::GoneInside, Fact::So);
            }
            return Ok(Readiness::waits(NO_KUBECONFIG, message));
        };
        let kubeconfig = match usable(&secret) {
            Ok(kubeconfig) => kubeconfig,
            Err(why) => {
                self.approvers.end(&subject.cluster.metadata.name);
                let message = format!("Secret {namespace}/{INTERNAL_KUBECONFIG} cannot be used: {why}");
                return Ok(Readiness::waits(BAD_KUBECONFIG, message));
            }
        };
        let (first, next) = self.konnectivity(subject).await?;
        let konnectivity = (&first, next.as_ref());
        let (mut tunnel_ca, mut named) = (None, Ok(()));
        if subject.has_tunnel() {
            named = self.name_authority(subject, &kubeconfig.authority).await?;
            tunnel_ca = self.tunnel_ca().await?;
        }
        let hosted = self.hosted(subject, &first).await?;
        let tunnel_ca = tunnel_ca.as_deref();
        let kept = self.reconcile_inside(subject, &kubeconfig, konnectivity, tunnel_ca, hosted).await;
        self.approve(subject, &kubeconfig, kept.answered).await;
        self.prove(subject, &kubeconfig, konnectivity, &kept, known).await?;
        Ok(with_write(kept.readiness, SEED_UNAVAILABLE, named))
    }

    /// The Konnectivity server by the first door, and by the second until that is being closed.
    async fn konnectivity(
        &self,
        subject: &Subject,
    ) -> Result<(Konnectivity, Option<Konnectivity>), RequestError> {
        let (first, second) = (&subject.exposed, subject.open_second());
        let by_port = |door: &ExposedCluster| strategy::of(door.spec.expose_strategy).has_node_ports();
        let mut node_port = None;
        if by_port(first) || second.is_some_and(by_port) {
            let services = api::<Service>(&self.client, &subject.namespace);
            let service = self.read(services, "Service", KONNECTIVITY).await?;
            let number = service.and_then(|seen| seen.value().pointer("/spec/ports/0/nodePort")?.as_u64());
            node_port = number.and_then(|number| u16::try_from(number).ok()).filter(|&number| number != 0);
        }
        let of = |door| Konnectivity::of(&subject.cluster, door, node_port);
        Ok((of(first), second.map(of)))
    }

    /// The authority of the tunnel certificate, if the seed has it.
    async fn tunnel_ca(&self) -> Result<Option<String>, RequestError> {
        let namespace = &self.settings.namespace;
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
        let what = format!("ConfigMap {namespace}/{TUNNEL_TRUST}");
        let trust = request(&what, maps.get_opt(TUNNEL_TRUST)).await?;
        let trust = trust.and_then(|map| map.data?.remove(inventory::CA_CERTIFICATE));
        if trust.is_some() {
            return Ok(trust);
        }
        let secret = self.secret(namespace, TUNNEL_CERTIFICATE).await?;
        Ok(secret.and_then(|secret| text(&secret, inventory::CA_CERTIFICATE)))
    }

    /// Writes on the Cluster the authority of its API server's certificate, unless somebody else has. The
    /// gateway asks that API server whether an agent's token is good.
    async fn name_authority(
        &self,
        subject: &Subject,
        authority: &str,
    ) -> Result<Result<(), String>, RequestError> {
        let metadata = &subject.cluster.metadata;
        if metadata.annotation(API_SERVER_CA).is_some() && !subject.seen.is_ours() {
            return Ok(Ok(()));
        }
        self.annotate(subject, json!({API_SERVER_CA: authority})).await
    }

    /// Takes back what [`Self::name_authority`] wrote: only agents need it.
    async fn forget_authority(&self, subject: &Subject) -> Result<Result<(), String>, RequestError> {
        let written = subject.cluster.metadata.annotation(API_SERVER_CA).is_some();
        if written && subject.seen.is_ours() { self.annotate(subject, json!({})).await } else { Ok(Ok(())) }
    }

    /// Applies these annotations of the Cluster, and no others.
    async fn annotate(
        &self,
        subject: &Subject,
        annotations: Value,
    ) -> Result<Result<(), String>, RequestError> {
        let metadata = &subject.cluster.metadata;
        let clusters = api::<Clusters>(&self.client, "");
        // Not on one that somebody made anew under this name.
        let wanted = json!({"metadata": {"name": metadata.name, "uid": metadata.uid,
            "annotations": annotations}});
        self.apply("annotation of the Cluster", &clusters, &wanted, Some(&subject.seen)).await
    }

    /// Applies an object of the seed. A refusal is the `Err` within: it may last, and what is inside must not
    /// wait for its end.
    pub(super) async fn apply<K: k8s_openapi::Resource + 'static>(
        &self,
        what: &str,
        api: &Api<Cached<K>>,
        wanted: &Value,
        current: Option<&Cached<K>>,
    ) -> Result<Result<(), String>, RequestError> {
        let written = async {
            match apply(api, wanted, current).await {
                Err(error) if is_refusal(&error) => Ok(Err(format!("{what}: {}", describe(&error)))),
                written => written.map(Ok),
            }
        };
        let written = request(what, written).await?;
        if let Ok(Applied::Changed(_)) = written {
            self.counters.wrote(K::KIND);
        }
        Ok(written.map(drop))
    }

    async fn cluster(&self, name: &str) -> Result<Option<(Cached<Clusters>, Cluster)>, RequestError> {
        let seen = self.read(api::<Clusters>(&self.client, ""), "Cluster", name).await?;
        Ok(seen.and_then(|seen| {
            let cluster = serde_json::from_value(seen.value()).ok()?;
            Some((seen, cluster))
        }))
    }
}

/// Whether the API server has answered that it does not take the object as it is. After a conflict the pass
/// begins anew.
fn is_refusal(error: &ApplyError) -> bool {
    status(&error.source).is_some_and(|status| !status.is_conflict())
}

/// The status of an inside, with what came of a write on the seed.
fn with_write(readiness: Readiness, reason: &'static str, written: Result<(), String>) -> Readiness {
    match written {
        Ok(()) => readiness,
        Err(why) if readiness.ready => Readiness::failed(reason, why),
        // What waits is no trouble by itself.
        Err(why) if !readiness.failed => Readiness::failed(reason, format!("{why}; {}", readiness.message)),
        Err(why) => Readiness { message: format!("{}; {why}", readiness.message), ..readiness },
    }
}

fn not_exposed() -> Readiness {
    let message = "waits until the cluster is exposed; the condition PorticoExposed says how that stands";
    Readiness::waits(NOT_EXPOSED, message.to_owned())
}

/// The kubeconfig in a Secret. One that names a program, a file or a proxy, or that would send its credential
/// in plain text, is not used.
fn usable(secret: &Secret) -> Result<Kubeconfig, String> {
    let key = inventory::KUBECONFIG;
    let text = text(secret, key).ok_or_else(|| format!("it has no text under the key {key:?}"))?;
    let kubeconfig = Kubeconfig::parse(&text).map_err(|bad| bad.to_string())?;
    if !kubeconfig.server.starts_with("https://") {
        return Err("its server does not begin with https://".to_owned());
    }
    // Under Tunneling it becomes the annotation of the Cluster, which admission would refuse.
    ApiServerCa::parse(&kubeconfig.authority).map_err(|bad| format!("its CA cannot be used: {bad}"))?;
    Ok(kubeconfig)
}
