//! One merge patch of one object, for verbs that carry out what a person asked for and end.

use std::time::Duration;

use http::Request;
use kube::Client;
use serde_json::Value;
use thiserror::Error;
use tokio::time::timeout;

use crate::error::describe;
use crate::page::{TooLarge, bounded};

/// Time limit of a request. kube's own retries, which could take minutes, end with it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Why an object cannot be written. Says what was tried, and the answer of the API server.
#[derive(Debug, Error)]
#[error("writing {what}: {why}")]
pub struct PatchError {
    what: String,
    why: String,
}

/// What became of a patch.
#[derive(Debug, Clone, PartialEq)]
pub enum Patched {
    /// The object as it is now.
    Written(Value),
    /// It is not of the `resourceVersion` in the patch any more: read it again, and decide again.
    Conflict,
}

/// Merges `patch` into the object at `path` of the API, as `manager`. `what` names it in errors.
pub async fn merge(
    client: &Client,
    path: &str,
    manager: &str,
    patch: &Value,
    what: &str,
) -> Result<Patched, PatchError> {
    let failed = |why| PatchError { what: what.to_owned(), why };
    let request = Request::patch(format!("{path}?fieldManager={manager}"))
        .header(http::header::CONTENT_TYPE, "application/merge-patch+json")
        .body(patch.to_string().into_bytes())
        .map_err(|error| failed(error.to_string()))?;
    match timeout(REQUEST_TIMEOUT, bounded(client, request)).await {
        Ok(Ok(Some(object))) => Ok(Patched::Written(object)),
        Ok(Ok(None)) => Err(failed(TooLarge.to_string())),
        Ok(Err(kube::Error::Api(status))) if status.reason == "Conflict" => Ok(Patched::Conflict),
        Ok(Err(error)) => Err(failed(describe(&error))),
        Err(_) => Err(failed(format!("the API server did not answer within {REQUEST_TIMEOUT:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Response, StatusCode};
    use http_body_util::{BodyExt, Full};
    use hyper::body::Bytes;
    use serde_json::json;
    use tower::service_fn;

    use super::*;

    /// An API server that answers every patch so, and tells of it what it got.
    async fn answered(status: StatusCode, answer: Value) -> Result<Patched, PatchError> {
        let service = service_fn(move |request: Request<kube::client::Body>| {
            let answer = answer.clone();
            async move {
                let (head, body) = request.into_parts();
                assert_eq!(head.uri, "/clusters/a?fieldManager=test");
                assert_eq!(head.headers["content-type"], "application/merge-patch+json");
                let body = body.collect().await.unwrap().to_bytes();
                assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), json!({"spec": {"x": null}}));
                let body = Full::new(Bytes::from(answer.to_string()));
                Ok::<_, Infallible>(Response::builder().status(status).body(body).unwrap())
            }
        });
        let client = Client::new(service, "default");
        merge(&client, "/clusters/a", "test", &json!({"spec": {"x": null}}), "Cluster a").await
    }

    #[tokio::test]
    async fn a_conflict_is_an_answer_and_a_refusal_is_an_error_in_the_words_of_the_api_server() {
        let object = json!({"kind": "Cluster"});
        assert_eq!(answered(StatusCode::OK, object.clone()).await.unwrap(), Patched::Written(object));
        let failure = json!({"kind": "Status", "status": "Failure", "message": "no"});
        let status = |code: u16, reason: &str| {
            let mut status = failure.clone();
            (status["code"], status["reason"]) = (code.into(), reason.into());
            status
        };
        let conflict = answered(StatusCode::CONFLICT, status(409, "Conflict")).await.unwrap();
        assert_eq!(conflict, Patched::Conflict);
        let refused = answered(StatusCode::UNPROCESSABLE_ENTITY, status(422, "Invalid")).await;
        let text = refused.unwrap_err().to_string();
        assert!(text.starts_with("writing Cluster a: the API server answered 422: no"), "{text}");
    }
}
