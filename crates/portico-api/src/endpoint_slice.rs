//! `EndpointSlice` (discovery.k8s.io/v1), with the fields that concern exposure.

use serde::{Deserialize, Serialize};

use crate::meta::ObjectMeta;
use crate::service::Protocol;
use crate::setting::or_default;

/// The label that names the Service a slice belongs to.
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// Some of the endpoints of one Service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointSlice {
    /// Namespace, and the label [`SERVICE_NAME_LABEL`].
    pub metadata: ObjectMeta,
    /// `IPv4`, `IPv6` or `FQDN`; the last is not used for routes.
    pub address_type: Box<str>,
    /// The endpoints.
    #[serde(deserialize_with = "or_default")]
    pub endpoints: Vec<Endpoint>,
    /// The ports every endpoint serves.
    #[serde(deserialize_with = "or_default")]
    pub ports: Vec<EndpointPort>,
}

impl EndpointSlice {
    /// The Service this slice belongs to, in the slice's own namespace.
    pub fn service_name(&self) -> Option<&str> {
        self.metadata.label(SERVICE_NAME_LABEL)
    }
}

/// One endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Endpoint {
    /// IP addresses in text form; all but the first are ignored by Kubernetes too.
    pub addresses: Vec<Box<str>>,
    /// Its state.
    pub conditions: EndpointConditions,
}

/// State of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EndpointConditions {
    /// Only `Some(true)` receives connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
}

/// One port of a slice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EndpointPort {
    /// The Service port's name; `None` and empty mean an unnamed port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<Box<str>>,
    /// Absent means any port; no route can use that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Transport protocol; absent means TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
}
