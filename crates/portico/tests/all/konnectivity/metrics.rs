//! The metrics of both makes side by side: what upstream's programs show, ours show with the same type and
//! the same labels. A value of a label that ours show is one of upstream's.

use std::collections::{BTreeMap, BTreeSet};

use tokio::io::AsyncWriteExt;

use super::endpoint::Endpoint;
use super::frontend::round_trip;
use super::program::{Program, until};
use super::site::Make::{Ours, Upstream};
use super::site::Pair;
use super::site::{Make, Mode::Grpc, Transport::Unix};
use crate::common::free_port;

/// What a page of metrics says: of each family of upstream's its type, and its labels as far as there are
/// samples.
type Families = BTreeMap<String, (String, BTreeSet<String>)>;

/// The families of upstream's names on a page in Prometheus' text format.
fn families(page: &str) -> Families {
    let mut families = Families::new();
    let mut current = None;
    for line in page.lines().filter(|line| !line.starts_with("# HELP ")) {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let is_upstreams = name.starts_with("konnectivity_network_proxy_");
            current = is_upstreams.then(|| name.to_owned());
            if is_upstreams {
                families.entry(name.to_owned()).or_default().0 = kind.to_owned();
            }
        } else if let Some(name) = &current {
            families.get_mut(name).unwrap().1.extend(labels(line));
        }
    }
    families
}

/// The names of a sample's labels, with the bound of a bucket as a number.
fn labels(sample: &str) -> Vec<String> {
    let Some((_, rest)) = sample.split_once('{') else { return Vec::new() };
    let mut parts = rest.split('"');
    let mut labels = Vec::new();
    while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
        let name = name.trim_matches([',', '=']);
        let bound = value.parse::<f64>().ok().filter(|_| name == "le");
        labels.push(bound.map_or_else(|| name.to_owned(), |bound| format!("{name}={bound}")));
    }
    labels
}

/// Every family of upstream's page is on ours, with its type and labels. Returns the names.
pub(crate) fn are_upstreams(theirs: &str, ours: &str) -> Vec<String> {
    let (theirs, ours) = (families(theirs), families(ours));
    for (name, family) in &theirs {
        assert_eq!(ours.get(name), Some(family), "{name}: ours, and upstream's");
    }
    theirs.into_keys().collect()
}

/// The values of the labels of upstream's families on a page, but for the bounds of buckets. Samples that are
/// 0 do not count: upstream shows none of what has not happened yet.
fn values(page: &str) -> BTreeSet<String> {
    let samples = page.lines().filter(|line| line.starts_with("konnectivity_network_proxy_"));
    let mut values = BTreeSet::new();
    for (name, rest) in samples.filter(|line| !line.ends_with(" 0")).filter_map(|line| line.split_once('{')) {
        let labels = rest.rsplit_once('}').expect("the labels end").0.split(',');
        let labels = labels.filter(|label| !label.starts_with("le="));
        values.extend(labels.map(|label| format!("{name} {label}")));
    }
    values
}

/// The page of a program.
pub(crate) fn page(program: &Program) -> String {
    program.get("/metrics").expect("the health port answers").1
}

#[tokio::test]
async fn the_server_lists_open_connections_and_agents_to_people() {
    let pair = Pair::start(Ours, Ours, Grpc, Unix).await;
    let echo = Endpoint::echo().await;
    let mut open = pair.frontend.connect(&echo.target()).await;
    round_trip(&mut open, b"carried").await;
    let list = || pair.server.admin("/connections");
    until("the list has the bytes of the connection", || {
        let list = list();
        let (up, down) = (r#""bytes_up":7"#, r#""bytes_down":7"#);
        list.contains(&echo.target()) && list.contains(up) && list.contains(down)
    })
    .await;
    assert!(pair.server.admin("/connections?o=table").starts_with("AGENT"));
    assert!(pair.server.admin("/agents").contains(env!("CARGO_PKG_VERSION")));
    drop(open);
    until("the connection is gone from the list", || !list().contains(&echo.target())).await;
}

/// What the server and the agent of a make show once everything has happened that one server, one agent and
/// one frontend can make happen.
async fn pages(make: Make) -> [String; 2] {
    let mut pair = Pair::start(make, make, Grpc, Unix).await;
    let echo = Endpoint::echo().await;
    round_trip(&mut pair.frontend.connect(&echo.target()).await, b"carried").await;
    pair.frontend.open(&format!("127.0.0.1:{}", free_port())).await.err().expect("nobody listens there");
    // Not read: it fills the server's channels.
    let sender = Endpoint::sender(1 << 40).await;
    let mut stalled = pair.frontend.connect(&sender.target()).await;
    stalled.write_all(b"?").await.unwrap();
    stalled.flush().await.unwrap();
    let shows = async |program: &Program, name: &str| {
        let name = format!("konnectivity_network_proxy_{name}");
        until(&format!("{make:?} shows {name}"), || page(program).contains(&format!("\n{name}{{"))).await;
    };
    shows(&pair.server.program, "server_full_receive_channels").await;
    pair.helper.as_mut().expect("the frontend's program").kill();
    // Upstream's counts several, one after the other.
    until(&format!("{make:?} counts the frontend that left"), || {
        let name = "konnectivity_network_proxy_server_stream_errors_total";
        pair.server.program.metric(name, r#"code="Canceled""#) > 0.5
    })
    .await;
    let server = page(&pair.server.program);
    // While upstream's agent closes an endpoint it does not read, and counts no failure of its server's.
    pair.agent.wait_for_metric("konnectivity_network_proxy_agent_open_endpoint_connections", "", 0.0).await;
    pair.server.program.kill();
    shows(&pair.agent, "agent_server_connection_failure_count").await;
    shows(&pair.agent, "agent_stream_errors_total").await;
    [server, page(&pair.agent)]
}

/// Those of Leases are compared in `leases_and_tokens_with_a_real_api_server`.
#[tokio::test]
async fn every_metric_of_upstreams_programs_is_there_with_its_type_and_labels() {
    let (theirs, ours) = tokio::join!(pages(Upstream), pages(Ours));
    for (part, seen) in [(0, 13), (1, 8)] {
        let names = are_upstreams(&theirs[part], &ours[part]);
        assert_eq!(names.len(), seen, "upstream shows others now: {names:?}");
        let (theirs, ours) = (values(&theirs[part]), values(&ours[part]));
        assert!(ours.is_subset(&theirs), "no values of upstream's: {:?}", ours.difference(&theirs));
    }
}
