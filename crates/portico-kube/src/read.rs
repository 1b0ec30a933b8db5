//! Reads one object, or a list by labels, once: for verbs that answer a question and end.

use std::time::Duration;

use http::Request;
use kube::Client;
use kube::api::ListParams;
use kube::core::Status;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;
use tokio::time::timeout;

use crate::error::describe;
use crate::page::{MAX_BYTES, OBJECTS, TooLarge, bounded, bounded_by};

/// Time limit of a request. kube's own retries, which could take minutes, end with it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest page of a pod that is read: the routes of 20,000 clusters.
const MAX_POD_PAGE: usize = 64 << 20;

/// Why an object cannot be read. Says what was tried, and the answer of the API server.
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
    // An API server that does not have the kind answers 404 too, for another reason.
    get(client, path, what, (MAX_BYTES, TooLarge.to_string()), |status| status.reason == "NotFound").await
}

/// Reads the page at `path`, which a pod serves, through the API; `None` if it has no such page, or is gone.
/// `what` names it in errors.
pub async fn read_of_pod<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    what: &str,
) -> Result<Option<T>, ReadError> {
    let too_large = format!("it has more than {} MiB, and is not read", MAX_POD_PAGE >> 20);
    // The pod's own 404 is text, and no answer of the API server.
    get(client, path, what, (MAX_POD_PAGE, too_large), |status| status.code == 404).await
}

/// Reads at most `longest` bytes; a longer answer is the error `too_large`. `None` after an error of the API
/// server of which `is_missing` holds.
async fn get<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    what: &str,
    (longest, too_large): (usize, String),
    is_missing: fn(&Status) -> bool,
) -> Result<Option<T>, ReadError> {
    let failed = |why| ReadError { what: what.to_owned(), why };
    let request = Request::get(path).body(Vec::new()).map_err(|error| failed(error.to_string()))?;
    match timeout(REQUEST_TIMEOUT, bounded_by(longest, client, request)).await {
        Ok(Ok(Some(found))) => Ok(Some(found)),
        Ok(Ok(None)) => Err(failed(too_large)),
        Ok(Err(kube::Error::Api(status))) if is_missing(&status) => Ok(None),
        Ok(Err(error)) => Err(failed(describe(&error))),
        Err(_) => Err(failed(format!("the API server did not answer within {REQUEST_TIMEOUT:?}"))),
    }
}

/// A page of a list, without what its objects are.
#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    metadata: PageMeta,
    #[serde(default)]
    items: Vec<Value>,
}

#[derive(Default, Deserialize)]
struct PageMeta {
    #[serde(default, rename = "continue")]
    next: String,
}

/// Which objects of a list are read.
#[derive(Debug, Clone, Copy)]
pub enum Selector<'a> {
    /// All of them.
    All,
    /// The objects with these labels.
    Labels(&'a str),
    /// The objects with these fields. Only a few fields of each kind can be asked for.
    Fields(&'a str),
}

/// Reads the objects of the list at `path` of the API, which is without a query, page by page, those that
/// `selector` names. Each is handed to `each`, so that a long list is never held as it is read. `what` names
/// it in errors: of a selector that is none, the API server says what is wrong with it. A list that is not
/// there is an error, and not an empty one.
pub async fn list(
    client: &Client,
    path: &str,
    selector: Selector<'_>,
    what: &str,
    mut each: impl FnMut(Value),
) -> Result<(), ReadError> {
    let failed = |why| ReadError { what: what.to_owned(), why };
    let mut params = match selector {
        Selector::All => ListParams::default(),
        Selector::Labels(labels) => ListParams::default().labels(labels),
        Selector::Fields(fields) => ListParams::default().fields(fields),
    };
    let mut objects = OBJECTS;
    loop {
        params.limit = Some(objects);
        let request = kube::core::Request::new(path).list(&params).map_err(|it| failed(it.to_string()))?;
        let page: Page = match timeout(REQUEST_TIMEOUT, bounded(client, request)).await {
            Ok(Ok(Some(page))) => page,
            Ok(Ok(None)) if objects == 1 => return Err(failed(TooLarge.to_string())),
            Ok(Ok(None)) => {
                objects /= 2;
                continue;
            }
            Ok(Err(error)) => return Err(failed(describe(&error))),
            Err(_) => {
                return Err(failed(format!("the API server did not answer within {REQUEST_TIMEOUT:?}")));
            }
        };
        page.items.into_iter().for_each(&mut each);
        if page.metadata.next.is_empty() {
            return Ok(());
        }
        params.continue_token = Some(page.metadata.next);
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::Response;
    use http_body_util::Full;
    use hyper::body::Bytes;
    use serde_json::json;
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

    /// An API server with three objects, which gives one in each page. An answer with more than one of them
    /// is too long.
    fn paged() -> Client {
        let service = service_fn(|request: Request<kube::client::Body>| async move {
            let query = request.uri().query().unwrap_or_default().to_owned();
            assert!(query.contains("labelSelector=team%3Da"), "{query}");
            let next = match query.split("continue=").nth(1) {
                None => 1,
                Some(token) => token.split('&').next().unwrap().parse::<u8>().unwrap() + 1,
            };
            let more = if next < 3 { next.to_string() } else { String::new() };
            let page = json!({"metadata": {"continue": more}, "items": [next]}).to_string();
            let is_short = query.contains("limit=1&") || query.ends_with("limit=1");
            let text = if is_short { page } else { format!("\"{}\"", "x".repeat(MAX_BYTES)) };
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(text))))
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_list_is_read_to_its_last_page_in_pages_that_are_short_enough() {
        let mut found = Vec::new();
        let team = Selector::Labels("team=a");
        list(&paged(), "/clusters", team, "Clusters", |object| found.push(object)).await.unwrap();
        assert_eq!(found, [1, 2, 3]);
    }

    #[tokio::test]
    async fn a_list_that_is_not_there_is_an_error_and_fields_are_asked_for() {
        let service = service_fn(|request: Request<kube::client::Body>| async move {
            let query = request.uri().query().unwrap_or_default();
            assert!(query.contains("fieldSelector=spec.type%3Da"), "{query}");
            let answer = Response::builder().status(404);
            Ok::<_, Infallible>(answer.body(Full::new(Bytes::from("404 page not found\n"))).unwrap())
        });
        let client = Client::new(service, "default");
        let fields = Selector::Fields("spec.type=a");
        let error = list(&client, "/clusters", fields, "Clusters", |_| ()).await.unwrap_err().to_string();
        assert!(error.starts_with("reading Clusters: "), "{error}");
    }
}
