//! What the server says of a Lease that it cannot keep.

use std::collections::BTreeMap;
use std::future::ready;

use kube::Client;
use kube::client::Body;
use portico_konnectivity::server::{ServerLease, Status};
use portico_lab::faulty_api::{Answer, FaultyApi, nowhere};
use portico_lab::log_lines::LogLines;
use serde_json::json;
use tokio::sync::mpsc;

/// The line about a Lease that could not be removed.
async fn line(client: Client) -> String {
    let (lines, _collected) =
        LogLines::collect(|metadata| metadata.target().starts_with("portico_konnectivity"));
    ServerLease::new(client, "kube-system", BTreeMap::new(), Status::default()).release().await;
    let lines = lines.messages();
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines[0].clone()
}

#[tokio::test]
async fn a_right_is_named_only_if_the_api_server_says_that_it_is_missing() {
    let right = "needs get, list, create, update and delete on leases";
    for (status, is_denied) in [(401, true), (403, true), (500, false)] {
        let api = FaultyApi::default();
        api.rules(|rules| rules.answers.push(("/leases", Answer::Status(status), usize::MAX)));
        let line = line(api.client(&nowhere())).await;
        assert_eq!(line.contains(right), is_denied, "{status}: {line}");
    }
    let line = line(nowhere()).await;
    assert!(!line.contains(right) && line.contains("runs out"), "{line}");
}

/// An API server with two pages of Leases, of which none is valid. Tells what it was asked.
fn two_pages(asked: mpsc::UnboundedSender<String>) -> Client {
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (method, uri) = (request.method().clone(), request.uri().to_string());
        // The API server takes that date, and nothing here reads it.
        let spec = json!({"leaseDurationSeconds": 30, "renewTime": "9999-12-31T23:59:59.000000Z"});
        let lease =
            |name: &str| json!({"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec.clone()});
        let page = |name: &str, next: &str| {
            json!({"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList",
                "metadata": {"continue": next}, "items": [lease(name)]})
        };
        let is_list = method == http::Method::GET && uri.contains("/leases?");
        let answer = match (is_list, uri.contains("continue=next")) {
            (true, false) => page("first", "next"),
            (true, true) => page("second", ""),
            (false, _) if method == http::Method::DELETE => json!({"kind": "Status", "status": "Success"}),
            (false, _) => lease("ours"),
        };
        let _ = asked.send(format!("{method} {uri}"));
        ready(Ok::<_, std::io::Error>(http::Response::new(Body::from(answer.to_string().into_bytes()))))
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn leases_of_servers_that_are_gone_are_looked_for_page_by_page() {
    let (asked, mut requests) = mpsc::unbounded_channel();
    let lease = ServerLease::new(two_pages(asked), "kube-system", BTreeMap::new(), Status::default());
    let mut seen = Vec::new();
    let collects = async {
        while seen.iter().filter(|line: &&String| line.starts_with("DELETE")).count() < 2 {
            seen.extend(requests.recv().await);
        }
    };
    tokio::select! {
        never = lease.run() => match never {},
        () = collects => {}
    }
    let lists = seen.iter().filter(|line| line.contains("/leases?")).collect::<Vec<_>>();
    assert!(lists.len() == 2 && lists.iter().all(|line| line.contains("limit=100")), "{lists:?}");
    let deleted = seen.iter().filter_map(|line| line.strip_prefix("DELETE ")).collect::<Vec<_>>();
    assert!(deleted[0].contains("/leases/first") && deleted[1].contains("/leases/second"), "{deleted:?}");
}
