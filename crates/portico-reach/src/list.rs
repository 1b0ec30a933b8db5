//! Lists of the seed's API.

use portico_kube::{Client, read};
use serde::Deserialize;
use serde_json::Value;

/// The objects of a list of the seed's API; none where that kind is not known.
pub(crate) async fn items(client: &Client, path: &str, what: &str) -> anyhow::Result<Vec<Value>> {
    #[derive(Deserialize)]
    struct List {
        items: Vec<Value>,
    }
    let list: Option<List> = read(client, path, what).await?;
    Ok(list.map(|list| list.items).unwrap_or_default())
}
