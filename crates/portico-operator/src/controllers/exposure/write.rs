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
use portico_kube::cached::Cached;
use portico_source::served::Served;
use serde_json::json;
use tokio::time::Instant;

use super::context::Context;
use super::objects::node_ports_of;
use super::reports::tell_put_back;
use crate::cache::{Cache, api};
use crate::contention::RepairBackoff;
use crate::managed::{self, Put, delete};
use crate::write::{self, DEFINITION_OUTDATED, NEWER_DEFINITIONS, NOT_DECLARED, WriteError, must_lead, part};

/// Failed passes before a cluster gets another NodePort than the one that its users know: some seconds.
const SAME_NUMBER: u32 = 3;

/// The controllers of Kubernetes that make EndpointSlices: of pods, and of Endpoints.
const KUBERNETES_CONTROLLERS: [&str; 2] =
    ["endpointslice-controller.k8s.io", "endpointslicemirroring-controller.k8s.io"];

/// HTTP status of an object that the API server does not take as it is.
const INVALID: u16 = 422;

/// Whether the NodePort that was asked for by number belongs to another Service now, or to no range.
fn is_node_port_taken(error: &WriteError) -> bool {
    let taken = |message: &str| {
        message.contains("provided port is already allocated")
            || message.contains("provided port is not in the valid range")
    };
    error.status().is_some_and(|status| status.code == INVALID && taken(&status.message))
}

/// No failure, if another replica leads by now: it does it.
pub(super) fn unless_another_leads(error: WriteError) -> Result<(), WriteError> {
    if matches!(error, WriteError::NotLeading) { Ok(()) } else { Err(error) }
}

/// Status of a cluster after this error.
pub(super) fn reachability_after(error: &WriteError) -> Reachability {
    let (message, text) = (error.status().map(|status| status.message.as_str()), error.to_string());
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
        (error.reason(), text)
    };
    Reachability { exposed: false, reason, message }
}

/// What is written of a Service that has a selector and should have none.
const SELECTOR: &str = "selector of Service";

impl Context {
    /// Applies a Service. A Service without a NodePort asks for the `remembered` one, which users know: the
    /// Service was gone, or its door was closed and is opened again.
    pub(super) async fn put_service(
        &self,
        cluster: &Cluster,
        own: &str,
        mut service: Wanted,
        remembered: Option<(&str, u16)>,
    ) -> Result<bool, WriteError> {
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
                if is_node_port_taken(&error) && self.failures(&cluster.metadata.name) >= SAME_NUMBER =>
            {
                self.put(cluster, &self.services, own, &without).await
            }
            other => other,
        }
    }

    /// Removes the selector of another manager from a Service whose EndpointSlices Portico writes. Then
    /// deletes its Endpoints, and the EndpointSlices that Kubernetes made for it. Kubernetes neither updates
    /// nor deletes them any more, and would mirror the Endpoints.
    async fn unselect(&self, cluster: &Cluster, own: &str, name: &str) -> Result<(), WriteError> {
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
                let key = ObjectKey::new(own, name);
                let text = format!("{} {key} {done}", Service::KIND);
                tell_put_back(cluster, part(Service::KIND, &key), &text, &self.events).await;
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

    /// Applies one object. Returns whether that changed it.
    pub(super) async fn put<K: Resource + Send + Sync + 'static>(
        &self,
        cluster: &Cluster,
        cache: &Cache<K>,
        namespace: &str,
        wanted: &Wanted,
    ) -> Result<bool, WriteError> {
        must_lead(&self.leads)?;
        let key = ObjectKey::new(namespace, &wanted.name);
        let put = managed::put(&self.client, cache, &key, &wanted.fields, |record| {
            self.backoff(cluster, (K::KIND, &wanted.name), record)
        });
        let put = put.await?;
        if put == Put::Unchanged {
            return Ok(false);
        }
        self.counters.wrote(K::KIND);
        if let Put::Back(text) = put {
            tell_put_back(cluster, part(K::KIND, &key), &text, &self.events).await;
        }
        Ok(true)
    }

    /// Deletes one object, unless its deletion has begun.
    pub(super) async fn remove<K: Resource + Send + Sync + 'static>(
        &self,
        cache: &Arc<Cache<K>>,
        own: &str,
        seen: &Cached<K>,
    ) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
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
    ) -> Result<T, WriteError> {
        must_lead(&self.leads)?;
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

    /// The Cluster as it was written: no pass works from an older one.
    pub(super) fn wrote_cluster(&self, written: &Served<Cluster>) {
        self.written.wrote(written);
        self.counters.wrote("Cluster");
    }
}
