//! The server half: detects the protocol of a connection to the tunnel port, reads the certificate of its
//! client, and serves its CONNECT requests.
//!
//! [`serve()`] reads the first bytes. Under TLS ([`tls`]) the certificate of the client is kept for later
//! requests ([`client_certificate`], [`client_ca`], [`identity`], [`caller`]). [`http2`] makes a task of each
//! stream; [`http1`] makes a tunnel of the connection, which [`tls_tunnel`] copies under TLS and the caller
//! copies without. Called by the gateway for every connection that its tunnel listener accepts.

mod caller;
pub(crate) mod client_ca;
pub(crate) mod client_certificate;
mod failure;
mod http1;
mod http2;
mod identity;
pub(crate) mod tls;
mod tls_tunnel;
mod x509;

use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use portico_net::{ReadAhead, ReadLimit, Rewind, SharedTcp};
use portico_wire::Parse;
use portico_wire::connect::{self, Protocol as Spoken};
use tokio::io::AsyncRead;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;

use self::caller::{Caller, read_more};
use self::client_certificate::LONGEST_CHAIN;
use self::http1::Opened;
use crate::handler::{Handler, Upstream};
use crate::settings::Settings;

pub use client_ca::{ClientCaError, ClientCaFile, ClientCaFileError, RevocationList, TenantPattern};
pub use client_certificate::{CertificateProblem, Presented};
pub use failure::{Failure, Finished};
pub use tls::{ALPN, Tls, TlsError, TlsFiles};

/// Most bytes of a client's half of a TLS handshake. They are the longest chain of certificates that is
/// taken, plus twice a hello with post-quantum keys. rustls would keep 64 KiB of an unfinished handshake.
const TLS_HANDSHAKE: usize = LONGEST_CHAIN + 4 * 1024;

/// The next step of the caller of [`serve()`].
#[derive(Debug)]
pub enum Served<M> {
    /// HTTP/1.1 without TLS: the client has got its 200. The tunnel is two TCP connections now, which the
    /// caller copies by splice(2).
    Carry {
        /// The client.
        downstream: TcpStream,
        /// What it sent with its request. It goes to the upstream first.
        early: Bytes,
        /// Where it goes.
        upstream: Upstream<M>,
    },
    /// Nothing.
    Finished(Finished),
}

/// Serves one accepted connection. `first` is what was already read from it. `drain` is ready when no new
/// streams are wanted. Dropping the future ends the connection and resets its streams.
///
/// Must be polled on a current-thread runtime: streams run as tasks on the same thread.
pub async fn serve<H: Handler>(
    mut stream: TcpStream,
    first: Bytes,
    settings: &Settings,
    drain: impl Future<Output = ()>,
    handler: &Arc<H>,
) -> Result<Served<H::Meter>, Failure> {
    let deadline = Instant::now() + settings.hello_timeout;
    // Fails only on a dead socket, and the next read says so.
    let _ = stream.set_nodelay(true);
    let mut first = BytesMut::from(first);
    let spoken =
        timeout_at(deadline, sniff(&mut stream, &mut first)).await.map_err(|_| Failure::TooSlow)??;
    let plaintext =
        || if settings.plaintext { Ok(Caller::plaintext()) } else { Err(Failure::PlaintextNotServed) };
    match (spoken, &settings.tls) {
        (Spoken::Tls, None) => Err(Failure::TlsNotServed),
        (Spoken::Tls, Some(tls)) => {
            serve_tls(stream, first.freeze(), tls, settings, drain, handler).await.map(Served::Finished)
        }
        (Spoken::Http2Preface, _) => {
            let caller = plaintext()?;
            let stream = Rewind::new(first.freeze(), stream);
            http2::serve(stream, &caller, settings, drain, deadline, handler).await.map(Served::Finished)
        }
        (Spoken::Http1, _) => match plaintext() {
            Err(failure) => {
                http1::refuse_plaintext(&mut stream, &first, &**handler).await;
                Err(failure)
            }
            Ok(caller) => Ok(match http1::open(&mut stream, first, &caller, deadline, handler).await? {
                None => Served::Finished(Finished::Closed),
                Some(Opened { early, upstream }) => Served::Carry { downstream: stream, early, upstream },
            }),
        },
    }
}

/// TLS, and what is spoken inside.
async fn serve_tls<H: Handler>(
    stream: TcpStream,
    first: Bytes,
    tls: &Arc<Tls>,
    settings: &Settings,
    drain: impl Future<Output = ()>,
    handler: &Arc<H>,
) -> Result<Finished, Failure> {
    // The timeout begins anew with each step of the client. While thousands of agents return at once the
    // gateway is the slow one. A handshake that is given up half-way has to be done twice.
    let socket = Arc::new(stream);
    let limit = ReadLimit::new(TLS_HANDSHAKE.saturating_sub(first.len()));
    let below = Rewind::new(first, ReadAhead::limited(SharedTcp(Arc::clone(&socket)), &limit));
    let accept = TlsAcceptor::from(tls.current())
        .accept_with(below, |tls| tls.set_buffer_limit(Some(portico_dial::TLS_BUFFER)));
    let accepted = timeout(settings.hello_timeout, accept).await.map_err(|_| Failure::TooSlow)?;
    let deadline = Instant::now() + settings.hello_timeout;
    let mut stream = accepted.map_err(tls_failure)?;
    limit.uncount();
    let caller = Caller::of(&stream, tls, limit);
    let mut inside = BytesMut::new();
    let spoken = match stream.get_ref().1.alpn_protocol() {
        Some(name) if name == b"h2" || name == ALPN => Spoken::Http2Preface,
        Some(_) => Spoken::Http1,
        None => {
            timeout_at(deadline, sniff(&mut stream, &mut inside)).await.map_err(|_| Failure::TooSlow)??
        }
    };
    match spoken {
        Spoken::Tls => Err(Failure::Malformed("there is TLS within TLS")),
        Spoken::Http2Preface => {
            let stream = Rewind::new(inside.freeze(), stream);
            http2::serve(stream, &caller, settings, drain, deadline, handler).await
        }
        Spoken::Http1 => {
            if let Some(opened) = http1::open(&mut stream, inside, &caller, deadline, handler).await? {
                // It is not read ahead: what waits for the upstream is one buffer a direction.
                tls_tunnel::carry(stream, socket, opened, settings.stream_idle).await;
            }
            Ok(Finished::Closed)
        }
    }
}

fn tls_failure(error: io::Error) -> Failure {
    use rustls::Error::{InvalidCertificate, NoCertificatesPresented};
    match error.get_ref().and_then(|source| source.downcast_ref::<rustls::Error>()) {
        Some(source @ (InvalidCertificate(_) | NoCertificatesPresented)) => {
            Failure::Untrusted(source.clone())
        }
        _ => Failure::Tls(error),
    }
}

/// Reads until the first bytes tell what the client speaks.
async fn sniff<S: AsyncRead + Unpin>(stream: &mut S, bytes: &mut BytesMut) -> Result<Spoken, Failure> {
    loop {
        match connect::sniff(bytes) {
            Parse::Complete(spoken) => return Ok(spoken),
            Parse::Malformed(malformed) => return Err(Failure::Malformed(malformed.reason())),
            Parse::NeedMore => {}
        }
        match read_more(stream, bytes).await {
            Ok(0) | Err(_) => return Err(Failure::ClosedEarly),
            Ok(_) => {}
        }
    }
}
