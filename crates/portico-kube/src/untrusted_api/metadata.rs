//! Lists of an API server that is not trusted, by the metadata of the objects.

use http::{Method, header};
use serde_json::Value;

use super::rows::word;
use super::{UntrustedApi, UntrustedApiError};

const AS_METADATA: &str = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";

/// Objects of one answer: the managed fields take some KiB of each. If that is too much, one by one.
const AT_ONCE: usize = 8;

impl UntrustedApi {
    /// Reads the metadata of the objects in the list at `url`, in at most `answers` answers.
    ///
    /// # Errors
    /// There are more than that, too.
    pub async fn metadata(&self, url: &str, answers: usize) -> Result<Vec<Value>, UntrustedApiError> {
        let mark = if url.contains('?') { '&' } else { '?' };
        let (mut found, mut rest, mut at_once) = (Vec::new(), String::new(), AT_ONCE);
        for _ in 0..answers {
            let url = format!("{url}{mark}limit={at_once}{rest}");
            let list = self.exchange(Method::GET, &url, header::ACCEPT, AS_METADATA, &Value::Null).await;
            let mut list = match list {
                Err(UntrustedApiError::TooLong(_)) if at_once > 1 => {
                    at_once = 1;
                    continue;
                }
                list => list?.0,
            };
            let items = list["items"].as_array_mut().map(std::mem::take).unwrap_or_default();
            found.extend(items.into_iter().map(|mut item| item["metadata"].take()));
            let next = word(&list, "continue");
            if next.is_empty() {
                return Ok(found);
            }
            rest = format!("&continue={next}");
        }
        Err(UntrustedApiError::TooLong(super::what(&Method::GET, url)))
    }
}
