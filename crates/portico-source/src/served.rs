//! Objects as a Kubernetes API serves them, in the form that `kube` can list and watch.
//!
//! `kube` needs an object with its own `ObjectMeta`. A [`Served`] has one with name, namespace,
//! resourceVersion and generation only, beside the compact object that the rest of Portico works with.
//! Managed fields and status are dropped before the next object of a page is read. An object that does not
//! fit its kind is a value too: it must not fail the list of ten thousand others.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::net::IpAddr;

use kube::Resource;
use kube::api::{DynamicObject, ObjectMeta};
use portico_api::cluster::{Cluster, ClusterCondition, ClusterStatus};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::{Kind, ObjectKey, ObjectMeta as Metadata, ObjectRef};
use portico_api::seed::Seed;
use portico_api::service::Service;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::object::{InvalidObject, Object};

/// A kind as an API server names it.
pub trait ServedKind: Send + Sync + 'static {
    /// The kind.
    const KIND: Kind;
    /// The API group; empty for the core group.
    const GROUP: &'static str;
    /// The version of the group.
    const VERSION: &'static str;
    /// The name in URLs and in discovery.
    const PLURAL: &'static str;
}

macro_rules! served {
    ($($kind:ident, $group:literal, $version:literal, $plural:literal;)+) => {
        $(impl ServedKind for $kind {
            const KIND: Kind = Kind::$kind;
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
            const PLURAL: &'static str = $plural;
        })+
    };
}

served! {
    Service, "", "v1", "services";
    EndpointSlice, "discovery.k8s.io", "v1", "endpointslices";
    KubermaticConfiguration, "kubermatic.k8c.io", "v1", "kubermaticconfigurations";
    Seed, "kubermatic.k8c.io", "v1", "seeds";
    Cluster, "kubermatic.k8c.io", "v1", "clusters";
    ExposedCluster, "portico.k8c.io", "v1alpha1", "exposedclusters";
}

/// An object of kind `K` from an API server.
pub struct Served<K> {
    meta: ObjectMeta,
    /// Kind, namespace and name.
    pub reference: ObjectRef,
    /// The object, or why it cannot be read.
    pub object: Result<Object, InvalidObject>,
    /// Where it cannot be read; there `object` may be put back to what was read last.
    pub unread: Option<Box<Unread>>,
    kind: PhantomData<K>,
}

/// The facts about an object that cannot be read. They suffice to let it go once it is deleted, and to let
/// nobody use its ClusterIPs.
#[derive(Debug, Clone)]
pub struct Unread {
    /// Why.
    pub why: InvalidObject,
    /// Name, UID, finalizers, and the time of its deletion.
    pub metadata: Metadata,
    /// Of a Service.
    pub cluster_ips: Vec<IpAddr>,
    /// Of a Cluster.
    status: Value,
}

impl Unread {
    /// Takes over what can be read of the status of a Cluster. Controllers compare with it what they are
    /// about to write: with an older one they would write it again and again.
    pub fn read_status(&self, status: &mut ClusterStatus) {
        let now = &self.status;
        read_part(&now["address"], &mut status.address);
        read_part(&now["namespaceName"], &mut status.namespace_name);
        read_part(&now["extendedHealth"], &mut status.extended_health);
        read_part(&now["phase"], &mut status.phase);
        status.conditions.retain(|name, _| now["conditions"].get(&**name).is_some());
        for (name, condition) in now["conditions"].as_object().into_iter().flatten() {
            if let Ok(condition) = ClusterCondition::deserialize(condition) {
                status.conditions.insert(name.as_str().into(), condition);
            }
        }
    }
}

/// Replaces `part`, if it can be read or is gone.
fn read_part<T: DeserializeOwned + Default>(value: &Value, part: &mut T) {
    if value.is_null() {
        *part = T::default();
    } else if let Ok(read) = T::deserialize(value) {
        *part = read;
    }
}

impl<K> Served<K> {
    /// Where the object cannot be read, puts back what was read `last`, less the metadata that must be known
    /// of it, and the status of a Cluster. Another object of the same name is no earlier version of this one.
    pub fn keep_last_read(&mut self, last: Option<&Self>) {
        let Some(unread) = &self.unread else { return };
        let Some(Ok(last)) = last.map(|last| &last.object) else { return };
        if last.metadata().uid == unread.metadata.uid {
            let mut kept = last.clone();
            let metadata = kept.metadata_mut();
            metadata.finalizers = unread.metadata.finalizers.clone();
            metadata.deletion_timestamp = unread.metadata.deletion_timestamp;
            if let Object::Cluster(cluster) = &mut kept {
                unread.read_status(&mut cluster.status);
            }
            self.object = Ok(kept);
        }
    }
}

