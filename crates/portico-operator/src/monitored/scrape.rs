//! One answer of one program, as it comes, less what is not kept.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, HOST, HeaderValue};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use portico_hosting::monitoring::{Access, Filter, Source, Target, TooLong};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::Credentials;

/// Time limit of one scrape. Prometheus gives up after 10 s. How many are under way is bounded by the
/// connections of the admin listener: one that lets them wait loses its oldest first.
const PATIENCE: Duration = Duration::from_secs(8);

/// A name that the certificate of each API server has.
const API_SERVER: &str = "kubernetes";

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum ScrapeError {
    /// The program took too long.
    #[error("no answer within {PATIENCE:?}")]
    Late,
    /// The cluster has given no certificate for its metrics, and the program asks for one.
    #[error("the cluster has no Secret prometheus-kubeconfig that can be used; the operator makes it")]
    NoCredentials,
    /// The program does not accept connections.
    #[error("connecting: {0}")]
    Connect(#[source] std::io::Error),
    /// The TLS handshake failed.
    #[error("TLS: {0}")]
    Tls(#[source] std::io::Error),
    /// The program's answer is not HTTP, or was cut off.
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// The program answered with another status than 200.
    #[error("the program answered {0}{hint}", hint = hint(*.0))]
    Status(StatusCode),
    /// The program answered more than is read of one.
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
    const fn as_str(&self) -> &'static str {
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

/// How many scrapes there were, and of how many bytes.
#[derive(Debug, Default)]
pub struct ScrapeCounts {
    ended: Mutex<BTreeMap<(Source, &'static str), u64>>,
    read: AtomicU64,
    kept: AtomicU64,
}

impl ScrapeCounts {
    /// Scrapes that have ended, by program and how: `ok`, `abandoned` by the client, or why there was no
    /// answer.
    pub fn ended(&self) -> BTreeMap<(Source, &'static str), u64> {
        self.lock().clone()
    }

    /// Bytes that programs answered.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Relaxed)
    }

    /// Bytes of them that were passed on.
    pub fn bytes_kept(&self) -> u64 {
        self.kept.load(Relaxed)
    }

    /// Counts a scrape that has ended, as `word` says.
    fn count(&self, source: Source, word: &'static str) {
        *self.lock().entry((source, word)).or_default() += 1;
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Source, &'static str), u64>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a scrape when it is dropped. A scrape whose client went away, or that had to make room for another,
/// counts too.
struct Ending<'a> {
    counts: &'a ScrapeCounts,
    source: Source,
    word: &'static str,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.counts.count(self.source, self.word);
    }
}

/// Reads the metrics of programs.
#[derive(Debug, Default)]
pub struct Scraper {
    counts: Arc<ScrapeCounts>,
}

impl Scraper {
    /// What it has done, also from now on.
    pub fn counts(&self) -> Arc<ScrapeCounts> {
        Arc::clone(&self.counts)
    }

    /// The metrics of `target` that are kept. They are filtered as they come: no whole answer is held.
    ///
    /// # Errors
    /// The program did not answer, or with too much.
    pub async fn scrape(
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
            Err(error) => error.as_str(),
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
        *request.uri_mut() = Uri::from_static("/metrics");
        request.headers_mut().insert(HOST, HeaderValue::from_static(API_SERVER));
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static("text/plain;version=0.0.4"));
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
