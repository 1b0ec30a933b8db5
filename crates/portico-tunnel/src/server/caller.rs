//! The facts about a client from its connection, before there is a request. Also how its first bytes are
//! read.

use std::io;
use std::sync::Arc;

use bytes::BytesMut;
use portico_net::ReadLimit;
use portico_wire::connect::MAX_HEAD;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio_rustls::server::TlsStream;

use super::client_certificate::Presented;
use super::tls::Tls;
use crate::handler::{Handler, Protocol, Request};
use crate::token::Token;

/// What the connection tells about the client.
#[derive(Debug)]
pub(crate) struct Caller {
    tls: bool,
    /// Its certificate; `None` if it was not asked for one, or had none.
    certificate: Option<Arc<Presented>>,
    /// What is read of it below TLS.
    limit: Option<Arc<ReadLimit>>,
}

impl Caller {
    /// A client without TLS.
    pub(super) fn plaintext() -> Self {
        Self { tls: false, certificate: None, limit: None }
    }

    /// The client at the other end of a TLS stream, which is read by the limit.
    pub(super) fn of<S: AsyncRead + AsyncWrite>(
        stream: &TlsStream<S>,
        tls: &Tls,
        limit: Arc<ReadLimit>,
    ) -> Self {
        let chain = stream.get_ref().1.peer_certificates();
        let certificate = chain.and_then(|chain| tls.presented(chain)).map(Arc::new);
        Self { tls: true, certificate, limit: Some(limit) }
    }

    /// The client has authenticated: from now on it is read ahead.
    pub(super) fn trust(&self) {
        self.limit.iter().for_each(|limit| limit.lift());
    }

    /// Tells `handler` that the client's protocol is known.
    pub(crate) fn established(&self, handler: &impl Handler) {
        handler.established(self.tls, self.certificate.as_deref());
    }

    /// The request of this client, with which no bytes came.
    pub(crate) fn request(&self, authority: &str, token: Option<Token>, protocol: Protocol) -> Request {
        let certificate = self.certificate.clone();
        let (authority, tls) = (authority.into(), self.tls);
        Request { authority, certificate, token, protocol, tls, client_first: false }
    }
}

/// Reads once, within the bound of a request head.
pub(super) async fn read_more<S: AsyncRead + Unpin>(
    stream: &mut S,
    bytes: &mut BytesMut,
) -> io::Result<usize> {
    /// Room for one read. CONNECT heads and ClientHellos without post-quantum keys fit; longer ones take
    /// another.
    const STEP: usize = 1024;
    bytes.reserve(STEP.min(MAX_HEAD));
    stream.read_buf(bytes).await
}
