//! An object of any kind that Portico reads, and how it is made from plain data.

use std::sync::Arc;

use portico_api::annotations;
use portico_api::change::Keyed;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::{Kind, ObjectMeta, ObjectRef};
use portico_api::names::{MAX_OBJECT_NAME, is_object_name};
use portico_api::seed::Seed;
use portico_api::service::Service;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

/// The namespace of an object that names none although its kind has one, as with `kubectl apply`.
const DEFAULT_NAMESPACE: &str = "default";

/// Longest value of an annotation under a key that is not ours nor KKP's.
const LONGEST_EXPOSE: usize = 128;

/// Most bytes of labels and annotations of a Service: a CA of 16 KiB, and much of everything else.
const MOST_METADATA: usize = 24 * 1_024;

/// Why data is no object of its kind.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct InvalidObject {
    /// The field, `spec.ports[0].port`; empty for the entire object.
    pub field: String,
    /// What is wrong with it.
    pub message: String,
}

macro_rules! objects {
    ($($kind:ident),+) => {
        /// An object of one of the kinds that Portico reads, reduced to the fields that concern exposure.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs, reason = "each variant is documented as the kind of the same name")]
        pub enum Object {
            $($kind(Box<$kind>)),+
        }

        impl Object {
            /// The metadata of the object.
            pub fn metadata(&self) -> &ObjectMeta {
                match self {
                    $(Self::$kind(object) => &object.metadata),+
                }
            }

            pub(crate) fn metadata_mut(&mut self) -> &mut ObjectMeta {
                match self {
                    $(Self::$kind(object) => &mut object.metadata),+
                }
            }

            /// The kind of the object.
            pub fn kind(&self) -> Kind {
                match self {
                    $(Self::$kind(_) => Kind::$kind),+
                }
            }

            fn of_kind(kind: Kind, value: Value) -> Result<Self, InvalidObject> {
                match kind {
                    $(Kind::$kind => typed(value).map(Box::new).map(Self::$kind)),+
                }
            }
        }

        $(impl From<$kind> for Object {
            fn from(object: $kind) -> Self {
                Self::$kind(Box::new(object))
            }
        })+
    };
}

objects!(Service, EndpointSlice, KubermaticConfiguration, Seed, Cluster, ExposedCluster);

impl Object {
    /// Reads `value` as an object of `kind`. Sets the default namespace and checks the name.
    pub(crate) fn from_value(kind: Kind, value: Value) -> Result<Self, InvalidObject> {
        let mut object = Self::of_kind(kind, value)?;
        let meta = object.metadata_mut();
        if kind == Kind::Service {
            keep_what_counts(meta)?;
        }
        if matches!(kind, Kind::Cluster | Kind::ExposedCluster) {
            meta.namespace = Arc::default();
        } else if meta.namespace.is_empty() {
            meta.namespace = DEFAULT_NAMESPACE.into();
        }
        check_name("metadata.name", &meta.name)?;
        if !meta.namespace.is_empty() {
            check_name("metadata.namespace", &meta.namespace)?;
        }
        Ok(object)
    }

    /// Kind, namespace and name of the object.
    pub fn reference(&self) -> ObjectRef {
        ObjectRef::new(self.kind(), self.metadata())
    }
}

impl Keyed for Object {
    type Key = ObjectRef;

    fn key(&self) -> ObjectRef {
        self.reference()
    }
}

/// Reads `value`; an error names the field. `apiVersion`, `kind` and unknown fields are ignored.
fn typed<T: DeserializeOwned>(value: Value) -> Result<T, InvalidObject> {
    portico_yaml::typed(value)
        .map_err(|invalid| InvalidObject { field: invalid.field, message: invalid.message })
}

