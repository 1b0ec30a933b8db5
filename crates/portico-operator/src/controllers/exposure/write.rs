//! Single writes of the exposure controller: each is applied once it is needed, by the leader alone, within
//! its time limit, and counted. An object that another client changes back each time is left to it.

use std::sync::Arc;

use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, Patch};
use kube::{Api, ResourceExt};
use portico_api::cluster::Cluster;
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_api::meta::ObjectKey;
use portico_api::names::ClusterName;
use portico_expose::exposure::{Reachability, SLICE_MANAGED_BY, Wanted};
use portico_kube::apply::merging;
use portico_kube::apply::{Applied, ApplyError, apply};
use portico_kube::cached::Cached;
use portico_kube::error::describe;
use portico_source::served::Served;
use serde_json::json;
use thiserror::Error;
use tokio::time::{Instant, timeout};

use super::context::Context;
use super::objects::node_ports_of;
use super::reports::tell_put_back;
use crate::cache::{Cache, api};
use crate::contention::RepairBackoff;
use crate::managed::delete;
use crate::write::{
    self, DEFINITION_OUTDATED, NEWER_DEFINITIONS, NOT_DECLARED, REQUEST_TIMEOUT, RequestError, WRITE_REFUSED,
    status,
};

/// Failed passes before a cluster gets another NodePort than the one that its users know: some seconds.
const SAME_NUMBER: u32 = 3;

/// The controllers of Kubernetes that make EndpointSlices: of pods, and of Endpoints.
const KUBERNETES_CONTROLLERS: [&str; 2] =
    ["endpointslice-controller.k8s.io", "endpointslicemirroring-controller.k8s.io"];

/// HTTP status of a write to a version that is not the present one.
const CONFLICT: u16 = 409;

/// HTTP status of an object that the API server does not take as it is.
const INVALID: u16 = 422;

/// Why a pass did not end. Retried with back-off.
#[derive(Debug, Error)]
pub(super) enum PassError {
    #[error("{}", describe(.0))]
    Apply(#[from] ApplyError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("another replica leads by now")]
    NotLeading,
}

impl PassError {
    fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Self::Apply(error) => status(&error.source),
            Self::Request(error) => error.status(),
            Self::NotLeading => None,
        }
    }

    /// Somebody, perhaps this process, has written the object since it was read.
    pub(super) fn is_conflict(&self) -> bool {
        self.status().is_some_and(|status| status.code == CONFLICT)
    }

    /// A NodePort that was asked for by number belongs to another Service now, or to no range.
    fn is_node_port_taken(&self) -> bool {
        let taken = |message: &str| {
            message.contains("provided port is already allocated")
                || message.contains("provided port is not in the valid range")
        };
        self.status().is_some_and(|status| status.code == INVALID && taken(&status.message))
    }

    /// No failure, if the new leader does it.
    pub(super) fn unless_another_leads(self) -> Result<(), Self> {
        if matches!(self, Self::NotLeading) { Ok(()) } else { Err(self) }
    }

    /// Status of a cluster after this error.
    pub(super) fn reachability(&self) -> Reachability {
        let (message, text) = (self.status().map(|status| status.message.as_str()), self.to_string());
        let says = |part: &str| message.is_some_and(|message| message.contains(part));
        let (reason, message) = if says("range is full") || says("failed to allocate a nodePort") {
            let remedy = "delete Services that hold NodePorts, widen --service-node-port-range of the seed's \
                          API server, or move clusters to Tunneling, which needs none";
            ("NodePortsExhausted", format!("{text}; {remedy}"))
        } else if says("because it is being terminated") {
            ("NamespaceTerminating", format!("{text}; it is made anew once it is gone"))
        } else if says(NOT_DECLARED) {
            (DEFINITION_OUTDATED, format!("{text}; {NEWER_DEFINITIONS}"))
        } else {
            (if let Self::Request(error) = self { error.reason() } else { WRITE_REFUSED }, text)
        };
        Reachability { exposed: false, reason, message }
    }
}

/// What is written of a Service that has a selector and should have none.
const SELECTOR: &str = "selector of Service";

impl Context {
    /// Applies a Service. One that has no NodePort asks for that which users know, `remembered`: it is gone,
    /// or its door was closed and is opened again.
    pub(super) async fn put_service(
        &self,
        cluster: &Cluster,
        own: &str,
        mut service: Wanted,
        remembered: Option<(&str, u16)>,
    ) -> Result<Option<Cached<Service>>, PassError> {
        if service.fields.pointer("/spec/selector").is_none() {
            self.unselect(cluster, own, &service.name).await?;
        }
        let Some((_, number)) = remembered.filter(|(name, _)| *name == service.name) else {
            return self.put(cluster, &self.services, own, &service).await;
        };
        let found = self.services.get(own, &service.name);
        if found.is_some_and(|seen| !node_ports_of(&service.name, &seen.value()).is_empty()) {
            return self.put(cluster, &self.services, own, &service).await;
        }
        let without = service.clone();
        service.fields["spec"]["ports"][0]["nodePort"] = number.into();
        match self.put(cluster, &self.services, own, &service).await {
            // The watch may be ahead of the API server's release of the number that the Service had.
            Err(error)
                if error.is_node_port_taken() && self.failures(&cluster.metadata.name) >= SAME_NUMBER =>
            {
                self.put(cluster, &self.services, own, &without).await
            }
            other => other,
        }
    }

