//! The trait that every strategy implements. Planner, plan, policy and validation use it.

use std::net::IpAddr;

use portico_api::cluster::Address;
use portico_api::policy::AllowList;
use portico_api::seed::Seed;
use portico_api::service::{Service, ServiceType};
use portico_api::strategy::AnsweredBy;

use crate::certificate::SubjectNames;
use crate::findings::Findings;
use crate::inputs::{Inputs, Known, LoadBalancers, Scope};
use crate::services::Exposed;

/// The rules of one expose strategy: plain functions over plain values.
pub(crate) trait Strategy: Sync {
    /// The type of the exposed Services.
    fn service_type(&self) -> ServiceType;

    /// The exposed Services, the API server first, and what each is reached by.
    fn services(&self, inputs: &Inputs<'_>) -> Vec<Exposed>;

    /// The load balancer Service of the cluster itself, if it has one. It admits `ranges`.
    fn load_balancer(&self, _inputs: &Inputs<'_>, _ranges: &AllowList) -> Option<Service> {
        None
    }

    /// Where users and nodes reach the API server. `node_port` is that of its Service.
    fn endpoint(&self, inputs: &Inputs<'_>, node_port: Option<u16>) -> Endpoint;

    /// Whether an agent on each worker node leads pods to the API server.
    fn has_agent(&self) -> bool {
        false
    }

    /// Names on the API server's serving certificate.
    fn certificate(&self, inputs: &Inputs<'_>, address: &Address) -> SubjectNames {
        let mut names = SubjectNames::common(inputs, address);
        names.add_ip(address.ip);
        names
    }

    /// Whether each cluster has a load balancer of its own.
    fn has_load_balancer(&self) -> bool {
        false
    }

    /// Whether a proxy opens the NodePorts of the cluster.
    fn opens_node_ports(&self, seed: &Seed, _load_balancers: LoadBalancers) -> bool {
        !seed.spec.nodeport_proxy.disable
    }

    /// Checks whether a Cluster can be exposed like this.
    fn check(&self, scope: &Scope<'_>, findings: &mut Findings);

    /// Why no address can be given to users while there is no domain, if so.
    fn no_address(&self, scope: &Scope<'_>, known: &Known) -> Option<NoAddress>;
}

/// Where users and nodes reach an API server.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) answered_by: AnsweredBy,
    /// Host name, or address in text form.
    pub(crate) name: Option<String>,
    pub(crate) ip: Option<IpAddr>,
    pub(crate) port: Option<u16>,
}

/// Why users cannot be given an address.
#[derive(Debug)]
pub(crate) struct NoAddress {
    pub(crate) why: String,
    /// What to do, besides setting a domain.
    pub(crate) remedy: &'static str,
}
