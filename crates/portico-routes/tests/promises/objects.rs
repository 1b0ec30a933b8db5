//! A small language for objects, so that tests read like the story they check.

use std::sync::Arc;

use portico_api::annotations::{EXPOSE, PORT_MAPPING};
use portico_api::change::Change;
use portico_api::endpoint_slice::{
    Endpoint, EndpointConditions, EndpointPort, EndpointSlice, SERVICE_NAME_LABEL,
};
use portico_api::meta::{ObjectKey, ObjectMeta};
use portico_api::names::{Authority, HostName, Tenant};
use portico_api::policy::{ClusterFacts, ClusterPolicy};
use portico_api::service::{Service, ServicePort, ServiceSpec, ServiceType};
use portico_routes::index::IndexChange;
use portico_routes::route::RouteKey;

/// `namespace/name`.
pub(crate) fn key(text: &str) -> ObjectKey {
    let (namespace, name) = text.split_once('/').expect("a key is written namespace/name");
    ObjectKey::new(namespace, name)
}

fn meta(text: &str) -> ObjectMeta {
    let ObjectKey { namespace, name } = key(text);
    ObjectMeta { name: (&*name).into(), namespace: (&*namespace).into(), ..ObjectMeta::default() }
}

/// A Service with one port, `secure` 443, exposed as `expose` says.
pub(crate) fn service(name: &str, expose: &str) -> Service {
    let secure = ServicePort { name: "secure".into(), port: 443, ..ServicePort::default() };
    let spec = ServiceSpec { ports: vec![secure], ..ServiceSpec::default() };
    Service { metadata: meta(name), spec }.annotated(EXPOSE, expose)
}

pub(crate) trait ServiceWords: Sized {
    fn annotated(self, key: &str, value: &str) -> Self;
    fn mapping(self, json: &str) -> Self;
    fn created(self, second: i64) -> Self;
    fn uid(self, uid: &str) -> Self;
    fn node_port(self, number: u16) -> Self;
    fn port(self, name: &str, number: u16) -> Self;
}

impl ServiceWords for Service {
    fn annotated(mut self, key: &str, value: &str) -> Self {
        self.metadata.annotations.insert(key.into(), value.into());
        self
    }

    fn mapping(self, json: &str) -> Self {
        self.annotated(PORT_MAPPING, json)
    }

    fn created(mut self, second: i64) -> Self {
        self.metadata.creation_timestamp = Some(jiff::Timestamp::from_second(second).unwrap());
        self
    }

    fn uid(mut self, uid: &str) -> Self {
        self.metadata.uid = uid.into();
        self
    }

    /// Type NodePort, with this number on the first port.
    fn node_port(mut self, number: u16) -> Self {
        self.spec.service_type = ServiceType::NodePort;
        self.spec.ports[0].node_port = Some(number);
        self
    }

    /// One more TCP port.
    fn port(mut self, name: &str, number: u16) -> Self {
        self.spec.ports.push(ServicePort { name: name.into(), port: number, ..ServicePort::default() });
        self
    }
}

/// A Service exposed by SNI under `host`.
pub(crate) fn sni(name: &str, host: &str) -> Service {
    service(name, "SNI").mapping(&format!(r#"{{"secure":"{host}"}}"#))
}

/// The slice `name` of the Service `of` in the same namespace: all `ready`, on port `secure` 6443.
pub(crate) fn slice(name: &str, of: &str, ready: &[&str]) -> EndpointSlice {
    let mut metadata = meta(name);
    metadata.labels.insert(SERVICE_NAME_LABEL.into(), of.into());
    EndpointSlice {
        metadata,
        address_type: "IPv4".into(),
        endpoints: ready.iter().map(|address| endpoint(address, Some(true))).collect(),
        ports: vec![endpoint_port("secure", 6443)],
    }
}

pub(crate) fn endpoint(address: &str, ready: Option<bool>) -> Endpoint {
    Endpoint { addresses: vec![address.into()], conditions: EndpointConditions { ready } }
}

pub(crate) fn endpoint_port(name: &str, number: u16) -> EndpointPort {
    EndpointPort { name: Some(name.into()), port: Some(number), protocol: None }
}

pub(crate) fn host(name: &str) -> RouteKey {
    RouteKey::Host(HostName::parse(name).unwrap())
}

pub(crate) fn authority(text: &str) -> RouteKey {
    RouteKey::Authority(Authority::parse(text).unwrap())
}

/// A Service that a user wrote is applied.
pub(crate) fn written(service: Service) -> IndexChange {
    IndexChange::Service(Change::Apply(Arc::new(service)))
}

/// A Service that is planned for the Cluster in its namespace is applied.
pub(crate) fn planned(service: Service) -> IndexChange {
    IndexChange::PlannedService(Change::Apply(Arc::new(service)))
}

pub(crate) fn no_service(name: &str) -> IndexChange {
    IndexChange::Service(Change::Delete(key(name)))
}

pub(crate) fn sliced(slice: EndpointSlice) -> IndexChange {
    IndexChange::EndpointSlice(Change::Apply(Box::new(slice)))
}

pub(crate) fn no_slice(name: &str) -> IndexChange {
    IndexChange::EndpointSlice(Change::Delete(key(name)))
}

pub(crate) fn policy(policy: ClusterPolicy) -> IndexChange {
    IndexChange::Policy(Change::Apply(Arc::new(policy)))
}

/// The Cluster `name` is known, and the host name that follows from it.
pub(crate) fn named(name: &str, host: &str) -> IndexChange {
    let cluster = ClusterFacts::of(Some(HostName::parse(host).unwrap()), None);
    policy(ClusterPolicy { cluster, ..ClusterPolicy::open(Tenant::of_text(name)) })
}

pub(crate) fn no_policy(cluster: &str) -> IndexChange {
    IndexChange::Policy(Change::Delete(Tenant::of_text(cluster)))
}
