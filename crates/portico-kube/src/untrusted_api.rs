//! An API server that is not trusted: that of a user cluster, in the hands of its users.
//!
//! It may be away, slow or mute, answer without end, or lie. Every step has a time limit, no answer is longer
//! than [`LONGEST_ANSWER`], and nothing that it says gets into the log as it is. It is reached by a
//! kubeconfig that names neither programs nor files: the caller has read that by `portico_pki::Kubeconfig`.
//!
//! An object that somebody else made is left alone ([`Applied::Foreign`]).

use std::time::Duration;

use http::response::Parts;
use http::{HeaderMap, HeaderName, Method, Request, header};
use http_body_util::BodyExt;
use hyper::body::Bytes;
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::Client;
use kube::client::Body;
use portico_api::text::one_line;
use portico_dial::Dialer;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::timeout;

use crate::FIELD_MANAGER;
use crate::apply::{contains, is_applied, is_ours};
use crate::client::{self, ClientError, TooLong};
use crate::error::describe;
use crate::json::may_hold_more_than;

mod metadata;
mod rows;

use rows::MOST_BYTES;
pub use rows::Rows;

/// Time limit for a connection, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit of a request, with the connection it may need and all of the answer.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is read. The longest of our objects has 12 KiB with everything that controllers
/// say about it.
pub const LONGEST_ANSWER: usize = 64 * 1_024;

/// The longest time that a watch takes.
pub const LONGEST_WATCH: Duration = Duration::from_secs(300);

/// Most values of an answer: our longest object has some hundred. As a tree each takes 100 to 200 bytes.
const MOST_VALUES: usize = 4_096;

/// Most characters of what it says that get into a message.
const QUOTED: usize = 300;

/// The way into one cluster.
pub struct UntrustedApi(Client);

/// Why a request did not work. All of them are worth another attempt, with back-off.
#[derive(Debug, Error)]
pub enum UntrustedApiError {
    /// Neither connection nor answer: it is away, its certificate is not the right one, or it breaks off.
    #[error("{what}: {why}")]
    Unreachable {
        /// What was tried.
        what: String,
        /// What came of it.
        why: String,
    },
    /// Too slow.
    #[error("{0}: no answer within {REQUEST_TIMEOUT:?}")]
    NoAnswer(String),
    /// Too long.
    #[error(
        "{0}: the answer is longer than {LONGEST_ANSWER} bytes, has more than {MOST_VALUES} values, or is \
         one of a list with more than {MOST_BYTES} bytes"
    )]
    TooLong(String),
    /// It refused.
    #[error("{what}: it answered {code}: {message}")]
    Refused {
        /// What was tried.
        what: String,
        /// The HTTP status.
        code: u16,
        /// What it says, shortened.
        message: String,
    },
    /// An answer that is no object.
    #[error("{0}: the answer is no object of the Kubernetes API")]
    Unreadable(String),
}

impl UntrustedApiError {
    /// The failure in one word, for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "Unreachable",
            Self::NoAnswer(_) => "NoAnswer",
            Self::TooLong(_) => "AnswerTooLong",
            Self::Refused { .. } => "Refused",
            Self::Unreadable(_) => "AnswerUnreadable",
        }
    }
}

/// What [`UntrustedApi::apply`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    /// Nothing: the object was as wanted.
    Unchanged,
    /// The object is new, or was changed.
    Changed,
    /// Nothing: somebody else made the object, and it is not as wanted. Its last writer.
    Foreign(String),
}

impl UntrustedApi {
    /// The way by the text of a kubeconfig with everything in it, through the proxy of `dialer`, if it has
    /// one. No request is made.
    pub async fn new(kubeconfig: &str, dialer: Dialer) -> Result<Self, ClientError> {
        client::bounded(kubeconfig, dialer, CONNECT_TIMEOUT, LONGEST_ANSWER).await.map(Self)
    }

