//! The rules of every controller for a write to the seed. It has a time limit, is made as Portico, and heeds
//! other writers.

use std::error::Error;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{DeleteParams, Preconditions};
use kube::core::Status;
use portico_api::cluster::Cluster;
use portico_api::meta::ObjectKey;
use portico_kube::apply::ApplyError;
use portico_kube::error::describe;
use portico_kube::leader::Leads;
use portico_source::Object;
use portico_source::served::Served;
use serde_json::Value;
use thiserror::Error;
use tokio::sync::watch::Receiver;
use tokio::time::timeout;

/// Time limit of a request. The API server may have done it all the same; the watch will tell.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The reason of what the API server does not do as it is asked to.
pub(crate) const WRITE_REFUSED: &str = "WriteRefused";

/// The reason of a field that the definition of its kind does not have.
pub(crate) const DEFINITION_OUTDATED: &str = "DefinitionOutdated";

/// What to do about it.
pub(crate) const NEWER_DEFINITIONS: &str = "it is of an older version: apply `portico crds`, or with \
                                            KKP `portico crds --own` and the definitions of that KKP";

/// The words of the API server about such a field if it is applied. If it is merged, the field is dropped.
pub(crate) const NOT_DECLARED: &str = "field not declared in schema";

/// The seed's API server did not do what it was asked for. Retried with back-off.
#[derive(Debug, Error)]
pub(crate) enum RequestError {
    #[error("{what}: {}", describe(&**source))]
    Failed { what: String, source: Box<dyn Error + Send + Sync> },
    #[error("{0}: no answer within {REQUEST_TIMEOUT:?}")]
    NoAnswer(String),
    #[error("the definition of {kind} on this seed drops {field}; {NEWER_DEFINITIONS}")]
    Dropped { kind: &'static str, field: &'static str },
}

impl RequestError {
    /// The reason of the condition that follows.
    pub(crate) fn reason(&self) -> &'static str {
        if matches!(self, Self::Dropped { .. }) { DEFINITION_OUTDATED } else { WRITE_REFUSED }
    }

    /// What the API server answered, if it did.
    pub(crate) fn status(&self) -> Option<&Status> {
        match self {
            Self::Failed { source, .. } => source.downcast_ref().and_then(status),
            Self::NoAnswer(_) | Self::Dropped { .. } => None,
        }
    }
}

/// Why an object was not written. Retried with back-off.
#[derive(Debug, Error)]
pub(crate) enum WriteError {
    #[error("{kind}: {source}")]
    Apply { kind: &'static str, source: ApplyError },
    #[error(transparent)]
    Request(#[from] RequestError),
    /// It cannot even be asked for: no certificate can have the names that were configured.
    #[error("{0}")]
    Impossible(String),
    #[error(
        "{kind} {key} is somebody else's, and nothing is written over it; delete it, and it is made here"
    )]
    Foreign { kind: &'static str, key: ObjectKey },
    #[error("another replica leads by now")]
    NotLeading,
}

impl WriteError {
    /// What the API server answered, if it did.
    pub(crate) fn status(&self) -> Option<&Status> {
        match self {
            Self::Apply { source, .. } => status(&source.source),
            Self::Request(error) => error.status(),
            Self::Foreign { .. } | Self::Impossible(_) | Self::NotLeading => None,
        }
    }

    /// Somebody, perhaps this process, has written the object since it was read.
    pub(crate) fn is_conflict(&self) -> bool {
        self.status().is_some_and(Status::is_conflict)
    }

    /// The object is gone.
    pub(crate) fn is_not_found(&self) -> bool {
        self.status().is_some_and(Status::is_not_found)
    }

    /// The reason of the condition that follows.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Impossible(_) => "InvalidConfiguration",
            Self::Request(error) => error.reason(),
            Self::Foreign { .. } => "ForeignObject",
            Self::Apply { .. } | Self::NotLeading => WRITE_REFUSED,
        }
    }
}

/// Ends a pass that another replica does by now.
pub(crate) fn must_lead(leads: &Receiver<Leads>) -> Result<(), WriteError> {
    if leads.borrow().now() { Ok(()) } else { Err(WriteError::NotLeading) }
}

/// What the API server answered, if it did.
pub(crate) fn status(error: &kube::Error) -> Option<&Status> {
    match error {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

/// Sends a request. `what` says in errors what it was for.
pub(crate) async fn request<T, E: Error + Send + Sync + 'static>(
    what: &str,
    request: impl Future<Output = Result<T, E>>,
) -> Result<T, RequestError> {
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(RequestError::Failed { what: what.to_owned(), source: Box::new(error) }),
        Err(_) => Err(RequestError::NoAnswer(what.to_owned())),
    }
}

/// Parameters for deleting `object`, and none that somebody made anew under its name.
pub(crate) fn only_this(object: &Value) -> DeleteParams {
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned);
    DeleteParams {
        preconditions: Some(Preconditions { uid, resource_version: None }),
        ..DeleteParams::default()
    }
}

/// Whether the deletion of `object` has begun. A finalizer may hold it for long.
pub(crate) fn is_terminating(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some()
}

/// An object of the seed as Events name what they are about.
pub(crate) fn part(kind: &str, key: &ObjectKey) -> ObjectReference {
    ObjectReference {
        kind: Some(kind.to_owned()),
        namespace: Some(key.namespace.to_string()).filter(|namespace| !namespace.is_empty()),
        name: Some(key.name.to_string()),
        ..ObjectReference::default()
    }
}

/// The reason of the Event about an object that somebody had changed or deleted.
pub(crate) const PUT_BACK: &str = "PutBack";

/// Checks that a Cluster, as it was written, has this condition. An API server does not say that it has
/// dropped one which the definition of the kind lacks.
pub(crate) fn has_condition(written: &Served<Cluster>, condition: &str) -> Result<(), RequestError> {
    match &written.object {
        Ok(Object::Cluster(cluster)) if !cluster.status.conditions.contains_key(condition) => {
            Err(RequestError::Dropped { kind: "Clusters", field: "status.conditions" })
        }
        _ => Ok(()),
    }
}
