//! Plans of clusters, and their inputs: the objects of a live seed, or of a directory.

use std::time::Duration;

use anyhow::anyhow;
use portico_api::cluster::{Address, Cluster};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_api::kkp;
use portico_api::names::ClusterName;
use portico_api::seed::Seed;
use portico_api::strategy::ExposeStrategy;
use portico_dial::{Dialer, ProxyFiles, ProxySetting, Target};
use portico_expose::doors::{Door, both};
use portico_expose::inputs::{Ingress, Inputs, Known, LoadBalancers, Scope};
use portico_expose::migration::Now;
use portico_expose::migration::plan::{self, Facts, ManagedBy, MigrationPlan};
use portico_expose::node_ports::PortKey;
use portico_expose::plan::{Plan, plan as plan_door};
use portico_expose::resolve::{self, DecidedBy, Decision, seed_of};
use portico_expose::strategy::{self, FRONT};
use portico_expose::validate::usable;
use portico_kube::{Client, read};
use portico_preflight::Observation;
use portico_preflight::check::{Limits, tls};
use portico_reach::cluster::missing;
use portico_reach::doors::record;
use portico_source::{Loaded, ManifestProblem, Object, list_objects};
use portico_sync::Site;
use serde_json::Value;

/// The label of the Deployment of Portico's operator.
const OPERATOR: &str = "portico-operator";

/// Port by Service and port name.
type PortOf<'a> = &'a dyn Fn(&str, &str) -> Option<u16>;

/// The objects that decide about one cluster.
struct Objects<'a> {
    cluster: &'a Cluster,
    seeds: Vec<&'a Seed>,
    configuration: Option<&'a KubermaticConfiguration>,
}

/// What is known beside them.
struct Beside<'a> {
    managed_by: ManagedBy,
    record: Option<&'a ExposedClusterSpec>,
    /// The strategy that users know, where nothing is recorded.
    before: Option<ExposeStrategy>,
    node_port: PortOf<'a>,
    /// What the cluster's own load balancer has, if there is one.
    front: Vec<Ingress>,
    presented: Option<Vec<Box<str>>>,
    /// Whether the operator has an image.
    has_image: Option<bool>,
    sni_port: u16,
}

/// The plan of a cluster among the objects of a directory.
///
/// # Errors
/// The Cluster is not there, or no Seed is its own.
pub fn plan_of_site(
    site: &Site,
    name: &str,
    to: ExposeStrategy,
    sni_port: u16,
) -> anyhow::Result<MigrationPlan> {
    let objects = Objects::of(&site.originals, &site.loaded.problems, name)?;
    let persisted = site.pipeline.planner().persisted();
    let of_services = node_ports(&site.originals, objects.cluster);
    let namespace = objects.cluster.name().namespace();
    let remembered =
        |service: &str, port: &str| persisted.node_ports.get(&PortKey::new(&namespace, service, port));
    let beside = Beside {
        managed_by: plan::managed_by(objects.cluster, site.is_kkp_there),
        record: None,
        before: persisted.strategies.get(&objects.cluster.name()).copied(),
        node_port: &|service, port| of_services(service, port).or_else(|| remembered(service, port)),
        front: Vec::new(),
        presented: None,
        has_image: None,
        sni_port,
    };
    objects.plan(to, beside)
}

/// A live seed, and how it is read.
pub struct LiveSeed {
    /// Its API.
    pub client: Client,
    /// How long listing its objects may take. Each other request to it has a limit of its own.
    pub timeout: Duration,
    /// Port at which clients find the listener that routes by server name.
    pub sni_port: u16,
}

/// The inputs for plans of the clusters of a live seed.
pub struct Plans<'a> {
    seed: &'a LiveSeed,
    objects: Vec<Object>,
    problems: Vec<ManifestProblem>,
    is_kkp_there: bool,
    has_image: Option<bool>,
}