/// Drops the annotations of a Service that are not read, and refuses a Service whose others are too long. A
/// tenant may make Services by the thousand, each with 256 KiB of them. All are held in memory.
fn keep_what_counts(meta: &mut ObjectMeta) -> Result<(), InvalidObject> {
    // The key that asks for exposure is a setting; its value is one word, or a few.
    meta.annotations.retain(|key, value| annotations::is_known(key) || value.len() <= LONGEST_EXPOSE);
    let strings = meta.annotations.iter().chain(&meta.labels);
    let length: usize = strings.map(|(key, value)| key.len() + value.len()).sum();
    if length <= MOST_METADATA {
        return Ok(());
    }
    Err(InvalidObject {
        field: "metadata.annotations".to_owned(),
        message: format!(
            "hold {length} bytes with the labels, of which {MOST_METADATA} are read; make them fewer"
        ),
    })
}

/// Accepts what Kubernetes accepts as a name.
fn check_name(field: &str, name: &str) -> Result<(), InvalidObject> {
    if is_object_name(name) {
        return Ok(());
    }
    let message = if name.is_empty() {
        "is missing".to_owned()
    } else {
        format!(
            "is {name:?}, but may only hold up to {MAX_OBJECT_NAME} lower-case letters, digits, '-' and '.', \
             and must begin and end with a letter or a digit, and so must every part between two dots"
        )
    };
    Err(InvalidObject { field: field.to_owned(), message })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_without_a_namespace_is_in_the_one_that_kubectl_would_choose() {
        let object = Object::from_value(Kind::Service, json!({"metadata": {"name": "a"}})).unwrap();
        assert_eq!(object.reference().to_string(), "Service default/a");
        let object =
            Object::from_value(Kind::Cluster, json!({"metadata": {"name": "a", "namespace": "b"}})).unwrap();
        assert_eq!(object.reference().to_string(), "Cluster a");
    }

    #[test]
    fn the_field_that_does_not_fit_is_named() {
        let value = json!({"metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}, {"port": "x"}]}});
        assert_eq!(Object::from_value(Kind::Service, value).unwrap_err().field, "spec.ports[1].port");
    }

    #[test]
    fn a_value_that_does_not_fit_is_described_in_terms_of_the_manifest() {
        let message = |port: Value| {
            let value = json!({"metadata": {"name": "a"}, "spec": {"ports": [port]}});
            Object::from_value(Kind::Service, value).unwrap_err().message
        };
        assert_eq!(
            message(json!({"port": 70_000})),
            "invalid value: integer `70000`, expected a whole number from 0 to 65535"
        );
        assert_eq!(
            message(json!({"protocol": "tcp"})),
            "`tcp` is not known, expected one of `TCP`, `UDP`, `SCTP`"
        );
    }

    #[test]
    fn of_the_annotations_of_a_service_only_those_are_held_that_somebody_reads() {
        let service = |annotations: Value| {
            let value = json!({"metadata": {"name": "a", "annotations": annotations}});
            Object::from_value(Kind::Service, value)
        };
        let long = "x".repeat(200_000);
        let expose = "nodeport-proxy.k8s.io/expose";
        let object = service(json!({"theirs": long, "example.com/expose": "SNI", expose: "SNI"})).unwrap();
        let kept: Vec<&str> = object.metadata().annotations.keys().map(|key| &**key).collect();
        assert_eq!(kept, ["example.com/expose", expose]);
        let error = service(json!({"nodeport-proxy.k8s.io/port-mapping": long})).unwrap_err();
        assert_eq!(error.field, "metadata.annotations");
        let many: serde_json::Map<_, _> =
            (0..1_000).map(|number| (format!("k{number}"), "x".repeat(100).into())).collect();
        assert_eq!(service(many.into()).unwrap_err().field, "metadata.annotations");
    }

    #[test]
    fn names_that_cannot_exist_are_refused() {
        for name in ["", "A", "a_b", "-a", "a.", "a/b"] {
            let error = Object::from_value(Kind::Service, json!({"metadata": {"name": name}})).unwrap_err();
            assert_eq!(error.field, "metadata.name");
        }
    }
}
