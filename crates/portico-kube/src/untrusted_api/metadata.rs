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
            found.extend(take_metadata(&mut list));
            let next = word(&list, "continue");
            if next.is_empty() {
                return Ok(found);
            }
            rest = format!("&continue={next}");
        }
        Err(UntrustedApiError::TooLong(super::what(&Method::GET, url)))
    }
}

/// What is no object has none, and is null.
fn take_metadata(list: &mut Value) -> impl Iterator<Item = Value> + use<> {
    let items = list.get_mut("items").and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default();
    items.into_iter().map(|mut item| item.get_mut("metadata").map(Value::take).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_what_is_no_object_in_a_list_there_is_no_metadata() {
        let of = |mut list: Value| take_metadata(&mut list).collect::<Vec<_>>();
        let items = json!([{"metadata": {"name": "a"}}, 1, "x", [], null, {}]);
        let null = Value::Null;
        let expected = [&json!({"name": "a"}), &null, &null, &null, &null, &null];
        assert_eq!(of(json!({"items": items})).iter().collect::<Vec<_>>(), expected);
        for none in [json!({}), json!({"items": 7}), json!(7)] {
            assert!(of(none).is_empty());
        }
    }
}
