//! The common part of the demo's stand-ins: HTTP/1.1 over real TLS on a free port of loopback.

use std::convert::Infallible;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use portico_pki::Pair;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Connections served at once; more wait. It is a demo: a few terminals, each with a few commands.
const MOST_CONNECTIONS: usize = 256;
/// How long a client may take for its TLS handshake, and for each request head.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a stand-in answers.
pub(super) type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// A stand-in that serves until it is dropped.
pub(super) struct StandIn {
    /// Where it listens.
    pub(super) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl StandIn {
    /// Serves under `identity` what `answer` says, to clients that `admits` takes.
    pub(super) async fn start<F, A>(
        identity: &Pair,
        admits: fn(SocketAddr) -> bool,
        answer: F,
    ) -> anyhow::Result<Self>
    where
        F: Fn(Request<Incoming>) -> A + Send + Sync + 'static,
        A: Future<Output = Answer> + Send + 'static,
    {
        let acceptor = TlsAcceptor::from(Arc::new(tls(identity)?));
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("opening a port on 127.0.0.1")?;
        let address = listener.local_addr().context("asking for the port that was opened")?;
        let task = tokio::spawn(accept(listener, acceptor, admits, Arc::new(answer)));
        Ok(Self { address, task })
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept<F, A>(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    admits: fn(SocketAddr) -> bool,
    answer: Arc<F>,
) where
    F: Fn(Request<Incoming>) -> A + Send + Sync + 'static,
    A: Future<Output = Answer> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((_, peer)) if !admits(peer) => {}
            Ok((stream, _)) => {
                let (acceptor, answer) = (acceptor.clone(), Arc::clone(&answer));
                tokio::spawn(async move {
                    serve(stream, acceptor, answer).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a stand-in cannot accept a connection");
                // Out of descriptors: trying again at once would only burn CPU.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve<F, A>(stream: TcpStream, acceptor: TlsAcceptor, answer: Arc<F>)
where
    F: Fn(Request<Incoming>) -> A + Send + Sync + 'static,
    A: Future<Output = Answer> + Send + 'static,
{
    let Ok(Ok(tls)) = timeout(PATIENCE, acceptor.accept(stream)).await else { return };
    let service = service_fn(move |request| {
        let answer = Arc::clone(&answer);
        async move { Ok::<_, Infallible>(answer(request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(tls), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection to a stand-in ended");
    }
}

fn tls(identity: &Pair) -> anyhow::Result<ServerConfig> {
    let chain =
        CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder.with_no_client_auth().with_single_cert(
                chain.map_err(|error| rustls::Error::General(error.to_string()))?,
                key.map_err(|error| rustls::Error::General(error.to_string()))?,
            )
        })
        .context("making the TLS configuration of a stand-in")?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// A page of text.
pub(super) fn text(text: &str) -> Answer {
    with_type("text/plain; charset=utf-8", whole(text.to_owned()))
}

/// A body that is there already.
pub(super) fn whole(text: String) -> UnsyncBoxBody<Bytes, Infallible> {
    Full::new(Bytes::from(text)).boxed_unsync()
}

/// An answer with this body.
pub(super) fn with_type(content_type: &'static str, body: UnsyncBoxBody<Bytes, Infallible>) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}
