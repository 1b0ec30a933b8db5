//! What is wrong with the objects in a book, in one list: for `portico check`, `portico routes`, `/routes`, logs and a metric.
//!
//! What is wrong with an object on its own was found when it was read. What depends on other objects (conflicts, a policy
//! that overrides annotations) is worked out here, when somebody asks: it changes with them.

use std::borrow::Cow;

use portico_api::annotations::{ALLOW, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, PORT_MAPPING};
use portico_api::meta::{Kind, ObjectRef};
use portico_api::problem::{Problem, Severity};

use crate::book::{RouteBook, Slot};
use crate::claims::Claim;
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
            let created = winner.service.as_ref()?.age.created();
            let age = created.map(|time| format!(", created {time}")).unwrap_or_default();
            let message = format!("{key} belongs to the elder Service {}{age}", winner.key);
            (message, format!("{remedy}, or remove the elder Service: this one then has it at once"))
        };
        let object = ObjectRef { kind: Kind::Service, key: slot.key.clone() };
        Some(Problem { severity: Severity::Error, reason, object, field, message, remedy })
    }
}

fn overridden_annotations(slot: &Slot) -> Problem {
    Problem {
        severity: Severity::Warning,
        reason: "overridden-annotation",
        object: ObjectRef { kind: Kind::Service, key: slot.key.clone() },
        field: "metadata.annotations".into(),
        message: format!(
            "{ALLOW}, {MAX_CONNECTIONS} and {MAX_CONNECTIONS_PER_SECOND} do not count here: the namespace belongs to a Cluster"
        ),
        remedy: "set spec.apiServerAllowedIPRanges and the budget annotations on the Cluster, and remove them here".into(),
    }
}
