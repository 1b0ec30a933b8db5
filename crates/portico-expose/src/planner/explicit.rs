//! Services that a user wrote: their NodePorts, and which planned Services they replace.

use std::collections::{BTreeMap, HashMap};

use portico_api::annotations::{EXPOSE, ExposeTypes};
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::port_range::PortRange;
use portico_api::problem::{Problem, Severity};
use portico_api::service::{Protocol, Service, ServiceType};

use crate::node_ports::{Exhausted, NodePortAllocator, PortKey, Taken};
use crate::random::Random;
use crate::strategy;

/// The reason of the warning about a NodePort outside the range.
pub(super) const OUTSIDE_RANGE: &str = "node-port-outside-range";

/// The Services that users wrote.
#[derive(Debug, Default)]
pub(super) struct ExplicitServices {
    /// `None` for a Service without NodePorts, which is nearly all of them where clusters use Tunneling.
    services: HashMap<ObjectKey, Option<Box<NodePorts>>>,
    /// Services that did not get a NodePort, as written. They are tried again when one becomes free.
    waiting: BTreeMap<ObjectKey, Service>,
    /// Ports on which the gateway itself listens.
    reserved: Box<[u16]>,
}

/// The NodePorts of one Service.
#[derive(Debug, Default)]
struct NodePorts {
    /// All of them by port name, fixed or allocated.
    by_name: Vec<(Box<str>, u16)>,
    /// The NodePorts that the manifest fixes, each with the index of its port.
    fixed: Vec<(usize, u16)>,
    /// Whether the gateway opens them.
    exposed: bool,
}

impl ExplicitServices {
    /// No Service yet. None of them can have the ports `reserved`.
    pub(super) fn new(reserved: &[u16]) -> Self {
        Self { reserved: reserved.into(), ..Self::default() }
    }

    pub(super) fn contains(&self, key: &ObjectKey) -> bool {
        self.services.contains_key(key)
    }

    /// The NodePort of a port of a Service that a user wrote.
    pub(super) fn node_port(&self, key: &ObjectKey, port_name: &str) -> Option<u16> {
        let ports = self.services.get(key)?.as_ref()?;
        ports.by_name.iter().find(|(name, _)| **name == *port_name).map(|&(_, port)| port)
    }

    /// For each Service that fixes NodePorts, which of them lie outside `range`.
    pub(super) fn outside(&self, range: PortRange) -> Vec<(ObjectRef, Vec<Problem>)> {
        let services = self.services.iter().filter_map(|(key, ports)| {
            let ports = ports.as_ref().filter(|ports| !ports.fixed.is_empty())?;
            let object = ObjectRef { kind: Kind::Service, key: key.clone() };
            let problems = outside(&object, ports, range);
            Some((object, problems))
        });
        services.collect()
    }

    /// Whether one of these Services uses the `port` that is allocated to `key`.
    pub(super) fn holds(&self, key: &PortKey, port: u16) -> bool {
        let mut parts = key.as_str().splitn(3, '/');
        let (Some(namespace), Some(name), Some(port_name)) = (parts.next(), parts.next(), parts.next())
        else {
            return false;
        };
        self.node_port(&ObjectKey::new(namespace, name), port_name) == Some(port)
    }

    /// Adds or replaces a Service, and returns it as it is to be served. Its missing NodePorts are then
    /// allocated, and those of others are left out.
    pub(super) fn set(
        &mut self,
        written: Service,
        allocator: &mut NodePortAllocator,
        range: PortRange,
        random: &mut Random,
    ) -> (Service, Vec<Problem>) {
        let key = written.metadata.key();
        let object = ObjectRef::new(Kind::Service, &written.metadata);
        self.remove(&key, allocator);
        let mut service = written.clone();
        let mut ports = NodePorts { exposed: wants_node_ports(&service), ..NodePorts::default() };
        let mut problems = Vec::new();
        for (index, port) in service.spec.ports.iter_mut().enumerate() {
            let owner = PortKey::new(&key.namespace, &key.name, &port.name);
            match port.node_port {
                Some(number) if ports.exposed && self.reserved.contains(&number) => {
                    port.node_port = None;
                    problems.push(node_port_reserved(&object, index, number));
                }
                Some(number) => match allocator.fix(&owner, number) {
                    Ok(()) => ports.fixed.push((index, number)),
                    Err(taken) => {
                        port.node_port = None;
                        problems.push(node_port_taken(&object, index, &taken));
                    }
                },
                None if ports.exposed && port.protocol == Protocol::TCP => {
                    match allocator.allocate(std::slice::from_ref(&owner), range, random) {
                        Ok(()) => port.node_port = allocator.get(&owner),
                        Err(exhausted) => problems.push(node_ports_exhausted(&object, &exhausted)),
                    }
                }
                None => {}
            }
            ports.by_name.extend(port.node_port.map(|number| (port.name.clone(), number)));
        }
        if !problems.is_empty() {
            self.waiting.insert(key.clone(), written);
        }
        problems.extend(outside(&object, &ports, range));
        // A fixed port is also in `by_name`.
        self.services.insert(key, (!ports.by_name.is_empty()).then(|| Box::new(ports)));
        (service, problems)
    }

