//! What is wrong with the objects in a book, in one list: for `portico check`, `portico routes`, `/routes`, logs and a metric.
//!
//! What is wrong with an object on its own was found when it was read. What depends on other objects (conflicts, a policy
//! that overrides annotations) is worked out here, when somebody asks: it changes with them.

use std::borrow::Cow;

use portico_api::annotations::{ALLOW, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, PORT_MAPPING};
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::ClusterName;
use portico_api::problem::{Problem, Severity};

use crate::book::{RouteBook, Slot};
use crate::claims::Claim;
use crate::facts::{Age, Origin};
use crate::findings::annotation_field;
use crate::route::RouteKey;

impl RouteBook {
    /// Everything that is wrong now, in no particular order. [`Self::problems_version`] says when to ask again.
    pub fn problems(&self) -> impl Iterator<Item = Cow<'_, Problem>> {
        let services = self.exposed().flat_map(|(_, _, service)| &service.problems);
        let slices = self.slices.iter().flat_map(|(_, slice)| &slice.problems);
        let conflicts = self.claims.waiting().filter_map(|(key, claim)| self.conflict(key, claim));
        let overridden = self.exposed().filter(|(_, slot, service)| {
            service.own_policy.is_some()
                && self.namespaces.get(&slot.key.namespace).is_some_and(|it| it.known)
        });
        let overridden = overridden.map(|(_, slot, _)| overridden_annotations(slot));
        services.chain(slices).map(Cow::Borrowed).chain(conflicts.chain(overridden).map(Cow::Owned))
    }

    fn conflict(&self, key: &RouteKey, claim: Claim) -> Option<Problem> {
        let owner = self.owner(key)?;
        let slot = self.slots.get(claim.slot as usize)?;
        let port = slot.service.as_ref()?.ports.get(usize::from(claim.port))?;
        let winner = self.slots.get(owner.slot as usize)?;
        let winning_port = winner.service.as_ref()?.ports.get(usize::from(owner.port))?;
        let (reason, field, remedy) = match key {
            RouteKey::Host(_) => {
                ("host-conflict", annotation_field(PORT_MAPPING), "choose another host name")
            }
            RouteKey::Port(_) => ("node-port-conflict", "spec.ports".to_owned(), "choose another nodePort"),
            RouteKey::Authority(_) => {
                ("authority-conflict", "spec.ports".to_owned(), "choose another port or name")
            }
        };
        let (message, remedy) = if owner.slot == claim.slot {
            let ports = format!(
                "port {} ({:?}) and port {} ({:?})",
                winning_port.port, winning_port.name, port.port, port.name
            );
            (format!("{key} is claimed by {ports}; the first has it"), remedy.to_owned())
        } else {
            why(key, remedy, winner, slot)?
        };
        let planned = slot.service.as_ref()?.origin == Origin::Planned;
        let (object, field) =
            if planned { (cluster_of(&slot.key), String::new()) } else { (service_ref(slot), field) };
        Some(Problem { severity: Severity::Error, reason, object, field, message, remedy })
    }
}

/// Why `winner` has `key` and `loser` has not, and what can be done about that. Nobody knows a planned Service: its Cluster is
/// named instead.
fn why(key: &RouteKey, remedy: &str, winner: &Slot, loser: &Slot) -> Option<(String, String)> {
    let (winning, losing) = (winner.service.as_ref()?, loser.service.as_ref()?);
    let of_it = match winning.origin {
        Origin::Planned => cluster_of(&winner.key),
        Origin::Written => service_ref(winner),
    };
    let (message, remedy) = match (winning.origin, losing.origin) {
        (Origin::Planned, Origin::Written) => {
            let message =
                format!("{key} belongs to {of_it}: what a Cluster asks for comes before any Service");
            return Some((message, remedy.to_owned()));
        }
        _ => (by_age(key, &of_it, &winning.age, &losing.age), remedy),
    };
    Some((message, format!("{remedy}, or remove {of_it}: this one then has it at once")))
}

/// What decided between two of one origin.
fn by_age(key: &RouteKey, winner: &ObjectRef, winning: &Age, losing: &Age) -> String {
    match (winning.created(), losing.created()) {
        (Some(first), Some(second)) if first == second => {
            format!(
                "{key} belongs to {winner}, created in the same second, {first}, which comes first by uid or name"
            )
        }
        (Some(created), Some(_)) => format!("{key} belongs to the elder {winner}, created {created}"),
        (Some(created), None) => {
            format!(
                "{key} belongs to {winner}, created {created}; without a creationTimestamp this one counts as younger"
            )
        }
        (None, _) => {
            format!("{key} belongs to {winner}, which comes first by name: neither has a creationTimestamp")
        }
    }
}

fn service_ref(slot: &Slot) -> ObjectRef {
    ObjectRef { kind: Kind::Service, key: slot.key.clone() }
}

/// The Cluster that a planned Service is for.
fn cluster_of(service: &ObjectKey) -> ObjectRef {
    let name = ClusterName::of_namespace(&service.namespace);
    ObjectRef { kind: Kind::Cluster, key: ObjectKey::new("", name.as_str()) }
}

fn overridden_annotations(slot: &Slot) -> Problem {
    Problem {
        severity: Severity::Warning,
        reason: "overridden-annotation",
        object: service_ref(slot),
        field: "metadata.annotations".into(),
        message: format!(
            "{ALLOW}, {MAX_CONNECTIONS} and {MAX_CONNECTIONS_PER_SECOND} do not count here: the namespace belongs to a Cluster"
        ),
        remedy: "set spec.apiServerAllowedIPRanges and the budget annotations on the Cluster, and remove them here".into(),
    }
}
