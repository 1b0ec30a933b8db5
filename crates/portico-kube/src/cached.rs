//! An object as a controller keeps it: what comparing needs, in a form that is small at rest.
//!
//! A controller holds thousands of objects to see whether each is as it wants it. A [`Cached`] keeps the
//! object as one text, without what other managers say about their fields. The names of the fields that
//! Portico manages are a third of an object, and the same for every cluster. Each such text is kept once.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use kube::Resource;
use kube::api::{DynamicObject, ObjectMeta};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::FIELD_MANAGER;

/// Prefix of the annotations by which people tell Portico something.
const OWN_ANNOTATIONS: &str = "portico.k8c.io/";

/// The field of a set of fields under which those of the metadata are.
const METADATA: &str = "f:metadata";

/// What [`Owned`] objects have, each text once.
static SHARED: Mutex<Shared> = Mutex::new(Shared { texts: BTreeSet::new(), most: 0 });

/// An object of kind `K` as it was last seen.
pub struct Cached<K> {
    /// Name, namespace, resourceVersion.
    meta: ObjectMeta,
    /// The object, without managed fields, nor annotations of others.
    text: Box<str>,
    /// What Portico has applied.
    owned: Option<Owned>,
    /// The manager, other than Portico, that wrote it last.
    other_writer: Option<Box<str>>,
    kind: PhantomData<K>,
}

/// A set of fields in the format `FieldsV1`, as two texts that objects share. The fields of the metadata name
/// the owner, and are the same for all objects of one cluster. The rest is the same for one object of all
/// clusters.
#[derive(Clone)]
struct Owned {
    metadata: Arc<str>,
    rest: Arc<str>,
}

/// Texts that objects share.
struct Shared {
    texts: BTreeSet<Arc<str>>,
    /// With so many, those that no object has any more are looked for.
    most: usize,
}

impl<K> Cached<K> {
    /// The object, without managed fields.
    pub fn value(&self) -> Value {
        // It was written from a value.
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// The manager, other than Portico, that wrote it last; not its status.
    pub fn other_writer(&self) -> Option<&str> {
        self.other_writer.as_deref()
    }

    /// The fields that Portico has applied, in the format `FieldsV1`.
    pub(crate) fn owned(&self) -> Option<Map<String, Value>> {
        self.owned.as_ref().and_then(Owned::fields)
    }

    /// Whether Portico has applied it.
    pub fn is_ours(&self) -> bool {
        self.owned.is_some()
    }
}

impl Owned {
    /// The fields that the manager of this entry has applied. `None` if the manager is not Portico, or if it
    /// has not applied.
    fn of(entry: &Value) -> Option<Self> {
        let is_ours = entry["manager"] == FIELD_MANAGER
            && entry["operation"] == "Apply"
            && entry["subresource"].as_str().unwrap_or_default().is_empty();
        if !is_ours {
            return None;
        }
        let mut rest = entry["fieldsV1"].clone();
        let metadata = rest.as_object_mut().and_then(|fields| fields.remove(METADATA)).unwrap_or_default();
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { metadata: shared.text(&metadata.to_string()), rest: shared.text(&rest.to_string()) })
    }

    fn fields(&self) -> Option<Map<String, Value>> {
        // They were written from values.
        let mut fields: Map<String, Value> = serde_json::from_str(&self.rest).ok()?;
        let metadata: Value = serde_json::from_str(&self.metadata).ok()?;
        if !metadata.is_null() {
            fields.insert(METADATA.to_owned(), metadata);
        }
        Some(fields)
    }
}

impl Shared {
    /// This text, shared with all that asked for the same.
    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        if self.texts.len() >= self.most {
            self.texts.retain(|text| Arc::strong_count(text) > 1);
            // Seldom enough to cost nothing, whatever there is.
            self.most = 2 * self.texts.len() + 16;
        }
        let text: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&text));
        text
    }
}

impl<'de, K> Deserialize<'de> for Cached<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        let mut other_writer = None;
        let mut owned = None;
        if let Some(entries) = value.pointer_mut("/metadata/managedFields").and_then(Value::as_array_mut) {
            let others = entries
                .iter()
                .filter(|entry| entry["manager"] != FIELD_MANAGER && entry["subresource"].is_null());
            // Times in this form are ordered as texts.
            let newest = others.max_by_key(|entry| entry["time"].as_str().map(str::to_owned));
            other_writer = newest.and_then(|entry| entry["manager"].as_str()).map(Into::into);
            owned = entries.iter().find_map(Owned::of);
        }
        drop_annotations_of_others(&mut value);
        if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        let field = |name: &str| {
            value.pointer(&format!("/metadata/{name}")).and_then(Value::as_str).map(str::to_owned)
        };
        let meta = ObjectMeta {
            name: field("name"),
            namespace: field("namespace"),
            resource_version: field("resourceVersion"),
            ..ObjectMeta::default()
        };
        Ok(Self { meta, text: value.to_string().into(), owned, other_writer, kind: PhantomData })
    }
}

