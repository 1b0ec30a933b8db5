//! Takes every change of an object into the index, and marks the Services concerned.

use std::net::IpAddr;
use std::sync::Arc;

use portico_api::change::{Change, Keyed};
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::meta::ObjectKey;
use portico_api::service::Service;

use crate::annotations;
use crate::endpoints::{self, MAX_ENDPOINTS};
use crate::facts::{Origin, Reach, ServiceFacts, SliceFacts};
use crate::index::{IndexChange, RouteIndex, ServiceEntry};

impl RouteIndex {
    /// Records one change. The routes follow with the next [`Self::commit`].
    pub fn apply(&mut self, change: IndexChange) {
        match change {
            IndexChange::Service(Change::Apply(service)) => self.apply_service(&service, Origin::Written),
            IndexChange::PlannedService(Change::Apply(service)) => {
                self.apply_service(&service, Origin::Planned);
            }
            IndexChange::Service(Change::Delete(key)) => {
                self.set_reach(&key, None, false);
                self.delete_service(&key, true);
            }
            // Nobody deletes a planned Service by mistake: it is not wanted any more.
            IndexChange::PlannedService(Change::Delete(key)) => {
                self.set_reach(&key, None, false);
                self.delete_service(&key, false);
            }
            IndexChange::EndpointSlice(Change::Apply(slice)) => self.apply_slice(&slice),
            IndexChange::EndpointSlice(Change::Delete(key)) => self.delete_slice(&key),
            IndexChange::Policy(Change::Apply(policy)) => self.set_policy(&policy.key(), Some(policy)),
            IndexChange::Policy(Change::Delete(tenant)) => self.set_policy(&tenant, None),
            IndexChange::PoliciesRequired => self.require_policies(),
            IndexChange::ClusterIp(change) => self.apply_cluster_ip(change),
        }
    }

    fn apply_service(&mut self, service: &Service, origin: Origin) {
        let key = service.key();
        if !self.is_in_scope(&key.namespace) {
            return;
        }
        let facts = annotations::read(service, origin, &self.settings.expose_annotations, &mut self.names);
        let reach = Some(service).filter(|_| self.settings.in_kubernetes).and_then(Reach::of);
        self.set_reach(&key, reach, facts.is_none());
        match facts {
            Some(facts) => self.set_service(&key, Some(facts), true),
            None => self.delete_service(&key, false),
        }
    }

    /// `is_front` says whether it may be a Service that leads to the gateway.
    fn set_reach(&mut self, key: &ObjectKey, reach: Option<Box<Reach>>, is_front: bool) {
        if reach.is_some() && is_front {
            self.fronts.insert(key.clone());
        } else {
            self.fronts.remove(key);
        }
        let before = self.services.get(key).and_then(|entry| entry.reach.as_ref());
        if before != reach.as_ref() {
            self.entry(key).reach = reach;
            self.changed.insert(key.clone());
        }
    }

    fn delete_service(&mut self, key: &ObjectKey, keep_names: bool) {
        if self.services.contains_key(key) {
            self.set_service(key, None, keep_names);
        }
    }

    /// `keep_names` says whether the names of a Service that goes are kept for its namespace, since it may be
    /// made anew.
    fn set_service(&mut self, key: &ObjectKey, facts: Option<ServiceFacts>, keep_names: bool) {
        let before = self.entry(key).service.clone();
        if before.as_deref() == facts.as_ref() {
            return;
        }
        let facts = facts.map(Arc::new);
        let concerned = |facts: &Arc<ServiceFacts>| {
            !facts.problems().is_empty()
                || facts.own_policy().is_some()
                || self.lacks_policy(&facts.key.namespace)
        };
        if before.iter().chain(&facts).any(concerned) || self.slices_have_problems(key) {
            self.problems_version += 1;
        }
        if let Some(before) = &before {
            // A change of age says that it was deleted and made anew between two looks.
            self.claimants.remove(&before.key);
            let is_another = facts.as_ref().is_none_or(|facts| facts.age != before.age);
            self.withdraw_claims(before, keep_names && is_another);
        }
        if let Some(facts) = &facts {
            self.claimants.insert(facts.key.clone());
            self.add_claims(facts);
        }
        self.entry(key).service = facts;
        self.changed.insert(key.clone());
    }

    fn apply_slice(&mut self, slice: &EndpointSlice) {
        if !self.is_in_scope(&slice.metadata.namespace) {
            return;
        }
        let namespace = self.names.share(&slice.metadata.namespace);
        let key = ObjectKey { namespace: Arc::clone(&namespace), name: Arc::clone(&slice.metadata.name) };
        let Some(service) = slice.service_name() else { return self.delete_slice(&key) };
        let service = ObjectKey { namespace, name: self.names.get(service) };
        if self.slice_services.get(&key).is_some_and(|before| *before != service.name) {
            self.delete_slice(&key);
        }
        let facts = endpoints::read(slice, &self.settings.endpoints, &mut self.names);
        let slices = &self.entry(&service).slices;
        let position = slices.binary_search_by(|other| other.name.cmp(&facts.name));
        if position.is_ok_and(|position| slices[position] == facts) {
            return;
        }
        let had_problems = self.slices_have_problems(&service);
        let slices = &mut self.entry(&service).slices;
        match position {
            Ok(position) => slices[position] = facts,
            Err(position) => {
                // Nearly every Service has one slice: a vector would make room for four.
                if slices.is_empty() {
                    slices.reserve_exact(1);
                }
                slices.insert(position, facts);
            }
        }
        if position.is_err() {
            self.slice_services.insert(key, Arc::clone(&service.name));
        }
        let have_problems = had_problems || self.slices_have_problems(&service);
        self.problems_version += u64::from(have_problems || self.is_waited_for(&service));
        self.changed.insert(service);
    }

    fn delete_slice(&mut self, key: &ObjectKey) {
        let Some(service) = self.slice_services.remove(key) else { return };
        let service = ObjectKey { namespace: Arc::clone(&key.namespace), name: service };
        let had_problems = self.slices_have_problems(&service);
        let slices = &mut self.entry(&service).slices;
        if let Ok(position) = slices.binary_search_by(|other| other.name.cmp(&key.name)) {
            slices.remove(position);
        }
        self.problems_version += u64::from(had_problems || self.is_waited_for(&service));
        self.changed.insert(service);
    }

    /// Whether another Service waits for a key of this one: then its readiness is part of a problem.
    fn is_waited_for(&self, service: &ObjectKey) -> bool {
        let facts = self.services.get(service).and_then(|entry| entry.service.as_ref());
        facts.is_some_and(|facts| self.claims_of(facts).iter().any(|(key, _)| self.claims.is_contested(key)))
    }

    /// Whether the slices of a Service may be a reason for a problem of their own or of the Service.
    fn slices_have_problems(&self, service: &ObjectKey) -> bool {
        let Some(ServiceEntry { slices, .. }) = self.services.get(service) else { return false };
        // A ClusterIP that has gone since the last commit was a problem until now.
        let is_cluster_ip = |address: &IpAddr| {
            self.cluster_ips.contains(address) || self.changed_cluster_ips.contains(address)
        };
        let has_problem =
            |slice: &SliceFacts| !slice.problems().is_empty() || slice.ready.iter().any(is_cluster_ip);
        slices.iter().any(has_problem) || endpoints::count(slices) > MAX_ENDPOINTS
    }
}
