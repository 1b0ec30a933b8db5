//! Health of the programs of a control plane, from its workloads and pods. Pure.

use portico_api::hosting::Layout;
use portico_api::text::one_line;
use serde_json::{Map, Value, json};

/// The program whose readiness is that of the cluster.
pub(super) const API_SERVER: &str = "apiserver";

/// KKP's name of the Prometheus of a cluster, which only some have.
const MONITORING: &str = "monitoring";

/// Most characters of what a kubelet or a scheduler says that get into a message.
const QUOTED: usize = 300;

/// The remedy for an image that a node does not get.
const IMAGE_REMEDY: &str = ", see the Events of its pod, and the operator's --registry-mirror, \
                            --image-pull-secret and --image";

/// The remedy for a volume that nobody makes.
const VOLUME_REMEDY: &str = ", its storage class is that of spec.componentsOverride.etcd.storageClass, else \
                             the operator's --storage-class, else the seed's default";

/// One program of a control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Component {
    /// The name of its containers.
    pub(super) name: String,
    pub(super) wanted: usize,
    pub(super) ready: usize,
    /// Why one of them is not ready, if its node or the scheduler says so.
    trouble: Option<String>,
}

/// Health of a control plane.
pub(super) struct Health {
    pub(super) layout: Layout,
    pub(super) components: Vec<Component>,
    /// Whether all of them are as the plan wants them by now; unknown where a pass ended before its plan.
    pub(super) rolled_out: Option<bool>,
}

/// Whether all pods of a workload are ready, and made of what it says now.
pub(super) fn is_rolled_out(workload: &Value) -> bool {
    let status = &workload["status"];
    let wanted = workload["spec"]["replicas"].as_u64().unwrap_or(1);
    let all = |field: &str| status[field].as_u64() == Some(wanted);
    status["observedGeneration"] == workload["metadata"]["generation"]
        && ["replicas", "updatedReplicas", "readyReplicas"].into_iter().all(all)
}

/// The programs of these workloads, in their order.
pub(super) fn components<'a>(workloads: impl Iterator<Item = &'a Value>, pods: &[Value]) -> Vec<Component> {
    let mut found: Vec<Component> = Vec::new();
    for workload in workloads {
        let wanted =
            usize::try_from(workload["spec"]["replicas"].as_u64().unwrap_or(1)).unwrap_or(usize::MAX);
        let pod = &workload["spec"]["template"];
        let app = &pod["metadata"]["labels"]["app"];
        let own: Vec<&Value> = pods.iter().filter(|pod| pod["metadata"]["labels"]["app"] == *app).collect();
        let (sidecars, before): (Vec<&Value>, Vec<&Value>) =
            listed(pod, "initContainers").partition(|container| container["restartPolicy"] == "Always");
        let before: Vec<&str> = before.iter().filter_map(|container| container["name"].as_str()).collect();
        for container in sidecars.into_iter().chain(listed(pod, "containers")) {
            let name = container["name"].as_str().unwrap_or_default();
            found.push(component(name, wanted, &own, &before));
        }
    }
    found
}

fn listed<'a>(pod: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    pod["spec"][field].as_array().into_iter().flatten()
}

/// One program. A container that runs to its end `before` all others keeps each of them from starting.
fn component(name: &str, wanted: usize, pods: &[&Value], before: &[&str]) -> Component {
    let mut component = Component { name: name.to_owned(), wanted, ready: 0, trouble: None };
    for pod in pods {
        let ends = pod["metadata"]["deletionTimestamp"].is_string();
        let status = container_status(pod, name);
        if !ends && status.is_some_and(|status| status["ready"] == true) {
            component.ready += 1;
        } else if component.trouble.is_none() {
            let mut before = before.iter().filter_map(|name| container_status(pod, name));
            let earlier = || before.find(|status| status["ready"] != true).and_then(trouble);
            component.trouble = status.and_then(trouble).or_else(earlier).or_else(|| unscheduled(pod));
        }
    }
    component
}

