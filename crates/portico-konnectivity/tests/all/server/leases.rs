//! What the server says of a Lease that it cannot keep.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use kube::Client;
use portico_konnectivity::server::{ServerLease, Status};
use portico_lab::faulty_api::{Answer, FaultyApi, nowhere};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The texts of log lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("portico_konnectivity")
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Visit for Lines {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

/// The line about a Lease that could not be removed.
async fn line(client: Client) -> String {
    let lines = Lines::default();
    let _read = tracing::subscriber::set_default(lines.clone());
    ServerLease::new(client, "kube-system", BTreeMap::new(), Status::default()).release().await;
    let lines = lines.0.lock().unwrap();
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
