//! The metrics of control planes that Prometheus gets: where they are, and which of them are kept.
//!
//! A small control plane exposes some twenty thousand series, of which few are ever looked at. `portico
//! metrics` asks each program, by the certificate that the cluster has for it, and passes on what [`Filter`]
//! keeps. Names of jobs and labels are those that KKP's Prometheus has, so that its dashboards and alerts
//! find them.

mod filter;
mod kept;

use std::net::IpAddr;

use portico_api::names::ClusterName;
use serde::Serialize;
use serde_json::Value;

use crate::facts::CLUSTER;
use crate::program::{api_server, controller_manager, etcd, konnectivity, scheduler};

pub use filter::{Filter, TooLong};

/// The Secret in the namespace of a cluster with the kubeconfig for reading its metrics.
pub const SECRET: &str = "prometheus-kubeconfig";

/// The label by which the pods of control planes are found.
pub const PODS: &str = CLUSTER;

/// A program with metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The API server.
    ApiServer,
    /// The controller manager.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// A member of etcd.
    Etcd,
    /// The Konnectivity server.
    Konnectivity,
}

/// How a program serves its metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// To anybody, without TLS.
    Plain,
    /// To clients with the right, over TLS with a certificate of the cluster's authority.
    Verified,
    /// To clients with the right, over TLS with a certificate that the program makes when it starts. Nobody
    /// can know it before.
    OwnCertificate,
}

impl Source {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::ApiServer, Self::ControllerManager, Self::Scheduler, Self::Etcd, Self::Konnectivity];

    /// The name of its container, which is that of the job too.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ApiServer => api_server::NAME,
            Self::ControllerManager => controller_manager::NAME,
            Self::Scheduler => scheduler::NAME,
            Self::Etcd => etcd::NAME,
            Self::Konnectivity => konnectivity::NAME,
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.name() == name)
    }

    /// The name of the port of its container that has the metrics.
    const fn port(self) -> &'static str {
        match self {
            Self::ApiServer => api_server::PORT_NAME,
            Self::ControllerManager => controller_manager::PORT_NAME,
            Self::Scheduler => scheduler::PORT_NAME,
            Self::Etcd => etcd::METRICS_PORT_NAME,
            Self::Konnectivity => konnectivity::HEALTH_PORT_NAME,
        }
    }

    /// How its metrics are had.
    pub const fn access(self) -> Access {
        match self {
            Self::ApiServer => Access::Verified,
            Self::ControllerManager | Self::Scheduler => Access::OwnCertificate,
            Self::Etcd | Self::Konnectivity => Access::Plain,
        }
    }
}

/// The metrics of one program in one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The cluster.
    pub cluster: ClusterName,
    /// The pod, in the namespace of the cluster.
    pub pod: Box<str>,
    /// The program.
    pub source: Source,
    /// The address of the pod.
    pub address: IpAddr,
    /// The port of the metrics.
    pub port: u16,
}

/// Labels of a [`Target`], as KKP's Prometheus has them.
#[derive(Debug, Serialize)]
pub struct Labels<'a> {
    cluster: &'a str,
    namespace: String,
    job: &'static str,
    instance: &'a str,
    pod: &'a str,
}

impl Target {
    /// Its labels.
    pub fn labels(&self) -> Labels<'_> {
        let alone = self.source == Source::Etcd && !self.pod.starts_with(etcd::NAME);
        Labels {
            cluster: self.cluster.as_str(),
            namespace: self.cluster.namespace(),
            job: self.source.name(),
            // By which dashboards find members. In the one pod of `compact` it is the first and only one.
            instance: if alone { etcd::FIRST } else { &self.pod },
            pod: &self.pod,
        }
    }
}

/// The targets in a pod. There are none if it is no pod of a control plane, has no address, or has ended.
pub fn targets(pod: &Value) -> Vec<Target> {
    found(pod).unwrap_or_default()
}

fn found(pod: &Value) -> Option<Vec<Target>> {
    let text = |path: &str| pod.pointer(path).and_then(Value::as_str);
    let cluster = ClusterName::new(pod.pointer("/metadata/labels")?.get(CLUSTER)?.as_str()?);
    // What has the label elsewhere is not ours.
    if text("/metadata/namespace")? != cluster.namespace() {
        return None;
    }
    if matches!(text("/status/phase"), Some("Succeeded" | "Failed")) {
        return None;
    }
    let (name, address) = (text("/metadata/name")?, text("/status/podIP")?.parse().ok()?);
    let list = |path: &str| pod.pointer(path).and_then(Value::as_array).into_iter().flatten();
    let containers = list("/spec/initContainers").chain(list("/spec/containers"));
    let target = |container: &Value| {
        let source = Source::named(container["name"].as_str()?)?;
        let ports = container["ports"].as_array()?;
        let port = ports.iter().find(|port| port["name"] == source.port())?;
        let port = u16::try_from(port["containerPort"].as_u64()?).ok()?;
        Some(Target { cluster: cluster.clone(), pod: name.into(), source, address, port })
    };
    Some(containers.filter_map(target).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> Value {
        json!({
            "metadata": {"name": "control-plane-0", "namespace": "cluster-a", "labels": {"cluster": "a"}},
            "spec": {
                "initContainers": [
                    {"name": "etcd", "ports": [{"name": "etcd-metrics", "containerPort": 2_378}]},
                    {"name": "etcd-launcher"},
                ],
                "containers": [
                    {"name": "scheduler", "ports": [{"name": "scheduler", "containerPort": 10_259}]},
                    {"name": "a-friend", "ports": [{"name": "scheduler", "containerPort": 1}]},
                ],
            },
            "status": {"podIP": "10.0.0.7", "phase": "Running"},
        })
    }

    #[test]
    fn each_program_of_a_pod_is_a_target_with_the_labels_that_dashboards_know() {
        let targets = targets(&pod());
        let labels: Vec<Value> =
            targets.iter().map(|target| serde_json::to_value(target.labels()).unwrap()).collect();
        let label = |job: &str, instance: &str| {
            json!({"cluster": "a", "namespace": "cluster-a", "job": job, "instance": instance,
                "pod": "control-plane-0"})
        };
        assert_eq!(labels, [label("etcd", "etcd-0"), label("scheduler", "control-plane-0")]);
        assert_eq!(targets.iter().map(|target| target.port).collect::<Vec<_>>(), [2_378, 10_259]);
    }

    #[test]
    fn what_is_no_pod_of_a_control_plane_or_cannot_answer_is_no_target() {
        for (path, value) in [
            ("/metadata/namespace", json!("default")),
            ("/metadata/labels/cluster", json!("b")),
            ("/status/podIP", json!("")),
            ("/status/phase", json!("Failed")),
            ("/metadata/labels", json!(7)),
        ] {
            let mut pod = pod();
            *pod.pointer_mut(path).unwrap() = value;
            assert_eq!(targets(&pod), [], "{path}");
        }
    }
}