impl LiveSeed {
    /// Reads what plans follow from; of the Services only those of one cluster, if it is named.
    ///
    /// # Errors
    /// The seed cannot be read in time.
    pub async fn plans(&self, cluster: Option<&str>) -> anyhow::Result<Plans<'_>> {
        let namespace = cluster.map(|name| ClusterName::new(name).namespace());
        let listed = list_objects(&self.client, namespace.as_deref(), self.timeout).await?;
        let Loaded { objects, problems, .. } = listed;
        let is_kkp_there = is_kkp_there(&self.client, &objects).await;
        let has_image = has_image(&self.client).await;
        Ok(Plans { seed: self, objects, problems, is_kkp_there, has_image })
    }

    /// The plan of one cluster.
    ///
    /// # Errors
    /// The seed cannot be read in time, the Cluster is not there, or no Seed is its own.
    pub async fn plan(&self, cluster: &str, to: ExposeStrategy) -> anyhow::Result<MigrationPlan> {
        self.plans(Some(cluster)).await?.plan_of(cluster, to).await
    }
}

impl Plans<'_> {
    /// The plan of one of the clusters.
    ///
    /// # Errors
    /// The Cluster is not there, or what is its own cannot be read.
    pub async fn plan_of(&self, cluster: &str, to: ExposeStrategy) -> anyhow::Result<MigrationPlan> {
        let (name, client) = (cluster, &self.seed.client);
        let namespace = ClusterName::new(name).namespace();
        let objects = Objects::of(&self.objects, &self.problems, name)?;
        let record = record(client, objects.cluster).await?;
        let managed_by = plan::managed_by(objects.cluster, self.is_kkp_there);
        let path = format!("/api/v1/namespaces/{namespace}/services/{FRONT}");
        let front: Option<Value> = read(client, &path, &format!("Service {namespace}/{FRONT}")).await?;
        let presented = match managed_by {
            ManagedBy::Elsewhere => presented(objects.cluster).await,
            _ => None,
        };
        let beside = Beside {
            managed_by,
            record: record.as_ref(),
            before: None,
            node_port: &node_ports(&self.objects, objects.cluster),
            front: front.as_ref().map(Ingress::of_service).unwrap_or_default(),
            presented,
            has_image: self.has_image,
            sni_port: self.seed.sni_port,
        };
        objects.plan(to, beside)
    }
}

impl<'a> Objects<'a> {
    fn of(objects: &'a [Object], problems: &[ManifestProblem], name: &str) -> anyhow::Result<Self> {
        let (mut cluster, mut seeds, mut configuration) = (None, Vec::new(), None);
        for object in objects {
            match object {
                Object::Cluster(found) if *found.metadata.name == *name => cluster = Some(&**found),
                Object::Seed(seed) => seeds.push(&**seed),
                Object::KubermaticConfiguration(found) => {
                    configuration.get_or_insert(&**found);
                }
                _ => {}
            }
        }
        Ok(Self { cluster: cluster.ok_or_else(|| missing(name, problems))?, seeds, configuration })
    }

    fn plan(&self, to: ExposeStrategy, beside: Beside<'_>) -> anyhow::Result<MigrationPlan> {
        let cluster = self.cluster;
        let seed = *seed_of(cluster, &self.seeds).map_err(|problem| anyhow!("{problem}"))?;
        let now = beside.record.map(Now::of);
        let in_force = now.map(|now| now.first).or(beside.before);
        let in_force =
            in_force.unwrap_or_else(|| resolve::strategy(cluster, seed, self.configuration).strategy);
        // Back to the door that users know, the one that closes is the other.
        let second = now.and_then(|now| now.second).map(|second| second.strategy);
        let from = second.filter(|_| to == in_force).unwrap_or(in_force);
        let door = |strategy| self.door(seed, strategy, in_force, &beside);
        let (from, to_plan) = (door(from), door(to));
        let wanted = alone(cluster, to, beside.record);
        let problems = usable(&wanted, &self.seeds, self.configuration).err().unwrap_or_default();
        Ok(plan::plan(&Facts {
            cluster,
            managed_by: beside.managed_by,
            from: &from,
            to: &to_plan,
            both: &both(&from, &to_plan),
            now,
            problems: &problems,
            presented: beside.presented.as_deref(),
            has_image: beside.has_image,
        }))
    }

