//! One pass over one cluster: what should exist is applied, in the order in which it depends on each other.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::Patch;
use kube::{Api, ResourceExt};
use portico_api::cluster::Cluster;
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_expose::doors::Doors;
use portico_expose::exposure::{
    CLUSTER_LABEL, Exposure, Found, Reachability, Wanted, exposure, namespace, reachability,
    remembered_node_port, slices_to_gateways,
};
use portico_expose::networks::agent_ip;
use portico_expose::resolve::DecidedBy;
use portico_expose::services::{APISERVER, EXPOSED};
use portico_expose::strategy::{self, AnsweredBy, FRONT};
use portico_expose::validate::usable;
use portico_kube::apply::merging;
use portico_kube::cached::Cached;
use portico_source::served::Served;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::context::Context;
use super::objects::node_ports_of;
use super::{INVALID, NEWER_RECORD};
use crate::clusters::unreadable;
use crate::condition::one_text;
use crate::write::WriteError;

/// Status of a cluster after a pass.
pub(super) enum Outcome {
    /// It is not known yet: something that is under way triggers another pass.
    Waits,
    /// Nothing was written: everything stays as it was.
    Stopped(Reachability),
    /// Everything is as it should be.
    Done(Box<Done>),
}

/// What a pass has come to.
pub(super) struct Done {
    pub(super) reachability: Reachability,
    /// What is recorded.
    pub(super) doors: Doors,
    pub(super) exposure: Exposure,
    pub(super) found: Found,
    /// Whether the pass left nothing out.
    pub(super) whole: bool,
}

/// A pass that ends before its first write.
fn stopped(exposed: bool, reason: &'static str, message: String) -> Outcome {
    Outcome::Stopped(Reachability { exposed, reason, message })
}