/// Drops annotations that Portico neither manages nor reads. Any writer of an object may give it 256 KiB of
/// them, and all objects are held in memory.
fn drop_annotations_of_others(object: &mut Value) {
    let Some(annotations) = object.pointer_mut("/metadata/annotations").map(Value::take) else { return };
    let Value::Object(mut annotations) = annotations else { return };
    let managed = object.pointer("/metadata/managedFields").and_then(Value::as_array);
    let own: Vec<&Value> = managed
        .into_iter()
        .flatten()
        .filter(|entry| entry["manager"] == FIELD_MANAGER)
        .filter_map(|entry| entry.pointer("/fieldsV1/f:metadata/f:annotations"))
        .collect();
    annotations.retain(|key, _| {
        key.starts_with(OWN_ANNOTATIONS) || own.iter().any(|own| own.get(format!("f:{key}")).is_some())
    });
    object["metadata"]["annotations"] = annotations.into();
}

// Written out, because derive would require `K: Clone`.
impl<K> Clone for Cached<K> {
    fn clone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            text: self.text.clone(),
            owned: self.owned.clone(),
            other_writer: self.other_writer.clone(),
            kind: PhantomData,
        }
    }
}

impl<K> std::fmt::Debug for Cached<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.meta.name.as_deref().unwrap_or_default();
        write!(f, "{}/{name}", self.meta.namespace.as_deref().unwrap_or_default())
    }
}

impl<K: k8s_openapi::Resource> Resource for Cached<K> {
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
            json!({"manager": manager, "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1",
                "fieldsV1": {"f:metadata": {"f:labels": {"f:x": {}}}, "f:spec": {"f:type": {}}}})
        };
        let object = json!({
            "metadata": {"name": "a", "namespace": "n", "resourceVersion": "7", "labels": {"x": "y"},
                "managedFields": [entry("portico"), entry("kubectl")]},
            "spec": {"type": "ClusterIP"}, "status": {"loadBalancer": {}}});
        let seen: Cached<Service> = serde_json::from_value(object).unwrap();
        assert!(seen.is_ours());
        assert_eq!(seen.other_writer(), Some("kubectl"));
        let value = seen.value();
        assert_eq!(value["metadata"]["managedFields"], Value::Null);
        assert_eq!(seen.owned().map(Value::from).unwrap(), entry("portico")["fieldsV1"]);
        assert_eq!(
            (&value["spec"]["type"], &value["metadata"]["labels"]["x"]),
            (&json!("ClusterIP"), &json!("y"))
        );
        assert_eq!(seen.meta().resource_version.as_deref(), Some("7"));
        let foreign: Cached<Service> =
            serde_json::from_value(json!({"metadata": {"managedFields": [entry("helm")]}})).unwrap();
        assert!(!foreign.is_ours());
    }

    #[test]
    fn the_names_of_managed_fields_are_kept_once_for_all_clusters_and_no_longer_than_an_object_has_them() {
        let made = |cluster: &str, object: &str| -> Cached<Service> {
            let owner = json!({format!("k:{{\"uid\":\"{cluster}\"}}"): {}});
            let fields = json!({"f:metadata": {"f:ownerReferences": owner}, "f:spec": {object: {}}});
            let entry = json!({"manager": "portico", "operation": "Apply", "fieldsV1": fields});
            serde_json::from_value(json!({"metadata": {"managedFields": [entry]}})).unwrap()
        };
        let same = |one: &Arc<str>, other: &Arc<str>| Arc::ptr_eq(one, other);
        let owned = |seen: &Cached<Service>| seen.owned.clone().unwrap();
        let (one, beside, other) = (made("once-1", "f:a"), made("once-1", "f:b"), made("once-2", "f:a"));
        assert!(same(&owned(&one).metadata, &owned(&beside).metadata));
        assert!(same(&owned(&one).rest, &owned(&other).rest));
        assert!(!same(&owned(&one).metadata, &owned(&other).metadata));
        for cluster in 0..1_000 {
            made(&format!("gone-{cluster}"), "f:a");
        }
        let kept = SHARED.lock().unwrap().texts.iter().filter(|text| text.contains("gone-")).count();
        assert!(kept < 100, "{kept}");
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
        let seen: Cached<Service> = serde_json::from_value(object).unwrap();
        let kept = json!({"applied": "1", "portico.k8c.io/tunnel-certificate": "provided"});
        assert_eq!(seen.value()["metadata"]["annotations"], kept);
    }
}
