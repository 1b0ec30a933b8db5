//! Status of the exposure of a cluster: one word for programs, one sentence for people.

use std::net::IpAddr;

use portico_api::annotations::ENDPOINTS;
use portico_api::strategy::ExposeStrategy;

use super::{Exposure, Found, known_by_second, text};
use crate::inputs::Ingress;
use crate::plan::Plan;
use crate::services::APISERVER;
use crate::strategy::AnsweredBy;

/// Status of the exposure of one cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reachability {
    /// Whether clients find it.
    pub exposed: bool,
    /// One word, in CamelCase.
    pub reason: &'static str,
    /// A sentence with the finding and the remedy.
    pub message: String,
}

impl Reachability {
    fn no(reason: &'static str, message: String) -> Self {
        Self { exposed: false, reason, message }
    }
}

/// Status of the first door of a cluster whose objects are as `exposure` wants them.
pub fn reachability(exposure: &Exposure, found: &Found) -> Reachability {
    of_door(&exposure.plan, exposure, found)
}

/// Status of the second door, while it is open.
pub fn reachability_of_second(exposure: &Exposure, found: &Found) -> Option<Reachability> {
    let second = exposure.second.as_ref()?;
    let known = known_by_second(found);
    let found = Found { known, dns_error: found.second_dns_error.clone(), ..found.clone() };
    Some(of_door(second, exposure, &found))
}

fn of_door(plan: &Plan, exposure: &Exposure, found: &Found) -> Reachability {
    let address = &plan.address;
    if let Some((service, port)) = exposure.unallocated.first() {
        let message = format!("Service {service}: port {port} has no NodePort yet");
        return Reachability::no("NodePortPending", message);
    }
    if address.external_name.is_empty() {
        return match plan.answered_by {
            AnsweredBy::LoadBalancer => Reachability::no(
                "LoadBalancerPending",
                "Service front-loadbalancer has no address yet; if this stays, nothing on this seed gives \
                 addresses to Services of type LoadBalancer, or its quota is used up: kubectl describe it"
                    .to_owned(),
            ),
            AnsweredBy::Gateway | AnsweredBy::SeedNodes => Reachability::no(
                "NoName",
                "there is no domain, and so no name for users; set spec.ingress.domain of the \
                 KubermaticConfiguration"
                    .to_owned(),
            ),
        };
    }
    let name = &*address.external_name;
    let expected = expected(plan, found);
    let known = &found.known.resolved;
    if found.dns_error.is_some() || address.ip.is_none() {
        let why = found.dns_error.as_deref().unwrap_or("it was not looked up yet");
        let remedy =
            if expected.is_empty() { String::new() } else { format!("; let it lead to {}", text(&expected)) };
        return Reachability::no("NameNotResolved", format!("{name}: {why}{remedy}"));
    }
    let url = &address.url;
    if let Some(port) = unpublished(plan, found) {
        let message = format!(
            "{url}: the load balancer in front does not publish port {port}; if this stays, its condition \
             portico.k8c.io/Published says why: kubectl get service -o yaml, of the front Service"
        );
        return Reachability::no("PortNotPublished", message);
    }
    if found.no_endpoints {
        // The door is there, and what is behind it is not this controller's.
        let message = format!(
            "{url} leads to Service {APISERVER}, and no API server is ready behind it: start pods with the \
             label app: apiserver, or name where it runs in the annotation {ENDPOINTS}"
        );
        return Reachability { exposed: true, reason: "NoEndpoints", message };
    }
    if !expected.is_empty() && !known.is_empty() && !known.iter().any(|ip| expected.contains(ip)) {
        // No failure: there may be a translation of addresses between users and seed.
        let message = format!(
            "{url}: the name leads to {}, the seed is reached at {}; fine if something there forwards to it",
            text(known),
            text(&expected)
        );
        return Reachability { exposed: true, reason: "NameLeadsElsewhere", message };
    }
    Reachability { exposed: true, reason: "Exposed", message: format!("reached at {url}") }
}

/// The NodePort by which users come through the load balancer in front, if that does not have it.
fn unpublished(plan: &Plan, found: &Found) -> Option<u16> {
    let by_front =
        plan.answered_by == AnsweredBy::Gateway && plan.decision.strategy == ExposeStrategy::NodePort;
    let port = plan.address.port.filter(|_| by_front)?;
    let ports = found.front_ports.as_ref()?;
    (!ports.contains(&port)).then_some(port)
}

/// Where the name of the cluster should lead, as far as that is known.
fn expected(plan: &Plan, found: &Found) -> Vec<IpAddr> {
    let ips = |ingress: &[Ingress]| ingress.iter().filter_map(|ingress| ingress.ip).collect();
    match plan.answered_by {
        AnsweredBy::Gateway => ips(&found.front),
        AnsweredBy::SeedNodes => found.known.node_ips.clone(),
        AnsweredBy::LoadBalancer => ips(&found.known.front),
    }
}
