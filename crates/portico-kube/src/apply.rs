//! Server-side apply with one field manager, without writes at rest.
//!
//! [`apply`] compares before it writes. An object costs no request if it has every wanted field, and none
//! that Portico applied earlier and no longer wants. Ownership is read from `metadata.managedFields`, so
//! `current` must carry them. A watch that drops them makes every call a write, which the API server then
//! recognises as no change.
//!
//! Not for lists whose items other managers may have written and Portico must remove: apply removes only what
//! this manager alone has applied. See KEP-555.

use std::hash::{BuildHasher, RandomState};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Map, Value};
use thiserror::Error;

use crate::FIELD_MANAGER;
use crate::cached::Cached;
use crate::error::describe;

/// Parameters of a forced apply as Portico: fields that another manager holds are taken over.
pub fn applying() -> PatchParams {
    PatchParams::apply(FIELD_MANAGER).force()
}

/// Parameters of a merge patch as Portico.
pub fn merging() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Parameters of a create or a replace as Portico.
pub fn writing() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// What [`apply`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied<K> {
    /// Nothing: the object was as wanted.
    Unchanged,
    /// The object is new, or was changed; this is its present state.
    Changed(K),
}

/// Why an object was not applied: the API server refused it, or was not reached. Retry with back-off.
#[derive(Debug, Error)]
#[error("cannot apply {name}: {}", describe(source))]
pub struct ApplyError {
    /// The object.
    pub name: String,
    /// What went wrong.
    pub source: Box<kube::Error>,
}

/// Makes an object as `wanted`, which holds the wanted fields and no others; `apiVersion` and `kind` are
/// added. `current` is the object as it was last seen, `None` if there was none.
///
/// Without `current` there is nothing to compare with, and every apply counts as a change. Fields that
/// another manager holds with another value are taken over: a controller insists.
pub async fn apply<K>(
    api: &Api<Cached<K>>,
    wanted: &Value,
    current: Option<&Cached<K>>,
) -> Result<Applied<Cached<K>>, ApplyError>
where
    K: k8s_openapi::Resource + 'static,
{
    let mut fields = wanted.clone();
    if let Some(object) = fields.as_object_mut() {
        // Required by the API server.
        object.insert("apiVersion".into(), K::API_VERSION.into());
        object.insert("kind".into(), K::KIND.into());
    }
    let present = current.map(Cached::value);
    if let Some(present) = &present
        && let Some(owned) = current.and_then(Cached::owned)
        && is_as_applied(&fields, present, &owned)
    {
        return Ok(Applied::Unchanged);
    }
    let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
    let written = api.patch(name, &applying(), &Patch::Apply(&fields)).await;
    let object = written.map_err(|source| ApplyError { name: name.to_owned(), source: Box::new(source) })?;
    let same = present.is_some_and(|present| {
        // If Portico did not own the object before, the write changed its ownership, and counts as a change.
        current.is_some_and(Cached::is_ours) && is_same_but_status(&present, &object.value())
    });
    Ok(if same { Applied::Unchanged } else { Applied::Changed(object) })
}

/// Makes an object as `wanted`, of which there must never be a second version. The second writer gets a
/// conflict, also where both believe to lead. To apply it later is another write, which [`apply`] does.
///
/// The write is an apply, because a right to apply can be limited to a name, and a right to create cannot.
/// Its manager is one that nobody else uses, and it does not force.
pub async fn make_once<K>(api: &Api<Cached<K>>, wanted: &Value) -> Result<Cached<K>, ApplyError>
where
    K: k8s_openapi::Resource + 'static,
{
    let mut fields = wanted.clone();
    if let Some(object) = fields.as_object_mut() {
        object.insert("apiVersion".into(), K::API_VERSION.into());
        object.insert("kind".into(), K::KIND.into());
    }
    let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
    let manager = format!("{FIELD_MANAGER}-{:016x}", RandomState::new().hash_one(name));
    let written = api.patch(name, &PatchParams::apply(&manager), &Patch::Apply(&fields)).await;
    written.map_err(|source| ApplyError { name: name.to_owned(), source: Box::new(source) })
}

