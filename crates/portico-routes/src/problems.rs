//! The problems of the objects of an index: for `portico check`, `portico routes`, `/routes`, logs and a
//! metric.
//!
//! The problems of an object on its own are found when it is read. Problems that depend on other objects
//! (conflicts, a policy that overrides annotations) change with them, and are computed here, on demand.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;

use portico_api::annotations::{
    ALLOW, FAIR_SHARE, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, PORT_MAPPING,
};
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::ClusterName;
use portico_api::problem::{Problem, Severity};

use crate::claims::{Because, Claim, Rank, Waiting};
use crate::endpoints::{self, MAX_ENDPOINTS, MAX_LISTED};
use crate::facts::{Age, Origin, ServiceFacts, SliceFacts};
use crate::findings::{MAX_PER_OBJECT, annotation_field};
use crate::index::RouteIndex;
use crate::route::RouteKey;

impl RouteIndex {
    /// Everything that is wrong now, in no particular order. [`Self::problems_version`] says when to look
    /// again.
    pub fn problems(&self) -> impl Iterator<Item = Cow<'_, Problem>> {
        let exposed = || self.services.values().filter_map(|entry| entry.service.as_deref());
        let services = exposed().flat_map(|service| service.problems());
        let slices = self.services.values().filter(|entry| entry.service.is_some());
        let slices = slices.flat_map(|entry| &entry.slices).flat_map(SliceFacts::problems);
        // A Service of 256 ports may wait for as many names, and a thousand Services for the same.
        let mut reported: HashMap<&ObjectKey, usize> = HashMap::new();
        let waiting = self.claims.waiting().filter(move |waiting| {
            let reported = reported.entry(&waiting.claim.service.key).or_default();
            *reported += 1;
            *reported <= MAX_PER_OBJECT
        });
        let conflicts = waiting.map(|waiting| self.conflict(&waiting));
        let overridden = exposed().filter(|service| {
            service.own_policy().is_some() && self.policies.contains_key(&service.key.namespace)
        });
        let overridden = overridden.map(overridden_annotations);
        let shared = self.shared_endpoints();
        let lacking = exposed().filter(|service| self.lacks_policy(&service.key.namespace)).map(lacks_policy);
        let computed = conflicts.chain(overridden).chain(shared).chain(lacking);
        let computed = computed.chain(self.cluster_ip_endpoints()).chain(self.too_many_endpoints());
        services.chain(slices).map(Cow::Borrowed).chain(computed.map(Cow::Owned))
    }
}

impl RouteIndex {
    /// The problem of a claim that waits.
    fn conflict(&self, Waiting { key, claim, because }: &Waiting<'_>) -> Problem {
        let loser = &*claim.service;
        let (reason, field, remedy) = match key {
            RouteKey::Host(_) => {
                ("host-conflict", annotation_field(PORT_MAPPING), "choose another host name")
            }
            RouteKey::Port(_) => ("node-port-conflict", "spec.ports".to_owned(), "choose another nodePort"),
            RouteKey::Authority(_) => {
                ("authority-conflict", "spec.ports".to_owned(), "choose another port or name")
            }
        };
        let object = named(loser);
        let (message, remedy) = match because {
            Because::Owned(winner) | Because::Held(winner) | Because::Returned(winner)
                if winner.service.key == loser.key =>
            {
                (same_service(key, winner, claim), remedy.to_owned())
            }
            Because::Held(winner) if winner.rank == claim.rank => held(key, remedy, winner),
            Because::Owned(winner) | Because::Held(winner) => reason_and_remedy(key, remedy, winner, claim),
            Because::Returned(winner) => (
                format!("{key} belongs to {}, whose namespace had it before", named(&winner.service)),
                remedy.to_owned(),
            ),
            Because::Kept(namespace) => (
                format!("{key} is kept for the namespace {namespace}, whose Service may be made anew"),
                format!(
                    "{remedy}; or, if that namespace is not to have it again, remove {object} and add it anew"
                ),
            ),
        };
        let message = match because {
            Because::Owned(winner) | Because::Held(winner) | Because::Returned(winner)
                if self.only_loser_is_ready(winner, claim) =>
            {
                format!(
                    "{message}, though it has no ready endpoint and this one has: KKP would serve this one"
                )
            }
            _ => message,
        };
        // The field is one of the Service. A planned Service has no manifest with that field.
        let field = if loser.origin == Origin::Planned { String::new() } else { field };
        Problem { severity: Severity::Error, reason, object, field, message, remedy }
    }

