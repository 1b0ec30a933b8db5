//! The nodes of a cluster, and by which path each of them speaks.
//!
//! All of it comes from the cluster's own API server, which may be hostile. So answers are read in bounded
//! pieces, and made harmless before they leave this module.

use std::collections::BTreeMap;

use portico_api::text::{self, one_line};
use portico_hosting::serving;
use portico_kube::untrusted_api::{UntrustedApi, UntrustedApiError};
use serde::Serialize;
use serde_json::Value;

/// Lines of one answer; those of Nodes are long.
const AT_ONCE: usize = 50;

/// Answers to one list.
const ANSWERS: usize = 100;

/// Most characters of a cell.
const LONGEST: usize = 80;

/// Most agents that are named as the way back to a node without its own.
const NAMED: usize = 3;

const NODES: &str = "/api/v1/nodes";
/// By which pods reach the API server: Portico's, or KKP's.
const AGENTS: [&str; 2] = ["daemonsets/portico-agent", "daemonsets/envoy-agent"];
/// By which the API server reaches nodes.
const KONNECTIVITY: &str = "deployments/konnectivity-agent";
const SLICE: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";

/// A node, and by which paths it speaks. What is empty is not there.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// Its name.
    pub name: String,
    /// As kubectl shows it.
    pub status: String,
    /// The version of its kubelet.
    pub version: String,
    /// Its internal address.
    pub address: String,
    /// How its pods reach the API server.
    pub pods: String,
    /// How the API server reaches its kubelet.
    pub way_back: String,
    /// Whether nothing is wrong.
    pub ok: bool,
    /// The problem, and the remedy.
    pub problems: Vec<String>,
}

/// What the API server says.
#[derive(Debug, Default)]
pub struct Said {
    /// Name, status, version, address.
    nodes: Vec<[String; 4]>,
    /// Whether there are more nodes than were read.
    pub more: bool,
    /// Where the Service `kubernetes` leads pods.
    pub endpoints: Vec<String>,
    /// Whether the agent of a node is ready; `None` if pods need none.
    agents: Option<BTreeMap<String, bool>>,
    /// Whether Konnectivity's agent of a node is ready; `None` if the API server needs none.
    konnectivity: Option<BTreeMap<String, bool>>,
    /// Users whose certificates for serving wait.
    waiting: Vec<String>,
}

impl Said {
    /// Asks it.
    pub async fn read(inside: &UntrustedApi) -> Result<Self, UntrustedApiError> {
        let columns = ["Name", "Status", "Version", "Internal-IP"];
        let nodes = inside.rows(NODES, columns, AT_ONCE, ANSWERS).await?;
        let requests = inside.rows(&serving::listed(), ["Requestor", "Condition"], AT_ONCE, ANSWERS).await?;
        let waiting = requests.rows.into_iter().filter(|[_, condition]| condition == "Pending");
        Ok(Self {
            nodes: nodes.rows,
            more: nodes.more,
            endpoints: endpoints(&inside.get(SLICE).await?.unwrap_or_default()),
            agents: agents(inside, None).await?,
            konnectivity: pods(inside, KONNECTIVITY, None).await?,
            waiting: waiting.map(|[user, _]| user).collect(),
        })
    }

