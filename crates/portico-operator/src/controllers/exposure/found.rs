//! The facts about one cluster from the seed's objects, for planning.

use jiff::Timestamp;
use portico_api::annotations::EXPOSE;
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::ExposedCluster;
use portico_expose::doors::Doors;
use portico_expose::exposure::{Found, doors_of_services};
use portico_expose::inputs::{Ingress, Scope};
use portico_expose::migration::Now;
use portico_expose::migration::plan::has_two_doors_now;
use portico_expose::services::{APISERVER, EXPOSED};
use portico_expose::strategy::FRONT;
use serde_json::Value;

use super::context::Context;
use super::objects::{addresses_of, node_ports_of, ports_of};
use crate::write::is_terminating;

impl Context {
    /// The known facts about `cluster`, without its name in DNS.
    pub(super) fn found(&self, cluster: &Cluster) -> Found {
        let namespace = cluster.name().namespace();
        let service = |name: &str| self.services.get(&namespace, name).map(|seen| seen.value());
        let gateways = self.gateway_addresses();
        let slices = self.api_servers.in_namespace(&namespace);
        let no_endpoints = slices.iter().all(|slice| addresses_of(&slice.value()).is_empty());
        let mut found = Found { gateways, no_endpoints, ..Found::default() };
        found.known.node_ips.clone_from(&self.settings.node_ips);
        let front = &self.settings.front;
        if let Some(front) = self.services.get(&front.namespace, &front.name) {
            let front = front.value();
            found.front = Ingress::of_service(&front);
            found.front_ports = Some(ports_of(&front));
        }
        for name in EXPOSED {
            let Some(service) = service(name) else { continue };
            found.node_ports.extend(node_ports_of(name, &service));
            if name == APISERVER {
                found.known.apiserver = Ingress::of_service(&service);
            }
        }
        // One that is being deleted is no way in any more, whatever its address leads to for now.
        if let Some(service) = service(FRONT).filter(|service| !is_terminating(service)) {
            found.known.front = Ingress::of_service(&service);
            let ip = service.pointer("/spec/loadBalancerIP").and_then(Value::as_str);
            found.known.front_ip = ip.and_then(|ip| ip.parse().ok());
        }
        found
    }

    /// The doors of a cluster: as they are recorded, or, without a record, as its Services tell. `None` for a
    /// new cluster.
    ///
    /// # Errors
    /// The record is of a newer version: what it asks for is not known here.
    pub(super) fn doors(&self, scope: Scope<'_>, found: &Found) -> Result<Option<Doors>, String> {
        let cluster = scope.cluster;
        let wanted = scope.decision.strategy;
        let recorded = match self.recorded(cluster)? {
            Some(doors) => Some(doors),
            None => self.doors_of_services(scope, found),
        };
        Ok(recorded.map(|doors| {
            let moves = doors.now.second.is_none() && doors.now.first != wanted && cluster.may_migrate();
            // A cluster that can have only one door changes to the new one at once, as with KKP.
            let at_once = moves && !has_two_doors_now(cluster);
            if at_once { doors.moved_to(Now::settled(wanted)) } else { doors }
        }))
    }

    /// The doors of the ExposedCluster. It fails as [`doors`](Self::doors) does.
    pub(super) fn recorded(&self, cluster: &Cluster) -> Result<Option<Doors>, String> {
        let name = &*cluster.metadata.name;
        let Some(seen) = self.exposed.get("", name) else { return Ok(None) };
        let exposed = seen.value();
        // One of a Cluster of the same name before says nothing.
        let owner = exposed.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
        if owner != Some(&cluster.metadata.uid) {
            return Ok(None);
        }
        let migrates = exposed.pointer("/spec/migration").is_some();
        match serde_json::from_value::<ExposedCluster>(exposed) {
            Ok(exposed) => Ok(Some(Doors::of(&exposed.spec))),
            Err(error) if migrates => Err(format!(
                "ExposedCluster {name} records a migration, and this version cannot read it ({error}): \
                 nothing is opened or closed. Run the operator that wrote it, mend the field, or delete the \
                 ExposedCluster: its doors are found again from its Services"
            )),
            // It is written anew.
            Err(_) => Ok(None),
        }
    }

    fn doors_of_services(&self, scope: Scope<'_>, found: &Found) -> Option<Doors> {
        let namespace = scope.cluster.name().namespace();
        let ours = |name: &str| self.services.get(&namespace, name).filter(|seen| seen.is_ours());
        let service = ours(APISERVER).map(|seen| seen.value())?;
        let annotations = service.pointer("/metadata/annotations");
        let expose = annotations.and_then(|annotations| annotations.get(EXPOSE)?.as_str());
        let seen = (expose, ours(FRONT).is_some());
        doors_of_services(scope, seen, found, self.settings.sni_port, Timestamp::now())
    }
}