    /// Every EndpointSlice of an exposed Service with a ClusterIP among its endpoints.
    fn cluster_ip_endpoints(&self) -> impl Iterator<Item = Problem> {
        let exposed = self.services.iter().filter(|(_, entry)| entry.service.is_some());
        let slices = exposed.flat_map(|(key, entry)| entry.slices.iter().map(move |slice| (key, slice)));
        slices.filter_map(|(key, slice)| {
            let address = slice.ready.iter().find(|address| self.cluster_ips.contains(*address))?;
            Some(cluster_ip_endpoint(&key.namespace, &slice.name, *address))
        })
    }

    /// Every Service with more endpoints than are used, or than its allow list follows.
    fn too_many_endpoints(&self) -> impl Iterator<Item = Problem> {
        self.services.iter().filter_map(|(key, entry)| {
            let mut ports = entry.service.iter().flat_map(|service| &service.ports);
            if ports.any(|port| endpoints::are_too_many(&entry.slices, &port.name)) {
                let message =
                    format!("a port has more ready endpoints than {MAX_ENDPOINTS}; only the first are used");
                return Some(too_many_endpoints(key, message));
            }
            let is_cut = endpoints::count(&entry.slices) > MAX_LISTED && self.targets.has(key);
            is_cut.then(|| {
                let message = format!(
                    "it has more than {MAX_LISTED} endpoints; only to the first of them the allow list \
                     holds for other tenants too"
                );
                too_many_endpoints(key, message)
            })
        })
    }

    fn only_loser_is_ready(&self, winner: &Claim, loser: &Claim) -> bool {
        let is_ready = |claim: &Claim| {
            let entry = self.services.get(&claim.service.key);
            entry.is_some_and(|entry| !self.ready(&entry.slices, &claim.port().name).is_empty())
        };
        !is_ready(winner) && is_ready(loser)
    }
}

/// The message about two ports of one Service that claim the same key.
fn same_service(key: &RouteKey, winner: &Claim, loser: &Claim) -> String {
    let (first, second) = (winner.port(), loser.port());
    let ports =
        format!("port {} ({:?}) and port {} ({:?})", first.port, first.name, second.port, second.name);
    format!("{key} is claimed by {ports}; the first has it")
}

/// Why `winner` owns `key` and `loser` does not, and what can be done about that.
fn reason_and_remedy(key: &RouteKey, remedy: &str, winner: &Claim, loser: &Claim) -> (String, String) {
    let owner = named(&winner.service);
    let message = match winner.rank {
        rank if rank == loser.rank => {
            let message = by_age(key, &owner, &winner.service.age, &loser.service.age);
            return (message, format!("{remedy}, or remove {owner}"));
        }
        Rank::Planned => {
            format!("{key} belongs to {owner}: what a Cluster asks for comes before any Service")
        }
        Rank::Named { .. } if matches!(loser.rank, Rank::Named { .. }) => format!(
            "{key} belongs to {owner}: of the Clusters that it follows from, that of that namespace has the \
             longest host name"
        ),
        Rank::Named { .. } => {
            format!("{key} belongs to {owner}: it follows from the Cluster of that namespace")
        }
        _ => format!("{key} belongs to {owner}: the namespace of a Cluster comes before any other"),
    };
    (message, remedy.to_owned())
}