impl Context {
    /// Makes everything of `cluster` as it should be, and says how it stands then. One that cannot be read as
    /// it is now is kept as it was read last; if it was never read, as it is.
    pub(super) async fn pass_over(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<Outcome, WriteError> {
        let Some(why) = unreadable(served) else {
            return self.pass(cluster, served.resource_version().as_deref()).await;
        };
        let refused = Reachability { exposed: false, reason: INVALID, message: why };
        if served.object.is_err() {
            return Ok(Outcome::Stopped(refused));
        }
        Ok(match self.pass(cluster, None).await? {
            Outcome::Waits => Outcome::Waits,
            Outcome::Stopped(_) => Outcome::Stopped(refused),
            Outcome::Done(done) => {
                Outcome::Done(Box::new(Done { reachability: refused, whole: false, ..*done }))
            }
        })
    }

    /// `version` is that of the Cluster as it was read; `None` if it is another one by now.
    async fn pass(&self, cluster: &Cluster, version: Option<&str>) -> Result<Outcome, WriteError> {
        let name = &*cluster.metadata.name;
        let seeds = self.installation.seeds.seeds();
        let refused = |message| stopped(false, INVALID, message);
        let configuration = match self.installation.configurations.one() {
            Ok(Some(configuration)) => configuration,
            Ok(None) => {
                // A strategy must not be decided on before the level that decides is there.
                let message =
                    "there is no KubermaticConfiguration; write one, with spec.ingress.domain".to_owned();
                return Ok(stopped(false, "NoConfiguration", message));
            }
            Err(several) => return Ok(refused(several.to_string())),
        };
        let own = cluster.name().namespace();
        let mut found = self.found(cluster);
        let scope = match usable(cluster, &seeds, Some(&configuration)) {
            Ok(scope) => scope,
            Err(problems) => return Ok(refused(one_text(&problems))),
        };
        found.doors = match self.doors(scope, &found) {
            Ok(doors) => doors,
            Err(newer) => return Ok(stopped(true, NEWER_RECORD, newer)),
        };
        let plan = |found: &Found| exposure(scope, found, self.settings.sni_port);
        let mut wanted = match plan(&found) {
            Ok(wanted) => wanted,
            Err(problem) => return Ok(refused(problem.to_string())),
        };
        if let Some(message) =
            self.backoffs().get_mut(name).and_then(|backoffs| backoffs.yielded(Instant::now()))
        {
            // Those that users come by. What else is wanted keeps nobody out.
            let by_balancer = wanted.plan.answered_by == AnsweredBy::LoadBalancer;
            let mut needed = [Some(APISERVER), by_balancer.then_some(FRONT)].into_iter().flatten();
            let missing = needed.find(|name| self.services.get(&own, name).is_none());
            let effect = missing.map(|name| format!(", and Service {name} is not made meanwhile"));
            let effect = effect.unwrap_or_default();
            let message = format!("{message}{effect}; stop that writer, this one waits");
            return Ok(stopped(missing.is_none(), "ForeignWriter", message));
        }
        let name_known = self.resolve(cluster, &wanted, &mut found);
        if let Ok(anew) = plan(&found) {
            wanted = anew;
        }

        if let Some(stopped) = self.namespace_in_the_way(cluster) {
            return Ok(stopped);
        }
        let recorded = found.doors.as_ref().and_then(|doors| doors.agent_ip);
        match self.fill_in(cluster, version, &wanted, recorded).await {
            // The watch is behind, and brings a newer Cluster at once.
            Err(error) if error.is_conflict() => return Ok(Outcome::Waits),
            filled_in => filled_in?,
        }
        self.put(cluster, &self.namespaces, "", &namespace(cluster)).await?;
        let remembered = remembered_node_port(cluster, &wanted, found.doors.as_ref());
        for service in &wanted.services {
            // Its slices are first: `put_service` deletes those of Kubernetes, and the next Service may fail.
            let of_service =
                |slice: &&Wanted| slice.fields["metadata"]["labels"][SERVICE_NAME_LABEL] == service.name;
            for slice in wanted.slices.iter().filter(of_service) {
                self.put(cluster, &self.slices, &own, slice).await?;
            }
            if self.put_service(cluster, &own, service.clone(), remembered).await?
                && let Some(written) = self.services.get(&own, &service.name)
            {
                found.node_ports.extend(node_ports_of(&service.name, &written.value()));
            }
        }
        if !wanted.unallocated.is_empty()
            && let Ok(anew) = plan(&found)
        {
            // What depends on the NodePorts that were just allocated.
            wanted = anew;
            for service in &wanted.services {
                self.put(cluster, &self.services, &own, service).await?;
            }
            for slice in &wanted.slices {
                self.put(cluster, &self.slices, &own, slice).await?;
            }
        }
        self.remove_leftovers(&own, &wanted).await?;
        let recorded = found.doors.clone();
        let recorded = recorded.unwrap_or_else(|| Doors::new(cluster, wanted.decision.strategy));
        let doors = Doors {
            first: wanted.plan.address.clone(),
            second: wanted.second.as_ref().map_or(recorded.second, |second| second.address.clone()),
            ..recorded
        };
        self.write_exposed(cluster, Some(&doors)).await?;
        // Before the first answer of DNS, no condition is written. That answer triggers another pass, and so
        // does the end of `PATIENCE`.
        Ok(if name_known {
            let reachability = reachability(&wanted, &found);
            Outcome::Done(Box::new(Done { reachability, doors, exposure: wanted, found, whole: true }))
        } else {
            Outcome::Waits
        })
    }

    /// Why nothing can be written into the namespace of a cluster, if so.
    fn namespace_in_the_way(&self, cluster: &Cluster) -> Option<Outcome> {
        let (name, own) = (&*cluster.metadata.name, cluster.name().namespace());
        let seen = self.namespaces.get("", &own)?;
        if !belongs_to(&seen, cluster) {
            let writer = seen.other_writer().unwrap_or("somebody else");
            let message = format!(
                "Namespace {own} is not labelled as this cluster's ({writer} wrote it last): nothing is \
                 written into it. Use another name, or, if it is the cluster's own: kubectl label namespace \
                 {own} {CLUSTER_LABEL}={name} --overwrite"
            );
            return Some(stopped(false, "NamespaceTaken", message));
        }
        (seen.value().pointer("/status/phase") == Some(&json!("Terminating"))).then(|| {
            let message = format!("Namespace {own} is being deleted; it is made anew once it is gone");
            stopped(false, "NamespaceTerminating", message)
        })
    }

    /// Looks up the names of the cluster's doors. Returns whether there was an answer about the first.
    fn resolve(&self, cluster: &Cluster, wanted: &Exposure, found: &mut Found) -> bool {
        let cluster_name = &*cluster.metadata.name;
        let hosts = [Some(&wanted.plan), wanted.second.as_ref()].map(|plan| {
            let host = &*plan?.address.external_name;
            (!host.is_empty() && host.parse::<IpAddr>().is_err()).then_some(host)
        });
        let look_up = |host: &str| self.resolver.answer(cluster_name, host, Instant::now());
        let [first, second] = hosts.map(|host| host.map(look_up));
        self.resolver.retain_names(cluster_name, |name| hosts.contains(&Some(name)));
        if let Some(second) = second {
            (found.second_dns_error, found.second_resolved) = (second.error, second.addresses);
            if found.second_resolved.is_empty() {
                let recorded = found.doors.as_ref().and_then(|doors| doors.second.ip);
                found.second_resolved.extend(recorded);
            }
        }
        let Some(answer) = first else { return true };
        let pending = answer.is_pending();
        (found.dns_error, found.known.resolved) = (answer.error, answer.addresses);
        if found.known.resolved.is_empty() {
            // An address that users have is not taken away because DNS is.
            let migrates = found.doors.as_ref().filter(|doors| doors.now.second.is_some());
            let known = migrates.map_or(cluster.status.address.ip, |doors| doors.first.ip);
            found.known.resolved.extend(known);
        }
        if found.known.node_ips.is_empty() {
            found.known.node_ips.clone_from(&found.known.resolved);
        }
        !pending
    }

    /// Writes strategy and agent address into a Cluster that names none, once: a later change of Seed or
    /// installation must not move it.
    async fn fill_in(
        &self,
        cluster: &Cluster,
        version: Option<&str>,
        wanted: &Exposure,
        recorded: Option<IpAddr>,
    ) -> Result<(), WriteError> {
        // The Cluster of now may name one.
        let Some(version) = version else { return Ok(()) };
        let decision = wanted.decision;
        let mut spec = json!({});
        if decision.decided_by != DecidedBy::Cluster {
            spec["exposeStrategy"] = json!(decision.strategy);
        }
        let agent = &cluster.spec.cluster_network.tunneling_agent_ip;
        if strategy::of(decision.strategy).has_agent() && agent.is_unset() {
            // The address recorded for an open door comes first, because agents listen on it.
            let agent = recorded.unwrap_or_else(|| agent_ip(cluster));
            spec["clusterNetwork"] = json!({"tunnelingAgentIP": agent});
        }
        if spec == json!({}) {
            return Ok(());
        }
        // The version keeps a choice that the user makes in this moment.
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": spec});
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let (params, patch) = (merging(), Patch::Merge(&patch));
        let written = clusters.patch(&cluster.metadata.name, &params, &patch);
        let written = self.request("spec.exposeStrategy of the Cluster", written).await?;
        self.wrote_cluster(&written);
        Ok(())
    }

    /// Leads the cluster's own load balancer to the gateway's pods of now. Those of a rollout before are
    /// gone, also where nothing else of the cluster may be changed.
    pub(super) async fn follow_gateways(&self, cluster: &Cluster) -> Result<(), WriteError> {
        let own = cluster.name().namespace();
        let Some(service) = self.services.get(&own, FRONT).filter(|seen| seen.is_ours()) else {
            return Ok(());
        };
        let wanted = slices_to_gateways(cluster, &service.value(), &self.found(cluster));
        for slice in &wanted {
            if self.may_write(cluster, EndpointSlice::KIND, &slice.name) {
                self.put(cluster, &self.slices, &own, slice).await?;
            }
        }
        for seen in self.slices.in_namespace(&own).iter().filter(|seen| seen.is_ours()) {
            let labels = &seen.value()["metadata"]["labels"];
            let is_wanted = wanted.iter().any(|slice| *slice.name == *seen.name_any());
            if labels[SERVICE_NAME_LABEL] == FRONT && !is_wanted {
                self.remove(&self.slices, &own, seen).await?;
            }
        }
        Ok(())
    }

    /// Deletes what a former strategy left.
    async fn remove_leftovers(&self, own: &str, wanted: &Exposure) -> Result<(), WriteError> {
        let services: BTreeSet<&str> = wanted.services.iter().map(|service| &*service.name).collect();
        // Nothing is deleted while a NodePort is unallocated: until then the plan leaves `front-loadbalancer`
        // out.
        let waits = !wanted.unallocated.is_empty();
        for name in EXPOSED.into_iter().chain([FRONT]).filter(|&name| !waits && !services.contains(name)) {
            if let Some(seen) = self.services.get(own, name).filter(|seen| seen.is_ours()) {
                self.remove(&self.services, own, &seen).await?;
            }
        }
        let slices: BTreeSet<&str> = wanted.slices.iter().map(|slice| &*slice.name).collect();
        for seen in self.slices.in_namespace(own) {
            if !waits && !slices.contains(&*seen.name_any()) && seen.is_ours() {
                self.remove(&self.slices, own, &seen).await?;
            }
        }
        Ok(())
    }
}

/// Whether a Namespace was made for this cluster, or is given to it by its label.
pub(crate) fn belongs_to(namespace: &Cached<Namespace>, cluster: &Cluster) -> bool {
    let value = namespace.value();
    let label = value.pointer("/metadata/labels").and_then(|labels| labels.get(CLUSTER_LABEL));
    label.and_then(Value::as_str) == Some(&cluster.metadata.name)
}