impl<'de, K: ServedKind> Deserialize<'de> for Served<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let field = |name: &str| value.pointer(name).and_then(Value::as_str);
        let meta = ObjectMeta {
            name: field("/metadata/name").map(str::to_owned),
            namespace: field("/metadata/namespace").map(str::to_owned),
            resource_version: field("/metadata/resourceVersion").map(str::to_owned),
            generation: value.pointer("/metadata/generation").and_then(Value::as_i64),
            ..ObjectMeta::default()
        };
        let key = ObjectKey::new(
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        );
        let reference = ObjectRef { kind: K::KIND, key };
        let known = ["name", "uid", "finalizers", "deletionTimestamp"];
        let known = known.map(|name| Some((name.to_owned(), value["metadata"].get(name)?.clone())));
        let cluster_ips = cluster_ips(&value);
        let status = if K::KIND == Kind::Cluster { value["status"].clone() } else { Value::Null };
        let object = Object::from_value(K::KIND, value);
        let unread = object.as_ref().err().map(|why| {
            let metadata = Value::Object(known.into_iter().flatten().collect());
            // An API server has no object with other metadata.
            let metadata = serde_json::from_value(metadata).unwrap_or_default();
            Box::new(Unread { why: why.clone(), metadata, cluster_ips, status })
        });
        Ok(Self { meta, reference, object, unread, kind: PhantomData })
    }
}

/// Those of a Service that need not be readable. Other kinds have none.
fn cluster_ips(object: &Value) -> Vec<IpAddr> {
    let spec = &object["spec"];
    let all = spec["clusterIPs"].as_array().into_iter().flatten().chain([&spec["clusterIP"]]);
    all.filter_map(|ip| ip.as_str()?.parse().ok()).collect()
}

// Written out, because derive would require `K: Clone`.
impl<K> Clone for Served<K> {
    fn clone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            reference: self.reference.clone(),
            object: self.object.clone(),
            unread: self.unread.clone(),
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
        K::VERSION.into()
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
    use std::collections::BTreeSet;

    use portico_api::cluster::Address;
    use portico_api::exposed_cluster::{ExposedClusterSpec, Migration, MigrationState, SecondDoor, Tunnel};
    use portico_api::policy::{Budget, Percent};
    use portico_api::strategy::ExposeStrategy;
    use serde_json::{Map, json};

    use super::*;
    use portico_yaml::Documents;

    #[test]
    fn an_object_that_does_not_fit_its_kind_fails_alone() {
        let list = json!([
            {
                "metadata": {"name": "a", "namespace": "n", "resourceVersion": "7"},
                "spec": {"ports": [{"port": 443}]},
            },
            {
                "metadata": {"name": "b", "namespace": "n", "resourceVersion": "8", "finalizers": ["x"]},
                "spec": {"ports": "none", "clusterIP": "192.0.2.1"},
            },
        ]);
        let list: Vec<Served<Service>> = serde_json::from_value(list).unwrap();
        assert_eq!(list[0].object.as_ref().unwrap().reference(), list[0].reference);
        assert_eq!(list[0].meta().resource_version.as_deref(), Some("7"));
        assert_eq!(list[1].reference.to_string(), "Service n/b");
        assert_eq!(list[1].object.as_ref().unwrap_err().field, "spec.ports");
        assert!(list[0].unread.is_none());
        let unread = list[1].unread.as_ref().unwrap();
        assert_eq!(&*unread.metadata.finalizers[0], "x");
        assert_eq!(unread.cluster_ips, [IpAddr::from([192, 0, 2, 1])]);
    }

    #[test]
    fn of_a_cluster_that_cannot_be_read_the_status_is_that_of_now_as_far_as_it_can_be_read() {
        let served = |pause: Value, status: Value| -> Served<Cluster> {
            let metadata = json!({"name": "a", "uid": "1"});
            let cluster = json!({"metadata": metadata, "spec": {"pause": pause}, "status": status});
            serde_json::from_value(cluster).unwrap()
        };
        let said = |reason: &str| json!({"status": "True", "reason": reason});
        let before = json!({"namespaceName": "cluster-a", "phase": "Creating",
            "address": {"port": 6443},
            "conditions": {"One": said("Before"), "Two": said("Before"), "Gone": said("Before")}});
        let last = served(json!(true), before);
        let now = json!({"namespaceName": "cluster-b", "phase": 7,
            "conditions": {"One": said("Now"), "Two": "nonsense"}});
        let mut unread = served(json!("no"), now);
        unread.keep_last_read(Some(&last));
        let Ok(Object::Cluster(cluster)) = &unread.object else { panic!("{:?}", unread.object) };
        let reason = |name: &str| &*cluster.status.conditions[name].reason;
        assert_eq!((reason("One"), reason("Two")), ("Now", "Before"));
        assert!(cluster.status.conditions.len() == 2 && cluster.status.address == Default::default());
        assert_eq!((&*cluster.status.namespace_name, &*cluster.status.phase), ("cluster-b", "Creating"));
        assert!(cluster.spec.pause);
    }

