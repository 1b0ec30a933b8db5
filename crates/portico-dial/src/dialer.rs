//! From a name and a port to a connected socket, through a corporate proxy if there is one.
//!
//! [`Dialer::resolve`] returns the addresses of a [`Target`], or those of the proxy that leads to it
//! (`setting` and `environment` decide). [`Dialer::connect`] connects to one of them (`tcp`) and asks the
//! proxy for the rest of the way (`connect`, `credentials`). The result is a [`Socket`] that knows its route.
//!
//! Nothing here is tried again, and everything is bounded in time. TLS to the target is in `client_tls`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use crate::client_tls::ClientTls;
use crate::connect::{self, Answer};
use crate::credentials::Credentials;
use crate::environment::{self, Exceptions};
use crate::error::{ConnectAnyError, DialError};
use crate::file_set::FileSet;
use crate::happy_eyeballs::connect_first;
use crate::proxy::Proxy;
use crate::resolve::{self, ResolveError, Resolved};
use crate::setting::{ProxyError, ProxySetting};
use crate::socket::{Route, Socket, Transport};
use crate::target::Target;
use crate::tcp::{self, TcpKeepAlive};

/// The time limits of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DialTimeouts {
    /// For TCP. Other addresses wait meanwhile, and a reachable one answers within a round trip.
    pub tcp: Duration,
    /// For TLS to the proxy and CONNECT, for which it must resolve a name and connect.
    pub proxy: Duration,
}

impl Default for DialTimeouts {
    fn default() -> Self {
        Self { tcp: Duration::from_secs(1), proxy: Duration::from_secs(5) }
    }
}

/// Files for the proxy.
#[derive(Debug, Clone, Default)]
pub struct ProxyFiles {
    /// `user:password`, read at each attempt. It takes precedence over the URL and the environment.
    pub credentials: Option<PathBuf>,
    /// The CA of an `https://` proxy, in PEM. Without it, the system's roots.
    pub ca: Option<PathBuf>,
}

/// Connects to targets. A process has one for all of them.
#[derive(Debug)]
pub struct Dialer {
    hop: Option<Hop>,
    timeouts: DialTimeouts,
    keep_alive: TcpKeepAlive,
    /// Empty: those of `/etc/resolv.conf`.
    name_servers: Box<[SocketAddr]>,
}

/// The proxy, and what it takes to use it.
#[derive(Debug)]
struct Hop {
    proxy: Arc<Proxy>,
    exceptions: Exceptions,
    credentials: Option<Credentials>,
    /// For an `https://` proxy, with its CA.
    tls: Option<(ClientTls, Mutex<FileSet>)>,
}

impl Dialer {
    /// Reads the environment once: `PORTICO_PROXY_AUTH`, `NO_PROXY`, and with [`ProxySetting::Env`] the
    /// proxy.
    pub fn new(proxy: ProxySetting, files: ProxyFiles) -> Result<Self, ProxyError> {
        Self::with_environment(proxy, files, |name| std::env::var(name).ok())
    }

    /// A dialer without a proxy.
    pub fn direct() -> Self {
        let (timeouts, keep_alive) = (DialTimeouts::default(), TcpKeepAlive::default());
        Self { hop: None, timeouts, keep_alive, name_servers: Box::default() }
    }

