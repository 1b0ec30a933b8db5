//! One object, read once: for verbs that answer a question and end.

use std::time::Duration;

use http::Request;
use kube::Client;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::timeout;

use crate::error::describe;
use crate::page::{TooLarge, bounded};

/// Time limit of a request. kube's own retries, which could take minutes, end with it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Why an object cannot be read. Says what was tried, and what the API server answered.
#[derive(Debug, Error)]
#[error("reading {what}: {why}")]
pub struct ReadError {
    what: String,
    why: String,
}

/// Reads the object at `path` of the API; `None` if there is none. `what` names it in errors.
pub async fn read<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    what: &str,
) -> Result<Option<T>, ReadError> {
    let failed = |why| ReadError { what: what.to_owned(), why };
    let request = Request::get(path).body(Vec::new()).map_err(|error| failed(error.to_string()))?;
    match timeout(REQUEST_TIMEOUT, bounded(client, request)).await {
        Ok(Ok(Some(object))) => Ok(Some(object)),
        Ok(Ok(None)) => Err(failed(TooLarge.to_string())),
        // An API server that does not have the kind answers 404 too, for another reason.
        Ok(Err(kube::Error::Api(status))) if status.reason == "NotFound" => Ok(None),
        Ok(Err(error)) => Err(failed(describe(&error))),
        Err(_) => Err(failed(format!("the API server did not answer within {REQUEST_TIMEOUT:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::Response;
    use http_body_util::Full;
    use hyper::body::Bytes;
    use serde_json::Value;
    use tower::service_fn;

    use super::*;
    use crate::page::MAX_BYTES;

    #[tokio::test]
    async fn an_object_that_is_too_long_is_an_error_and_is_not_held() {
        let service = service_fn(|_: Request<_>| async {
            let body = Full::new(Bytes::from(format!("\"{}\"", "x".repeat(MAX_BYTES))));
            Ok::<_, Infallible>(Response::new(body))
        });
        let client = Client::new(service, "default");
        let error = read::<Value>(&client, "/a", "Cluster a").await.unwrap_err().to_string();
        assert!(error.starts_with("reading Cluster a: the answer has more than 16 MiB"), "{error}");
    }
}
