//! One page of a list, bounded in bytes. An API server bounds pages in objects only, and one object may have
//! megabytes: five hundred of them would take more memory than a small pod has.

use futures_util::AsyncReadExt;
use kube::api::{ListParams, ObjectList};
use kube::core::Request;
use kube::{Api, Error, Resource};
use serde::de::DeserializeOwned;

/// Longest page that is read. Five hundred ordinary objects have one or two megabytes, and the largest object
/// that etcd takes has less than this in JSON.
pub(crate) const MAX_BYTES: usize = 16 << 20;

/// Reads a page of the objects of `api`; `None` if it is longer than [`MAX_BYTES`].
pub(crate) async fn page<K>(api: &Api<K>, params: &ListParams) -> kube::Result<Option<ObjectList<K>>>
where
    K: Resource + Clone + DeserializeOwned,
{
    let request = Request::new(api.resource_url()).list(params).map_err(Error::BuildRequest)?;
    let body = api.clone().into_client().request_stream(request).await?;
    let mut text = Vec::new();
    let most = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX);
    body.take(most.saturating_add(1)).read_to_end(&mut text).await.map_err(Error::ReadEvents)?;
    if text.len() > MAX_BYTES {
        return Ok(None);
    }
    serde_json::from_slice(&text).map(Some).map_err(Error::SerdeError)
}
