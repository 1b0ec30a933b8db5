//! The writes of a pass to a front Service: JSON merge patches of its ports and of the settings of the Seed.
//!
//! Server-side apply is not used: it removes only ports that the same manager applied. Ports written by
//! kubectl, or by KKP's updater before, must go too. A setting is removed only if Portico wrote it and nobody
//! else wrote it as well: `metadata.managedFields` shows that.
//!
//! Pure. The two patches are two requests, so that settings that the API server refuses keep no port back.

use std::collections::BTreeSet;

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::ResourceExt;
use portico_api::meta::Strings;
use portico_api::service::ServicePort;
use portico_expose::load_balancer::LoadBalancerSettings;
use portico_kube::FIELD_MANAGER;
use serde_json::{Map, Value, json};

/// What the settings of the Seed change.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Carried {
    /// The patch, if something differs.
    pub(super) patch: Option<Value>,
    /// What cannot be carried, and what to do.
    pub(super) problem: Option<String>,
}

/// The ports of the Service as Portico reads them. A port that it cannot read counts as absent, and so is
/// replaced.
pub(super) fn ports_of(service: &core::Service) -> Vec<ServicePort> {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let read = |port| serde_json::to_value(port).and_then(serde_json::from_value).ok();
    ports.iter().filter_map(read).collect()
}

/// How many of the `wanted` ports the Service has.
pub(super) fn published(service: &core::Service, wanted: &[ServicePort]) -> usize {
    let present: BTreeSet<u16> = ports_of(service).iter().map(|port| port.port).collect();
    wanted.iter().filter(|port| present.contains(&port.port)).count()
}

/// The patch that gives the Service these ports. It names the version that was planned from, so that a write
/// of another client in between is noticed and not overwritten.
pub(super) fn ports_patch(service: &core::Service, ports: &[ServicePort]) -> Value {
    json!({ "metadata": { "resourceVersion": service.resource_version() }, "spec": { "ports": ports } })
}

/// The patch that gives the Service the settings of the Seed.
pub(super) fn settings_patch(service: &core::Service, wanted: &LoadBalancerSettings) -> Carried {
    let mut annotations = Map::new();
    let present = service.annotations();
    for (key, value) in &wanted.annotations {
        if present.get(&**key).map(String::as_str) != Some(value) {
            annotations.insert(key.to_string(), json!(value));
        }
    }
    for key in present.keys().filter(|key| !wanted.annotations.contains_key(key.as_str())) {
        if is_only_ours(service, &["f:metadata", "f:annotations", &format!("f:{key}")]) {
            annotations.insert(key.clone(), Value::Null);
        }
    }
    let mut spec = Map::new();
    let ranges: BTreeSet<IpNet> = wanted.source_ranges.iter().copied().collect();
    let has = ranges_of(service);
    if !ranges.is_empty() && has != ranges.iter().map(ToString::to_string).collect() {
        spec.insert("loadBalancerSourceRanges".into(), json!(ranges));
    }
    if ranges.is_empty()
        && !has.is_empty()
        && is_only_ours(service, &["f:spec", "f:loadBalancerSourceRanges"])
    {
        spec.insert("loadBalancerSourceRanges".into(), Value::Null);
    }
    let problem = families(service, wanted, &mut spec);
    let mut patch = Map::new();
    if !annotations.is_empty() {
        patch.insert("metadata".into(), json!({ "annotations": annotations }));
    }
    if !spec.is_empty() {
        patch.insert("spec".into(), Value::Object(spec));
    }
    if patch.is_empty() {
        return Carried { patch: None, problem };
    }
    let mut patch = Value::Object(patch);
    patch["metadata"]["resourceVersion"] = json!(service.resource_version());
    Carried { patch: Some(patch), problem }
}