    /// As [`Dialer::new`], with another environment.
    pub fn with_environment(
        proxy: ProxySetting,
        files: ProxyFiles,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ProxyError> {
        let (proxy, exceptions) = match proxy {
            ProxySetting::Off => return Ok(Self::direct()),
            ProxySetting::Url(proxy) => (Some(proxy), Exceptions::of(&environment)),
            ProxySetting::Env => (environment::proxy(&environment)?, Exceptions::with_loopback(&environment)),
        };
        let hop = proxy.map(|proxy| Hop::new(proxy, exceptions, files, &environment)).transpose()?;
        Ok(Self { hop, ..Self::direct() })
    }

    /// Sets another keep-alive than [`TcpKeepAlive::default`].
    #[must_use]
    pub fn with_keep_alive(self, keep_alive: TcpKeepAlive) -> Self {
        Self { keep_alive, ..self }
    }

    /// Sets name servers in place of those of `/etc/resolv.conf`. The `hosts` file still goes first.
    #[must_use]
    pub fn with_name_servers(self, servers: &[SocketAddr]) -> Self {
        Self { name_servers: servers.into(), ..self }
    }

    /// Returns the proxy that leads to the target.
    #[must_use]
    pub fn via(&self, target: &Target) -> Option<&Proxy> {
        self.hop_to(target).map(|hop| &*hop.proxy)
    }

    /// Returns the addresses to connect to: the target's, or those of the proxy that leads to it.
    pub async fn resolve(&self, target: &Target) -> Result<Resolved, ResolveError> {
        resolve::resolve(self.via(target).map_or(target, Proxy::address), &self.name_servers).await
    }

    /// Connects to the target by one of the addresses that [`Dialer::resolve`] returned. Blocks for the time
    /// of reading the proxy's small files, if there are any.
    pub async fn connect(&self, target: &Target, address: SocketAddr) -> Result<Socket, DialError> {
        let hop = self.hop_to(target);
        let proxy = hop.map(|hop| Arc::clone(&hop.proxy));
        let connected = tcp::connect(address, self.timeouts.tcp, self.keep_alive).await;
        let stream = connected.map_err(|source| DialError::Tcp {
            address,
            target: target.clone(),
            proxy: proxy.clone(),
            source,
        })?;
        let transport = Transport::Plain(stream);
        let route = Route::new(target.clone(), proxy);
        let Some(hop) = hop else { return Ok(Socket::new(route, Bytes::new(), transport)) };
        let limit = self.timeouts.proxy;
        let answer = timeout(limit, hop.ask(transport, target)).await.unwrap_or_else(|_| {
            Err(DialError::ProxyTooSlow { proxy: Arc::clone(&hop.proxy), target: target.clone(), limit })
        })?;
        answer.into_socket(route, &hop.proxy).await
    }

    /// Resolves the target and connects to any of its addresses by happy eyeballs (RFC 8305). For callers to
    /// which one address is as good as another.
    pub async fn connect_any(&self, target: &Target) -> Result<Socket, ConnectAnyError> {
        let addresses = self.resolve(target).await?.addresses;
        let connected = connect_first(&addresses, |address| self.connect(target, address)).await;
        Ok(connected.ok_or_else(|| ConnectAnyError::NoAddress(target.clone()))??)
    }

    /// Why the content of the file with the proxy's CA is not in force, as of the last attempt.
    pub fn file_problem(&self) -> Option<String> {
        let (_, ca) = self.hop.as_ref()?.tls.as_ref()?;
        ca.lock().unwrap_or_else(PoisonError::into_inner).problem()
    }

    fn hop_to(&self, target: &Target) -> Option<&Hop> {
        self.hop.as_ref().filter(|hop| !hop.exceptions.contains(target))
    }
}

impl Hop {
    fn new(
        proxy: Proxy,
        exceptions: Exceptions,
        files: ProxyFiles,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ProxyError> {
        let credentials = Credentials::choose(files.credentials, proxy.credentials(), environment)?;
        let ca = FileSet::new("CA of the proxy", files.ca.iter().cloned().collect());
        let tls = proxy.is_tls().then(|| ClientTls::for_proxy(files.ca)).transpose()?;
        let tls = tls.map(|tls| (tls, Mutex::new(ca)));
        Ok(Self { proxy: Arc::new(proxy), exceptions, credentials, tls })
    }

    /// Asks the proxy for the way to the target.
    async fn ask(&self, transport: Transport, target: &Target) -> Result<Answer, DialError> {
        let proxy = &self.proxy;
        // First, so that a file that cannot be read costs no round trip.
        let credentials = self.credentials.as_ref().map(Credentials::header).transpose();
        let credentials = credentials
            .map_err(|source| DialError::Credentials { proxy: Arc::clone(proxy), source })?
            .zip(self.credentials.as_ref().map(Credentials::source));
        let transport = match (&self.tls, transport) {
            (Some((tls, ca)), Transport::Plain(tcp)) => {
                // A CA is replaced so rarely that its file is looked at when it is needed.
                ca.lock().unwrap_or_else(PoisonError::into_inner).reload_if_changed(|| tls.reload());
                let address = proxy.address();
                let route = Route::new(address.clone(), None);
                let stream = tls.handshake(&address.host, &route, tcp).await.map_err(|source| {
                    DialError::ProxyTls { proxy: Arc::clone(proxy), source: Box::new(source) }
                })?;
                Transport::Tls(Box::new(stream))
            }
            (_, transport) => transport,
        };
        connect::ask(transport, target, credentials, proxy).await
    }
}

#[cfg(test)]
mod tests;
