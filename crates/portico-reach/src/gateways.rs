//! The reports of a seed's gateways about their routes, and the ports that its load balancers publish.

use std::collections::{BTreeMap, HashMap};

use futures_util::future::join_all;
use portico_api::meta::ObjectKey;
use portico_api::names::GATEWAY_PODS;
use portico_expose::front::ADMIN_PORT;
use portico_kube::{Client, Selector, list, read_of_pod};
use portico_routes::route::RouteKey;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::links::AtGateway;

/// The Service of the proxy that KKP runs in a seed.
const KKP_PROXY: &str = "nodeport-proxy";

/// The pods of a seed's gateways.
pub(crate) struct Gateways {
    namespace: String,
    pods: Vec<Pod>,
}

struct Pod {
    name: String,
    ready: bool,
}

/// What the gateways say of their routes.
#[derive(Default)]
pub(crate) struct Answers(Vec<Answer>);

struct Answer {
    pod: String,
    ready: bool,
    /// Its rows by key, or why it could not be asked.
    routes: Result<HashMap<String, Row>, String>,
}

/// What counts of a gateway's listing.
#[derive(Default, Deserialize)]
struct Routes {
    routes: Vec<ListedRow>,
}

#[derive(Deserialize)]
struct ListedRow {
    key: Value,
    state: Value,
    #[serde(default)]
    failing: Vec<IgnoredAny>,
}

/// What a gateway says of one key.
struct Row {
    state: String,
    failing: usize,
}

impl Gateways {
    /// Finds the gateways in a namespace.
    pub(crate) async fn find(client: &Client, namespace: &str) -> anyhow::Result<Self> {
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let (selector, mut pods) = (Selector::Labels(GATEWAY_PODS), Vec::new());
        list(client, &path, selector, "the pods of the gateways", |pod| pods.push(Pod::of(&pod))).await?;
        Ok(Self { namespace: namespace.to_owned(), pods })
    }

    /// Asks each gateway that is ready about one cluster, or about all. The name becomes part of a path, so
    /// it must be that of an object.
    pub(crate) async fn ask(&self, client: &Client, cluster: Option<&str>) -> Answers {
        let page = cluster.map_or("routes".to_owned(), |name| format!("routes?cluster={name}"));
        Answers(join_all(self.pods.iter().map(|pod| pod.ask(client, &self.namespace, &page))).await)
    }

    /// How many are ready, and how many there are.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.pods.iter().filter(|pod| pod.ready).count(), self.pods.len())
    }
}

impl Answers {
    /// What each makes of a key.
    pub(crate) fn with(&self, key: &RouteKey) -> Vec<AtGateway> {
        let wanted = serde_json::to_value(key).map(|key| key.to_string()).unwrap_or_default();
        let at = |gateway: &Answer| {
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

impl Pod {
    fn of(pod: &Value) -> Self {
        let name = pod.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        Self { name: name.to_owned(), ready: is_ready(pod) }
    }

    async fn ask(&self, client: &Client, namespace: &str, page: &str) -> Answer {
        let Self { name, ready } = self;
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{ADMIN_PORT}/proxy/{page}");
        let routes: Result<Option<Routes>, _> = match ready {
            true => read_of_pod(client, &path, &format!("/{page} of pod {name}")).await,
            false => Ok(None),
        };
        let routes = match routes {
            Ok(routes) => Ok(rows_of(routes.unwrap_or_default())),
            Err(error) => Err(error.to_string()),
        };
        Answer { pod: name.clone(), ready: *ready, routes }
    }
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// The rows of a gateway's listing by their keys, as JSON.
fn rows_of(listed: Routes) -> HashMap<String, Row> {
    let row = |row: ListedRow| {
        (row.key.to_string(), Row { state: state_of(&row.state), failing: row.failing.len() })
    };
    listed.routes.into_iter().map(row).collect()
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use http_body_util::Full;
    use hyper::body::Bytes;
    use serde_json::json;
    use tower::service_fn;

    use super::*;

    /// A seed with one gateway, whose listing of all clusters has `length` bytes and more.
    fn seed(length: usize) -> Client {
        let service = service_fn(move |request: Request<kube::client::Body>| async move {
            let path = request.uri().path_and_query().unwrap().as_str();
            let (path, routes) = (path.to_owned(), json!([{"key": {"port": 31_001}, "state": "ready"}]));
            let (status, text) = match path.split("/gateway-0:8002/proxy").nth(1) {
                None => {
                    let status = json!({"conditions": [{"type": "Ready", "status": "True"}]});
                    let pod = json!({"metadata": {"name": "gateway-0"}, "status": status});
                    (200, json!({"items": [pod]}).to_string())
                }
                Some("/routes") => {
                    (200, json!({"clusters": ["x".repeat(length)], "routes": routes}).to_string())
                }
                Some("/routes?cluster=a") => (200, json!({"clusters": [], "routes": routes}).to_string()),
                Some(_) => (404, "no cluster is exposed\n".to_owned()),
            };
            let answer = Response::builder().status(status);
            Ok::<_, Infallible>(answer.body(Full::new(Bytes::from(text))).unwrap())
        });
        Client::new(service, "default")
    }

    /// The state of a route at the gateway of [`seed`], as it says of one cluster or of all.
    async fn state(length: usize, cluster: Option<&str>) -> Result<Option<String>, String> {
        let client = seed(length);
        let gateways = Gateways::find(&client, "portico").await.unwrap();
        assert_eq!(gateways.count(), (1, 1));
        gateways.ask(&client, cluster).await.with(&RouteKey::Port(31_001)).remove(0).route
    }

    /// More than is read of a pod.
    const ENDLESS: usize = 64 << 20;

    #[tokio::test]
    async fn one_cluster_is_asked_for_alone_however_long_the_listing_of_all_is() {
        assert_eq!(state(ENDLESS, Some("a")).await, Ok(Some("ready".to_owned())));
        assert_eq!(state(ENDLESS, Some("unknown-there")).await, Ok(None));
    }

    #[tokio::test]
    async fn the_listing_of_ten_thousand_clusters_is_read_and_one_without_end_is_not() {
        assert_eq!(state(32 << 20, None).await, Ok(Some("ready".to_owned())));
        let error = state(ENDLESS, None).await.unwrap_err();
        assert!(error.ends_with("it has more than 64 MiB, and is not read"), "{error}");
    }
}
