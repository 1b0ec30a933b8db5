//! The Secrets of a control plane. They are read for each pass: an outdated view could have a key made anew
//! that must stay. They are not kept, because they are many times the size of the rest.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::{ByteString, Resource};
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::Event;
use kube::{Api, Client, ResourceExt};
use portico_api::cluster::Cluster;
use portico_api::meta::ObjectKey;
use portico_api::names::ClusterName;
use portico_expose::exposure::{CLUSTER_LABEL, MANAGED_BY, owner};
use portico_hosting::{CLUSTER, Digests, digests};
use portico_kube::apply::Applied;
use portico_kube::cached::Cached;
use portico_kube::events::{Note, Severity};
use portico_kube::watch::progress;
use portico_pki::{ClusterPki, Due, Review, Secrets, Why};
use serde_json::{Value, json};

use super::context::{ACTION, CONTROL_PLANES, Context};
use super::relists::Relists;
use crate::cache::api;
use crate::clock::far_off;
use crate::clusters::Work;
use crate::controllers::exposed::reference;
use crate::follow::recorded;
use crate::managed::{applied, made_once};
use crate::status::StatusHandle;
use crate::write::{WriteError, must_lead, part, request};

/// Reads that are under way at a time, of one cluster.
const AT_ONCE: usize = 4;

const KIND: &str = Secret::KIND;

/// The Secrets of one cluster as they were read.
pub(super) struct ClusterSecrets {
    seen: BTreeMap<String, Cached<Secret>>,
    /// What they hold.
    data: Secrets,
}

/// What came of a review.
pub(super) struct Reviewed {
    /// It, without what was written.
    pub(super) review: Review,
    /// Secrets that are due, and somebody else's.
    pub(super) foreign: Vec<&'static str>,
    /// Why the clock keeps everything as it is.
    pub(super) clock: Option<String>,
}

/// The clusters of which such a Secret changes. Nothing is kept, and what they hold is not even read.
pub(super) fn changes(
    client: &Client,
    relists: &Relists,
    status: &StatusHandle,
) -> Vec<BoxStream<'static, Work>> {
    let secrets = portico_hosting::secrets();
    let changes = secrets.iter().map(|secret| {
        let api = Api::<PartialObjectMeta<Secret>>::all(client.clone());
        let relists = relists.clone();
        recorded(progress(api, Some(&secret.name)), KIND, status.clone())
            .map(move |event| match event {
                Ok(Event::Apply(seen) | Event::Delete(seen)) => {
                    let cluster = ClusterName::of_namespace(&seen.namespace().unwrap_or_default());
                    cluster.map(|cluster| ObjectRef::new(cluster.as_str())).into_iter().collect()
                }
                Ok(Event::InitDone) => relists.note(),
                Ok(Event::Init | Event::InitApply(_)) | Err(_) => Work::new(),
            })
            .boxed()
    });
    changes.collect()
}

impl Context {
    pub(super) async fn secrets(&self, namespace: &str) -> Result<ClusterSecrets, WriteError> {
        let names = portico_hosting::secrets().into_iter().map(|secret| secret.name);
        let read = |name: String| async move {
            Ok::<_, WriteError>((self.secret(&ObjectKey::new(namespace, &name)).await?, name))
        };
        let found: Vec<_> = stream::iter(names).map(read).buffered(AT_ONCE).try_collect().await?;
        let found = found.into_iter().filter_map(|(seen, name)| Some((name, seen?)));
        let seen: BTreeMap<String, Cached<Secret>> = found.collect();
        let data = seen.iter().map(|(name, seen)| (name.clone(), texts(&seen.value()))).collect();
        Ok(ClusterSecrets { seen, data })
    }

