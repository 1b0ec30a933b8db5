//! The proofs inside a user cluster that a migration between expose strategies waits for
//! ([`portico_expose::migration`]), and whether they hold. Each pass looks anew, in the state that is
//! recorded; nothing is kept.
//!
//! If a proof is unknown, its text says why, and what to do. The text is part of a condition, so it is the
//! same as long as nothing changes. It has no times, and names are in order.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_api::exposed_cluster::{ExposedCluster, MigrationState};
use portico_api::migration::NodeMoves;
use portico_dial::Dialer;
use portico_expose::migration::{Fact, Facts, Now, Proof};
use portico_expose::services::APISERVER;
use portico_expose::user_cluster::{
    ATTEMPT_LABEL, Id, KONNECTIVITY_AGENT, KONNECTIVITY_AGENT_NEXT, Konnectivity, NODE_AGENT, NODE_PROBE,
    POD_LABEL, TURN_LABEL, attempt, of_second_door,
};
use portico_kube::error::describe;
use portico_kube::untrusted_api::{UntrustedApi, UntrustedApiError};
use portico_pki::Kubeconfig;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::context::Context;
use super::nodes::{self, ANSWERS, AT_ONCE, NODES, Nodes, failed, too_slow};
use super::subject::{Kept, Known, Readiness, Subject, foreign, host_of};
use crate::cache::api;
use crate::controllers::exposure::addresses_of;
use crate::observed;
use crate::write::{RequestError, request};
use presented::{NotPresented, presents};
use rollout::Rollout;
use turns::Turns;

mod presented;
mod rollout;
mod turns;

const PODS: &str = "/api/v1/namespaces/kube-system/pods";

/// What kubeadm calls kube-proxy's pods.
const PROXY_LABEL: &str = "k8s-app";

/// The DaemonSet of kube-proxy.
const PROXY: &str = "kube-proxy";

/// The proofs of a state that are looked for here.
fn proofs(state: MigrationState) -> &'static [Proof] {
    match state {
        MigrationState::Opening => &[Proof::Certificate],
        MigrationState::Proving => &[Proof::Answer, Proof::Reach, Proof::Agents, Proof::Konnectivity],
        MigrationState::Moving => &[Proof::Kubeconfigs, Proof::Endpoints, Proof::Rollouts],
        MigrationState::MovingNodes => &[Proof::Nodes],
        MigrationState::Quieting => &[],
        MigrationState::Closing => &[Proof::GoneInside],
    }
}

impl Context {
    /// Tells what is known of a cluster that migrates. What is not does not hold, because of how it `stands`
    /// with the inside.
    pub(super) fn observe(&self, exposed: &ExposedCluster, mut known: Known, stands: &Readiness) {
        let name = &*exposed.metadata.name;
        let Some(migration) = &exposed.spec.migration else { return self.observed.forget(name) };
        let mut facts = Facts::unknown(Now::of(&exposed.spec));
        for &proof in proofs(migration.state) {
            let fact = known.remove(&proof).unwrap_or_else(|| Fact::NotSo(stands.message.clone()));
            facts.proofs.insert(proof, fact);
        }
        facts.proofs.extend(known.remove(&Proof::Present).map(|fact| (Proof::Present, fact)));
        let second_url = migration.second.address.url.clone();
        self.observed.tell(name, observed::Look { facts, second_url });
    }