/// Whether applying `wanted` would change nothing: all of it is there, Portico has applied it, and Portico
/// has applied nothing else.
pub(crate) fn is_applied(wanted: &Value, current: &Value, managers: &[ManagedFieldsEntry]) -> bool {
    let owned = managers
        .iter()
        .find(|entry| is_ours(entry))
        .and_then(|entry| entry.fields_v1.as_ref())
        .and_then(|fields| fields.0.as_object());
    owned.is_some_and(|owned| is_as_applied(wanted, current, owned))
}

/// Whether applying `wanted` would change nothing, where `owned` is what Portico has applied.
fn is_as_applied(wanted: &Value, current: &Value, owned: &Map<String, Value>) -> bool {
    contains(current, wanted) && wants_all(wanted, owned)
}

/// Whether this says what Portico has applied.
pub(crate) fn is_ours(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(FIELD_MANAGER)
        && entry.operation.as_deref() == Some("Apply")
        && entry.subresource.as_deref().unwrap_or_default().is_empty()
}

/// Whether every field of `wanted` has its value in `current`. Lists must have the same length: which of
/// their items belong together is known to the API server alone.
pub(crate) fn contains(current: &Value, wanted: &Value) -> bool {
    match (current, wanted) {
        (Value::Object(current), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            // The types do not serialise these two, which cannot differ.
            matches!(key.as_str(), "apiVersion" | "kind") && !current.contains_key(key)
                // The API server drops empty maps of metadata.
                || wanted.as_object().is_some_and(Map::is_empty) && !current.contains_key(key)
                || current.get(key).is_some_and(|current| contains(current, wanted))
        }),
        (Value::Array(current), Value::Array(wanted)) => {
            current.len() == wanted.len()
                && current.iter().zip(wanted).all(|(current, wanted)| contains(current, wanted))
        }
        (current, wanted) => current == wanted,
    }
}

/// Whether `wanted` has every field of `owned`, a set of fields in the format `FieldsV1`. There `f:NAME` is a
/// field. An item of a list is `k:{...}` by its keys, `v:VALUE` by its value, or `i:INDEX` by its index.
fn wants_all(wanted: &Value, owned: &Map<String, Value>) -> bool {
    owned.iter().all(|(path, below)| {
        // The value itself, beside what is below it.
        if path == "." {
            return true;
        }
        let found = match path.split_once(':') {
            Some(("f", name)) => wanted.get(name),
            Some(("k", keys)) => item(wanted, keys, has_keys),
            Some(("v", value)) => item(wanted, value, |item, value| item == value),
            Some(("i", index)) => index.parse::<usize>().ok().and_then(|index| wanted.get(index)),
            _ => None,
        };
        let below = below.as_object();
        found.is_some_and(|found| below.is_none_or(|below| wants_all(found, below)))
    })
}

/// The first item of a list that fits what is written as JSON in a path.
fn item<'a>(list: &'a Value, text: &str, fits: impl Fn(&Value, &Value) -> bool) -> Option<&'a Value> {
    let wanted: Value = serde_json::from_str(text).ok()?;
    list.as_array()?.iter().find(|item| fits(item, &wanted))
}

/// Whether an item of a list is the one with these keys. A key that it leaves out has its default: the
/// protocol of a port.
fn has_keys(item: &Value, keys: &Value) -> bool {
    let mut present = keys.as_object().into_iter().flatten().filter_map(|(key, value)| {
        let own = item.get(key)?;
        Some(own == value)
    });
    present.next() == Some(true) && present.all(|same| same)
}

