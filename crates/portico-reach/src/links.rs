//! The links of the way to a cluster, each with its finding. They are pure, so that a test can show every
//! broken link.

use std::fmt;

use portico_api::annotations::PORT_MAPPING;
use portico_api::cluster::{Cluster, EXPOSED, USER_CLUSTER_READY};
use portico_api::meta::ObjectKey;
use portico_api::problem::{Problem, Severity};
use portico_api::text::one_line;
use portico_expose::services::APISERVER;
use portico_routes::route::RouteKey;
use portico_routes::rows::{NoEndpoints, RouteRow, RouteState};
use portico_source::ManifestProblem;
use serde::Serialize;

/// Most characters of a finding, and of a remedy.
pub(crate) const LONGEST: usize = 1_000;

/// One link of the chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// What it is.
    pub link: &'static str,
    /// Whether it holds.
    pub state: State,
    /// What was found.
    pub evidence: String,
    /// The remedy; empty where it holds.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// Whether a link holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It does.
    Holds,
    /// It does not, and no later one can.
    Broken,
    /// It could not be found out, or says nothing for sure.
    Unknown,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Holds => "holds",
            Self::Broken => "BROKEN",
            Self::Unknown => "unknown",
        })
    }
}

impl Link {
    /// Whether no later link can hold.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.state == State::Broken
    }

    pub(crate) fn holds(link: &'static str, evidence: impl AsRef<str>) -> Self {
        Self::new(link, State::Holds, evidence.as_ref(), "")
    }

    pub(crate) fn broken(link: &'static str, evidence: impl AsRef<str>, remedy: impl AsRef<str>) -> Self {
        Self::new(link, State::Broken, evidence.as_ref(), remedy.as_ref())
    }

    pub(crate) fn unknown(link: &'static str, evidence: impl AsRef<str>, remedy: impl AsRef<str>) -> Self {
        Self::new(link, State::Unknown, evidence.as_ref(), remedy.as_ref())
    }

    /// Both texts may quote others: conditions, and the answers of a user cluster. A line break in them would
    /// pass for a row of the table.
    fn new(link: &'static str, state: State, evidence: &str, remedy: &str) -> Self {
        Self { link, state, evidence: one_line(evidence, LONGEST), remedy: one_line(remedy, LONGEST) }
    }
}

/// The object itself; `unread` says why there is none that can be read.
pub(crate) fn object(name: &str, cluster: Option<&Cluster>, unread: Option<&ManifestProblem>) -> Link {
    const LINK: &str = "Cluster";
    let Some(cluster) = cluster else {
        return match unread {
            Some(problem) => {
                Link::broken(LINK, format!("{name} cannot be read: {}", problem.message), &problem.remedy)
            }
            None => {
                Link::broken(LINK, format!("there is no Cluster {name}"), "kubectl get clusters lists them")
            }
        };
    };
    if cluster.metadata.deletion_timestamp.is_some() {
        return Link::broken(LINK, format!("Cluster {name} is being deleted"), "");
    }
    let paused = if cluster.spec.pause { ", paused: nobody changes anything of it" } else { "" };
    Link::holds(LINK, format!("{name}{paused}"))
}

/// What is wrong with the object as written.
pub(crate) fn configuration<'a>(problems: impl IntoIterator<Item = &'a Problem>) -> Link {
    const LINK: &str = "configuration";
    let mut errors = problems.into_iter().filter(|problem| problem.severity == Severity::Error);
    match errors.next() {
        None => Link::holds(LINK, "nothing is wrong with it"),
        Some(first) => {
            let more = errors.count();
            let more = if more == 0 { String::new() } else { format!(" (and {more} more)") };
            let text = format!("{}: {}{more}", first.field, first.message);
            Link::broken(LINK, text, first.remedy.clone())
        }
    }
}

/// The operator's words, if one is at work.
pub(crate) fn condition(cluster: &Cluster) -> Link {
    const LINK: &str = "condition";
    match cluster.status.conditions.get(EXPOSED) {
        None => Link::unknown(LINK, "no operator has written one", "fine beside KKP, which writes none"),
        Some(found) if &*found.status == "True" => {
            Link::holds(LINK, format!("{}: {}", found.reason, found.message))
        }
        Some(found) => Link::broken(LINK, format!("{}: {}", found.reason, found.message), "as it says"),
    }
}