    /// Looks for the proofs of the state that a cluster is in, after its inside was `kept`.
    pub(super) async fn prove(
        &self,
        subject: &Subject,
        kubeconfig: &Kubeconfig,
        konnectivity: (&Konnectivity, Option<&Konnectivity>),
        kept: &Kept,
        known: &mut Known,
    ) -> Result<(), RequestError> {
        let (Some(state), Some(second)) = (subject.state(), &subject.second) else { return Ok(()) };
        let Some(api) = kept.api.as_ref().filter(|_| !kept.readiness.failed) else { return Ok(()) };
        let api_servers = match state {
            MigrationState::Opening => self.api_servers(&subject.namespace).await?,
            _ => BTreeSet::new(),
        };
        let name_servers = &*self.settings.name_servers;
        let look = Look { subject, second, kubeconfig, api_servers, konnectivity, kept, api, name_servers };
        let limit = self.settings.pass_timeout;
        if timeout(limit, look.proofs(state, known)).await.is_err() {
            let slow = too_slow(&kubeconfig.server, limit);
            for &proof in proofs(state) {
                known.entry(proof).or_insert_with(|| Fact::NotSo(slow.clone()));
            }
        }
        Ok(())
    }

    /// Where the API servers of a cluster listen that are ready: each of them, as gateways see them.
    async fn api_servers(&self, namespace: &str) -> Result<BTreeSet<SocketAddr>, RequestError> {
        let slices = api::<EndpointSlice>(&self.client, namespace);
        let of_service = ListParams::default().labels(&format!("{SERVICE_NAME_LABEL}={APISERVER}"));
        let what = format!("EndpointSlices of Service {namespace}/{APISERVER}");
        let slices = request(&what, slices.list(&of_service)).await?;
        Ok(slices.items.iter().flat_map(|slice| sockets_of(&slice.value())).collect())
    }
}

/// Where the endpoints of a slice that are ready listen, of a Service with one port.
fn sockets_of(slice: &Value) -> Vec<SocketAddr> {
    let port = slice.pointer("/ports/0/port").and_then(Value::as_u64);
    let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else { return Vec::new() };
    let socket = |ip: IpAddr| SocketAddr::new(ip, port);
    addresses_of(slice).into_iter().map(socket).collect()
}

/// A look at one cluster.
struct Look<'a> {
    subject: &'a Subject,
    /// By its second door.
    second: &'a ExposedCluster,
    kubeconfig: &'a Kubeconfig,
    /// Each that is ready, where its certificate is asked for.
    api_servers: BTreeSet<SocketAddr>,
    /// By the first door, and by the second.
    konnectivity: (&'a Konnectivity, Option<&'a Konnectivity>),
    kept: &'a Kept,
    api: &'a UntrustedApi,
    /// The name servers that outsiders ask.
    name_servers: &'a [SocketAddr],
}

