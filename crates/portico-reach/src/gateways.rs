//! The reports of a seed's gateways about their routes, and the ports that its load balancers publish.

use std::collections::{BTreeMap, HashMap};

use futures_util::future::join_all;
use portico_api::meta::ObjectKey;
use portico_api::names::GATEWAY_PODS;
use portico_expose::front::ADMIN_PORT;
use portico_kube::{Client, Selector, list, read};
use portico_routes::route::RouteKey;
use serde_json::Value;

use crate::links::AtGateway;

/// The Service of the proxy that KKP runs in a seed.
const KKP_PROXY: &str = "nodeport-proxy";

/// The gateways of a seed.
pub(crate) struct Gateways(Vec<Gateway>);

struct Gateway {
    pod: String,
    ready: bool,
    /// Its rows by key, or why it could not be asked.
    routes: Result<HashMap<String, Row>, String>,
}

/// What a gateway says of one key.
struct Row {
    state: String,
    failing: usize,
}

impl Gateways {
    /// Asks each gateway that is ready.
    pub(crate) async fn ask(client: &Client, namespace: &str) -> anyhow::Result<Self> {
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let (selector, mut pods) = (Selector::Labels(GATEWAY_PODS), Vec::new());
        list(client, &path, selector, "the pods of the gateways", |pod| pods.push(pod)).await?;
        Ok(Self(join_all(pods.iter().map(|pod| Gateway::ask(client, namespace, pod))).await))
    }

    /// How many are ready, and how many there are.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.0.iter().filter(|gateway| gateway.ready).count(), self.0.len())
    }

    /// What each makes of a key.
    pub(crate) fn with(&self, key: &RouteKey) -> Vec<AtGateway> {
        let wanted = serde_json::to_value(key).map(|key| key.to_string()).unwrap_or_default();
        let at = |gateway: &Gateway| {
            let row = gateway.routes.as_ref().map(|rows| rows.get(&wanted));
            AtGateway {
                pod: gateway.pod.clone(),
                ready: gateway.ready,
                failing: row.as_ref().ok().and_then(|row| Some(row.as_ref()?.failing)).unwrap_or_default(),
                route: row.map(|row| row.map(|row| row.state.clone())).map_err(Clone::clone),
            }
        };
        self.0.iter().map(at).collect()
    }
}

impl Gateway {
    async fn ask(client: &Client, namespace: &str, pod: &Value) -> Self {
        let name = pod.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        let ready = is_ready(pod);
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{ADMIN_PORT}/proxy/routes");
        let routes: Result<Option<Value>, _> = match ready {
            true => read(client, &path, &format!("/routes of pod {name}")).await,
            false => Ok(None),
        };
        let routes = match routes {
            Ok(routes) => Ok(routes.as_ref().map(rows_of).unwrap_or_default()),
            Err(error) => Err(error.to_string()),
        };
        Self { pod: name.to_owned(), ready, routes }
    }
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// The rows of a gateway's listing by their keys, as JSON.
fn rows_of(routes: &Value) -> HashMap<String, Row> {
    let row = |row: &Value| {
        let failing = row["failing"].as_array().map_or(0, Vec::len);
        (row["key"].to_string(), Row { state: state_of(&row["state"]), failing })
    };
    routes["routes"].as_array().into_iter().flatten().map(row).collect()
}

/// The state as one word, and what else is reported about it.
fn state_of(state: &Value) -> String {
    state.as_str().map_or_else(|| state.to_string(), str::to_owned)
}

/// Ports and addresses of one Service of type LoadBalancer.
#[derive(Default, Clone)]
pub(crate) struct LoadBalancer {
    pub(crate) ports: Vec<u16>,
    pub(crate) addresses: Vec<String>,
}

/// All Services of type LoadBalancer.
pub(crate) struct LoadBalancers(BTreeMap<ObjectKey, LoadBalancer>);

impl LoadBalancers {
    pub(crate) async fn read(client: &Client) -> anyhow::Result<Self> {
        let (selector, mut found) = (Selector::Fields("spec.type=LoadBalancer"), BTreeMap::new());
        let what = "Services of type LoadBalancer";
        list(client, "/api/v1/services", selector, what, |service| found.extend([balancer_of(&service)]))
            .await?;
        Ok(Self(found))
    }

    /// The Service of KKP's proxy, if there is one.
    pub(crate) fn of_kkp(&self) -> Option<&ObjectKey> {
        self.0.keys().find(|key| *key.name == *KKP_PROXY)
    }

    /// One without ports and addresses if there is none.
    pub(crate) fn get(&self, key: &ObjectKey) -> LoadBalancer {
        self.0.get(key).cloned().unwrap_or_default()
    }
}

fn balancer_of(service: &Value) -> (ObjectKey, LoadBalancer) {
    let text = |path: &str| service.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let list = |path: &str| service.pointer(path).and_then(Value::as_array).into_iter().flatten();
    let port = |port: &Value| port["port"].as_u64().and_then(|port| u16::try_from(port).ok());
    let address = |entry: &Value| entry["ip"].as_str().or(entry["hostname"].as_str()).map(str::to_owned);
    let balancer = LoadBalancer {
        ports: list("/spec/ports").filter_map(port).collect(),
        addresses: list("/status/loadBalancer/ingress").filter_map(address).collect(),
    };
    (ObjectKey::new(text("/metadata/namespace"), text("/metadata/name")), balancer)
}