fn container_status<'a>(pod: &'a Value, name: &str) -> Option<&'a Value> {
    let all = ["initContainerStatuses", "containerStatuses"].map(|field| pod["status"][field].as_array());
    all.into_iter().flatten().flatten().find(|status| status["name"] == name)
}

/// The node's report about a container that is not ready. Times and numbers that change by themselves are
/// left out: the text must be the same at the next look.
fn trouble(status: &Value) -> Option<String> {
    let waiting = &status["state"]["waiting"];
    match waiting["reason"].as_str() {
        // Normal at the beginning. A program that crashes again and again waits and runs by turns.
        Some("PodInitializing" | "ContainerCreating" | "CrashLoopBackOff") | None => {
            ended(&status["lastState"]["terminated"])
        }
        // An attempt and the pause after it come by turns, and the kubelet quotes ports of its connections.
        Some("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName") => {
            let image = one_line(status["image"].as_str().unwrap_or_default(), QUOTED);
            Some(format!("its node does not get the image {image:?}{IMAGE_REMEDY}"))
        }
        Some(reason) => {
            let message = waiting["message"].as_str().map(|words| format!(" ({})", one_line(words, QUOTED)));
            Some(format!("{reason}{}", message.unwrap_or_default()))
        }
    }
}

/// How a program ended the last time.
fn ended(last: &Value) -> Option<String> {
    let code = last["exitCode"].as_i64()?;
    let words = last["message"].as_str().map(|words| format!(" ({})", one_line(words, QUOTED)));
    let why = words.unwrap_or_else(|| "; its log says why".to_owned());
    Some(format!("it ended with exit code {code}{why}"))
}

/// Why no node takes a pod.
fn unscheduled(pod: &Value) -> Option<String> {
    let conditions = pod["status"]["conditions"].as_array()?;
    let scheduled = conditions.iter().find(|condition| condition["type"] == "PodScheduled")?;
    let message = scheduled["message"].as_str().filter(|_| scheduled["status"] == "False")?;
    let remedy = if message.contains("PersistentVolumeClaim") { VOLUME_REMEDY } else { "" };
    Some(format!("no node takes it ({}){remedy}", one_line(message, QUOTED)))
}

/// Whether clients are served: one API server at least is ready.
pub(super) fn serves(components: &[Component]) -> bool {
    components.iter().any(|component| component.name == API_SERVER && component.ready > 0)
}

/// Whether everything runs.
pub(super) fn is_whole(components: &[Component]) -> bool {
    components.iter().all(|component| component.ready >= component.wanted)
}

/// What is not as it should be, in words. Programs that wait for one thing, as those of one pod do, are
/// named together.
pub(super) fn text(components: &[Component]) -> String {
    let missing: Vec<&Component> =
        components.iter().filter(|component| component.ready < component.wanted).collect();
    let together = |one: &&Component, next: &&Component| {
        let same = one.ready == next.ready && one.wanted == next.wanted && one.trouble == next.trouble;
        same && one.trouble.is_some()
    };
    let texts: Vec<String> = missing
        .chunk_by(together)
        .map(|group| {
            let names: Vec<&str> = group.iter().map(|component| &*component.name).collect();
            let Component { wanted, ready, trouble, .. } = group[0];
            let trouble = trouble.as_ref().map(|trouble| format!(": {trouble}")).unwrap_or_default();
            format!("{} {ready} of {wanted}{trouble}", names.join(", "))
        })
        .collect();
    texts.join("; ")
}