    /// A row for each node.
    pub fn rows(&self) -> Vec<Row> {
        let all = self.konnectivity.iter().flatten();
        let working: Vec<&str> = all.filter(|(_, ready)| **ready).map(|(node, _)| node.as_str()).collect();
        // Once, and not for each of thousands of nodes.
        let by_others = format!("by {}", few(&working));
        let row = |[name, status, version, address]: &[String; 4]| {
            let mut problems = Vec::new();
            if status.split(',').next() != Some("Ready") {
                problems.push("not ready: kubectl describe node, and journalctl -u kubelet there".to_owned());
            }
            let pods = match self.agents.as_ref().map(|agents| agents.get(name)) {
                None => "direct".to_owned(),
                Some(Some(true)) => "agent".to_owned(),
                Some(agent) => {
                    let what = if agent.is_some() { "its agent is not ready" } else { "it has no agent" };
                    problems.push(format!("{what}: its pods do not reach the API server"));
                    "none".to_owned()
                }
            };
            let way_back = match self.konnectivity.as_ref().map(|agents| agents.get(name)) {
                None => "direct".to_owned(),
                Some(Some(true)) => "its own agent".to_owned(),
                Some(_) if working.is_empty() => {
                    problems.push("no Konnectivity agent is ready: no logs, no exec".to_owned());
                    "none".to_owned()
                }
                Some(_) => by_others.clone(),
            };
            if self.waiting.iter().any(|user| serving::node_of(user) == Some(name)) {
                problems.push(
                    "its certificate for serving waits for approval: no logs, no exec; kubectl get csr"
                        .to_owned(),
                );
            }
            Row {
                name: shown(name),
                status: shown(status),
                version: shown(version),
                address: shown(address),
                pods,
                way_back: shown(&way_back),
                ok: problems.is_empty(),
                problems,
            }
        };
        self.nodes.iter().map(row).collect()
    }
}

/// For each node with an agent, whether one that is there is ready. If `node` is given, for it alone. `None`
/// if there is no DaemonSet of agents. A cluster that changes from KKP's agents to Portico's has both for a
/// while, and pods need one of them.
pub(crate) async fn agents(
    inside: &UntrustedApi,
    node: Option<&str>,
) -> Result<Option<BTreeMap<String, bool>>, UntrustedApiError> {
    let mut all: Option<BTreeMap<String, bool>> = None;
    for workload in AGENTS {
        let Some(found) = pods(inside, workload, node).await? else { continue };
        let known = all.get_or_insert_default();
        for (node, ready) in found {
            *known.entry(node).or_default() |= ready;
        }
    }
    Ok(all)
}

/// For each node with a pod of this workload in `kube-system`, whether one of them is ready. If `node` is
/// given, for it alone. `None` if there is no such workload.
async fn pods(
    inside: &UntrustedApi,
    workload: &str,
    node: Option<&str>,
) -> Result<Option<BTreeMap<String, bool>>, UntrustedApiError> {
    let workload = inside.get(&format!("/apis/apps/v1/namespaces/kube-system/{workload}")).await?;
    let Some(selector) = workload.as_ref().map(selector) else { return Ok(None) };
    let of_node = node.map(|node| format!("&fieldSelector=spec.nodeName%3D{node}")).unwrap_or_default();
    let url = format!("/api/v1/namespaces/kube-system/pods?labelSelector={selector}{of_node}");
    let found = inside.rows(&url, ["Node", "Ready", "Status"], AT_ONCE, ANSWERS).await?;
    let mut nodes = BTreeMap::new();
    for [node, ready, status] in found.rows {
        *nodes.entry(node).or_default() |= status == "Running" && all_ready(&ready);
    }
    Ok(Some(nodes))
}

/// The labels of the pods of a workload, as a query has them. What is no label does not get there.
fn selector(workload: &Value) -> String {
    let labels = workload["spec"]["selector"]["matchLabels"].as_object().into_iter().flatten();
    let is_plain = |text: &str| text.chars().all(|it| it.is_ascii_alphanumeric() || "-_./".contains(it));
    let labels = labels.filter_map(|(key, value)| Some((key, value.as_str()?)));
    let labels = labels.filter(|(key, value)| is_plain(key) && is_plain(value));
    labels.map(|(key, value)| format!("{key}%3D{value}").replace('/', "%2F")).collect::<Vec<_>>().join(",")
}

/// Whether `1/1` says that all containers are.
fn all_ready(text: &str) -> bool {
    text.split_once('/').is_some_and(|(ready, all)| ready == all && all != "0")
}

/// The first of these names, and how many there are beside them.
fn few(names: &[&str]) -> String {
    text::few(names.iter(), NAMED, LONGEST)
}

fn endpoints(slice: &Value) -> Vec<String> {
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    let addresses = endpoints.flat_map(|endpoint| endpoint["addresses"].as_array().into_iter().flatten());
    addresses.filter_map(Value::as_str).map(shown).collect()
}

