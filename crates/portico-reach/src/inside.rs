//! The answers of a cluster's API server, one worker node as it reports it, and the way back to that.
//!
//! The API server is a user cluster's. Its answers are bounded and shown, and decide nothing else.

use std::collections::BTreeMap;

use portico_api::cluster::Cluster;
use portico_api::names::MESH_CONDITION;
use portico_api::strategy::ExposeStrategy;
use portico_expose::strategy;
use portico_kube::Client;
use portico_kube::untrusted_api::UntrustedApiError;
use serde_json::Value;

use crate::admin;
use crate::chain::Chain;
use crate::links::Link;
use crate::nodes;

/// The last link of users.
const API_SERVER: &str = "API server";

/// Adds the links of a node, up to the first that is broken. `seed` is the way to the seed, and `door` the
/// one in force.
pub(crate) async fn try_node(
    chain: &mut Chain,
    seed: &Client,
    cluster: &Cluster,
    node: &str,
    door: ExposeStrategy,
) {
    let name = &*cluster.metadata.name;
    let inside = match admin::enter_as_admin(seed, name).await {
        Ok(inside) => inside,
        Err(error) => {
            let remedy = format!("as `portico kubeconfig {name}` would say");
            return chain.push(Link::broken("kubeconfig", format!("{error:#}"), remedy));
        }
    };
    let path = format!("/api/v1/nodes/{node}");
    let object = match inside.get(&path).await {
        Ok(object) => object,
        Err(error) => return chain.push(unasked("Node", &error)),
    };
    chain.push(registered(node, object.as_ref(), door));
    let Some(object) = object else { return };
    if strategy::of(door).has_agent() {
        chain.push(match nodes::agents(&inside, Some(node)).await {
            Ok(agents) => agent(node, agents.as_ref()),
            Err(error) => unasked("agent", &error),
        });
    }
    if chain.broken().is_none() {
        // Small, and an object, which the API server has to fetch from the kubelet.
        chain.push(way_back(inside.get(&format!("{path}/proxy/configz")).await));
    }
    mesh(&object).into_iter().for_each(|link| chain.push(link));
}

/// Adds what the cluster's API server answers to its admin: to a request that needs its storage, over TLS by
/// the cluster's own CA.
pub(crate) async fn try_api_server(chain: &mut Chain, seed: &Client, cluster: &Cluster) {
    chain.push(match admin::enter_as_admin(seed, &cluster.metadata.name).await {
        Ok(inside) => answered(inside.get("/api/v1/namespaces/default").await),
        Err(error) => {
            let remedy = "give the Cluster an admin kubeconfig, or yourself the right to read it";
            Link::unknown(API_SERVER, format!("not asked: {error:#}"), remedy)
        }
    });
}

/// What its answer says.
fn answered(asked: Result<Option<Value>, UntrustedApiError>) -> Link {
    let error = match asked {
        Ok(_) => return Link::holds(API_SERVER, "it answers its admin"),
        Err(error) => error,
    };
    let remedy = match &error {
        UntrustedApiError::Refused { code: 401, .. } => {
            let remedy = "it is up, and does not know the credential in the Secret admin-kubeconfig: that \
                          has ended, or is of another cluster. Where Portico issues it, delete the Secret; \
                          else put a new one there";
            return Link::unknown(API_SERVER, error.to_string(), remedy);
        }
        UntrustedApiError::Refused { code: 403, .. } => {
            let remedy = "it is up, and knows the user of the Secret admin-kubeconfig, who has no right to \
                          look: bind it to cluster-admin inside the cluster";
            return Link::unknown(API_SERVER, error.to_string(), remedy);
        }
        UntrustedApiError::Refused { code: 500.., .. } | UntrustedApiError::NoAnswer(_) => {
            "its log says why: usually etcd is away, full or slow, or it is still starting"
        }
        UntrustedApiError::Unreachable { .. } => {
            "if its certificate is not trusted, another server answers there, or the Secret \
             admin-kubeconfig is of another cluster"
        }
        _ => "no API server answers so: find out what does at this address",
    };
    Link::broken(API_SERVER, error.to_string(), remedy)
}

fn unasked(link: &'static str, error: &UntrustedApiError) -> Link {
    Link::unknown(link, error.to_string(), "asked from here: ask it with kubectl")
}

fn condition<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
    conditions.into_iter().flatten().find(|condition| condition["type"] == name)
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

/// The command that tries what a machine needs to be a node, where clusters have this strategy. FILE is an
/// inventory: docs/preflight.md.
pub fn preflight(strategy: ExposeStrategy) -> String {
    format!("portico preflight --role worker --product portico --strategy {strategy} --inventory FILE")
}

/// Whether the node has joined, and its kubelet reports.
fn registered(node: &str, object: Option<&Value>, strategy: ExposeStrategy) -> Link {
    const LINK: &str = "Node";
    let Some(object) = object else {
        let remedy = format!(
            "has its kubelet joined? On the machine: journalctl -u kubelet, and {}",
            preflight(strategy)
        );
        return Link::broken(LINK, format!("there is no Node {node} in the cluster"), remedy);
    };
    match condition(object, "Ready") {
        Some(ready) if ready["status"] == "True" => Link::holds(LINK, format!("{node} is ready")),
        Some(ready) => {
            let (message, heard) = (text(ready, "message"), text(ready, "lastHeartbeatTime"));
            let remedy = format!(
                "its kubelet is away, or says why: journalctl -u kubelet there, and {}",
                preflight(strategy)
            );
            Link::broken(LINK, format!("{node} is not ready: {message} (last heard of {heard})"), remedy)
        }
        None => Link::broken(LINK, format!("{node} has never reported"), "start its kubelet"),
    }
}

