//! One object, read once: for verbs that answer a question and end.

use std::time::Duration;

use http::Request;
use kube::Client;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::timeout;

use crate::error::describe;

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
    match timeout(REQUEST_TIMEOUT, client.request(request)).await {
        Ok(Ok(object)) => Ok(Some(object)),
        // An API server that does not have the kind answers 404 too, for another reason.
        Ok(Err(kube::Error::Api(status))) if status.reason == "NotFound" => Ok(None),
        Ok(Err(error)) => Err(failed(describe(&error))),
        Err(_) => Err(failed(format!("the API server did not answer within {REQUEST_TIMEOUT:?}"))),
    }
}
