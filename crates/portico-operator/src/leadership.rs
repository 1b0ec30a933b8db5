//! Which process writes. A process with the controller of one front Service shares the Lease of that Service
//! with all others of it. An operator writes objects that the whole cluster has one of. So it first needs the
//! one Lease of the cluster, whatever its `--service` and its namespace.
//!
//! An operator that waits for one of another installation says so: by an Event on that Lease, in the log, and
//! in the status.

use futures_util::future::join3;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use portico_api::text::one_line;
use portico_kube::events::{Events, Note, Severity};
use portico_kube::leader::{self, Holder, Leads, LeaseSettings};
use tokio::sync::watch as channel;
use tracing::{info, warn};

use crate::controllers::front::Settings;
use crate::status::StatusHandle;

/// Where the Lease of the cluster is: in the one namespace that every cluster has.
const NAMESPACE: &str = "kube-system";

/// Its name. An operator of another version must have the same.
const NAME: &str = "portico-operator";

/// The annotation of that Lease with the front Service of the operator that holds it.
const SERVICE: &str = "portico.k8c.io/service";

/// The name of the election on Events.
pub(crate) const CONTROLLER: &str = "portico-operator";

/// Most characters of what the Lease says that get into a message.
const QUOTED: usize = 100;

/// Tries to lead for the front Service of `front`, until `leading` has no receiver left.
pub(crate) async fn elect_front(client: Client, front: Settings, leading: channel::Sender<Leads>) {
    leader::elect(client, front.lease(), leading, channel::Sender::new(None)).await;
}

/// Tries to lead the whole cluster, and then for the front Service of `front`.
pub(crate) async fn elect_operator(
    client: Client,
    front: Settings,
    events: Events,
    status: StatusHandle,
    leading: channel::Sender<Leads>,
) {
    let service = front.plan.front.to_string();
    let settings = LeaseSettings {
        namespace: NAMESPACE.to_owned(),
        name: NAME.to_owned(),
        // Pods of two installations, in two namespaces, may have the same name.
        identity: format!("{}_{service}", front.identity),
        says: Some((SERVICE, service.clone())),
    };
    let (holding, holds) = channel::channel(Leads::default());
    let (other, others) = channel::channel(None);
    let whole = leader::elect(client.clone(), settings, holding, other);
    // First the Lease of the cluster, then that of the front Service. Otherwise two operators could hold one
    // each and wait for ever.
    let within = leader::elect_while(client, front.lease(), Some(holds), leading, channel::Sender::new(None));
    join3(whole, within, tell(service, others, events, status)).await;
}

/// Says when an operator of another installation leads, and when none does any more.
async fn tell(
    service: String,
    mut others: channel::Receiver<Option<Holder>>,
    events: Events,
    status: StatusHandle,
) {
    status.operator(|_| ());
    while others.changed().await.is_ok() {
        let other = others.borrow_and_update().clone();
        let other = other.filter(|other| other.says.as_deref().is_some_and(|says| says != service));
        let text = other.map(|other| waits_for(&other, &service));
        let before = status.operator(|operator| std::mem::replace(&mut operator.waits_for, text.clone()));
        match (before, text) {
            (before, Some(text)) if before.as_ref() != Some(&text) => {
                warn!("{text}");
                let note = Note {
                    severity: Severity::Warning,
                    reason: "SecondOperator",
                    action: "Elect",
                    text: &text,
                };
                events.publish(&lease(), note).await;
            }
            (Some(_), None) => info!("no operator of another installation leads any more"),
            _ => {}
        }
    }
}

fn waits_for(other: &Holder, service: &str) -> String {
    let quoted = |text: &str| one_line(text, QUOTED);
    let theirs = other.says.as_deref().map(quoted).unwrap_or_default();
    format!(
        "another operator leads this cluster, that of the front Service {theirs} (replica {}, by Lease \
         {NAMESPACE}/{NAME}); the one of {service} writes nothing. Delete one of the two",
        quoted(&other.identity)
    )
}

fn lease() -> ObjectReference {
    ObjectReference {
        api_version: Some("coordination.k8s.io/v1".to_owned()),
        kind: Some("Lease".to_owned()),
        namespace: Some(NAMESPACE.to_owned()),
        name: Some(NAME.to_owned()),
        ..ObjectReference::default()
    }
}
