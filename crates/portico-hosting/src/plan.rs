//! A Cluster to the objects of its control plane.

use portico_api::cluster::HostingSpec;
use portico_api::hosting::{AntiAffinity, Layout};
use portico_api::problem::Problem;
use portico_expose::exposure::{CLUSTER_LABEL, MANAGED_BY, namespace, owner};
use portico_expose::inputs::Scope;
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::{self, Configs, Files};
use crate::facts::{CLUSTER, Digests, Facts};
use crate::network_policy;
use crate::pki::{self, SecretUse};
use crate::pod::{Placement, template};
use crate::program::{Program, api_server, controller_manager, etcd, konnectivity, prometheus, scheduler};
use crate::settings::Settings;
use crate::validate::validate;

/// The workload of `compact`.
const COMPACT: &str = "control-plane";

/// Size of a volume of etcd where a Cluster does not say, as in KKP.
const DISK: &str = "5Gi";

/// The volume of a member of etcd. Under either layout it has the name that a StatefulSet gives to it.
pub fn claim_name(member: u16) -> String {
    format!("{}-{}-{member}", etcd::VOLUME, etcd::NAME)
}

/// Whether a pod of this name has a member of etcd.
pub fn has_etcd(pod: &str) -> bool {
    pod.rsplit_once('-').is_some_and(|(set, _)| set == COMPACT || set == etcd::NAME)
}

/// The control plane of one cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ControlPlane {
    /// The cluster.
    pub cluster: String,
    /// Its version of Kubernetes.
    pub version: String,
    /// Its layout.
    pub layout: &'static str,
    /// Every object, whole, in the order in which they are made. Secrets are not among them.
    pub objects: Vec<Value>,
    /// The Secrets that its pods need, or that are made for users.
    pub secrets: Vec<SecretUse>,
    /// What is void in its Cluster.
    #[serde(skip)]
    pub warnings: Vec<Problem>,
}

/// The control plane of the Cluster of `scope`, which is that of [`portico_expose::validate::usable`]. Its
/// expose strategy changes nothing here.
///
/// # Errors
/// Everything wrong with the Cluster, if it must not be used as written. What exists must stay then.
pub fn plan(scope: &Scope<'_>, settings: &Settings, digests: &Digests) -> Result<ControlPlane, Vec<Problem>> {
    let verdict = validate(scope, settings);
    if verdict.refused {
        return Err(verdict.problems);
    }
    let written = HostingSpec::default();
    let hosting = scope.cluster.spec.hosting.as_deref().unwrap_or(&written);
    // Validation has refused a Cluster without either.
    let facts = configs(scope, hosting, settings)
        .and_then(|configs| Facts::of(*scope, hosting, settings, digests, configs));
    let Some(facts) = facts else { return Err(verdict.problems) };
    let mut objects = facts.foundation();
    match facts.layout {
        Layout::Compact => objects.extend(facts.compact()),
        Layout::Dedicated => objects.extend(facts.dedicated()),
    }
    if prometheus::is_asked_for(scope.cluster) {
        objects.extend(facts.prometheus());
    }
    Ok(ControlPlane {
        cluster: scope.cluster.metadata.name.to_string(),
        version: facts.version.to_string(),
        layout: facts.layout.name(),
        objects,
        secrets: facts.secrets(),
        warnings: verdict.problems,
    })
}

/// Every ConfigMap. `None` for a Cluster that names no version.
fn configs(scope: &Scope<'_>, hosting: &HostingSpec, settings: &Settings) -> Option<Configs> {
    let cluster = scope.cluster;
    let mut configs = config::maps(hosting, *hosting.version.get()?);
    let initialized = cluster.has_held_data().to_string();
    configs.push((etcd::CONFIG, Files::from([(etcd::INITIALIZED, initialized)])));
    if prometheus::is_asked_for(cluster) {
        let (name, seed) = (&cluster.metadata.name, &scope.seed.metadata.name);
        configs.push(prometheus::config(name, seed, &settings.metrics_url));
    }
    Some(configs)
}