/// The operator's words about the inside of the cluster, if it looks there. Users come in without.
pub(crate) fn inside(cluster: &Cluster) -> Option<Link> {
    const LINK: &str = "inside";
    let found = cluster.status.conditions.get(USER_CLUSTER_READY)?;
    let text = format!("{}: {}", found.reason, found.message);
    Some(if &*found.status == "True" {
        Link::holds(LINK, text)
    } else {
        Link::unknown(LINK, text, "nodes and pods may miss their agents, users do not")
    })
}

/// The remedy where a cluster has no Service.
fn maker(cluster: &Cluster) -> &'static str {
    if cluster.spec.pause {
        return "the Cluster is paused, so nobody makes it: remove spec.pause";
    }
    match cluster.status.conditions.get(EXPOSED) {
        Some(found) if &*found.reason == "ForeignWriter" => "as the condition says: stop that client",
        _ => "portico operator makes it, or KKP's controllers: see that one of them runs",
    }
}

/// The Service that exposes the API server, and the keys that it claims.
pub(crate) fn service(cluster: &Cluster, namespace: &str, rows: &[RouteRow]) -> Link {
    const LINK: &str = "Service";
    let Some(first) = of_api_server(rows).next() else {
        return Link::broken(
            LINK,
            format!("no Service {namespace}/{APISERVER} asks to be exposed"),
            maker(cluster),
        );
    };
    for row in of_api_server(rows) {
        let key = &row.key;
        match &row.state {
            RouteState::Conflict { winner } => {
                return Link::broken(LINK, taken(key, &winner.service), one_must_change(key));
            }
            RouteState::Kept { tenant } => {
                let text = format!("{key} is kept for {tenant}, whose Service is gone");
                return Link::broken(LINK, text, "restart the gateways once it is to be given up");
            }
            RouteState::ListenersOff if !matches!(key, RouteKey::Port(_)) => {
                let text = format!("{key}: the Seed disables its nodeport-proxy");
                return Link::broken(LINK, text, "only a gateway routes by name: enable it");
            }
            RouteState::ListenerFailed { error } => {
                return Link::broken(LINK, format!("{key}: {error}"), "free the port on the gateways");
            }
            RouteState::Ready | RouteState::NotReady | RouteState::ListenersOff => {}
        }
    }
    let keys: Vec<String> = of_api_server(rows).map(|row| row.key.to_string()).collect();
    Link::holds(LINK, format!("{} by {}", first.backend.service, keys.join(", ")))
}

/// The pods, or addresses, behind it.
pub(crate) fn endpoints(rows: &[RouteRow]) -> Link {
    const LINK: &str = "endpoints";
    let Some(row) = of_api_server(rows).next() else {
        return Link::unknown(LINK, "there is no Service", "");
    };
    if !row.endpoints.is_empty() {
        let shown: Vec<String> = row.endpoints.iter().take(3).map(ToString::to_string).collect();
        let count = row.endpoints.len();
        return Link::holds(LINK, format!("{count} ready: {}", shown.join(", ")));
    }
    let (text, remedy) = match &row.no_endpoints {
        None => (
            format!("none of {} is ready", row.endpoints_total),
            "kubectl describe the pods of the API server: its readiness probe says why",
        ),
        Some(NoEndpoints::NoSlice) => (
            "no EndpointSlice belongs to the Service".to_owned(),
            "the Service selects no pod: start the API server, or name its addresses on the Cluster with \
             portico.k8c.io/endpoints",
        ),
        Some(NoEndpoints::NoPort { found }) => (
            format!("EndpointSlices have the ports {}, and not the Service's", found.join(", ")),
            "the port of Service and slice must have one name",
        ),
        Some(NoEndpoints::Empty) => (
            "its EndpointSlices are empty".to_owned(),
            "no pod of the API server runs, or none has the label that the Service selects",
        ),
        Some(NoEndpoints::Refused) => {
            ("no endpoint may be one".to_owned(), "portico check --kubeconfig says why for each")
        }
    };
    Link::broken(LINK, text, remedy)
}

/// In place of gateways and load balancer, where a Seed disables them.
pub(crate) fn nodes(key: &RouteKey) -> Link {
    let text = format!("the Seed disables its nodeport-proxy: clients come to the seed's nodes, by {key}");
    Link::holds("nodes", text)
}

