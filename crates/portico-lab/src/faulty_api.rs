//! A proxy before an API server that goes mute, refuses, denies or lies, as tests tell it.
//!
//! It is a client whose requests pass through it: no port, no certificate, and the real API server behind.
//! For those that come by a kubeconfig, [`FaultyApi::serve`] opens a port.

use std::future::pending;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use http::header::DATE;
use http::{Request, Response};
use http_body_util::{BodyDataStream, BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service;
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tower::service_fn;

use crate::pki::Authority;

type ResponseBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, <Body as hyper::body::Body>::Error>>>;

/// What the proxy does with requests.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// Accepts requests and answers none; open watches fall silent, for ever.
    pub mute: bool,
    /// Is mute to requests whose URL has this text, and to no others.
    pub mute_to: Option<&'static str>,
    /// Requests that were accepted and not answered.
    pub unanswered: usize,
    /// How long each request waits before it passes.
    pub slow: Option<Duration>,
    /// Requests whose URL has this text get this answer, so many times.
    pub answers: Vec<(&'static str, Answer, usize)>,
    /// Answers have this Date in place of the API server's.
    pub date: Option<String>,
    /// So many writes pass, those of Leases and Events aside; the next one never arrives.
    pub writes_left: Option<usize>,
    /// Writes to a URL that has this text wait for as long as this says so.
    pub held: Option<&'static str>,
    /// A write has not passed.
    pub withheld: bool,
}

/// An answer that is not the API server's.
#[derive(Debug, Clone, Copy)]
pub enum Answer {
    /// A failure with this HTTP status.
    Status(u16),
    /// A list without objects, of a version that is yet to come.
    Empty,
}

/// A client whose requests all fail: no API server is there.
#[must_use]
pub fn nowhere() -> Client {
    let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
    let service = service_fn(move |_: Request<Body>| async move { Err::<Response<Body>, _>(refused()) });
    Client::new(service, "default")
}

/// A proxy before an API server.
#[derive(Debug, Clone, Default)]
pub struct FaultyApi(Arc<Mutex<Rules>>);

impl FaultyApi {
    /// Changes what it does with requests.
    pub fn rules<T>(&self, change: impl FnOnce(&mut Rules) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether every answer of its rules was given as often as it was to be.
    pub fn has_answered(&self) -> bool {
        self.rules(|rules| rules.answers.iter().all(|(_, _, left)| *left == 0))
    }

    /// A client whose requests pass here on their way to the API server of `direct`.
    pub fn client(&self, direct: &Client) -> Client {
        let (proxy, direct) = (self.clone(), direct.clone());
        let service = service_fn(move |request: Request<Body>| {
            let (proxy, direct) = (proxy.clone(), direct.clone());
            async move { proxy.pass(&direct, request).await }
        });
        Client::new(service, "default")
    }

    /// Opens a port on loopback, from which requests pass here on their way to the API server of `direct`,
    /// with its rights.
    pub async fn serve(&self, direct: &Client) -> Result<FaultyPort> {
        let authority = Authority::new("faulty")?;
        let config = authority.server("api", &["127.0.0.1"])?.server_config(&[b"http/1.1"])?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("https://{}", listener.local_addr()?);
        let (proxy, direct, tls) = (self.clone(), direct.clone(), TlsAcceptor::from(Arc::new(config)));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (proxy, direct, tls) = (proxy.clone(), direct.clone(), tls.clone());
                tokio::spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let service = service::service_fn(move |request: Request<Incoming>| {
                        let (proxy, direct) = (proxy.clone(), direct.clone());
                        async move {
                            let (head, body) = request.into_parts();
                            let body = Body::from(body.collect().await?.to_bytes().to_vec());
                            let answer = proxy.pass(&direct, Request::from_parts(head, body)).await?;
                            Ok::<_, anyhow::Error>(answer)
                        }
                    });
                    // A client that goes ends the connection, and what it waited for.
                    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                    drop(connection.await);
                });
            }
        });
        Ok(FaultyPort { url, authority, task })
    }

    /// One request and its answer.
    async fn pass(&self, direct: &Client, request: Request<Body>) -> kube::Result<Response<ResponseBody>> {
        let url = request.uri().to_string();
        if let Some(time) = self.rules(|rules| rules.slow) {
            tokio::time::sleep(time).await;
        }
        if !request.method().is_safe() {
            self.pass_write(&url).await;
        }
        if let Some(answer) = self.answer(&url).await {
            return Ok(answer);
        }
        let mut response = direct.send(request).await?;
        if let Some(date) = self.rules(|rules| rules.date.as_ref().and_then(|date| date.parse().ok())) {
            response.headers_mut().insert(DATE, date);
        }
        Ok(response.map(|body| self.gated(body)))
    }

    /// Lets a write pass, now or later, or never returns.
    async fn pass_write(&self, url: &str) {
        if ["/leases", "/events"].iter().any(|text| url.contains(text)) {
            return;
        }
        let passes = self.rules(|rules| match &mut rules.writes_left {
            Some(0) => {
                rules.withheld = true;
                false
            }
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        });
        if !passes {
            pending::<()>().await;
        }
        while self.rules(|rules| {
            let is_held = rules.held.is_some_and(|text| url.contains(text));
            rules.withheld |= is_held;
            is_held
        }) {
            // Rules are plain values, which tell nobody that they have changed.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn answer(&self, url: &str) -> Option<Response<ResponseBody>> {
        let mute = self.rules(|rules| {
            let mute = rules.mute || rules.mute_to.is_some_and(|text| url.contains(text));
            rules.unanswered += usize::from(mute);
            mute
        });
        if mute {
            pending::<()>().await;
        }
        let answer = self.rules(|rules| {
            let (_, answer, left) =
                rules.answers.iter_mut().find(|(text, _, left)| *left > 0 && url.contains(text))?;
            *left -= 1;
            Some(*answer)
        })?;
        let (status, body) = match answer {
            Answer::Status(code) => {
                // Clients tell by the reason that there is no such object.
                let reason = if code == 404 { "NotFound" } else { "X" };
                let body = format!(
                    r#"{{"kind": "Status", "status": "Failure", "code": {code},
                        "reason": "{reason}", "message": "no"}}"#
                );
                (code, body)
            }
            Answer::Empty => (200, r#"{"metadata": {"resourceVersion": "999999"}, "items": []}"#.to_owned()),
        };
        let body = stream::once(async { Ok(Frame::data(Bytes::from(body))) }).boxed();
        let mut response = Response::new(StreamBody::new(body));
        *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
        Some(response)
    }

    /// A body that stops while the proxy is mute, and never goes on.
    fn gated(&self, body: Body) -> ResponseBody {
        let proxy = self.clone();
        let frames = BodyDataStream::new(body).then(move |data| {
            let mute = proxy.rules(|rules| rules.mute);
            async move {
                if mute {
                    pending::<()>().await;
                }
                data
            }
        });
        StreamBody::new(frames.map_ok(Frame::data).boxed())
    }
}

/// A port of a proxy. Closed when this is dropped.
pub struct FaultyPort {
    url: String,
    authority: Authority,
    task: JoinHandle<()>,
}

impl FaultyPort {
    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The authority of its certificate.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }
}

impl Drop for FaultyPort {
    fn drop(&mut self) {
        self.task.abort();
    }
}
