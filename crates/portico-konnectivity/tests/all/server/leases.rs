//! What the server says of a Lease that it cannot keep.

use std::collections::BTreeMap;

use kube::Client;
use portico_konnectivity::server::{ServerLease, Status};
use portico_lab::faulty_api::{Answer, FaultyApi, nowhere};
use portico_lab::log_lines::LogLines;

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