/// In place of gateways, where KKP's proxy serves.
pub(crate) fn of_kkp(proxy: &str) -> Link {
    let text = format!("Service {proxy} is that of KKP's proxy, which is not asked");
    Link::unknown("gateways", text, "see /config_dump of its pods")
}

/// What one gateway makes of it.
pub(crate) struct AtGateway {
    /// Its pod.
    pub(crate) pod: String,
    /// Whether the pod is ready.
    pub(crate) ready: bool,
    /// The state of the wanted route there, as it says; or why it could not be asked.
    pub(crate) route: Result<Option<String>, String>,
    /// Endpoints that did not accept connections lately.
    pub(crate) failing: usize,
}

/// The gateways: listener, route and endpoints as each of them sees them.
pub(crate) fn gateways(key: &RouteKey, found: &[AtGateway]) -> Link {
    const LINK: &str = "gateways";
    if found.is_empty() {
        let remedy = "portico operator makes it from the Seed, whose condition PorticoSeedReady says more; \
                      without it: kubectl apply -f deploy/gateway.yaml";
        return Link::broken(LINK, "no pod of a gateway was found", remedy);
    }
    let ready = found.iter().filter(|gateway| gateway.ready).count();
    if ready == 0 {
        let text = format!("none of {} is ready", found.len());
        return Link::broken(LINK, text, "kubectl describe them; GET /readyz?verbose says what is missing");
    }
    for gateway in found.iter().filter(|gateway| gateway.ready) {
        let pod = &gateway.pod;
        match &gateway.route {
            Err(why) => {
                let remedy =
                    "it needs get on pods/proxy; or look at /routes?cluster=NAME of the pod yourself";
                return Link::unknown(LINK, format!("{pod} could not be asked: {why}"), remedy);
            }
            Ok(None) => {
                let remedy = "it lags behind, or watches another annotation or namespace: /readyz?verbose, \
                              --expose-annotation";
                return Link::broken(LINK, format!("{pod} has no route by {key}"), remedy);
            }
            Ok(Some(state)) if state != "ready" => {
                return Link::broken(
                    LINK,
                    format!("{pod} says of {key}: {state}"),
                    "GET /routes of that pod",
                );
            }
            Ok(Some(_)) if gateway.failing > 0 => {
                let text = format!("{pod}: {} endpoints did not accept connections lately", gateway.failing);
                return Link::unknown(LINK, text, "see that NetworkPolicies let the gateway reach them");
            }
            Ok(Some(_)) => {}
        }
    }
    Link::holds(LINK, format!("{ready} of {} ready, each routes {key}", found.len()))
}

/// The load balancer in front. `port` is the one that clients need.
pub(crate) fn front(service: &str, port: u16, ports: &[u16], addresses: &[String]) -> Link {
    const LINK: &str = "load balancer";
    if !ports.contains(&port) {
        let remedy = "portico front, or the operator, publishes it: /status there says what is in the way";
        return Link::broken(LINK, format!("Service {service} does not publish port {port}"), remedy);
    }
    if addresses.is_empty() {
        let remedy = "something must give addresses to Services of type LoadBalancer: kubectl describe it";
        return Link::broken(LINK, format!("Service {service} has no address"), remedy);
    }
    Link::holds(LINK, format!("{service} at {}, port {port}", addresses.join(", ")))
}

/// Why another Service has the `key`. The routing table decides so.
fn taken(key: &RouteKey, winner: &ObjectKey) -> String {
    format!(
        "{key} belongs to Service {winner}: what follows from a Cluster comes first, then what is in the \
         namespace of a Cluster, then the elder"
    )
}

/// The remedy where two Services claim `key`. Each may be the way into a cluster, and made anew if deleted.
fn one_must_change(key: &RouteKey) -> String {
    let what = match key {
        RouteKey::Host(_) => format!("host name (annotation {PORT_MAPPING})"),
        RouteKey::Port(_) => "nodePort".to_owned(),
        RouteKey::Authority(_) => "port or name".to_owned(),
    };
    format!("change the {what} of the Service that should not have it; delete no Service {APISERVER}")
}