    /// Writes the Secrets that are due. It writes nothing over a Secret of somebody else, and nothing that
    /// depends on a lost one. `used` is whether the cluster may have been up.
    pub(super) async fn reconcile_secrets(
        &self,
        cluster: &Cluster,
        pki: &ClusterPki,
        held: &mut ClusterSecrets,
        used: bool,
    ) -> Result<Reviewed, WriteError> {
        let review = match self.review(pki, held, used) {
            Ok(review) => review,
            // What exists must not end meanwhile.
            Err(impossible) => {
                self.renew(cluster).await?;
                return Err(impossible);
            }
        };
        self.write_due(cluster, review, held).await
    }

    /// Keeps existing certificates alive while their wanted content is not known. A certificate that ends is
    /// issued again with the names that it has. Returns when to look again.
    pub(super) async fn renew(&self, cluster: &Cluster) -> Result<Option<Duration>, WriteError> {
        let Some((mut held, review)) = self.endings(cluster).await? else { return Ok(None) };
        let reviewed = self.write_due(cluster, review, &mut held).await?;
        Ok(self.renewal(&reviewed))
    }

    /// The Secrets of a control plane that exists, and what of them ends soon.
    async fn endings(&self, cluster: &Cluster) -> Result<Option<(ClusterSecrets, Review)>, WriteError> {
        let (name, namespace) = (&cluster.metadata.name, cluster.name().namespace());
        if self.ours_in(StatefulSet::KIND, &namespace).is_empty() {
            return Ok(None);
        }
        let held = self.secrets(&namespace).await?;
        let pki = ClusterPki::as_found(name, &namespace, &held.data, self.settings.keys);
        let review = self.review(&pki, &held, true)?.endings();
        Ok(Some((held, review)))
    }

    /// The first certificate that ends soon, of a control plane of which nothing is to be written; and the
    /// authorities that end.
    pub(super) async fn first_endings(
        &self,
        cluster: &Cluster,
    ) -> Result<(Option<String>, Option<String>), WriteError> {
        let Some((held, review)) = self.endings(cluster).await? else { return Ok((None, None)) };
        // Those of others are not renewed by the end of the pause either.
        let is_ours = |due: &&Due| held.seen.get(due.secret).is_some_and(|current| current.is_ours());
        let first = review.due.iter().find(is_ours);
        let first = first.map(|due| format!("Secret {}: {}", due.secret, due.why));
        Ok((first, review.ending_authorities((self.settings.clock)())))
    }

    /// Copies the credentials of registries from the namespace of the operator. A missing one is left out,
    /// and one that somebody else has put in the namespace of the cluster is left as it is. Pods say which
    /// they lack.
    pub(super) async fn copy_pull_secrets(&self, cluster: &Cluster) -> Result<(), WriteError> {
        for name in &self.settings.plan.pull_secrets {
            let source = self.secret(&ObjectKey::new(&self.settings.namespace, name)).await?;
            let key = ObjectKey::new(&cluster.name().namespace(), name);
            let Some(source) = source else { continue };
            let current = self.secret(&key).await?;
            if current.as_ref().is_some_and(|current| !current.is_ours()) {
                continue;
            }
            must_lead(&self.leads)?;
            let source = source.value();
            let (data, kind) = (&source["data"], &source["type"]);
            let wanted = json!({"metadata": metadata(cluster, name), "data": data, "type": kind});
            if let Applied::Changed(_) = applied(&self.client, &key, &wanted, current.as_ref()).await? {
                self.counters.wrote(KIND);
            }
        }
        Ok(())
    }

    async fn secret(&self, key: &ObjectKey) -> Result<Option<Cached<Secret>>, WriteError> {
        let secrets = api::<Secret>(&self.client, &key.namespace);
        Ok(request(&format!("reading Secret {key}"), secrets.get_opt(&key.name)).await?)
    }