/// Adds the IP families. The first family of a Service cannot be changed.
fn families(
    service: &core::Service,
    wanted: &LoadBalancerSettings,
    spec: &mut Map<String, Value>,
) -> Option<String> {
    let present = service.spec.as_ref();
    let has = present.and_then(|spec| spec.ip_families.as_deref()).unwrap_or_default();
    if let (Some(first), Some(wanted)) = (has.first(), wanted.ip_families.first())
        && **first != **wanted
    {
        return Some(format!(
            "The Seed asks for the IP family {wanted} first, and a Service cannot change its first, {first}; \
             delete the Service and create it anew, or correct spec.nodeportProxy.ipFamilies"
        ));
    }
    let policy = present.and_then(|spec| spec.ip_family_policy.as_deref()).unwrap_or_default();
    if !wanted.ip_family_policy.is_empty() && *wanted.ip_family_policy != *policy {
        spec.insert("ipFamilyPolicy".into(), json!(wanted.ip_family_policy));
    }
    if !wanted.ip_families.is_empty()
        && !has.iter().map(|family| &**family).eq(wanted.ip_families.iter().map(|family| &**family))
    {
        spec.insert("ipFamilies".into(), json!(wanted.ip_families));
    }
    None
}

/// The source ranges as a set: KKP's operator repeats entries.
fn ranges_of(service: &core::Service) -> BTreeSet<String> {
    let ranges = service.spec.as_ref().and_then(|spec| spec.load_balancer_source_ranges.as_deref());
    ranges.unwrap_or_default().iter().cloned().collect()
}

/// The result of a write, to be recognised at the next pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    ports: BTreeSet<(Box<str>, u16)>,
    annotations: Strings,
    ranges: BTreeSet<String>,
}

impl Left {
    /// The fields that Portico writes, as the Service has them; only those annotations that are in `carried`.
    pub(super) fn of<'a>(service: &core::Service, carried: impl IntoIterator<Item = &'a Box<str>>) -> Self {
        let present = service.annotations();
        let kept =
            carried.into_iter().filter_map(|key| Some((key.clone(), present.get(&**key)?.as_str().into())));
        Self {
            ports: ports_of(service).into_iter().map(|port| (port.name, port.port)).collect(),
            annotations: kept.collect(),
            ranges: ranges_of(service),
        }
    }

    /// Whether the Service still has what was left.
    pub(super) fn is_in(&self, service: &core::Service) -> bool {
        Self::of(service, self.annotations.keys()) == *self
    }
}

/// The manager, other than Portico, that wrote the ports or the settings last.
pub(super) fn other_writer(service: &core::Service) -> String {
    let fields = [
        &["f:spec", "f:ports"][..],
        &["f:spec", "f:loadBalancerSourceRanges"],
        &["f:metadata", "f:annotations"],
    ];
    let others = service.managed_fields().iter().filter(|entry| !is_ours(entry));
    let wrote = others.filter(|entry| fields.iter().any(|path| owns(entry, path)));
    let newest = wrote.max_by_key(|entry| entry.time.as_ref().map(|time| time.0));
    let name = newest.and_then(|entry| entry.manager.as_deref()).filter(|name| !name.is_empty());
    name.map_or_else(|| "a client that managedFields does not name".to_owned(), |name| format!("{name:?}"))
}

/// Whether Portico wrote this field and no other manager did.
fn is_only_ours(service: &core::Service, path: &[&str]) -> bool {
    let (ours, others): (Vec<_>, Vec<_>) =
        service.managed_fields().iter().filter(|entry| owns(entry, path)).partition(|entry| is_ours(entry));
    !ours.is_empty() && others.is_empty()
}

fn is_ours(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(FIELD_MANAGER)
}