    #[test]
    fn urls_are_those_of_the_api_server() {
        assert_eq!(Served::<Service>::url_path(&(), None), "/api/v1/services");
        assert_eq!(
            Served::<EndpointSlice>::url_path(&(), Some("n")),
            "/apis/discovery.k8s.io/v1/namespaces/n/endpointslices"
        );
        assert_eq!(Served::<Cluster>::url_path(&(), None), "/apis/kubermatic.k8c.io/v1/clusters");
        assert_eq!(
            Served::<ExposedCluster>::url_path(&(), None),
            "/apis/portico.k8c.io/v1alpha1/exposedclusters"
        );
    }

    /// Every field that is written has a place in the schema, and every place can be written.
    #[test]
    fn the_schema_of_an_exposed_cluster_is_that_of_its_type() {
        let crd = include_str!("../../../deploy/crds.yaml");
        let crd = Documents::new(crd).next().unwrap().unwrap().to_value();
        assert_eq!(crd["spec"]["group"], ExposedCluster::GROUP);
        assert_eq!(crd["spec"]["names"]["plural"], ExposedCluster::PLURAL);
        let version = &crd["spec"]["versions"][0];
        assert_eq!(version["name"], ExposedCluster::VERSION);
        let schema = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let address = Address {
            url: "u".into(),
            port: Some(6443),
            external_name: "e".into(),
            internal_url: "i".into(),
            ip: Some([192, 0, 2, 1].into()),
            api_server_external_address: "a".into(),
        };
        let tunnel = Some(Tunnel { agent_ip: [192, 0, 2, 1].into() });
        let whole = ExposedClusterSpec {
            expose_strategy: ExposeStrategy::Tunneling,
            seed: "north".into(),
            datacenter: "lab-1".into(),
            host_name: "a.north.example.com".into(),
            paused: true,
            allowed_ip_ranges: Some(["192.0.2.0/24".parse().unwrap()].into()),
            load_balancer_source_ranges: ["2001:db8::/32".parse().unwrap()].into(),
            node_port_listeners_disabled: true,
            budget: Budget {
                max_connections: Some(5),
                max_connections_per_second: Some(6),
                fair_share: Some(Percent::HALF),
            },
            connection_settings: serde_json::from_value(json!({
                "sniListenerIdleTimeout": "1h", "tunnelingConnectionIdleTimeout": "1h",
                "tunnelingStreamIdleTimeout": "90s", "downstreamTCPKeepaliveTime": "60s",
                "downstreamTCPKeepaliveInterval": "10s", "downstreamTCPKeepaliveProbes": 3,
                "upstreamTCPKeepaliveTime": "60s", "upstreamTCPKeepaliveInterval": "10s",
                "upstreamTCPKeepaliveProbes": 3,
            }))
            .unwrap(),
            api_server_ca: "PEM".into(),
            address: address.clone(),
            tunnel,
            migration: Some(Box::new(Migration {
                state: MigrationState::Moving,
                since: "2026-01-02T03:04:05Z".parse().unwrap(),
                second: SecondDoor { expose_strategy: ExposeStrategy::Tunneling, address, tunnel },
            })),
        };
        fits(&serde_json::to_value(&whole).unwrap(), schema, "spec");
        let words = |field: &Value| field["enum"].clone();
        let migration = &schema["properties"]["migration"]["properties"];
        let strategies = json!(ExposeStrategy::ALL);
        assert_eq!(words(&schema["properties"]["exposeStrategy"]), strategies);
        assert_eq!(words(&migration["second"]["properties"]["exposeStrategy"]), strategies);
        assert_eq!(words(&migration["state"]), json!(MigrationState::ALL));
    }

    fn fits(value: &Value, schema: &Value, path: &str) {
        let expected = match value {
            Value::Object(_) => "object",
            Value::Array(_) => "array",
            Value::String(_) => "string",
            Value::Bool(_) => "boolean",
            _ => "integer",
        };
        assert_eq!(schema["type"], expected, "{path}");
        if let Value::Object(fields) = value {
            let places = schema["properties"].as_object().unwrap();
            let keys = |fields: &Map<String, Value>| fields.keys().cloned().collect::<BTreeSet<_>>();
            assert_eq!(keys(fields), keys(places), "{path}");
            for (key, value) in fields {
                fits(value, &places[key], &format!("{path}.{key}"));
            }
        }
        for item in value.as_array().into_iter().flatten() {
            fits(item, &schema["items"], path);
        }
    }
}