fn shown(text: &str) -> String {
    one_line(text, LONGEST)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(nodes: &[[&str; 2]]) -> Said {
        let node =
            |[name, status]: &[&str; 2]| [name, status, "v1.34.4", "192.0.2.1"].map(ToString::to_string);
        Said { nodes: nodes.iter().map(node).collect(), ..Said::default() }
    }

    fn ready(nodes: &[(&str, bool)]) -> Option<BTreeMap<String, bool>> {
        Some(nodes.iter().map(|(name, ready)| ((*name).to_owned(), *ready)).collect())
    }

    #[test]
    fn each_node_is_named_with_the_path_of_its_pods_and_the_way_back() {
        let direct = said(&[["a", "Ready"], ["b", "Ready,SchedulingDisabled"]]).rows();
        assert!(direct.iter().all(|row| row.ok && row.pods == "direct" && row.way_back == "direct"));
        let mut tunnelled = said(&[["a", "Ready"], ["b", "Ready"], ["c", "Ready"]]);
        tunnelled.agents = ready(&[("a", true), ("b", false)]);
        tunnelled.konnectivity = ready(&[("a", true), ("b", false)]);
        let rows = tunnelled.rows();
        let paths: Vec<[&str; 2]> = rows.iter().map(|row| [&*row.pods, &*row.way_back]).collect();
        assert_eq!(paths, [["agent", "its own agent"], ["none", "by a"], ["none", "by a"]]);
        assert_eq!(rows.iter().map(|row| row.ok).collect::<Vec<_>>(), [true, false, false]);
        assert!(rows[1].problems[0].contains("not ready") && rows[2].problems[0].contains("no agent"));
    }

    #[test]
    fn of_many_agents_the_first_are_named() {
        assert_eq!(few(&["a"]), "a");
        assert_eq!(few(&["a", "b", "c"]), "a, b, c");
        assert_eq!(few(&["a", "b", "c", "d", "e"]), "a, b, c and 2 more");
    }

    #[test]
    fn a_node_that_is_not_ready_or_that_nothing_reaches_has_a_problem() {
        let mut found = said(&[["a", "NotReady"], ["b", "Ready"]]);
        found.konnectivity = ready(&[("a", false)]);
        found.waiting = vec!["system:node:b".into()];
        let rows = found.rows();
        assert!(rows[0].problems[0].starts_with("not ready") && rows[0].way_back == "none");
        assert!(rows[1].problems[1].contains("kubectl get csr"), "{rows:?}");
    }

    #[test]
    fn what_a_cluster_says_leaves_as_plain_text() {
        let mut found = said(&[["a\u{1b}[2J", "Ready\nx"]]);
        found.konnectivity = ready(&[("b\u{1b}]0;x", true)]);
        let rows = found.rows();
        let Row { name, status, way_back, .. } = &rows[0];
        assert!(![name, status, way_back].iter().any(|text| text.contains(char::is_control)), "{rows:?}");
    }

    #[test]
    fn the_pods_of_a_workload_are_found_by_its_labels_and_by_nothing_else() {
        let of = |labels: Value| selector(&json!({"spec": {"selector": {"matchLabels": labels}}}));
        assert_eq!(
            of(json!({"app.kubernetes.io/name": "a", "b": "c"})),
            "app.kubernetes.io%2Fname%3Da,b%3Dc"
        );
        assert_eq!(of(json!({"a": "b&watch=1", "c": 7})), "");
    }

    #[test]
    fn endpoints_are_the_addresses_of_the_slice_and_containers_count_all() {
        let slice = json!({"endpoints": [{"addresses": ["192.0.2.1"]}, {"addresses": ["192.0.2.2"]}, 7]});
        assert_eq!(endpoints(&slice), ["192.0.2.1", "192.0.2.2"]);
        assert!(all_ready("1/1") && !["0/1", "0/0", "", "x"].iter().any(|text| all_ready(text)));
    }
}