/// Why `holder` has `key`, though another is older or comes first by name.
fn held(key: &RouteKey, remedy: &str, holder: &Claim) -> (String, String) {
    let owner = named(&holder.service);
    let message = format!(
        "{key} belongs to {owner}, which had it before; age or name would decide otherwise, and will when \
         the gateway starts again"
    );
    (message, format!("{remedy}, or remove {owner}"))
}

/// What decided between two of one rank.
fn by_age(key: &RouteKey, owner: &ObjectRef, winner: &Age, loser: &Age) -> String {
    match (winner.created(), loser.created()) {
        (Some(first), Some(second)) if first == second => format!(
            "{key} belongs to {owner}, created in the same second, {first}, which comes first by uid or name"
        ),
        (Some(created), Some(_)) => format!("{key} belongs to the elder {owner}, created {created}"),
        (Some(created), None) => format!(
            "{key} belongs to {owner}, created {created}; \
             without a creationTimestamp this one counts as younger"
        ),
        (None, _) => {
            format!("{key} belongs to {owner}, which comes first by name: neither has a creationTimestamp")
        }
    }
}

/// The object that a user knows: the Service itself, or the Cluster of a planned Service.
fn named(service: &ServiceFacts) -> ObjectRef {
    let cluster = ClusterName::of_namespace(&service.key.namespace);
    match cluster.filter(|_| service.origin == Origin::Planned) {
        Some(cluster) => ObjectRef { kind: Kind::Cluster, key: ObjectKey::new("", cluster.as_str()) },
        None => ObjectRef { kind: Kind::Service, key: service.key.clone() },
    }
}

fn cluster_ip_endpoint(namespace: &str, slice: &str, address: IpAddr) -> Problem {
    Problem {
        severity: Severity::Error,
        reason: "endpoint-refused",
        object: ObjectRef { kind: Kind::EndpointSlice, key: ObjectKey::new(namespace, slice) },
        field: "endpoints".into(),
        message: format!(
            "{address} is the ClusterIP of a Service, behind which nobody knows whose allow list holds; no \
             connection goes there"
        ),
        remedy: "write the addresses of the pods, or remove the endpoint".into(),
    }
}

fn too_many_endpoints(service: &ObjectKey, message: String) -> Problem {
    Problem {
        severity: Severity::Error,
        reason: "too-many-endpoints",
        object: ObjectRef { kind: Kind::Service, key: service.clone() },
        field: String::new(),
        message,
        remedy: "a control plane has a few: look at the EndpointSlices with this Service's label".into(),
    }
}

fn lacks_policy(service: &ServiceFacts) -> Problem {
    let namespace = &service.key.namespace;
    let name = ClusterName::of_namespace(namespace).map(|name| name.to_string()).unwrap_or_default();
    Problem {
        severity: Severity::Error,
        reason: "unknown-cluster",
        object: ObjectRef { kind: Kind::Service, key: service.key.clone() },
        field: "metadata.namespace".into(),
        message: format!("what the cluster {name:?} allows is not known, so nobody is admitted"),
        remedy: format!(
            "see whether the Cluster {name} exists and portico front runs and writes its ExposedCluster; \
             where there are no Clusters, start the gateway with --clusters-from services"
        ),
    }
}

fn overridden_annotations(service: &ServiceFacts) -> Problem {
    Problem {
        severity: Severity::Warning,
        reason: "overridden-annotation",
        object: ObjectRef { kind: Kind::Service, key: service.key.clone() },
        field: "metadata.annotations".into(),
        message: format!(
            "{ALLOW}, {MAX_CONNECTIONS}, {MAX_CONNECTIONS_PER_SECOND} and {FAIR_SHARE} do not count here: \
             the namespace belongs to a Cluster"
        ),
        remedy: "set spec.apiServerAllowedIPRanges and the budget annotations on the Cluster, \
                 and remove them here"
            .into(),
    }
}