fn owns(entry: &ManagedFieldsEntry, path: &[&str]) -> bool {
    let fields = entry.fields_v1.as_ref().map(|fields| &fields.0);
    path.iter().try_fold(fields, |fields, name| Some(fields?.get(name))).flatten().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Service with these fields, each with the manager that wrote it.
    fn service(annotations: Value, ranges: Value, managers: &[(&str, Value)]) -> core::Service {
        let managers: Vec<_> = managers
            .iter()
            .map(|(manager, fields)| {
                json!({"manager": manager, "operation": "Update", "time": "2026-01-01T00:00:00Z",
                    "fieldsV1": fields})
            })
            .collect();
        serde_json::from_value(json!({
            "metadata": {"name": "front", "resourceVersion": "7", "annotations": annotations,
                "managedFields": managers},
            "spec": {"loadBalancerSourceRanges": ranges, "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack"},
        }))
        .unwrap()
    }

    fn wanted(annotations: &[(&str, &str)], ranges: &[&str]) -> LoadBalancerSettings {
        LoadBalancerSettings {
            annotations: annotations.iter().map(|&(key, value)| (key.into(), value.into())).collect(),
            source_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            ..LoadBalancerSettings::default()
        }
    }

    fn patch(service: &core::Service, wanted: &LoadBalancerSettings) -> Option<Value> {
        settings_patch(service, wanted).patch
    }

    #[test]
    fn what_differs_is_written_and_nothing_else() {
        let service = service(json!({"a": "1", "other": "x"}), json!(["203.0.113.0/24"]), &[]);
        assert_eq!(patch(&service, &wanted(&[("a", "1")], &["203.0.113.0/24"])), None);
        assert_eq!(
            patch(&service, &wanted(&[("a", "2"), ("b", "3")], &["198.51.100.0/24", "203.0.113.0/24"])),
            Some(json!({
                "metadata": {"annotations": {"a": "2", "b": "3"}, "resourceVersion": "7"},
                "spec": {"loadBalancerSourceRanges": ["198.51.100.0/24", "203.0.113.0/24"]},
            }))
        );
    }

    #[test]
    fn entries_that_the_operator_of_kkp_repeats_are_no_difference() {
        let service = service(json!({}), json!(["203.0.113.0/24", "203.0.113.0/24"]), &[]);
        assert_eq!(patch(&service, &wanted(&[], &["203.0.113.0/24"])), None);
    }

    #[test]
    fn what_left_the_seed_goes_and_what_others_wrote_stays() {
        let ours = json!({"f:metadata": {"f:annotations": {"f:a": {}, "f:shared": {}}},
            "f:spec": {"f:loadBalancerSourceRanges": {}}});
        let theirs = json!({"f:metadata": {"f:annotations": {"f:shared": {}, "f:theirs": {}}}});
        let service = service(
            json!({"a": "1", "shared": "2", "theirs": "3", "nobody": "4"}),
            json!(["203.0.113.0/24"]),
            &[(FIELD_MANAGER, ours), ("kubectl", theirs)],
        );
        assert_eq!(
            patch(&service, &wanted(&[], &[])),
            Some(json!({
                "metadata": {"annotations": {"a": null}, "resourceVersion": "7"},
                "spec": {"loadBalancerSourceRanges": null},
            }))
        );
    }

    #[test]
    fn ranges_that_a_person_wrote_stay_while_the_seed_has_none() {
        let theirs = json!({"f:spec": {"f:loadBalancerSourceRanges": {}}});
        let service = service(json!({}), json!(["203.0.113.0/24"]), &[("kubectl-edit", theirs)]);
        assert_eq!(patch(&service, &wanted(&[], &[])), None);
    }

    #[test]
    fn families_are_carried_but_for_a_first_one_that_differs() {
        let service = service(json!({}), json!([]), &[]);
        let mut dual = wanted(&[], &[]);
        dual.ip_family_policy = "PreferDualStack".into();
        dual.ip_families = vec!["IPv4".into(), "IPv6".into()];
        assert_eq!(
            patch(&service, &dual).unwrap()["spec"],
            json!({"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv4", "IPv6"]})
        );
        dual.ip_families.reverse();
        let carried = settings_patch(&service, &dual);
        assert_eq!(carried.patch, None);
        assert!(carried.problem.unwrap().contains("create it anew"));
    }

    #[test]
    fn the_newest_other_writer_of_the_ports_is_named() {
        let ports = json!({"f:spec": {"f:ports": {}}});
        let status = json!({"f:status": {"f:loadBalancer": {}}});
        let managers = [(FIELD_MANAGER, ports.clone()), ("lb-updater", ports), ("cloud", status)];
        assert_eq!(other_writer(&service(json!({}), json!([]), &managers)), "\"lb-updater\"");
        let unnamed = other_writer(&service(json!({}), json!([]), &managers[..1]));
        assert!(unnamed.contains("does not name"), "{unnamed}");
    }
}
