//! What every object carries (name, namespace, age, labels, annotations), and how messages name an object.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::intern::Interner;
use crate::setting::or_default;

/// Labels or annotations. Boxed strings are smaller: they hardly ever change, and a gateway holds 10,000
/// objects.
pub type Strings = BTreeMap<Box<str>, Box<str>>;

/// The part of `metadata` that exposure depends on. Unknown fields are ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectMeta {
    /// Name, unique within the kind and namespace.
    pub name: Arc<str>,
    /// Empty for cluster-scoped kinds. A source puts `default` here if the manifest of a namespaced object
    /// has none.
    #[serde(skip_serializing_if = "str_is_empty")]
    pub namespace: Arc<str>,
    /// Empty for objects from a directory.
    #[serde(skip_serializing_if = "str_is_empty")]
    pub uid: Box<str>,
    /// In a conflict the older object wins. `None` counts as youngest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_timestamp: Option<Timestamp>,
    /// Set while the object waits for its finalizers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_timestamp: Option<Timestamp>,
    /// What keeps it once it is deleted.
    #[serde(skip_serializing_if = "<[_]>::is_empty", deserialize_with = "or_default")]
    pub finalizers: Box<[Box<str>]>,
    /// `metadata.labels`.
    #[serde(skip_serializing_if = "Strings::is_empty", deserialize_with = "or_default")]
    pub labels: Strings,
    /// `metadata.annotations`.
    #[serde(skip_serializing_if = "Strings::is_empty", deserialize_with = "or_default")]
    pub annotations: Strings,
}

impl ObjectMeta {
    /// The annotation `key`, if set.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.get(key).map(|value| &**value)
    }

    /// The label `key`, if set.
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(|value| &**value)
    }

    /// Whether the finalizer `name` is set.
    pub fn has_finalizer(&self, name: &str) -> bool {
        self.finalizers.iter().any(|finalizer| &**finalizer == name)
    }

    /// Namespace and name, shared with this object.
    pub fn key(&self) -> ObjectKey {
        ObjectKey { namespace: Arc::clone(&self.namespace), name: Arc::clone(&self.name) }
    }

    /// Replaces namespace and name by the copies that other objects share.
    pub fn share_names(&mut self, names: &mut Interner) {
        self.namespace = names.share(&self.namespace);
        self.name = names.share(&self.name);
    }
}

fn str_is_empty(text: &str) -> bool {
    text.is_empty()
}

/// Namespace and name of an object; the kind is known from the context.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Empty for cluster-scoped objects.
    pub namespace: Arc<str>,
    /// Name within the namespace.
    pub name: Arc<str>,
}

impl ObjectKey {
    /// A key from its two parts; the namespace of a cluster-scoped object is empty.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for ObjectKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The kinds Portico knows. Anything else in a manifest is skipped with a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Kind {
    /// `v1`.
    Service,
    /// `discovery.k8s.io/v1`.
    EndpointSlice,
    /// `kubermatic.k8c.io/v1`, one per installation.
    KubermaticConfiguration,
    /// `kubermatic.k8c.io/v1`.
    Seed,
    /// `kubermatic.k8c.io/v1`, cluster-scoped.
    Cluster,
    /// `portico.k8c.io/v1alpha1`, cluster-scoped: what a gateway must know of a Cluster. Not read from
    /// directories, where Clusters are.
    ExposedCluster,
}

impl Kind {
    /// The kind for the `apiVersion` and `kind` of a manifest; `None` if Portico does not read it.
    pub fn from_manifest(api_version: &str, kind: &str) -> Option<Self> {
        match (api_version, kind) {
            ("v1", "Service") => Some(Self::Service),
            ("discovery.k8s.io/v1", "EndpointSlice") => Some(Self::EndpointSlice),
            ("kubermatic.k8c.io/v1", "KubermaticConfiguration") => Some(Self::KubermaticConfiguration),
            ("kubermatic.k8c.io/v1", "Seed") => Some(Self::Seed),
            ("kubermatic.k8c.io/v1", "Cluster") => Some(Self::Cluster),
            _ => None,
        }
    }

    /// The name in manifests and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::KubermaticConfiguration => "KubermaticConfiguration",
            Self::Seed => "Seed",
            Self::Cluster => "Cluster",
            Self::ExposedCluster => "ExposedCluster",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One object, as messages name it: `Service cluster-a/apiserver-external`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ObjectRef {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace and name.
    #[serde(rename = "name")]
    pub key: ObjectKey,
}

impl ObjectRef {
    /// Names the object of `kind` that carries `meta`.
    pub fn new(kind: Kind, meta: &ObjectMeta) -> Self {
        Self { kind, key: meta.key() }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.key)
    }
}
