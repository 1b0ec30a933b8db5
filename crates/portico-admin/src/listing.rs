//! Listings: the same rows as JSON for programs and as a table for people, on the command line and over HTTP.

use std::borrow::Cow;
use std::io;

use clap::ValueEnum;
use hyper::body::Incoming;
use hyper::header::ACCEPT;
use hyper::{HeaderMap, Request, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use serde::Serialize;

use crate::body::{stream, whole};
use crate::server::{Answer, text, typed};
use crate::table;

/// How a listing is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people.
    Table,
    /// For programs; the field names are stable.
    Json,
}

impl OutputFormat {
    /// The format that a request asks for: by `?o=table` or `?o=json`, else by `Accept: text/...`, else JSON.
    ///
    /// # Errors
    ///
    /// The sentence for the client if `o` names no format.
    pub fn of_request(query: Query<'_>, headers: &HeaderMap) -> Result<Self, String> {
        let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
        match query.get("o").as_deref() {
            None if accept.is_some_and(|accept| accept.starts_with("text/")) => Ok(Self::Table),
            None | Some("json") => Ok(Self::Json),
            Some("table") => Ok(Self::Table),
            Some(other) => Err(format!("o={other:?} is no format; give table or json\n")),
        }
    }

    /// The media type of a listing in this format.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Table => "text/plain; charset=utf-8",
            Self::Json => "application/json",
        }
    }
}

/// Responds to a request with a listing in the format it asks for. `write` runs on a thread of its own.
pub fn answer(
    query: Query<'_>,
    headers: &HeaderMap,
    write: impl FnOnce(OutputFormat, &mut dyn io::Write) -> io::Result<()> + Send + 'static,
) -> Answer {
    match OutputFormat::of_request(query, headers) {
        Ok(format) => typed(format.content_type(), stream(move |out| write(format, out))),
        Err(sentence) => text(StatusCode::BAD_REQUEST, sentence),
    }
}

/// A row of a short listing.
pub trait Row<const N: usize>: Serialize {
    /// The titles of the columns.
    const HEADER: [&'static str; N];
    /// The row of the table.
    fn row(&self) -> [String; N];
}

/// Responds with a short listing. It is written at once, and no thread is started for it.
pub fn list<const N: usize, R: Row<N>>(request: &Request<Incoming>, query: Query<'_>, rows: &[R]) -> Answer {
    let format = match OutputFormat::of_request(query, request.headers()) {
        Ok(format) => format,
        Err(message) => return text(StatusCode::BAD_REQUEST, message),
    };
    let body = match format {
        // Numbers, addresses and names: serializing them cannot fail.
        OutputFormat::Json => serde_json::to_string(rows).unwrap_or_default() + "\n",
        OutputFormat::Table => table::render(R::HEADER, &rows.iter().map(R::row).collect::<Vec<_>>()),
    };
    typed(format.content_type(), whole(body))
}

/// The query of a request.
#[derive(Debug, Clone, Copy)]
pub struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    /// The query of `uri`, empty if it has none.
    pub fn of(uri: &'a Uri) -> Self {
        Self(uri.query().unwrap_or_default())
    }

    fn pairs(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    }

    /// Whether the name is there, with a value or without.
    pub fn has(self, name: &str) -> bool {
        self.pairs().any(|(key, _)| key == name)
    }

    /// The value of a name, without its percent-encoding (RFC 3986 section 2.1).
    pub fn get(self, name: &str) -> Option<Cow<'a, str>> {
        let value = self.pairs().find(|(key, _)| *key == name).map(|(_, value)| value);
        value.map(|value| percent_decode_str(value).decode_utf8_lossy())
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn a_query_is_read_with_and_without_values() {
        let query = Query("verbose&o=table");
        assert!(query.has("verbose"));
        assert_eq!(query.get("o").as_deref(), Some("table"));
        assert_eq!(Query("cluster=namespace%3amail").get("cluster").as_deref(), Some("namespace:mail"));
        assert_eq!(query.get("cluster"), None);
        assert!(!Query("").has("verbose"));
    }

    #[test]
    fn a_listing_is_json_unless_a_table_is_asked_for() {
        let mut headers = HeaderMap::new();
        assert_eq!(OutputFormat::of_request(Query(""), &headers), Ok(OutputFormat::Json));
        headers.insert(ACCEPT, HeaderValue::from_static("text/plain"));
        assert_eq!(OutputFormat::of_request(Query(""), &headers), Ok(OutputFormat::Table));
        assert_eq!(OutputFormat::of_request(Query("o=json"), &headers), Ok(OutputFormat::Json));
        assert!(OutputFormat::of_request(Query("o=yaml"), &headers).unwrap_err().contains("table or json"));
    }
}
