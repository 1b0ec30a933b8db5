//! An object as a controller keeps it: what comparing needs, in a form that is small at rest.
//!
//! A controller holds thousands of objects to see whether each is as it wants it. A [`Seen`] keeps the object
//! as one text, without what other managers say about their fields.

use std::borrow::Cow;
use std::marker::PhantomData;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::Resource;
use kube::api::{DynamicObject, ObjectMeta};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::FIELD_MANAGER;

/// Prefix of the annotations by which people tell Portico something.
const OWN_ANNOTATIONS: &str = "portico.k8c.io/";

/// An object of kind `K` as it was last seen.
pub struct Seen<K> {
    /// Name, namespace, resourceVersion.
    meta: ObjectMeta,
    /// The object, with what [`FIELD_MANAGER`] manages, and no other manager, nor their annotations.
    text: Box<str>,
    /// The manager, other than Portico, that wrote it last.
    other_writer: Option<Box<str>>,
    kind: PhantomData<K>,
}

impl<K> Seen<K> {
    /// The object.
    pub fn value(&self) -> Value {
        // It was written from a value.
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// The manager, other than Portico, that wrote it last; not its status.
    pub fn other_writer(&self) -> Option<&str> {
        self.other_writer.as_deref()
    }

    /// What Portico manages of it.
    pub(crate) fn managed(object: &Value) -> Vec<ManagedFieldsEntry> {
        let entries = &object["metadata"]["managedFields"];
        serde_json::from_value(entries.clone()).unwrap_or_default()
    }

    /// Whether Portico has applied it.
    pub fn is_ours(&self) -> bool {
        Self::managed(&self.value())
            .iter()
            .any(|entry| entry.operation.as_deref() == Some("Apply") && entry.subresource.is_none())
    }
}

impl<'de, K> Deserialize<'de> for Seen<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        let mut other_writer = None;
        if let Some(entries) = value.pointer_mut("/metadata/managedFields").and_then(Value::as_array_mut) {
            let others = entries
                .iter()
                .filter(|entry| entry["manager"] != FIELD_MANAGER && entry["subresource"].is_null());
            // Times in this form are ordered as texts.
            let newest = others.max_by_key(|entry| entry["time"].as_str().map(str::to_owned));
            other_writer = newest.and_then(|entry| entry["manager"].as_str()).map(Into::into);
            entries.retain(|entry| entry["manager"] == FIELD_MANAGER);
        }
        drop_annotations_of_others(&mut value);
        let field = |name: &str| {
            value.pointer(&format!("/metadata/{name}")).and_then(Value::as_str).map(str::to_owned)
        };
        let meta = ObjectMeta {
            name: field("name"),
            namespace: field("namespace"),
            resource_version: field("resourceVersion"),
            ..ObjectMeta::default()
        };
        Ok(Self { meta, text: value.to_string().into(), other_writer, kind: PhantomData })
    }
}

/// Drops annotations that Portico neither manages nor reads: who may write an object may give it 256 KiB of
/// them, and all objects are held in memory.
fn drop_annotations_of_others(object: &mut Value) {
    let Some(annotations) = object.pointer_mut("/metadata/annotations").map(Value::take) else { return };
    let Value::Object(mut annotations) = annotations else { return };
    let managed = object.pointer("/metadata/managedFields").and_then(Value::as_array);
    let own: Vec<&Value> = managed
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.pointer("/fieldsV1/f:metadata/f:annotations"))
        .collect();
    annotations.retain(|key, _| {
        key.starts_with(OWN_ANNOTATIONS) || own.iter().any(|own| own.get(format!("f:{key}")).is_some())
    });
    object["metadata"]["annotations"] = annotations.into();
}

// Written out, because derive would require `K: Clone`.
impl<K> Clone for Seen<K> {
    fn clone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            text: self.text.clone(),
            other_writer: self.other_writer.clone(),
            kind: PhantomData,
        }
    }
}

impl<K> std::fmt::Debug for Seen<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.meta.name.as_deref().unwrap_or_default();
        write!(f, "{}/{name}", self.meta.namespace.as_deref().unwrap_or_default())
    }
}

impl<K: k8s_openapi::Resource> Resource for Seen<K> {
    type DynamicType = ();
    type Scope = <DynamicObject as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        K::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        K::VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::URL_PATH_SEGMENT.into()
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
    use k8s_openapi::api::core::v1::Service;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_others_manage_is_dropped_and_the_rest_is_kept() {
        let entry = |manager: &str| {
            json!({"manager": manager, "operation": "Apply", "apiVersion": "v1",
                "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {}}})
        };
        let object = json!({
            "metadata": {"name": "a", "namespace": "n", "resourceVersion": "7", "labels": {"x": "y"},
                "managedFields": [entry("portico"), entry("kubectl")]},
            "spec": {"type": "ClusterIP"}, "status": {"loadBalancer": {}}});
        let seen: Seen<Service> = serde_json::from_value(object).unwrap();
        assert!(seen.is_ours());
        assert_eq!(seen.other_writer(), Some("kubectl"));
        let value = seen.value();
        assert_eq!(value["metadata"]["managedFields"].as_array().unwrap().len(), 1);
        assert_eq!(
            (&value["spec"]["type"], &value["metadata"]["labels"]["x"]),
            (&json!("ClusterIP"), &json!("y"))
        );
        assert_eq!(seen.meta().resource_version.as_deref(), Some("7"));
        let foreign: Seen<Service> =
            serde_json::from_value(json!({"metadata": {"managedFields": [entry("helm")]}})).unwrap();
        assert!(!foreign.is_ours());
    }

    #[test]
    fn of_annotations_those_are_kept_that_portico_manages_or_reads() {
        let entry = |manager: &str, key: &str| {
            let annotations = json!({format!("f:{key}"): {}});
            json!({"manager": manager, "fieldsV1": {"f:metadata": {"f:annotations": annotations}}})
        };
        let object = json!({"metadata": {
            "annotations": {"applied": "1", "portico.k8c.io/tunnel-certificate": "provided", "theirs": "x"},
            "managedFields": [entry("portico", "applied"), entry("helm", "theirs")]}});
        let seen: Seen<Service> = serde_json::from_value(object).unwrap();
        let kept = json!({"applied": "1", "portico.k8c.io/tunnel-certificate": "provided"});
        assert_eq!(seen.value()["metadata"]["annotations"], kept);
    }
}