fn of_api_server(rows: &[RouteRow]) -> impl Iterator<Item = &RouteRow> {
    rows.iter().filter(|row| *row.backend.service.name == *APISERVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway(ready: bool, route: Result<Option<&str>, &str>) -> AtGateway {
        let route = route.map(|state| state.map(str::to_owned)).map_err(str::to_owned);
        AtGateway { pod: "gateway-0".into(), ready, route, failing: 0 }
    }

    #[test]
    fn what_a_link_quotes_is_one_line_of_bounded_length() {
        let forged = format!("why\nCluster  holds\u{1b}[2J{}", "x".repeat(64 * 1_024));
        for link in [
            Link::holds("a", &forged),
            Link::broken("a", &forged, &forged),
            Link::unknown("a", &forged, &forged),
        ] {
            for text in [&link.evidence, &link.remedy] {
                assert!(!text.contains(char::is_control) && text.chars().count() <= LONGEST + 1, "{text}");
            }
            assert!(link.evidence.starts_with("why Cluster  holds"), "{link:?}");
        }
    }

    #[test]
    fn a_gateway_that_cannot_be_asked_is_no_proof_and_one_that_lacks_the_route_is() {
        let key = RouteKey::Port(31_001);
        let state = |found: &[AtGateway]| gateways(&key, found).state;
        assert_eq!(state(&[]), State::Broken);
        assert_eq!(state(&[gateway(false, Ok(None))]), State::Broken);
        assert_eq!(state(&[gateway(true, Ok(Some("ready")))]), State::Holds);
        assert_eq!(state(&[gateway(true, Ok(Some("ready"))), gateway(false, Ok(None))]), State::Holds);
        assert_eq!(state(&[gateway(true, Err("403"))]), State::Unknown);
        assert_eq!(state(&[gateway(true, Ok(Some("ready"))), gateway(true, Ok(None))]), State::Broken);
        assert_eq!(state(&[gateway(true, Ok(Some("notReady")))]), State::Broken);
        let failing = AtGateway { failing: 2, ..gateway(true, Ok(Some("ready"))) };
        assert_eq!(state(&[failing]), State::Unknown);
    }

    #[test]
    fn a_claim_that_another_service_has_is_given_up_by_a_change_and_not_by_deleting_one() {
        let key = RouteKey::Port(31_001);
        let text = taken(&key, &ObjectKey::new("cluster-b", APISERVER));
        assert_eq!(
            text,
            "port 31001 belongs to Service cluster-b/apiserver-external: what follows from a Cluster comes \
             first, then what is in the namespace of a Cluster, then the elder"
        );
        let remedy = one_must_change(&key);
        assert!(
            remedy.starts_with("change the nodePort") && remedy.contains("delete no Service"),
            "{remedy}"
        );
    }

    #[test]
    fn a_load_balancer_needs_the_port_and_an_address() {
        let state =
            |ports: &[u16], addresses: &[String]| front("portico/portico", 6_443, ports, addresses).state;
        assert_eq!(state(&[443], &["203.0.113.1".into()]), State::Broken);
        assert_eq!(state(&[443, 6_443], &[]), State::Broken);
        assert_eq!(state(&[443, 6_443], &["203.0.113.1".into()]), State::Holds);
    }

    #[test]
    fn what_the_operator_says_counts_and_its_silence_does_not() {
        let mut cluster = Cluster::default();
        assert_eq!(condition(&cluster).state, State::Unknown);
        let mut found = portico_api::cluster::ClusterCondition {
            status: "False".into(),
            reason: "NameNotResolved".into(),
            ..Default::default()
        };
        cluster.status.conditions.insert(EXPOSED.into(), found.clone());
        assert_eq!(condition(&cluster).state, State::Broken);
        found.status = "True".into();
        cluster.status.conditions.insert(EXPOSED.into(), found);
        assert_eq!(condition(&cluster).state, State::Holds);
    }

    #[test]
    fn a_cluster_without_a_service_is_mended_where_somebody_keeps_it_from_being_made() {
        let mut cluster = Cluster::default();
        let remedy = |cluster: &Cluster| service(cluster, "cluster-a", &[]).remedy.to_string();
        assert!(remedy(&cluster).contains("see that one of them runs"));
        let found = portico_api::cluster::ClusterCondition {
            status: "False".into(),
            reason: "ForeignWriter".into(),
            ..Default::default()
        };
        cluster.status.conditions.insert(EXPOSED.into(), found);
        assert!(remedy(&cluster).contains("stop that client"));
        cluster.spec.pause = true;
        assert!(remedy(&cluster).contains("remove spec.pause"));
    }
}
