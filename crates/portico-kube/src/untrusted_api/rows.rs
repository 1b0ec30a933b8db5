//! Lists of an API server that is not trusted, by the columns that kubectl shows. They are short, whatever
//! the objects hold.

use http::{Method, header};
use serde_json::Value;

use super::{UntrustedApi, UntrustedApiError, what};

/// Lines of a list as they are printed.
const AS_TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

/// Most lines of one answer. Within the longest answer they have room for names of 200 characters.
const MOST_AT_ONCE: usize = 200;

/// Most bytes of the cells of one list, in all its answers: 5,000 lines of 100 bytes.
pub(super) const MOST_BYTES: usize = 512 * 1_024;

/// Lines of a list, each with the columns that were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows<const N: usize> {
    /// What the server says, with nothing made harmless. A column that it does not know is empty.
    pub rows: Vec<[String; N]>,
    /// The version of the list, fit for a query.
    pub version: String,
    /// Whether the list has more lines.
    pub more: bool,
}

impl UntrustedApi {
    /// Reads the list at `url` in at most `answers` answers of `at_once` lines each.
    ///
    /// # Errors
    /// An answer that is none, and a list whose cells have more than half a MiB.
    pub async fn rows<const N: usize>(
        &self,
        url: &str,
        columns: [&str; N],
        at_once: usize,
        answers: usize,
    ) -> Result<Rows<N>, UntrustedApiError> {
        let at_once = at_once.min(MOST_AT_ONCE);
        let mark = if url.contains('?') { '&' } else { '?' };
        let mut found = Rows { rows: Vec::new(), version: String::new(), more: true };
        let (mut rest, mut bytes) = (String::new(), 0);
        for _ in 0..answers {
            let url = format!("{url}{mark}includeObject=None&limit={at_once}{rest}");
            let (table, _) = self.exchange(Method::GET, &url, header::ACCEPT, AS_TABLE, &Value::Null).await?;
            let mut lines = lines(&table, columns);
            let read = found.rows.len();
            found.rows.extend(lines.by_ref().take(at_once));
            bytes += found.rows[read..].iter().flatten().map(String::len).sum::<usize>();
            if bytes > MOST_BYTES {
                return Err(UntrustedApiError::TooLong(what(&Method::GET, &url)));
            }
            found.version = word(&table, "resourceVersion");
            let next = word(&table, "continue");
            if next.is_empty() {
                // It need not keep to what it was asked for.
                found.more = lines.next().is_some();
                break;
            }
            rest = format!("&continue={next}");
        }
        Ok(found)
    }
}

/// A field of the list that becomes part of a URL; empty if it could be more than a value there.
pub(super) fn word(table: &Value, field: &str) -> String {
    let text = table["metadata"][field].as_str().unwrap_or_default();
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    if text.chars().all(allowed) { text.to_owned() } else { String::new() }
}

fn lines<'a, const N: usize>(table: &'a Value, columns: [&str; N]) -> impl Iterator<Item = [String; N]> + 'a {
    let known = table["columnDefinitions"].as_array().map_or(&[][..], Vec::as_slice);
    let indexes = columns.map(|name| known.iter().position(|column| column["name"] == name));
    let rows = table["rows"].as_array().into_iter().flatten();
    rows.map(move |row| {
        indexes.map(|index| match index.map(|index| &row["cells"][index]) {
            Some(Value::String(text)) => text.clone(),
            None | Some(Value::Null) => String::new(),
            Some(other) => other.to_string(),
        })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_are_found_by_the_names_of_their_columns() {
        let table = json!({"columnDefinitions": [{"name": "Name"}, {"name": "Age"}, {"name": "Ready"}],
            "rows": [{"cells": ["a", "3s", 1]}, {"cells": ["b"]}, 7]});
        let found: Vec<[String; 3]> = lines(&table, ["Ready", "Name", "Other"]).collect();
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        assert_eq!(found, [row(["1", "a", ""]), row(["", "b", ""]), row(["", "", ""])]);
        assert_eq!(lines(&json!(7), ["Name"]).count(), 0);
    }

    #[test]
    fn what_would_add_to_the_query_is_no_version() {
        let of = |text: &str| word(&json!({"metadata": {"continue": text}}), "continue");
        assert_eq!(of("eyJ2IjoibWV0YS5rOHMuaW8vdjEi_-"), "eyJ2IjoibWV0YS5rOHMuaW8vdjEi_-");
        assert_eq!([of("a&watch=1"), of("a b"), of("a/../b")], ["", "", ""]);
    }
}