impl Facts<'_> {
    /// Namespace, configuration and policies: there before the first pod.
    fn foundation(&self) -> Vec<Value> {
        let cluster = self.scope.cluster;
        let mut namespace = namespace(&cluster.clone().begun()).fields;
        namespace["apiVersion"] = json!("v1");
        namespace["kind"] = json!("Namespace");
        if cluster.metadata.uid.is_empty()
            && let Some(meta) = namespace["metadata"].as_object_mut()
        {
            meta.remove("ownerReferences");
        }
        let mut objects = vec![namespace];
        for (name, files) in &self.configs {
            objects.push(with(self.object("v1", "ConfigMap", name), "data", json!(files)));
        }
        for (name, spec) in network_policy::policies(self) {
            objects.push(with(self.object("networking.k8s.io/v1", "NetworkPolicy", name), "spec", spec));
        }
        objects
    }

    /// One pod, and its volume. The volume and the member of etcd have the names of the first ones of the
    /// other layout.
    fn compact(&self) -> Vec<Value> {
        let claim = with(self.object("v1", "PersistentVolumeClaim", &claim_name(0)), "spec", self.claim());
        let name = COMPACT;
        let sidecars = [etcd::program(self), konnectivity::program(self), api_server::program(self)];
        let programs = [controller_manager::program(self), scheduler::program(self)];
        let volumes = vec![
            json!({"name": etcd::VOLUME,
                "persistentVolumeClaim": {"claimName": claim_name(0)}}),
            socket_volume(),
            launcher_volume(),
        ];
        let etcd = self.scope.cluster.spec.components_override.etcd.as_deref();
        // etcd alone decides where the pod runs: it has the volume.
        let placement = Placement {
            tolerations: etcd.map_or(&[], |etcd| &etcd.tolerations),
            node_selector: etcd.map(|etcd| &etcd.node_selector),
            host: None,
            zone: None,
        };
        // The Services lead to pods with the name of the API server.
        let app = api_server::NAME;
        let template =
            template(self, app, (Some(etcd::launcher(self)), &sidecars, &programs), &placement, volumes);
        // A StatefulSet, because two pods must never have the volume: not even while a node is silent.
        let set = self.workload(
            "StatefulSet",
            name,
            app,
            json!({"replicas": 1, "serviceName": name, "podManagementPolicy": "Parallel"}),
            template,
        );
        vec![claim, set]
    }

    fn dedicated(&self) -> Vec<Value> {
        let mut objects = vec![self.etcd_service()];
        if self.members > 1 {
            objects.push(self.budget(etcd::NAME, json!({"minAvailable": self.members / 2 + 1})));
        }
        // A replica that is not ready serves nobody, and must not keep its node from being drained. A member
        // of etcd counts all the same: it may be the one that has the data.
        let budget = json!({"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"});
        objects.push(self.budget(api_server::NAME, budget));
        objects.push(self.etcd_set());
        objects.push(self.api_servers());
        objects.push(self.deployment(controller_manager::program(self)));
        objects.push(self.deployment(scheduler::program(self)));
        objects
    }

    /// A Deployment, since nothing of it stays: two for a moment do no harm.
    fn prometheus(&self) -> [Value; 2] {
        let mut service = self.object("v1", "Service", prometheus::NAME);
        service["metadata"]["labels"][CLUSTER] = json!(prometheus::FEDERATED);
        let placement = Placement { tolerations: &[], node_selector: None, host: None, zone: None };
        let (name, programs) = (prometheus::NAME, [prometheus::program(self)]);
        let template = template(self, name, (None, &[], &programs), &placement, vec![prometheus::volume()]);
        let spec = rolling(1, &placement);
        [
            with(service, "spec", prometheus::service(self)),
            self.workload("Deployment", name, name, spec, template),
        ]
    }

    /// The names of the members, also of those that are not ready: they look for each other.
    fn etcd_service(&self) -> Value {
        let spec = json!({
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": {"app": etcd::NAME, CLUSTER: self.scope.cluster.metadata.name},
            "ports": [
                {"name": "client", "port": etcd::CLIENT_PORT, "targetPort": etcd::CLIENT_PORT},
                {"name": "peer", "port": etcd::PEER_PORT, "targetPort": etcd::PEER_PORT},
            ],
        });
        with(self.object("v1", "Service", etcd::NAME), "spec", spec)
    }

    fn etcd_set(&self) -> Value {
        let written = self.scope.cluster.spec.components_override.etcd.clone().unwrap_or_default();
        let mut placement =
            Placement::of(&written.tolerations, &written.host_anti_affinity, &written.zone_anti_affinity);
        placement.node_selector = Some(&written.node_selector);
        let template = template(
            self,
            etcd::NAME,
            (Some(etcd::launcher(self)), &[], &[etcd::program(self)]),
            &placement,
            vec![launcher_volume()],
        );
        let claim = json!({
            "metadata": {"name": etcd::VOLUME, "labels": self.labels()},
            "spec": self.claim(),
        });
        // All at once: the first members wait for the others.
        let spec = json!({
            "replicas": self.members,
            "serviceName": etcd::NAME,
            "podManagementPolicy": "Parallel",
            "volumeClaimTemplates": [claim],
        });
        self.workload("StatefulSet", etcd::NAME, etcd::NAME, spec, template)
    }

    fn api_servers(&self) -> Value {
        let settings = self.scope.cluster.spec.components_override.apiserver.pods.clone().unwrap_or_default();
        let placement =
            Placement::of(&settings.tolerations, &settings.host_anti_affinity, &settings.zone_anti_affinity);
        let (sidecars, programs) = ([konnectivity::program(self)], [api_server::program(self)]);
        let volumes = vec![socket_volume()];
        let template = template(self, api_server::NAME, (None, &sidecars, &programs), &placement, volumes);
        let spec = rolling(self.api_servers, &placement);
        self.workload("Deployment", api_server::NAME, api_server::NAME, spec, template)
    }

    /// Controller manager or scheduler.
    fn deployment(&self, program: Program) -> Value {
        let components = &self.scope.cluster.spec.components_override;
        let settings = match program.name {
            scheduler::NAME => components.scheduler.clone(),
            _ => components.controller_manager.clone(),
        };
        let settings = settings.unwrap_or_default();
        let placement =
            Placement::of(&settings.tolerations, &settings.host_anti_affinity, &settings.zone_anti_affinity);
        let name = program.name;
        let template = template(self, name, (None, &[], &[program]), &placement, Vec::new());
        let spec = rolling(settings.replicas.get().copied().unwrap_or(1), &placement);
        self.workload("Deployment", name, name, spec, template)
    }

    fn workload(&self, kind: &str, name: &str, app: &str, mut spec: Value, template: Value) -> Value {
        let cluster = &self.scope.cluster.metadata.name;
        spec["revisionHistoryLimit"] = json!(2);
        spec["selector"] = json!({"matchLabels": {"app": app, CLUSTER: cluster}});
        spec["template"] = template;
        let mut object = self.object("apps/v1", kind, name);
        object["metadata"]["labels"]["app"] = json!(app);
        with(object, "spec", spec)
    }

    fn budget(&self, app: &str, mut spec: Value) -> Value {
        spec["selector"] = json!({"matchLabels": {"app": app, CLUSTER: self.scope.cluster.metadata.name}});
        with(self.object("policy/v1", "PodDisruptionBudget", app), "spec", spec)
    }

    /// The volume of a member of etcd.
    fn claim(&self) -> Value {
        let etcd = self.scope.cluster.spec.components_override.etcd.as_deref();
        let size = etcd.map(|etcd| &etcd.disk_size).filter(|size| !size.is_null());
        let size = size
            .map_or_else(|| DISK.to_owned(), |size| size.as_str().map_or(size.to_string(), str::to_owned));
        let mut claim =
            json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}});
        let own = etcd.map(|etcd| &*etcd.storage_class).filter(|class| !class.is_empty());
        if let Some(class) = own.or(self.settings.storage_class.as_deref()) {
            claim["storageClassName"] = json!(class);
        }
        claim
    }

    fn labels(&self) -> Value {
        let cluster = &self.scope.cluster.metadata.name;
        json!({CLUSTER: cluster, CLUSTER_LABEL: cluster, MANAGED_BY.0: MANAGED_BY.1})
    }

    /// An object of this cluster, which ends with the Cluster.
    fn object(&self, api_version: &str, kind: &str, name: &str) -> Value {
        let cluster = self.scope.cluster;
        let mut metadata = json!({"name": name, "namespace": self.namespace, "labels": self.labels()});
        // One from a file has no identity yet.
        if !cluster.metadata.uid.is_empty() {
            metadata["ownerReferences"] = json!([owner(cluster)]);
        }
        json!({"apiVersion": api_version, "kind": kind, "metadata": metadata})
    }

    /// The Secrets that Portico makes, and those that the Cluster and the settings name.
    fn secrets(&self) -> Vec<SecretUse> {
        let mut secrets = pki::secrets();
        let named = &self.hosting.authentication_configuration;
        if !named.secret_name.is_empty() {
            secrets.push(SecretUse {
                name: named.secret_name.to_string(),
                keys: vec![named.secret_key.to_string()],
                holds: "AuthenticationConfiguration; to be there before, Portico does not make it".to_owned(),
            });
        }
        for name in &self.settings.pull_secrets {
            secrets.push(SecretUse {
                name: name.clone(),
                keys: vec![".dockerconfigjson".to_owned()],
                holds: "credentials of a registry, copied from the namespace of the operator".to_owned(),
            });
        }
        secrets
    }
}

fn with(mut object: Value, field: &str, value: Value) -> Value {
    object[field] = value;
    object
}

/// Where API server and Konnectivity server meet.
fn socket_volume() -> Value {
    json!({"name": konnectivity::SOCKET_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
}

/// The program that starts etcd.
fn launcher_volume() -> Value {
    json!({"name": etcd::LAUNCHER_VOLUME, "emptyDir": {}})
}

/// Replicas, and how they are replaced: one comes before one goes, unless there may be no room for it.
fn rolling(replicas: u16, placement: &Placement<'_>) -> Value {
    let required = Some(AntiAffinity::Required);
    let crowded = replicas > 1 && (placement.host == required || placement.zone == required);
    let (surge, unavailable) = if crowded { (0, 1) } else { (1, 0) };
    let rolling = json!({"maxSurge": surge, "maxUnavailable": unavailable});
    json!({"replicas": replicas, "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling}})
}