impl Look<'_> {
    async fn proofs(&self, state: MigrationState, known: &mut Known) {
        match state {
            MigrationState::Opening => _ = known.insert(Proof::Certificate, self.certificate().await),
            MigrationState::Proving => {
                known.insert(Proof::Answer, self.answer().await);
                let nodes = self.nodes().await;
                let attempt = self.attempt().map(|attempt| (ATTEMPT_LABEL, attempt));
                let reach = self.on_every_node(&nodes, &NODE_PROBE, POD_LABEL, attempt).await;
                known.insert(Proof::Reach, reach);
                let agents = match self.second.spec.tunnel {
                    Some(_) => self.on_every_node(&nodes, &NODE_AGENT, POD_LABEL, None).await,
                    None => Fact::So,
                };
                known.insert(Proof::Agents, agents);
                let next = self.konnectivity.1.unwrap_or(&Konnectivity::Pending);
                known.insert(Proof::Konnectivity, self.agents(&nodes, next, &KONNECTIVITY_AGENT_NEXT).await);
            }
            MigrationState::Moving => {
                known.insert(Proof::Endpoints, self.clean());
                known.insert(Proof::Rollouts, self.rollouts().await);
            }
            MigrationState::MovingNodes => {
                let attempt = self.attempt().unwrap_or_default();
                known.insert(Proof::Nodes, self.moved(&self.nodes().await, attempt).await);
            }
            MigrationState::Quieting => {
                let nodes = self.nodes().await;
                known.extend(Self::present(&nodes));
                self.late(&nodes).await;
            }
            MigrationState::Closing => {
                known.insert(Proof::GoneInside, self.gone().await);
                known.extend(Self::present(&self.nodes().await));
                // Last: nobody waits for a turn any more, so a label that cannot be removed harms nobody.
                self.takes_turns_back().await;
            }
        }
    }

    /// Whether the certificate of each API server holds for the second door. Each is asked for itself: they
    /// get another certificate one after the other. And by its own address: by the second door nobody may be
    /// able to come yet.
    async fn certificate(&self) -> Fact {
        let spec = &self.second.spec;
        let host = host_of(&spec.address.url);
        if host.is_empty() {
            return Fact::NotSo("the address of the second door is not known yet".to_owned());
        }
        if self.api_servers.is_empty() {
            return Fact::NotSo(format!("no API server of it is ready behind Service {APISERVER}"));
        }
        let agents = spec.tunnel.map(|tunnel| tunnel.agent_ip.to_string());
        let names: Vec<String> = [host.to_owned()].into_iter().chain(agents).collect();
        for server in &self.api_servers {
            for name in &names {
                let Err(error) = presents(*server, &self.kubeconfig.authority, name).await else { continue };
                let remedy = match error {
                    NotPresented::Unreachable(_) => "",
                    NotPresented::Other { .. } => {
                        "; where Portico hosts it, that follows by itself, elsewhere issue one with the name"
                    }
                };
                return Fact::NotSo(format!("its API server at {server}: {error}{remedy}"));
            }
        }
        Fact::So
    }

    /// Whether the API server answers by the second door, on the way of strangers.
    async fn answer(&self) -> Fact {
        let server = self.second.spec.address.url.to_string();
        if server.is_empty() {
            return Fact::NotSo("the address of the second door is not known yet".to_owned());
        }
        let why = |error: &dyn std::fmt::Display| {
            Fact::NotSo(format!(
                "at {server}, from the operator's pod: {error}; see load balancer, gateways, and the \
                 firewalls and NetworkPolicies between"
            ))
        };
        let kubeconfig = Kubeconfig { server: server.clone(), ..self.kubeconfig.clone() };
        let dialer = Dialer::direct().with_name_servers(self.name_servers);
        match UntrustedApi::new(&kubeconfig.to_yaml(), dialer).await {
            Ok(stranger) => stranger.version().await.map_or_else(|error| why(&error), |_| Fact::So),
            Err(error) => why(&describe(&error)),
        }
    }

    /// The nodes; `Err` says why there is nothing to tell by them.
    async fn nodes(&self) -> Result<Nodes, Fact> {
        nodes::list(self.api, &self.kubeconfig.server, None).await
    }

    /// Whether each ready node has a ready pod of a DaemonSet as it is now. `label` with its name is on them,
    /// and the one that is `also` asked for.
    async fn on_every_node(
        &self,
        nodes: &Result<Nodes, Fact>,
        id: &Id,
        label: &str,
        also: Option<(&str, String)>,
    ) -> Fact {
        match self.pods_on_nodes(nodes, id, label, also).await {
            Ok((nodes, pods)) => rollout::of_pods(id, label, &pods, nodes),
            Err(fact) => fact,
        }
    }

    /// The pods of the current version of a DaemonSet: node, ready containers and status of each. An error if
    /// the DaemonSet alone tells how far it is, or if the nodes or pods cannot be read.
    async fn pods_on_nodes<'n>(
        &self,
        nodes: &'n Result<Nodes, Fact>,
        id: &Id,
        label: &str,
        also: Option<(&str, String)>,
    ) -> Result<(&'n Nodes, Vec<[String; 3]>), Fact> {
        let nodes = self.to_be_looked_at(nodes, id)?;
        let number = match rollout::of_daemon_set(id, self.workload(id).await?.as_ref(), nodes) {
            Rollout::Known(fact) => return Err(fact),
            Rollout::ByPods(number) => number.to_string(),
        };
        let also = also.as_ref().map(|(key, value)| (*key, &**value));
        let labels = [(label, &*id.name), ("pod-template-generation", &*number)].into_iter().chain(also);
        let labels: Vec<String> = labels.map(|(key, value)| selected(key, value)).collect();
        let url = format!("{PODS}?labelSelector={}", labels.join(","));
        match self.api.rows(&url, ["Node", "Ready", "Status"], AT_ONCE, ANSWERS).await {
            Ok(pods) => Ok((nodes, pods.rows)),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Whether the Konnectivity agents of a Deployment are those of a server, if there is one.
    async fn agents(&self, nodes: &Result<Nodes, Fact>, server: &Konnectivity, id: &Id) -> Fact {
        match server {
            Konnectivity::Off => return Fact::So,
            Konnectivity::Pending => {
                return Fact::NotSo("Service konnectivity-server has no address or NodePort yet".to_owned());
            }
            Konnectivity::At(..) => {}
        }
        let nodes = match self.to_be_looked_at(nodes, id) {
            Ok(nodes) => nodes,
            Err(fact) => return fact,
        };
        match self.workload(id).await {
            Ok(object) => rollout::of_deployment(id, object.as_ref(), nodes),
            Err(fact) => fact,
        }
    }

    /// A workload; one that is not there for a reason is reported with that.
    async fn workload(&self, id: &Id) -> Result<Option<Value>, Fact> {
        match self.api.get(&id.path()).await {
            Ok(None) if !self.kept.readiness.ready => Err(Fact::NotSo(self.kept.readiness.message.clone())),
            found => found.map_err(|error| self.failed(&error)),
        }
    }

    /// The nodes, if the status of the workload `id` depends on them; the fact otherwise.
    fn to_be_looked_at<'n>(&self, nodes: &'n Result<Nodes, Fact>, id: &Id) -> Result<&'n Nodes, Fact> {
        if let Some((id, writer)) = self.kept.others.iter().find(|(other, _)| other == id) {
            return Err(Fact::NotSo(foreign(id, writer)));
        }
        let nodes = nodes.as_ref().map_err(Clone::clone)?;
        nodes.without_looking().map_or(Ok(nodes), Err)
    }

    /// Whether the pass inside left nothing to be done.
    fn clean(&self) -> Fact {
        let readiness = &self.kept.readiness;
        if readiness.ready { Fact::So } else { Fact::NotSo(readiness.message.clone()) }
    }

    /// Whether what reaches the API server by its address has followed to the first door.
    async fn rollouts(&self) -> Fact {
        let nodes = self.nodes().await;
        let agents = self.agents(&nodes, self.konnectivity.0, &KONNECTIVITY_AGENT).await;
        let proxy = self.kept.daemon_sets.iter().find(|id| id.name == PROXY);
        match (agents, proxy) {
            (Fact::So, Some(proxy)) => self.on_every_node(&nodes, proxy, PROXY_LABEL, None).await,
            (agents, _) => agents,
        }
    }

    /// Whether nothing on the nodes uses the second door any more. A node that is away comes back with the
    /// address that its kubelet had. Nodes whose turn it is get a label.
    async fn moved(&self, nodes: &Result<Nodes, Fact>, attempt: String) -> Fact {
        let (spec, by_second) = (&self.subject.exposed.spec, &self.second.spec);
        if by_second.address.url.is_empty() {
            // It never had an address, so nobody came by it.
            return Fact::So;
        }
        let also = Some((ATTEMPT_LABEL, attempt.clone()));
        let (nodes, pods) = match self.pods_on_nodes(nodes, &NODE_PROBE, POD_LABEL, also).await {
            Ok(found) => found,
            Err(fact) => return fact,
        };
        let settings = self.subject.settings();
        if settings.nodes == NodeMoves::ByHand {
            let url = &spec.address.url;
            return turns::by_hand(&pods, nodes, url);
        }
        let turn = selected(TURN_LABEL, &attempt);
        let given = nodes::list(self.api, &self.kubeconfig.server, Some(&turn)).await;
        let given: BTreeSet<String> = match given {
            Ok(given) => given.ready.into_iter().chain(given.away).collect(),
            Err(fact) => return fact,
        };
        let turns = Turns::of(&pods, nodes, &given);
        // An order to close the door does not wait for nodes.
        if settings.close != Some(by_second.expose_strategy) {
            for node in turns.next(usize::from(settings.parallel.get())) {
                let label = json!({"metadata": {"labels": {TURN_LABEL: attempt}}});
                if let Err(error) = self.api.merge(&format!("{NODES}/{node}"), &label).await {
                    return self.failed(&error);
                }
            }
        }
        turns.fact()
    }

    /// Gives turns to nodes that come late, while the old door is open still.
    async fn late(&self, nodes: &Result<Nodes, Fact>) {
        let Ok(Some(object)) = self.api.get(&NODE_PROBE.path()).await else { return };
        let labels = &object["spec"]["template"]["metadata"]["labels"];
        if let Some(attempt) = labels[ATTEMPT_LABEL].as_str() {
            // Nothing waits for them.
            self.moved(nodes, attempt.to_owned()).await;
        }
    }

    /// What is on the pods of this attempt beside their name.
    fn attempt(&self) -> Option<String> {
        self.subject.exposed.spec.migration.as_deref().map(attempt)
    }

    /// Whether all nodes are ready, if that is known. A node that is not may come back with an address that
    /// leads nowhere by then.
    fn present(nodes: &Result<Nodes, Fact>) -> Option<(Proof, Fact)> {
        let away = nodes.as_ref().ok()?.stay_behind();
        Some((Proof::Present, away.map_or(Fact::So, Fact::NotSo)))
    }

    /// Whether nothing is left of what the second door alone needed.
    async fn gone(&self) -> Fact {
        let mut left = Vec::new();
        for id in of_second_door(&self.subject.exposed) {
            match self.api.get(&id.path()).await {
                Ok(None) => {}
                Ok(Some(_)) => left.push(id.to_string()),
                Err(error) => return self.failed(&error),
            }
        }
        if left.is_empty() {
            return Fact::So;
        }
        Fact::NotSo(format!(
            "still inside the cluster: {}; what Portico made goes by itself, what somebody else made is to \
             be deleted",
            left.join(", ")
        ))
    }

    /// Removes the labels of [`Self::moved`] from Nodes, until one cannot be removed.
    async fn takes_turns_back(&self) {
        let turn = TURN_LABEL.replace('/', "%2F");
        let given = nodes::list(self.api, &self.kubeconfig.server, Some(&turn)).await;
        let Ok(given) = given else { return };
        for node in given.ready.union(&given.away).filter(|node| turns::is_name(node)) {
            let none = json!({"metadata": {"labels": {TURN_LABEL: null}}});
            if self.api.merge(&format!("{NODES}/{node}"), &none).await.is_err() {
                return;
            }
        }
    }

    fn failed(&self, error: &UntrustedApiError) -> Fact {
        failed(&self.kubeconfig.server, error)
    }
}

/// A label with its value, as one of those in a query.
fn selected(key: &str, value: &str) -> String {
    format!("{}%3D{value}", key.replace('/', "%2F"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_endpoint_that_is_ready_is_asked_at_the_port_of_its_slice() {
        let endpoints = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false}}, {"addresses": ["2001:db8::1"]}]);
        let slice = |ports: Value| json!({"endpoints": endpoints, "ports": ports});
        let found = sockets_of(&slice(json!([{"name": "secure", "port": 6_443}])));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.1:6443", "[2001:db8::1]:6443"]);
        for none in [json!([]), json!(null), json!([{"name": "secure"}]), json!([{"port": 70_000}])] {
            assert_eq!(sockets_of(&slice(none)), []);
        }
    }
}