    fn review(&self, pki: &ClusterPki, held: &ClusterSecrets, used: bool) -> Result<Review, WriteError> {
        let review = pki.review(&held.data, used, (self.settings.clock)());
        let review = review.map_err(|why| WriteError::Impossible(format!("certificates: {why}")))?;
        if let Some(end) = review.authorities.values().min() {
            let (cluster, end) = (pki.cluster.clone(), end.as_second());
            self.status.part(CONTROL_PLANES, |planes| planes.authority_ends.insert(cluster, end));
        }
        Ok(review)
    }

    async fn write_due(
        &self,
        cluster: &Cluster,
        mut review: Review,
        held: &mut ClusterSecrets,
    ) -> Result<Reviewed, WriteError> {
        let (mut foreign, mut refused) = (Vec::new(), Ok(()));
        if (!review.due.is_empty() || !review.lost.is_empty())
            && let Some(clock) = far_off(&self.client, self.settings.clock).await
        {
            return Ok(Reviewed { review, foreign, clock: Some(clock) });
        }
        for due in std::mem::take(&mut review.due) {
            let current = held.seen.get(due.secret);
            if current.is_some_and(|current| !current.is_ours()) {
                foreign.push(due.secret);
                continue;
            }
            match self.write(cluster, &due, current).await {
                Ok(()) => {
                    let data = due.data.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
                    held.data.insert(due.secret.to_owned(), data);
                }
                // One that is refused for ever must not let the rest end.
                Err(error) if is_refused(&due, &error) => refused = refused.and(Err(error)),
                Err(error) => return Err(error),
            }
        }
        refused.map(|()| Reviewed { review, foreign, clock: None })
    }

    async fn write(
        &self,
        cluster: &Cluster,
        due: &Due,
        current: Option<&Cached<Secret>>,
    ) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        let key = ObjectKey::new(&cluster.name().namespace(), due.secret);
        let wanted = wanted(cluster, due);
        if due.is_irreplaceable() && current.is_none() {
            // After a conflict the pass begins anew, with what is there.
            made_once::<Secret>(&self.client, &key, &wanted).await?;
            self.counters.wrote(KIND);
        } else if let Applied::Changed(_) = applied(&self.client, &key, &wanted, current).await? {
            self.counters.wrote(KIND);
        }
        // The first ones are what everybody expects.
        if due.why != Why::Missing || current.is_some() || cluster.has_held_data() {
            let text = &*format!("Secret {} is written again: {}", due.secret, due.why);
            let note = Note { severity: Severity::Normal, reason: "SecretRenewed", action: ACTION, text };
            self.events.publish_about(&reference(cluster), part(KIND, &key), note).await;
        }
        Ok(())
    }
}

impl ClusterSecrets {
    /// Their digests for the templates of pods: a change replaces those that read them at their start.
    pub(super) fn digests(&self) -> Digests {
        digests(&self.data)
    }
}

/// Whether the others can be written all the same. A certificate must not be there before its authority.
fn is_refused(due: &Due, error: &WriteError) -> bool {
    error.status().is_some() && !error.is_conflict() && !due.is_irreplaceable()
}

/// A Secret as it is applied.
fn wanted(cluster: &Cluster, due: &Due) -> Value {
    let data: BTreeMap<_, _> =
        due.data.iter().map(|(&key, value)| (key, ByteString(value.clone().into_bytes()))).collect();
    json!({"metadata": metadata(cluster, due.secret), "data": data})
}

fn metadata(cluster: &Cluster, secret: &str) -> Value {
    let name = &cluster.metadata.name;
    let labels = json!({MANAGED_BY.0: MANAGED_BY.1, CLUSTER_LABEL: name, CLUSTER: name});
    json!({"name": secret, "namespace": cluster.name().namespace(), "labels": labels,
        "ownerReferences": [owner(cluster)]})
}

/// What a Secret holds. What is no text fits nothing, and is reported as that.
fn texts(secret: &Value) -> BTreeMap<String, String> {
    let secret: Secret = serde_json::from_value(secret.clone()).unwrap_or_default();
    let data = secret.data.unwrap_or_default().into_iter();
    data.map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect()
}
