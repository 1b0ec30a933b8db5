//! Answers bounded in bytes: one object, and one page of a list. An API server bounds pages in objects only,
//! and one object may have megabytes. Five hundred of them would take more memory than a small pod has.

use std::error::Error;
use std::io;

use futures_util::AsyncReadExt;
use kube::api::{ListParams, ObjectList};
use kube::core::Request;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use thiserror::Error as ThisError;

use crate::client::TooLong;

/// Longest answer that is read. Five hundred ordinary objects have one or two megabytes, and the largest
/// object that etcd takes has less than this in JSON.
pub const MAX_BYTES: usize = 16 << 20;

/// Objects in one page of a list, as in client-go. A page has fewer if the objects are so large that it takes
/// too much.
pub const OBJECTS: u32 = 500;

/// An answer that is not read, because of its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
#[error("the answer has more than {} MiB of JSON; make the object smaller, or delete it", MAX_BYTES >> 20)]
pub struct TooLarge;

/// Reads a page of the objects of `api`; `None` if it is longer than [`MAX_BYTES`].
pub async fn page<K>(api: &Api<K>, params: &ListParams) -> kube::Result<Option<ObjectList<K>>>
where
    K: Resource + Clone + DeserializeOwned,
{
    let request = Request::new(api.resource_url()).list(params).map_err(kube::Error::BuildRequest)?;
    bounded(&api.clone().into_client(), request).await
}

/// Reads what answers a request; `None` if it is longer than [`MAX_BYTES`].
pub(crate) async fn bounded<T: DeserializeOwned>(
    client: &Client,
    request: http::Request<Vec<u8>>,
) -> kube::Result<Option<T>> {
    bounded_by(MAX_BYTES, client, request).await
}

/// Reads what answers a request; `None` if it is longer than `longest`.
pub(crate) async fn bounded_by<T: DeserializeOwned>(
    longest: usize,
    client: &Client,
    request: http::Request<Vec<u8>>,
) -> kube::Result<Option<T>> {
    let body = client.request_stream(request).await?;
    let mut text = Vec::new();
    let most = u64::try_from(longest).unwrap_or(u64::MAX);
    let read = body.take(most.saturating_add(1)).read_to_end(&mut text).await;
    if text.len() > longest || read.as_ref().is_err_and(is_too_long) {
        return Ok(None);
    }
    read.map_err(kube::Error::ReadEvents)?;
    serde_json::from_slice(&text).map(Some).map_err(kube::Error::SerdeError)
}

/// Whether the client reads no more of an answer ([`limited`](crate::client::limited)).
fn is_too_long(error: &io::Error) -> bool {
    let inner = error.get_ref().map(|error| error as &(dyn Error + 'static));
    std::iter::successors(inner, |&error| error.source()).any(|error| error.is::<TooLong>())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::client::Body;
    use tower::service_fn;

    use super::*;
    use crate::client::limited;

    #[tokio::test]
    async fn a_page_that_a_limited_client_does_not_read_is_too_long_like_any_other() {
        let list = "{\"metadata\":{},\"items\":[]}".to_owned() + &" ".repeat(1_000);
        let service = service_fn(move |_: http::Request<Body>| {
            std::future::ready(Ok::<_, io::Error>(http::Response::new(Body::from(list.clone().into_bytes()))))
        });
        let client = Client::new(service, "default");
        for (longest, is_read) in [(2_000, true), (500, false)] {
            let api: Api<ConfigMap> = Api::all(limited(client.clone(), longest));
            let page = page(&api, &ListParams::default()).await.unwrap();
            assert_eq!(page.is_some(), is_read, "{longest}");
        }
    }
}