    /// Removes the selector of another manager from a Service whose EndpointSlices Portico writes. Then
    /// deletes its Endpoints, and the EndpointSlices that Kubernetes made for it. Kubernetes neither updates
    /// nor deletes them any more, and would mirror the Endpoints.
    async fn unselect(&self, cluster: &Cluster, own: &str, name: &str) -> Result<(), PassError> {
        let Some(current) = self.services.get(own, name) else { return Ok(()) };
        if current.value().pointer("/spec/selector").is_some() {
            if !self.may_write(cluster, SELECTOR, name) {
                return Ok(());
            }
            let wanted = json!({"spec": {"selector": null}});
            let services = api::<Service>(&self.client, own);
            let what = format!("{SELECTOR} {own}/{name}");
            let (params, patch) = (merging(), Patch::Merge(&wanted));
            let written = self.request(&what, services.patch(name, &params, &patch)).await?;
            let back = self.backoff(cluster, (SELECTOR, name), |backoff| {
                backoff.applied(&wanted, Some(&*current), true, Instant::now())
            });
            self.services.written(written);
            self.counters.wrote("Service");
            if let Some(done) = back {
                tell_put_back(cluster, (Service::KIND, &ObjectKey::new(own, name)), &done, &self.events)
                    .await;
            }
        }
        let endpoints = Api::<Endpoints>::namespaced(self.client.clone(), own);
        let what = format!("Endpoints {own}/{name}");
        if self.request(&what, endpoints.get_metadata_opt(name)).await?.is_some() {
            self.request(&what, endpoints.delete(name, &DeleteParams::default())).await?;
            self.counters.wrote("Endpoints");
        }
        let slices = Api::<EndpointSlice>::namespaced(self.client.clone(), own);
        let of_service = ListParams::default().labels(&format!("{SERVICE_NAME_LABEL}={name}"));
        let what = format!("EndpointSlices of Service {own}/{name}");
        for slice in self.request(&what, slices.list_metadata(&of_service)).await? {
            let by = slice.labels().get(SLICE_MANAGED_BY).map(String::as_str).unwrap_or_default();
            if KUBERNETES_CONTROLLERS.contains(&by) {
                self.request(&what, slices.delete(&slice.name_any(), &DeleteParams::default())).await?;
                self.counters.wrote("EndpointSlice");
            }
        }
        Ok(())
    }

    /// Applies one object. Returns it if it was written.
    pub(super) async fn put<K: Resource + Send + Sync + 'static>(
        &self,
        cluster: &Cluster,
        cache: &Arc<Cache<K>>,
        namespace: &str,
        wanted: &Wanted,
    ) -> Result<Option<Cached<K>>, PassError> {
        self.lead()?;
        let current = cache.get(namespace, &wanted.name);
        let api = api::<K>(&self.client, namespace);
        let applied = apply(&api, &wanted.fields, current.as_deref());
        let applied = match timeout(REQUEST_TIMEOUT, applied).await {
            Ok(applied) => applied?,
            Err(_) => {
                let what = format!("applying {} {}", K::KIND, wanted.name);
                return Err(RequestError::NoAnswer(what).into());
            }
        };
        let changed = match applied {
            Applied::Unchanged => None,
            Applied::Changed(object) => Some(object),
        };
        let back = self.backoff(cluster, (K::KIND, &wanted.name), |backoff| {
            backoff.applied(&wanted.fields, current.as_deref(), changed.is_some(), Instant::now())
        });
        if let Some(object) = &changed {
            cache.written(object.clone());
            self.counters.wrote(K::KIND);
        }
        if let Some(done) = back {
            tell_put_back(cluster, (K::KIND, &ObjectKey::new(namespace, &wanted.name)), &done, &self.events)
                .await;
        }
        Ok(changed)
    }

    /// Deletes one object, unless its deletion has begun.
    pub(super) async fn remove<K: Resource + Send + Sync + 'static>(
        &self,
        cache: &Arc<Cache<K>>,
        own: &str,
        seen: &Cached<K>,
    ) -> Result<(), PassError> {
        self.lead()?;
        let key = ObjectKey::new(own, &seen.name_any());
        if delete(&self.client, cache, &key, &seen.value()).await? {
            self.counters.wrote(K::KIND);
        }
        if let Some(cluster) = ClusterName::of_namespace(own)
            && let Some(backoffs) = self.backoffs().get_mut(cluster.as_str())
        {
            backoffs.of(K::KIND, &key.name).deleted();
        }
        Ok(())
    }

    pub(super) async fn request<T>(
        &self,
        what: &str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, PassError> {
        self.lead()?;
        Ok(write::request(what, request).await?)
    }

    pub(super) fn may_write(&self, cluster: &Cluster, kind: &'static str, name: &str) -> bool {
        let mut backoffs = self.backoffs();
        let backoffs = backoffs.get_mut(&*cluster.metadata.name);
        backoffs.is_none_or(|backoffs| backoffs.may_write(kind, name, Instant::now()))
    }

    /// Records what became of an object of a cluster.
    fn backoff<T>(
        &self,
        cluster: &Cluster,
        (kind, name): (&'static str, &str),
        record: impl FnOnce(&mut RepairBackoff) -> T,
    ) -> T {
        let mut backoffs = self.backoffs();
        let backoffs = backoffs.entry(cluster.metadata.name.to_string()).or_default();
        record(backoffs.of(kind, name))
    }

    /// Ends a pass that another replica does by now.
    pub(super) fn lead(&self) -> Result<(), PassError> {
        if self.leads.borrow().now() { Ok(()) } else { Err(PassError::NotLeading) }
    }

    /// The Cluster as it was written: no pass works from an older one.
    pub(super) fn wrote_cluster(&self, written: &Served<Cluster>) {
        self.written.wrote(written);
        self.counters.wrote("Cluster");
    }
}