    /// Removes a Service and frees the NodePorts it fixed. Those allocated for it stay until they are
    /// released. Returns whether it was there.
    pub(super) fn remove(&mut self, key: &ObjectKey, allocator: &mut NodePortAllocator) -> bool {
        self.waiting.remove(key);
        let Some(ports) = self.services.remove(key) else { return false };
        for (_, port) in ports.iter().flat_map(|ports| &ports.fixed) {
            allocator.unfix(*port);
        }
        true
    }

    /// Frees the NodePorts that were allocated for a Service and that it does not use any more.
    pub(super) fn release_unused(&self, service: &ObjectKey, allocator: &mut NodePortAllocator) {
        let prefix = format!("{service}/");
        let keep = |key: &PortKey, port| !key.as_str().starts_with(&prefix) || self.holds(key, port);
        allocator.retain_in(&service.namespace, keep);
    }

    /// The Services that wait for a NodePort, as written.
    pub(super) fn take_waiting(&mut self) -> BTreeMap<ObjectKey, Service> {
        std::mem::take(&mut self.waiting)
    }
}

/// Whether missing NodePorts of a Service are allocated: only where the gateway would open them.
fn wants_node_ports(service: &Service) -> bool {
    let exposed = service.metadata.annotation(EXPOSE).map(ExposeTypes::parse);
    service.spec.service_type == ServiceType::NodePort
        && matches!(exposed, Some(Ok(types)) if types.node_port)
}

/// The gateway opens any port; a Kubernetes API server would have refused these.
fn outside(object: &ObjectRef, ports: &NodePorts, range: PortRange) -> Vec<Problem> {
    let strays = ports.fixed.iter().filter(|(_, number)| ports.exposed && !range.contains(*number));
    let problem = |&(index, number): &(usize, u16)| Problem {
        severity: Severity::Warning,
        reason: OUTSIDE_RANGE,
        object: object.clone(),
        field: format!("spec.ports[{index}].nodePort"),
        message: format!("{number} lies outside the NodePort range {range}, and is opened all the same"),
        remedy: "choose a number from the range, or widen spec.userCluster.nodePortRange of the \
                 KubermaticConfiguration"
            .into(),
    };
    strays.map(problem).collect()
}

fn node_port_taken(object: &ObjectRef, index: usize, taken: &Taken) -> Problem {
    Problem {
        severity: Severity::Error,
        reason: "node-port-taken",
        object: object.clone(),
        field: format!("spec.ports[{index}].nodePort"),
        message: format!("{} cannot be used: {taken}", taken.port),
        remedy: "choose another number, or leave it out and let one be drawn".into(),
    }
}

fn node_port_reserved(object: &ObjectRef, index: usize, number: u16) -> Problem {
    Problem {
        severity: Severity::Error,
        reason: "node-port-reserved",
        object: object.clone(),
        field: format!("spec.ports[{index}].nodePort"),
        message: format!("{number} cannot be used: the gateway itself listens there"),
        remedy: "choose another number, leave it out and let one be drawn, or give the gateway's listener \
                 another port"
            .into(),
    }
}

/// There are not enough NodePorts left for `object`.
pub(super) fn node_ports_exhausted(object: &ObjectRef, exhausted: &Exhausted) -> Problem {
    let without = strategy::names(|strategy| !strategy.has_node_ports());
    Problem {
        severity: Severity::Error,
        reason: "node-ports-exhausted",
        object: object.clone(),
        field: String::new(),
        message: exhausted.to_string(),
        remedy: format!(
            "widen spec.userCluster.nodePortRange of the KubermaticConfiguration (it must equal the seed's \
             own range), remove clusters, or use the strategy {without}, which needs no NodePorts"
        ),
    }
}
