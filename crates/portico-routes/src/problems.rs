//! What is wrong with the objects of an index: for `portico check`, `portico routes`, `/routes`, logs and a
//! metric.
//!
//! What is wrong with an object on its own is found when it is read. What depends on other objects
//! (conflicts, a policy that overrides annotations) changes with them: it is computed here, on demand.

use std::borrow::Cow;

use portico_api::annotations::{ALLOW, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, PORT_MAPPING};
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::ClusterName;
use portico_api::problem::{Problem, Severity};

use crate::claims::Claim;
use crate::facts::{Age, Origin, ServiceFacts};
use crate::findings::annotation_field;
use crate::index::RouteIndex;
use crate::route::RouteKey;

impl RouteIndex {
    /// Everything that is wrong now, in no particular order. [`Self::problems_version`] says when to look
    /// again.
    pub fn problems(&self) -> impl Iterator<Item = Cow<'_, Problem>> {
        let exposed = || self.services.values().filter_map(|entry| entry.service.as_deref());
        let services = exposed().flat_map(|service| &service.problems);
        let slices = self.services.values().flat_map(|entry| &entry.slices);
        let slices = slices.flat_map(|slice| &slice.problems);
        let conflicts = self.claims.waiting().map(|(key, owner, waiting)| conflict(key, owner, waiting));
        let overridden = exposed().filter(|service| {
            service.own_policy.is_some() && self.policies.contains_key(&service.key.namespace)
        });
        let overridden = overridden.map(overridden_annotations);
        let shared = self.shared_endpoints();
        let computed = conflicts.chain(overridden).chain(shared);
        services.chain(slices).map(Cow::Borrowed).chain(computed.map(Cow::Owned))
    }
}

/// The problem of the claim `loser`, which waits for `key` while `winner` owns it.
fn conflict(key: &RouteKey, winner: &Claim, loser: &Claim) -> Problem {
    let (reason, field, remedy) = match key {
        RouteKey::Host(_) => ("host-conflict", annotation_field(PORT_MAPPING), "choose another host name"),
        RouteKey::Port(_) => ("node-port-conflict", "spec.ports".to_owned(), "choose another nodePort"),
        RouteKey::Authority(_) => {
            ("authority-conflict", "spec.ports".to_owned(), "choose another port or name")
        }
    };
    let (message, remedy) = if winner.service.key == loser.service.key {
        let (first, second) = (winner.port(), loser.port());
        let ports =
            format!("port {} ({:?}) and port {} ({:?})", first.port, first.name, second.port, second.name);
        (format!("{key} is claimed by {ports}; the first has it"), remedy.to_owned())
    } else {
        reason_and_remedy(key, remedy, &winner.service, &loser.service)
    };
    let object = named(&loser.service);
    // The field is one of the Service. A planned Service has no manifest with that field.
    let field = if loser.service.origin == Origin::Planned { String::new() } else { field };
    Problem { severity: Severity::Error, reason, object, field, message, remedy }
}

/// Why `winner` owns `key` and `loser` does not, and what can be done about that.
fn reason_and_remedy(
    key: &RouteKey,
    remedy: &str,
    winner: &ServiceFacts,
    loser: &ServiceFacts,
) -> (String, String) {
    let owner = named(winner);
    if winner.origin == loser.origin {
        let message = by_age(key, &owner, &winner.age, &loser.age);
        return (message, format!("{remedy}, or remove {owner}: this one then has it at once"));
    }
    let message = format!("{key} belongs to {owner}: what a Cluster asks for comes before any Service");
    (message, remedy.to_owned())
}

/// What decided between two of one origin.
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

/// The object that a user knows: the Service, or the Cluster that a planned Service is for.
fn named(service: &ServiceFacts) -> ObjectRef {
    let cluster = ClusterName::of_namespace(&service.key.namespace);
    match cluster.filter(|_| service.origin == Origin::Planned) {
        Some(cluster) => ObjectRef { kind: Kind::Cluster, key: ObjectKey::new("", cluster.as_str()) },
        None => ObjectRef { kind: Kind::Service, key: service.key.clone() },
    }
}

fn overridden_annotations(service: &ServiceFacts) -> Problem {
    Problem {
        severity: Severity::Warning,
        reason: "overridden-annotation",
        object: ObjectRef { kind: Kind::Service, key: service.key.clone() },
        field: "metadata.annotations".into(),
        message: format!(
            "{ALLOW}, {MAX_CONNECTIONS} and {MAX_CONNECTIONS_PER_SECOND} do not count here: \
             the namespace belongs to a Cluster"
        ),
        remedy: "set spec.apiServerAllowedIPRanges and the budget annotations on the Cluster, \
                 and remove them here"
            .into(),
    }
}