/// Whether the node has its agent, Portico's or KKP's, by which its pods reach the API server. `agents` says
/// whether one is ready; `None` if the cluster has no DaemonSet of them.
fn agent(node: &str, agents: Option<&BTreeMap<String, bool>>) -> Link {
    const LINK: &str = "agent";
    let makes = "portico operator makes the DaemonSet, if it has --image; see PorticoUserClusterReady";
    let Some(agents) = agents else {
        return Link::broken(LINK, "the cluster has no DaemonSet of agents", makes);
    };
    match agents.get(node) {
        Some(true) => Link::holds(LINK, format!("that of {node} is ready")),
        Some(false) => {
            let remedy = "the node's pods do not reach the API server meanwhile: portico agent check on the \
                          node, or the log of KKP's envoy-agent";
            Link::broken(LINK, format!("that of {node} is not ready"), remedy)
        }
        None => {
            let remedy = "kubectl describe the DaemonSet, portico-agent or envoy-agent in kube-system: a \
                          taint or selector may keep it off the node";
            Link::broken(LINK, format!("no agent is on {node}"), remedy)
        }
    }
}

/// Whether the API server reaches the kubelet.
fn way_back(asked: Result<Option<Value>, UntrustedApiError>) -> Link {
    const LINK: &str = "kubelet";
    let why = match asked {
        // Too long an answer is one.
        Ok(Some(_)) | Err(UntrustedApiError::TooLong(_) | UntrustedApiError::Unreadable(_)) => {
            return Link::holds(LINK, "the API server reaches it: logs and exec work");
        }
        Ok(None) => "it does not know the path /configz".to_owned(),
        Err(error) => error.to_string(),
    };
    let remedy = "see the Konnectivity agents (kubectl get pods -n kube-system -l \
                  app.kubernetes.io/name=konnectivity-agent) and the server beside the API server";
    Link::broken(LINK, why, remedy)
}

/// The report of the mesh of nodes, if it runs.
fn mesh(object: &Value) -> Option<Link> {
    let found = condition(object, MESH_CONDITION)?;
    let message = text(found, "message");
    Some(match text(found, "status") {
        "True" => Link::holds("mesh", message),
        _ => Link::unknown("mesh", message, "the message names the rule to change"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::links::State;

    #[test]
    fn an_api_server_that_fails_or_is_none_is_the_broken_link_and_one_that_refuses_is_up() {
        let what = || "GET /api/v1/namespaces/default".to_owned();
        let refused = |code| UntrustedApiError::Refused { what: what(), code, message: "no".into() };
        let state = |asked| answered(asked).state;
        assert_eq!(state(Ok(Some(json!({})))), State::Holds);
        assert_eq!([state(Err(refused(401))), state(Err(refused(403)))], [State::Unknown; 2]);
        let remedy = |code| answered(Err(refused(code))).remedy;
        assert!(remedy(401).contains("has ended") && remedy(403).contains("has no right"));
        for broken in [
            refused(500),
            refused(503),
            refused(302),
            UntrustedApiError::NoAnswer(what()),
            UntrustedApiError::Unreadable(what()),
            UntrustedApiError::TooLong(what()),
            UntrustedApiError::Unreachable { what: what(), why: "reset".into() },
        ] {
            let link = answered(Err(broken));
            assert_eq!(link.state, State::Broken, "{link:?}");
            assert!(link.evidence.starts_with("GET /api") && !link.remedy.is_empty(), "{link:?}");
        }
    }

    #[test]
    fn a_node_that_is_not_ready_is_the_broken_link_with_what_its_kubelet_said_last() {
        let node = |status: &str| {
            json!({"status": {"conditions": [{"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": status, "message": "Kubelet stopped posting node status.",
                 "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}})
        };
        let registered = |object: Option<&Value>| registered("n", object, ExposeStrategy::Tunneling);
        assert_eq!(registered(None).state, State::Broken);
        assert_eq!(registered(Some(&json!({}))).state, State::Broken);
        assert_eq!(registered(Some(&node("True"))).state, State::Holds);
        let unknown = registered(Some(&node("Unknown")));
        assert_eq!(unknown.state, State::Broken);
        assert!(unknown.evidence.contains("Kubelet stopped") && unknown.evidence.contains("2026-01-01"));
    }

    #[test]
    fn an_agent_that_is_missing_or_not_ready_is_the_broken_link() {
        let state = |agents: &[(&str, bool)]| {
            let agents = agents.iter().map(|(node, ready)| ((*node).to_owned(), *ready)).collect();
            agent("n", Some(&agents)).state
        };
        assert_eq!(agent("n", None).state, State::Broken);
        assert_eq!(state(&[("m", true)]), State::Broken);
        assert_eq!(state(&[("n", false)]), State::Broken);
        assert_eq!(state(&[("n", true)]), State::Holds);
    }

    #[test]
    fn a_mesh_that_finds_something_is_reported_and_one_that_does_not_run_is_no_link() {
        let node =
            |status: &str| json!({"status": {"conditions": [{"type": MESH_CONDITION, "status": status}]}});
        assert_eq!(mesh(&json!({})), None);
        assert_eq!(mesh(&node("True")).unwrap().state, State::Holds);
        assert_eq!(mesh(&node("False")).unwrap().state, State::Unknown);
    }
}
