//! Objects as a Kubernetes API serves them, in the form that `kube` can list and watch.
//!
//! `kube` needs an object with its own `ObjectMeta`. A [`Served`] has one with name, namespace and
//! resourceVersion only, beside the compact object that the rest of Portico works with; managed fields and
//! status are dropped before the next object of a page is read. An object that does not fit its kind is a
//! value too: it must not fail the list of ten thousand others.

use std::borrow::Cow;
use std::marker::PhantomData;

use kube::Resource;
use kube::api::{DynamicObject, ObjectMeta};
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::seed::Seed;
use portico_api::service::Service;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::object::{InvalidObject, Object};

/// Group and version of the KKP kinds, in the spelling of discovery.
pub(crate) const KKP_GROUP_VERSION: &str = "kubermatic.k8c.io/v1";

/// A kind as an API server names it.
pub trait ServedKind: Send + Sync + 'static {
    /// The kind.
    const KIND: Kind;
    /// The API group; empty for the core group.
    const GROUP: &'static str;
    /// The name in URLs and in discovery.
    const PLURAL: &'static str;
}

macro_rules! served {
    ($($kind:ident, $group:literal, $plural:literal;)+) => {
        $(impl ServedKind for $kind {
            const KIND: Kind = Kind::$kind;
            const GROUP: &'static str = $group;
            const PLURAL: &'static str = $plural;
        })+
    };
}

served! {
    Service, "", "services";
    EndpointSlice, "discovery.k8s.io", "endpointslices";
    KubermaticConfiguration, "kubermatic.k8c.io", "kubermaticconfigurations";
    Seed, "kubermatic.k8c.io", "seeds";
    Cluster, "kubermatic.k8c.io", "clusters";
}

/// An object of kind `K` from an API server.
pub struct Served<K> {
    meta: ObjectMeta,
    /// Kind, namespace and name.
    pub reference: ObjectRef,
    /// The object, or why it cannot be read.
    pub object: Result<Object, InvalidObject>,
    kind: PhantomData<K>,
}

impl<'de, K: ServedKind> Deserialize<'de> for Served<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let field = |name: &str| value.pointer(name).and_then(Value::as_str);
        let meta = ObjectMeta {
            name: field("/metadata/name").map(str::to_owned),
            namespace: field("/metadata/namespace").map(str::to_owned),
            resource_version: field("/metadata/resourceVersion").map(str::to_owned),
            ..ObjectMeta::default()
        };
        let key = ObjectKey::new(
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        );
        let reference = ObjectRef { kind: K::KIND, key };
        Ok(Self { meta, reference, object: Object::from_value(K::KIND, value), kind: PhantomData })
    }
}

// Written out, because derive would require `K: Clone`.
impl<K> Clone for Served<K> {
    fn clone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            reference: self.reference.clone(),
            object: self.object.clone(),
            kind: PhantomData,
        }
    }
}

impl<K> std::fmt::Debug for Served<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.reference.fmt(f)
    }
}

impl<K: ServedKind> Resource for Served<K> {
    type DynamicType = ();
    type Scope = <DynamicObject as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::KIND.name().into()
    }

    fn group((): &()) -> Cow<'_, str> {
        K::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_that_does_not_fit_its_kind_fails_alone() {
        let list = json!([
            {
                "metadata": {"name": "a", "namespace": "n", "resourceVersion": "7"},
                "spec": {"ports": [{"port": 443}]},
            },
            {
                "metadata": {"name": "b", "namespace": "n", "resourceVersion": "8"},
                "spec": {"ports": "none"},
            },
        ]);
        let list: Vec<Served<Service>> = serde_json::from_value(list).unwrap();
        assert_eq!(list[0].object.as_ref().unwrap().reference(), list[0].reference);
        assert_eq!(list[0].meta().resource_version.as_deref(), Some("7"));
        assert_eq!(list[1].reference.to_string(), "Service n/b");
        assert_eq!(list[1].object.as_ref().unwrap_err().field, "spec.ports");
    }

    #[test]
    fn urls_are_those_of_the_api_server() {
        assert_eq!(Served::<Service>::url_path(&(), None), "/api/v1/services");
        assert_eq!(
            Served::<EndpointSlice>::url_path(&(), Some("n")),
            "/apis/discovery.k8s.io/v1/namespaces/n/endpointslices"
        );
        assert_eq!(Served::<Cluster>::url_path(&(), None), "/apis/kubermatic.k8c.io/v1/clusters");
    }
}