/// Whether only what other clients write has changed: the status. A controller of Kubernetes may do that
/// between the view that was compared with and the write.
fn is_same_but_status(before: &Value, after: &Value) -> bool {
    let stripped = |object: &Value| {
        let mut object = object.clone();
        for field in ["apiVersion", "kind", "status"] {
            object[field] = Value::Null;
        }
        object["metadata"]["resourceVersion"] = Value::Null;
        object
    };
    stripped(before) == stripped(after)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wanted() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "a", "labels": {"app": "x"}, "finalizers": ["portico/a"]},
            "spec": {"ports": [{"name": "https", "port": 443, "protocol": "TCP"}]},
        })
    }

    /// As the API server returns it: with defaults, and fields of others.
    fn current() -> Value {
        json!({
            "metadata": {
                "name": "a", "uid": "1", "labels": {"app": "x", "other": "y"}, "finalizers": ["portico/a"],
            },
            "spec": {
                "clusterIP": "10.0.0.1",
                "ports": [{"name": "https", "port": 443, "protocol": "TCP", "nodePort": 30_000}],
            },
        })
    }

    fn managers(fields: Value) -> Vec<ManagedFieldsEntry> {
        let entry = |manager: &str, operation: &str, fields: Value| -> ManagedFieldsEntry {
            let entry = json!({"manager": manager, "operation": operation, "fieldsV1": fields});
            serde_json::from_value(entry).unwrap()
        };
        vec![
            entry("kubectl", "Update", json!({"f:metadata": {"f:labels": {"f:other": {}}}})),
            entry(FIELD_MANAGER, "Apply", fields),
        ]
    }

    fn owned() -> Value {
        json!({
            "f:metadata": {"f:labels": {"f:app": {}}, "f:finalizers": {"v:\"portico/a\"": {}}},
            "f:spec": {"f:ports": {"k:{\"port\":443,\"protocol\":\"TCP\"}":
                {".": {}, "f:name": {}, "f:port": {}, "f:protocol": {}}}},
        })
    }

    #[test]
    fn an_object_as_wanted_is_not_written_again() {
        assert!(is_applied(&wanted(), &current(), &managers(owned())));
    }

    #[test]
    fn a_port_without_its_protocol_is_not_written_again() {
        let mut wanted = wanted();
        wanted["spec"]["ports"] = json!([{"name": "https", "port": 443}]);
        let mut owned = owned();
        let key = r#"k:{"port":443,"protocol":"TCP"}"#;
        owned["f:spec"]["f:ports"] = json!({key: {".": {}, "f:name": {}, "f:port": {}}});
        assert!(is_applied(&wanted, &current(), &managers(owned.clone())));
        wanted["spec"]["ports"] = json!([{"name": "https", "port": 444}]);
        assert!(!is_applied(&wanted, &current(), &managers(owned)));
    }

    #[test]
    fn a_status_that_others_write_meanwhile_is_no_change() {
        let mut later = current();
        later["metadata"]["resourceVersion"] = json!("8");
        later["status"] = json!({"readyReplicas": 2});
        assert!(is_same_but_status(&current(), &later));
        later["spec"]["clusterIP"] = json!("10.0.0.2");
        assert!(!is_same_but_status(&current(), &later));
    }

    #[test]
    fn an_empty_map_that_the_api_server_drops_is_not_written_again() {
        let mut wanted = wanted();
        wanted["metadata"]["annotations"] = json!({});
        assert!(is_applied(&wanted, &current(), &managers(owned())));
    }

    #[test]
    fn a_field_that_differs_or_is_missing_is_written() {
        for (path, value) in [
            ("/metadata/labels/app", json!("z")),
            ("/spec/ports/0/name", json!("other")),
            ("/spec/ports", json!([])),
            ("/metadata/finalizers", json!(null)),
        ] {
            let mut current = current();
            *current.pointer_mut(path).unwrap() = value;
            assert!(!is_applied(&wanted(), &current, &managers(owned())), "{path}");
        }
    }

    #[test]
    fn a_field_that_is_no_longer_wanted_is_written_away_and_one_of_others_is_not() {
        let mut less = wanted();
        less["metadata"]["labels"] = json!({});
        assert!(!is_applied(&less, &current(), &managers(owned())));
        let mut less = wanted();
        less["metadata"]["finalizers"] = json!([]);
        assert!(!is_applied(&less, &current(), &managers(owned())));
        let mut less = wanted();
        less["spec"] = json!({});
        assert!(!is_applied(&less, &current(), &managers(owned())));
    }

    #[test]
    fn an_object_that_portico_never_applied_is_written_to_own_its_fields() {
        assert!(!is_applied(&wanted(), &current(), &[]));
        let update = managers(json!({})).into_iter().map(|mut entry| {
            entry.operation = Some("Update".into());
            entry
        });
        assert!(!is_applied(&wanted(), &current(), &update.collect::<Vec<_>>()));
    }

    #[test]
    fn a_path_that_is_not_understood_is_written_rather_than_guessed() {
        assert!(!is_applied(&wanted(), &current(), &managers(json!({"x:odd": {}}))));
    }
}