    /// The door by one strategy alone, with the address that is known of it.
    fn door(
        &self,
        seed: &Seed,
        strategy: ExposeStrategy,
        in_force: ExposeStrategy,
        beside: &Beside<'_>,
    ) -> Plan {
        let mut cluster = alone(self.cluster, strategy, beside.record);
        if beside.managed_by == ManagedBy::Hosted {
            // A manifest does not say that.
            cluster = cluster.begun();
        }
        let published = std::mem::take(&mut cluster.status.address);
        // Names by port and by tunnel lead to the same place; that of a load balancer leads to that alone.
        let is_shared = |door| !strategy::of(door).has_load_balancer();
        let ip = published.ip.filter(|_| is_shared(strategy) && is_shared(in_force));
        cluster.status.address.ip = ip;
        let known = Known { front: beside.front.clone(), resolved: Vec::from_iter(ip), ..Known::default() };
        let decision = Decision { strategy, decided_by: DecidedBy::Cluster };
        let mut plan = plan_door(&Inputs {
            scope: Scope { cluster: &cluster, decision, seed, configuration: self.configuration },
            node_ports: beside.node_port,
            known: &known,
            load_balancers: match beside.managed_by {
                ManagedBy::Kkp => LoadBalancers::Cloud,
                _ => LoadBalancers::CloudAndGateway,
            },
            sni_port: beside.sni_port,
        });
        let second = beside.record.and_then(|record| record.migration.as_ref()).map(|it| &it.second);
        let recorded = second.filter(|second| second.expose_strategy == strategy).map(|it| &it.address);
        let address = if strategy == in_force { Some(&published) } else { recorded };
        if let Some(address) = address.filter(|address| !address.url.is_empty()) {
            plan.address = Address::clone(address);
        }
        plan
    }
}

/// The Cluster with the door by `strategy` alone; agents listen where they are known to.
fn alone(cluster: &Cluster, strategy: ExposeStrategy, record: Option<&ExposedClusterSpec>) -> Cluster {
    let mut door = Door::of(cluster, strategy);
    let second = record.and_then(|record| record.migration.as_ref()).and_then(|it| it.second.tunnel);
    let recorded = record.and_then(|record| record.tunnel).or(second);
    if let (Some(_), Some(tunnel)) = (door.agent_ip, recorded)
        && cluster.spec.cluster_network.tunneling_agent_ip.is_unset()
    {
        door.agent_ip = Some(tunnel.agent_ip);
    }
    door.alone(cluster)
}

/// The NodePorts of the Services of a cluster.
fn node_ports(objects: &[Object], cluster: &Cluster) -> impl Fn(&str, &str) -> Option<u16> {
    let namespace = cluster.name().namespace();
    move |service, port_name| {
        let services = objects.iter().filter_map(|object| match object {
            Object::Service(service) => Some(service),
            _ => None,
        });
        let mut named = services
            .filter(|found| *found.metadata.namespace == *namespace && *found.metadata.name == *service);
        named.next()?.spec.ports.iter().find(|port| *port.name == *port_name)?.node_port
    }
}

/// Whether KKP's controllers are at work. If that may not be read, they are taken to be absent, and a warning
/// says so.
async fn is_kkp_there(client: &Client, objects: &[Object]) -> bool {
    let name = kkp::DEPLOYMENT;
    let path = format!("/apis/apps/v1/deployments?fieldSelector=metadata.name%3D{name}");
    let list: Option<Value> = match read(client, &path, &format!("Deployments {name}")).await {
        Ok(list) => list,
        Err(error) => {
            tracing::warn!("whether KKP's controllers are on this seed is not known: {error}");
            return false;
        }
    };
    let is_here = |namespace: &str| {
        objects.iter().any(|object| match object {
            Object::Seed(_) | Object::KubermaticConfiguration(_) => {
                *object.metadata().namespace == *namespace
            }
            _ => false,
        })
    };
    let is_it = |deployment: &Value| {
        kkp::selects_its_pods(deployment) && deployment["metadata"]["namespace"].as_str().is_some_and(is_here)
    };
    list.as_ref().and_then(|list| list["items"].as_array()).into_iter().flatten().any(is_it)
}

