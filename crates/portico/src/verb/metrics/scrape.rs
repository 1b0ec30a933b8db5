//! One answer of one program, as it comes, less what is not kept.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::header::{ACCEPT, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use portico_hosting::monitoring::{Access, Filter, Source, Target, TooLong};
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::counts::Counts;
use super::credentials::Credentials;

/// Time limit of one scrape. Prometheus gives up after 10 s. How many are under way is bounded by the
/// connections of the admin listener: one that lets them wait loses its oldest first.
const PATIENCE: Duration = Duration::from_secs(8);

/// A name that the certificate of each API server has.
const API_SERVER: &str = "kubernetes";

/// Why there is no answer.
#[derive(Debug, Error)]
pub(super) enum ScrapeError {
    #[error("no answer within {PATIENCE:?}")]
    Late,
    #[error("the cluster has no Secret prometheus-kubeconfig that can be used; the operator makes it")]
    NoCredentials,
    #[error("connecting: {0}")]
    Connect(#[source] std::io::Error),
    #[error("TLS: {0}")]
    Tls(#[source] std::io::Error),
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    #[error("the program answered {0}{hint}", hint = hint(*.0))]
    Status(StatusCode),
    #[error(transparent)]
    TooLong(#[from] TooLong),
}

/// What to do about a refusal.
fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::FORBIDDEN => {
            ": the ClusterRole portico:metrics is missing in the cluster; the operator makes it"
        }
        _ => "",
    }
}

impl ScrapeError {
    /// One word, for the counter.
    pub(super) const fn word(&self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::NoCredentials => "no_credentials",
            Self::Connect(_) => "connect",
            Self::Tls(_) => "tls",
            Self::Http(_) => "http",
            Self::Status(_) => "status",
            Self::TooLong(_) => "too_long",
        }
    }
}

/// Counts a scrape when it is dropped: also one whose client went away, or had to make room for another.
struct Ending<'a> {
    counts: &'a Counts,
    source: Source,
    word: &'static str,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.counts.ended(self.source, self.word);
    }
}

/// Reads the metrics of programs.
#[derive(Debug)]
pub(super) struct Scraper {
    counts: Arc<Counts>,
}

impl Scraper {
    pub(super) fn new(counts: Arc<Counts>) -> Self {
        Self { counts }
    }

    /// The metrics of `target` that are kept.
    pub(super) async fn scrape(
        &self,
        target: &Target,
        credentials: Option<&Credentials>,
    ) -> Result<String, ScrapeError> {
        let mut ending = Ending { counts: &self.counts, source: target.source, word: "abandoned" };
        let scraped = timeout(PATIENCE, self.fetch(target, credentials)).await;
        let scraped = scraped.unwrap_or(Err(ScrapeError::Late));
        ending.word = match &scraped {
            Ok(kept) => {
                self.counts.kept.fetch_add(kept.len() as u64, Relaxed);
                "ok"
            }
            Err(error) => error.word(),
        };
        scraped
    }

    async fn fetch(&self, target: &Target, credentials: Option<&Credentials>) -> Result<String, ScrapeError> {
        let credentials = || credentials.ok_or(ScrapeError::NoCredentials);
        let config = match target.source.access() {
            Access::Plain => None,
            Access::Verified => Some(Arc::clone(&credentials()?.verified)),
            Access::OwnCertificate => Some(Arc::clone(&credentials()?.unverified)),
        };
        let socket = TcpStream::connect((target.address, target.port)).await.map_err(ScrapeError::Connect)?;
        let Some(config) = config else { return self.exchange(socket, target).await };
        let name = ServerName::try_from(API_SERVER)
            .map_err(|error| ScrapeError::Tls(std::io::Error::other(error)))?;
        let stream = TlsConnector::from(config).connect(name, socket).await.map_err(ScrapeError::Tls)?;
        self.exchange(stream, target).await
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        target: &Target,
    ) -> Result<String, ScrapeError> {
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.uri_mut() = http::Uri::from_static("/metrics");
        request.headers_mut().insert(HOST, http::HeaderValue::from_static(API_SERVER));
        request.headers_mut().insert(ACCEPT, http::HeaderValue::from_static("text/plain;version=0.0.4"));
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Ended with this future.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let mut response = sender.send_request(request).await?;
        if response.status() != StatusCode::OK {
            return Err(ScrapeError::Status(response.status()));
        }
        let mut filter = Filter::of(target.source);
        while let Some(frame) = response.body_mut().frame().await {
            let Ok(piece) = frame?.into_data() else { continue };
            self.counts.read.fetch_add(piece.len() as u64, Relaxed);
            filter.push(&piece)?;
        }
        Ok(filter.into_kept())
    }
}
