//! Under whose policy each Service stands: that of its namespace, else its own annotations.

use std::sync::Arc;

use portico_api::meta::ObjectKey;
use portico_api::names::{ClusterName, Tenant};
use portico_api::policy::ClusterPolicy;

use crate::index::{RouteIndex, ServiceEntry};

impl RouteIndex {
    pub(crate) fn set_policy(&mut self, tenant: &Tenant, policy: Option<Arc<ClusterPolicy>>) {
        let namespace = self.names.get(&tenant.namespace());
        if !self.is_in_scope(&namespace) || self.policies.get(&namespace) == policy.as_ref() {
            return;
        }
        let first = ObjectKey { namespace: Arc::clone(&namespace), name: "".into() };
        let in_namespace = self.services.range(first..).take_while(|(key, _)| key.namespace == namespace);
        // Includes Services that are not exposed: the list holds for their endpoints and NodePorts.
        let (keys, entries): (Vec<ObjectKey>, Vec<&ServiceEntry>) =
            in_namespace.map(|(key, entry)| (key.clone(), entry)).unzip();
        let services: Vec<_> = entries.into_iter().filter_map(|entry| entry.service.clone()).collect();
        // Claims depend on the policy: a NodePort number is claimed only where listeners are allowed, and a
        // Cluster comes before others.
        for service in &services {
            self.withdraw_claims(service, false);
        }
        let kept = self.claims.set_policy(&namespace, policy.as_deref());
        match policy {
            Some(policy) => self.policies.insert(Arc::clone(&namespace), policy),
            None => self.policies.remove(&namespace),
        };
        for owners in kept {
            self.mark(owners);
        }
        for service in &services {
            self.add_claims(service);
        }
        self.changed.extend(keys);
        self.problems_version += 1;
    }

    pub(crate) fn require_policies(&mut self) {
        if std::mem::replace(&mut self.policies_required, true) {
            return;
        }
        let lacking = self.services.keys().filter(|key| self.lacks_policy(&key.namespace));
        let lacking: Vec<ObjectKey> = lacking.cloned().collect();
        self.changed.extend(lacking);
        self.problems_version += 1;
    }

    /// Whether `namespace` is that of a cluster that must have a policy and has none.
    pub(crate) fn lacks_policy(&self, namespace: &str) -> bool {
        self.policies_required
            && !self.policies.contains_key(namespace)
            && ClusterName::of_namespace(namespace).is_some()
    }

    /// The policy that holds for the Service `key`, exposed or not.
    pub(crate) fn policy_of(&self, key: &ObjectKey) -> Arc<ClusterPolicy> {
        let namespace = &key.namespace;
        if self.lacks_policy(namespace) {
            return Arc::new(ClusterPolicy::nobody(Tenant::of_namespace(namespace)));
        }
        let facts = || self.services.get(key)?.service.as_ref()?.own_policy();
        match self.policies.get(namespace).or_else(facts) {
            Some(policy) => Arc::clone(policy),
            None => ClusterPolicy::open_for_namespace(namespace),
        }
    }

    /// The tenant of a policy whose source ranges admit fewer than its list does.
    pub fn restricted_by_source(&self) -> Option<&Tenant> {
        let restricts = |policy: &&Arc<ClusterPolicy>| {
            !policy.source_ranges.networks().is_empty() && policy.source_ranges != policy.allow
        };
        let tenants = self.policies.values().filter(restricts).map(|policy| &policy.tenant);
        tenants.min_by_key(|tenant| tenant.namespace())
    }
}
