//! The trait that every strategy implements. The objects of a cluster follow from it, and so do the steps of
//! a migration. One strategy says what opens, the other what closes.

use std::net::IpAddr;

use portico_api::annotations::ExposeTypes;
use portico_api::cluster::Address;
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_api::policy::AllowList;
use portico_api::seed::Seed;
use portico_api::service::{Service, ServiceType};
use portico_api::strategy::AnsweredBy;

use crate::certificate::SubjectNames;
use crate::findings::Findings;
use crate::inputs::{Inputs, Known, LoadBalancers, Scope};
use crate::services::Exposed;

/// The names of the strategies that have a property, as in `A, B or C`.
pub type Names = fn(fn(&dyn Strategy) -> bool) -> String;

/// The rules of one expose strategy: plain functions over plain values. The objects of a cluster are in its
/// [`Plan`](crate::plan::Plan).
pub trait Strategy: Sync {
    /// The type of the exposed Services.
    fn service_type(&self) -> ServiceType;

    /// Whether clients come by NodePorts of the cluster's own, and not by ports that clusters share.
    fn has_node_ports(&self) -> bool {
        self.service_type() == ServiceType::NodePort
    }

    /// Whether clusters are distinguished by host names, for which the installation needs a domain.
    fn needs_domain(&self) -> bool {
        false
    }

    /// The exposed Services, the API server first, and what each is reached by.
    fn services(&self, inputs: &Inputs<'_>) -> Vec<Exposed>;

    /// The load balancer Service of the cluster itself, if it has one. It admits `ranges`.
    fn load_balancer(&self, _inputs: &Inputs<'_>, _ranges: &AllowList) -> Option<Service> {
        None
    }

    /// Where users and nodes reach the API server. `node_port` is that of its Service.
    fn endpoint(&self, inputs: &Inputs<'_>, node_port: Option<u16>) -> Endpoint;

    /// The prefix of a cluster's external name that leads to its Konnectivity server, and the port. The port
    /// is `None` while it is not known. `node_port` is that of Service `konnectivity-server`.
    fn konnectivity(&self, _address: &Address, node_port: Option<u16>) -> (&'static str, Option<u16>) {
        ("", node_port)
    }

    /// What accepts connections at the address of a cluster of which its ExposedCluster alone is known.
    fn answered_by(&self, exposed: &ExposedClusterSpec) -> AnsweredBy {
        if exposed.node_port_listeners_disabled { AnsweredBy::SeedNodes } else { AnsweredBy::Gateway }
    }

    /// Whether a cluster is exposed like this, as its Services tell. `types` is the annotation of the API
    /// server's Service. `has_front` says whether the cluster has a load balancer of its own.
    fn is_open(&self, types: Option<ExposeTypes>, has_front: bool) -> bool;

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

    /// Checks whether a Cluster can be exposed like this. Remedies name the strategies that would do.
    fn check(&self, scope: &Scope<'_>, names: Names, findings: &mut Findings);

    /// Why no address can be given to users while there is no domain, if so.
    fn no_address(&self, scope: &Scope<'_>, known: &Known) -> Option<NoAddress>;

    /// How it begins, in a migration to it.
    fn opening(&self) -> Opening;

    /// How it ends, in a migration from it to `next`.
    fn closing(&self, next: &dyn Strategy) -> Closing;
}

/// Where users and nodes reach an API server.
#[derive(Debug)]
pub struct Endpoint {
    /// What accepts connections there.
    pub answered_by: AnsweredBy,
    /// Host name, or address in text form.
    pub name: Option<String>,
    /// The address, as far as known.
    pub ip: Option<IpAddr>,
    /// The port, once it is allocated.
    pub port: Option<u16>,
}

/// Why users cannot be given an address.
#[derive(Debug)]
pub struct NoAddress {
    /// Why, as a clause.
    pub why: String,
    /// What to do, besides setting a domain.
    pub remedy: &'static str,
}

/// How a strategy begins beside another one, on the same Services. The words stand in a sentence.
#[derive(Debug)]
pub struct Opening {
    /// What is opened.
    pub does: &'static str,
    /// What shows on the seed that it is open.
    pub proof: &'static str,
}

/// How a strategy ends beside another one. The words stand in a sentence.
#[derive(Debug)]
pub struct Closing {
    /// What is given up.
    pub does: &'static str,
    /// What would be another than now if it were opened again.
    pub again: &'static str,
    /// The objects that KKP's controllers do not remove; `None` if they remove all.
    pub kkp_leaves: Option<&'static str>,
}