/// `status.extendedHealth` of a Cluster, with KKP's names and values: `was_up` once it has served. A part
/// that a cluster may have or not is null where it has not.
pub(super) fn extended(components: &[Component], layout: Layout, was_up: bool) -> Map<String, Value> {
    let mut health = Map::from_iter([(MONITORING.to_owned(), Value::Null)]);
    for Component { name, wanted, ready, .. } in components {
        let key = match name.as_str() {
            "controller-manager" => "controller",
            "konnectivity-server" => "konnectivity",
            portico_hosting::PROMETHEUS => MONITORING,
            other => other,
        };
        let least = if name == "etcd" && layout == Layout::Dedicated { wanted / 2 + 1 } else { 1 };
        let value = match () {
            () if ready >= wanted => "Up",
            () if *ready < least && was_up => "Down",
            () => "Provisioning",
        };
        health.insert(key.to_owned(), json!(format!("HealthStatus{value}")));
    }
    health
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(app: &str, replicas: u64, sidecars: &[&str], programs: &[&str]) -> Value {
        let named = |names: &[&str]| -> Vec<Value> {
            names.iter().map(|name| json!({"name": name, "restartPolicy": "Always"})).collect()
        };
        json!({"spec": {"replicas": replicas, "template": {"metadata": {"labels": {"app": app}},
            "spec": {"initContainers": named(sidecars), "containers": named(programs)}}}})
    }

    fn pod(app: &str, statuses: &Value) -> Value {
        json!({"metadata": {"labels": {"app": app}}, "status": {"containerStatuses": statuses}})
    }

    #[test]
    fn every_program_is_named_by_itself_with_what_its_node_says() {
        let workloads = [workload("apiserver", 1, &["etcd"], &["apiserver", "scheduler"])];
        let mut one = pod(
            "apiserver",
            &json!([
                {"name": "apiserver", "ready": true},
                {"name": "scheduler", "ready": false, "lastState": {"terminated": {"exitCode": 2}},
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}}]),
        );
        one["status"]["initContainerStatuses"] = json!([{"name": "etcd", "ready": false,
            "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no\nsuch Secret"}}}]);
        let found = components(workloads.iter(), &[one]);
        assert!(serves(&found) && !is_whole(&found));
        assert_eq!(
            text(&found),
            "etcd 0 of 1: CreateContainerConfigError (no such Secret); scheduler 0 of 1: it ended with exit \
             code 2; its log says why"
        );
        let health = extended(&found, Layout::Compact, true);
        assert_eq!(health["apiserver"], "HealthStatusUp");
        assert_eq!(health["monitoring"], Value::Null, "it is taken away with its Prometheus");
        assert_eq!(health["etcd"], "HealthStatusDown");
        assert_eq!(extended(&found, Layout::Compact, false)["etcd"], "HealthStatusProvisioning");
    }

    #[test]
    fn a_workload_is_rolled_out_once_all_its_pods_are_new_and_ready() {
        let workload = |generation: u64, replicas: u64, updated: u64, ready: u64| {
            json!({"metadata": {"generation": generation}, "spec": {"replicas": 2},
                "status": {"observedGeneration": 3, "replicas": replicas, "updatedReplicas": updated,
                    "readyReplicas": ready}})
        };
        assert!(is_rolled_out(&workload(3, 2, 2, 2)));
        // Not seen yet; a third one beside two of before; one that does not start.
        for other in [workload(4, 2, 2, 2), workload(3, 3, 1, 2), workload(3, 2, 2, 1)] {
            assert!(!is_rolled_out(&other), "{other}");
        }
        assert!(!is_rolled_out(&json!({"metadata": {"generation": 1}, "spec": {}})));
    }

    #[test]
    fn a_pod_that_no_node_takes_says_why() {
        let workloads = [workload("etcd", 3, &[], &["etcd"])];
        let waiting = json!({"metadata": {"labels": {"app": "etcd"}}, "status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "message": "unbound PersistentVolumeClaims"}]}});
        let found = components(workloads.iter(), &[waiting]);
        let said = "etcd 0 of 3: no node takes it (unbound PersistentVolumeClaims), its storage class is";
        assert!(text(&found).starts_with(said), "{}", text(&found));
        assert!(!serves(&found));
    }

    #[test]
    fn programs_of_one_pod_that_wait_for_one_thing_are_named_together() {
        let workloads = [workload("apiserver", 1, &["etcd"], &["apiserver", "scheduler"])];
        let waiting = json!({"metadata": {"labels": {"app": "apiserver"}}, "status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "message": "too few"}]}});
        let found = components(workloads.iter(), &[waiting]);
        assert_eq!(text(&found), "etcd, apiserver, scheduler 0 of 1: no node takes it (too few)");
        assert_eq!(
            text(&components(workloads.iter(), &[])),
            "etcd 0 of 1; apiserver 0 of 1; scheduler 0 of 1"
        );
    }

    #[test]
    fn what_runs_before_a_program_is_none_itself_and_its_trouble_is_that_of_the_program() {
        let mut etcd = workload("etcd", 1, &[], &["etcd"]);
        etcd["spec"]["template"]["spec"]["initContainers"] = json!([{"name": "etcd-launcher"}]);
        let mut one = pod(
            "etcd",
            &json!([{"name": "etcd", "ready": false,
            "state": {"waiting": {"reason": "PodInitializing"}}}]),
        );
        one["status"]["initContainerStatuses"] = json!([{"name": "etcd-launcher", "ready": false,
            "image": "portico:1", "state": {"waiting": {"reason": "ErrImagePull"}}}]);
        let found = components([&etcd].into_iter(), &[one]);
        let said = text(&found);
        let image = "etcd 0 of 1: its node does not get the image \"portico:1\", see";
        assert!(said.starts_with(image), "{said}");
    }

    #[test]
    fn what_a_node_says_by_turns_has_one_text() {
        let said = |state: Value| {
            let status = json!([{"name": "etcd", "ready": false, "image": "etcd:1", "state": state,
                "lastState": {"terminated": {"exitCode": 2}}}]);
            text(&components([workload("etcd", 1, &[], &["etcd"])].iter(), &[pod("etcd", &status)]))
        };
        let waits =
            |reason: &str, message: &str| said(json!({"waiting": {"reason": reason, "message": message}}));
        let image = waits("ErrImagePull", "dial tcp 192.0.2.7:43210: connection refused");
        assert_eq!(image, waits("ErrImagePull", "dial tcp 192.0.2.7:43212: connection refused"));
        assert_eq!(image, waits("ImagePullBackOff", "Back-off pulling image \"etcd:1\""));
        assert!(image.contains("\"etcd:1\"") && image.contains("--registry-mirror"), "{image}");
        let crashes = waits("CrashLoopBackOff", "back-off 40s restarting failed container");
        assert_eq!(crashes, waits("CrashLoopBackOff", "back-off 1m20s restarting failed container"));
        assert_eq!(crashes, said(json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})));
        assert_eq!(crashes, said(json!({"terminated": {"exitCode": 2}})));
        assert_eq!(crashes, "etcd 0 of 1: it ended with exit code 2; its log says why");
    }

    #[test]
    fn the_last_words_of_a_program_are_quoted() {
        let waiting = json!([{"name": "etcd", "ready": false,
            "lastState": {"terminated": {"exitCode": 1, "message": "restore the volume"}},
            "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]);
        let found = components([workload("etcd", 1, &[], &["etcd"])].iter(), &[pod("etcd", &waiting)]);
        let words = "etcd 0 of 1: it ended with exit code 1 (restore the volume)";
        assert_eq!(text(&found), words);
    }

    #[test]
    fn most_of_etcd_keeps_a_control_plane_from_being_down() {
        let workloads = [workload("etcd", 3, &[], &["etcd"])];
        let ready = || pod("etcd", &json!([{"name": "etcd", "ready": true}]));
        let health = |pods: &[Value]| {
            extended(&components(workloads.iter(), pods), Layout::Dedicated, true)["etcd"].clone()
        };
        assert_eq!(health(&[ready(), ready(), ready()]), "HealthStatusUp");
        assert_eq!(health(&[ready(), ready()]), "HealthStatusProvisioning");
        assert_eq!(health(&[ready()]), "HealthStatusDown");
    }
}