/// Whether the operator has an image for what it starts inside clusters. `None` if nobody can tell: it may
/// run under another name, or nobody may look.
async fn has_image(client: &Client) -> Option<bool> {
    let path = format!("/apis/apps/v1/deployments?labelSelector=app.kubernetes.io%2Fname%3D{OPERATOR}");
    match read(client, &path, &format!("Deployments {OPERATOR}")).await {
        Ok(list) => has_image_of(&list?),
        Err(error) => {
            tracing::warn!("whether the operator has an --image is not known: {error}");
            None
        }
    }
}

/// Whether one of these Deployments has an image in its arguments; `None` if there is none.
fn has_image_of(deployments: &Value) -> Option<bool> {
    let deployments = deployments["items"].as_array().filter(|all| !all.is_empty())?;
    let containers = deployments.iter().flat_map(|deployment| {
        deployment.pointer("/spec/template/spec/containers").and_then(Value::as_array).into_iter().flatten()
    });
    let words = containers.flat_map(|container| ["command", "args"].map(|key| container[key].as_array()));
    let mut words = words.flatten().flatten().filter_map(Value::as_str);
    Some(words.any(|word| word == "--image" || word.starts_with("--image=")))
}

/// The names of the certificate at the address of now, as this machine sees it.
async fn presented(cluster: &Cluster) -> Option<Vec<Box<str>>> {
    let address = &cluster.status.address;
    let (name, port) = (address.external_name.clone(), address.port?);
    let dialer = Dialer::new(ProxySetting::Env, ProxyFiles::default()).ok()?;
    let target = Target { host: name.clone(), port };
    let server = tls::Server { target, name, trust: tls::Trust::Any, alpn: vec!["http/1.1".into()] };
    match tls::check(&dialer, &server, Limits::default()).await.seen {
        Observation::Tls(session) => Some(session.names),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use portico_source::invalid;
    use portico_source::served::Served;
    use serde_json::json;

    use super::*;

    #[test]
    fn of_a_cluster_that_cannot_be_read_there_is_no_plan_and_its_field_is_named() {
        let served = json!({"metadata": {"name": "a"}, "spec": {"auditLogging": "yes"}});
        let served: Served<Cluster> = serde_json::from_value(served).unwrap();
        let problems = [invalid(served.reference, &served.object.unwrap_err())];
        let refused = |name| Objects::of(&[], &problems, name).err().unwrap().to_string();
        assert!(refused("a").contains("Cluster a: spec.auditLogging: invalid type"), "{}", refused("a"));
        assert!(refused("b").starts_with("there is no Cluster b"), "{}", refused("b"));
    }

    #[test]
    fn an_operator_has_an_image_if_its_arguments_name_one_and_without_an_operator_nobody_knows() {
        let of = |args: Value| {
            let container = json!({"image": "registry.example.com/portico:1", "args": args});
            let spec = json!({"template": {"spec": {"containers": [container]}}});
            has_image_of(&json!({"items": [{"spec": spec}]}))
        };
        assert_eq!(of(json!(["operator", "--image=registry.example.com/portico:1"])), Some(true));
        assert_eq!(of(json!(["operator", "--image", "registry.example.com/portico:1"])), Some(true));
        assert_eq!(of(json!(["operator", "--image-pull-secret=x", "--gateway-image=y"])), Some(false));
        assert_eq!(of(json!(null)), Some(false));
        assert_eq!(has_image_of(&json!({"items": []})), None);
        assert_eq!(has_image_of(&json!({})), None);
    }
}
