//! A connection to a target, and its route.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use portico_net::Rewind;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::proxy::Proxy;
use crate::target::Target;

/// The route of a connection. Prints as `HOST:PORT` or `HOST:PORT through PROXY`.
#[derive(Debug, Clone)]
pub struct Route {
    target: Target,
    proxy: Option<Arc<Proxy>>,
}

impl Route {
    pub(crate) fn new(target: Target, proxy: Option<Arc<Proxy>>) -> Self {
        Self { target, proxy }
    }

    /// Returns where it leads.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the proxy in between.
    #[must_use]
    pub fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_deref()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.proxy {
            None => self.target.fmt(f),
            Some(proxy) => write!(f, "{} through {proxy}", self.target),
        }
    }
}

/// Carries bytes to a target and back: plain TCP, or TLS to the proxy in between.
#[derive(Debug)]
pub struct Socket {
    route: Route,
    /// Begins with the bytes that came after the proxy's answer.
    stream: Rewind<Transport>,
}

impl Socket {
    /// `early`: bytes that were read from the transport after the proxy's answer.
    pub(crate) fn new(route: Route, early: Bytes, transport: Transport) -> Self {
        Self { route, stream: Rewind::new(early, transport) }
    }

    /// Returns the route.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.route
    }
}

/// The connection to the first hop.
#[derive(Debug)]
pub(crate) enum Transport {
    /// TCP.
    Plain(TcpStream),
    /// TLS to a proxy. Boxed: it is rare, and large.
    Tls(Box<TlsStream<TcpStream>>),
}

// === AsyncRead, AsyncWrite ===

impl AsyncRead for Transport {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        // Both are: TCP passes the slices to the kernel, TLS puts them into one record.
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

portico_net::forward_writes!(Socket);