    /// Makes the object at `path` as `wanted`, which holds the wanted fields and no others. One that has all
    /// of them costs no write.
    pub async fn apply(&self, path: &str, wanted: &Value) -> Result<Applied, UntrustedApiError> {
        let current = self.get(path).await?;
        if let Some(current) = &current {
            let managers = managers(current);
            if !managers.iter().any(is_ours) {
                let same = content(wanted).all(|(key, value)| contains(&current[key], value));
                let writer = || Applied::Foreign(last_writer(&managers));
                return Ok(if same { Applied::Unchanged } else { writer() });
            }
            if is_applied(wanted, current, &managers) {
                return Ok(Applied::Unchanged);
            }
        }
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        // As a tree the object is many times its text: it goes before the server answers again.
        let before = current.map(|current| version(&current));
        let url = format!("{path}?fieldManager={FIELD_MANAGER}&force=true");
        let written = self.send(Method::PATCH, &url, "application/apply-patch+yaml", wanted).await?;
        Ok(if before == Some(version(&written)) { Applied::Unchanged } else { Applied::Changed })
    }

    /// Deletes the object at `path`, if Portico made it. Returns whether it did.
    pub async fn remove(&self, path: &str) -> Result<bool, UntrustedApiError> {
        let Some(current) = self.get(path).await? else { return Ok(false) };
        let leaves = current["metadata"].get("deletionTimestamp").is_some();
        if leaves || !managers(&current).iter().any(is_ours) {
            return Ok(false);
        }
        // Not one that somebody made anew under this name.
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background",
            "preconditions": {"uid": current["metadata"]["uid"]}});
        match self.send(Method::DELETE, path, "application/json", &options).await {
            Ok(_) => Ok(true),
            Err(UntrustedApiError::Refused { code: 404, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The object at `path`; `None` if there is none.
    pub async fn get(&self, path: &str) -> Result<Option<Value>, UntrustedApiError> {
        match self.send(Method::GET, path, "application/json", &Value::Null).await {
            Ok(object) => Ok(Some(object)),
            Err(UntrustedApiError::Refused { code: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The server's words about itself, and its time, if it tells that.
    pub async fn version(&self) -> Result<(Value, Option<Timestamp>), UntrustedApiError> {
        let accept = "application/json";
        let (version, headers) =
            self.exchange(Method::GET, "/version", header::ACCEPT, accept, &Value::Null).await?;
        let date = headers.get(header::DATE).and_then(|date| date.to_str().ok());
        Ok((version, date.and_then(|date| rfc2822::parse(date).ok()).map(|date| date.timestamp())))
    }

    /// Asks the server whether it takes requests. A user without the right to ask is refused.
    pub async fn ready(&self) -> Result<(), UntrustedApiError> {
        let path = "/readyz";
        let (head, said) = self.answer(Method::GET, path, header::ACCEPT, "text/plain", &Value::Null).await?;
        if head.status.is_success() {
            return Ok(());
        }
        let message = quoted(&String::from_utf8_lossy(&said));
        Err(UntrustedApiError::Refused {
            what: what(&Method::GET, path),
            code: head.status.as_u16(),
            message,
        })
    }

    /// Makes an object in the collection at `path`, or asks for what a subresource there does.
    pub async fn create(&self, path: &str, object: &Value) -> Result<Value, UntrustedApiError> {
        self.send(Method::POST, path, "application/json", object).await
    }

    /// Approves the CertificateSigningRequest at `path`, as it was read. A request that has changed since is
    /// refused.
    pub async fn approve(
        &self,
        path: &str,
        mut request: Value,
        reason: &str,
        message: &str,
    ) -> Result<(), UntrustedApiError> {
        request["status"]["conditions"] =
            json!([{"type": "Approved", "status": "True", "reason": reason, "message": message}]);
        self.send(Method::PUT, &format!("{path}/approval"), "application/json", &request).await.map(drop)
    }

    /// Changes these fields of the object at `path` (RFC 7396).
    pub async fn merge(&self, path: &str, patch: &Value) -> Result<Value, UntrustedApiError> {
        let url = format!("{path}?fieldManager={FIELD_MANAGER}");
        self.send(Method::PATCH, &url, "application/merge-patch+json", patch).await
    }

    /// Waits until something changes in the list at `url`, which names the version to start from. Also
    /// returns when `limit` has passed, or the server ends the watch. The change is not read.
    pub async fn changed(&self, url: &str, limit: Duration) -> Result<(), UntrustedApiError> {
        let what = format!("watch {}", path_of(url));
        let failed = |error: &(dyn std::error::Error + 'static)| failed(&what, error);
        let limit = limit.min(LONGEST_WATCH);
        let url = format!("{url}&watch=1&timeoutSeconds={}", limit.as_secs().max(1));
        let request = Request::builder().uri(url).header(header::ACCEPT, "application/json");
        let request = request.body(Body::empty()).map_err(|error| failed(&error))?;
        let response = match timeout(REQUEST_TIMEOUT, self.0.send(request)).await {
            Ok(response) => response.map_err(|error| failed(&error))?,
            Err(_) => return Err(UntrustedApiError::NoAnswer(what)),
        };
        let code = response.status().as_u16();
        if !response.status().is_success() {
            return Err(UntrustedApiError::Refused { what, code, message: "no watch".to_owned() });
        }
        match timeout(limit, response.into_body().frame()).await {
            Ok(Some(Err(error))) => Err(failed(&error)),
            // It need not keep to the time that it was asked for.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn send(
        &self,
        method: Method,
        url: &str,
        content_type: &str,
        body: &Value,
    ) -> Result<Value, UntrustedApiError> {
        Ok(self.exchange(method, url, header::CONTENT_TYPE, content_type, body).await?.0)
    }

    async fn exchange(
        &self,
        method: Method,
        url: &str,
        header: HeaderName,
        media_type: &str,
        body: &Value,
    ) -> Result<(Value, HeaderMap), UntrustedApiError> {
        let what = what(&method, url);
        let (head, bytes) = self.answer(method, url, header, media_type, body).await?;
        if may_hold_more_than(&bytes, MOST_VALUES) {
            return Err(UntrustedApiError::TooLong(what));
        }
        let object: Option<Value> = serde_json::from_slice(&bytes).ok().filter(Value::is_object);
        if !head.status.is_success() {
            let said = object.as_ref().and_then(|status| status["message"].as_str());
            let message = quoted(said.unwrap_or("nothing that explains it"));
            return Err(UntrustedApiError::Refused { what, code: head.status.as_u16(), message });
        }
        object.map(|object| (object, head.headers)).ok_or(UntrustedApiError::Unreadable(what))
    }

    async fn answer(
        &self,
        method: Method,
        url: &str,
        header: HeaderName,
        media_type: &str,
        body: &Value,
    ) -> Result<(Parts, Bytes), UntrustedApiError> {
        let what = what(&method, url);
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(url);
        let request = request.header(header, media_type).body(Body::from(body));
        let failed = |error: &(dyn std::error::Error + 'static)| failed(&what, error);
        let request = request.map_err(|error| failed(&error))?;
        let exchange = async {
            let response = self.0.send(request).await.map_err(|error| failed(&error))?;
            let (head, body) = response.into_parts();
            let bytes = body.collect().await.map_err(|error| failed(&error))?.to_bytes();
            Ok((head, bytes))
        };
        match timeout(REQUEST_TIMEOUT, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(UntrustedApiError::NoAnswer(what)),
        }
    }
}

/// What is tried, for a message.
fn what(method: &Method, url: &str) -> String {
    format!("{method} {}", path_of(url))
}

/// What of a URL gets into a message.
fn path_of(url: &str) -> &str {
    url.split('?').next().unwrap_or_default()
}

fn failed(what: &str, error: &(dyn std::error::Error + 'static)) -> UntrustedApiError {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    if causes.any(|cause| cause.is::<TooLong>()) {
        return UntrustedApiError::TooLong(what.to_owned());
    }
    UntrustedApiError::Unreachable { what: what.to_owned(), why: quoted(&describe(error)) }
}

/// What is wanted beside name and labels, which every object has.
fn content(wanted: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let fields = wanted.as_object().into_iter().flatten();
    fields.filter(|(key, _)| !["metadata", "apiVersion", "kind"].contains(&key.as_str()))
}

fn managers(object: &Value) -> Vec<ManagedFieldsEntry> {
    serde_json::from_value(object["metadata"]["managedFields"].clone()).unwrap_or_default()
}

/// The manager that wrote an object last; not its status.
fn last_writer(managers: &[ManagedFieldsEntry]) -> String {
    let newest = managers
        .iter()
        .filter(|entry| entry.subresource.as_deref().unwrap_or_default().is_empty())
        .max_by_key(|entry| entry.time.as_ref().map(|time| time.0));
    quoted(newest.and_then(|entry| entry.manager.as_deref()).unwrap_or("somebody"))
}

/// What somebody says that is not trusted.
fn quoted(text: &str) -> String {
    one_line(text, QUOTED)
}

#[cfg(test)]
mod tests;
