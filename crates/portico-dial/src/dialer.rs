//! The way to a gateway: from a name and a port to a connected socket, through a corporate proxy if there is
//! one.
//!
//! A [`Target`] is what the operator wrote. [`Dialer::resolve`] makes addresses of it, and says until when
//! they hold; if a proxy is used (`setting`, `environment`, `no_proxy` decide) they are the proxy's, for then
//! the proxy resolves the target. [`Dialer::connect`] connects to one of them (`tcp`) and asks the proxy for
//! the rest of the way (`connect`, with the user and password of `credentials`). What comes out is a
//! [`Socket`] that leads to the target and knows which way it came.
//!
//! What deliberately lives elsewhere: TLS to the target (`client_tls`), which address to try when, and how
//! often (`client`). Nothing here repeats anything, and everything has a bound in time.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use portico_net::SharedTcp;
use tokio::time::timeout;

use crate::client_tls::ClientTls;
use crate::connect::{self, Answer};
use crate::credentials::Credentials;
use crate::environment::{self, Exceptions};
use crate::error::{ConnectAnyError, DialError};
use crate::happy_eyeballs::connect_first;
use crate::resolve::{self, ResolveError, Resolved};
use crate::setting::{Proxy, ProxyError, ProxySetting};
use crate::socket::{Route, Socket, Transport};
use crate::target::Target;
use crate::tcp;

/// What one attempt may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DialTimeouts {
    /// Until TCP is connected. Other addresses wait meanwhile, and who is reachable at all answers within a
    /// round trip.
    pub tcp: Duration,
    /// Until the proxy has let us through: TLS to it, and CONNECT, for which it must resolve a name and
    /// connect itself.
    pub proxy: Duration,
}

impl Default for DialTimeouts {
    fn default() -> Self {
        Self { tcp: Duration::from_secs(1), proxy: Duration::from_secs(5) }
    }
}

/// Files about the proxy.
#[derive(Debug, Clone, Default)]
pub struct ProxyFiles {
    /// `user:password`, read at each attempt. Goes before what the URL or the environment say.
    pub credentials: Option<PathBuf>,
    /// The CA of an `https://` proxy, in PEM. Without it, the system's roots.
    pub ca: Option<PathBuf>,
}

/// Connects to targets. One for the life of a process, for all of its targets.
#[derive(Debug)]
pub struct Dialer {
    way: Option<Way>,
    timeouts: DialTimeouts,
    /// None are those of `/etc/resolv.conf`.
    name_servers: Box<[SocketAddr]>,
}

/// Through a proxy, except for some.
#[derive(Debug)]
struct Way {
    proxy: Arc<Proxy>,
    exceptions: Exceptions,
    credentials: Option<Credentials>,
    /// For an `https://` proxy.
    tls: Option<ClientTls>,
}

impl Dialer {
    /// Takes the setting, and what the environment says to it: `PORTICO_PROXY_AUTH`, `NO_PROXY`, and with
    /// [`ProxySetting::Env`] the proxy itself. What it says later does not count.
    pub fn new(proxy: ProxySetting, files: ProxyFiles) -> Result<Self, ProxyError> {
        Self::with_environment(proxy, files, |name| std::env::var(name).ok())
    }

    /// As [`Dialer::new`], with an environment of the caller's own.
    pub fn with_environment(
        proxy: ProxySetting,
        files: ProxyFiles,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ProxyError> {
        let proxy = match proxy {
            ProxySetting::Off => None,
            ProxySetting::Url(proxy) => Some(proxy),
            ProxySetting::Env => environment::proxy(&environment)?,
        };
        let way = proxy.map(|proxy| Way::new(proxy, files, &environment)).transpose()?;
        Ok(Self { way, timeouts: DialTimeouts::default(), name_servers: Box::default() })
    }

    /// With other bounds than [`DialTimeouts::default`].
    #[must_use]
    pub fn with_timeouts(self, timeouts: DialTimeouts) -> Self {
        Self { timeouts, ..self }
    }

    /// Asks these name servers, and not those of `/etc/resolv.conf`. The `hosts` file still goes first.
    #[must_use]
    pub fn with_name_servers(self, servers: &[SocketAddr]) -> Self {
        Self { name_servers: servers.into(), ..self }
    }

    /// The proxy that the way to this target leads through.
    #[must_use]
    pub fn via(&self, target: &Target) -> Option<&Proxy> {
        self.way_to(target).map(|way| &*way.proxy)
    }

    /// The addresses to connect to: the target's, or those of the proxy that leads to it.
    pub async fn resolve(&self, target: &Target) -> Result<Resolved, ResolveError> {
        resolve::resolve(self.via(target).map_or(target, Proxy::address), &self.name_servers).await
    }

    /// Connects to one of the addresses that [`Dialer::resolve`] gave for this target, and through the proxy,
    /// if it is the proxy's, to the target. Blocks for the time of reading the proxy's small files, if there
    /// are any.
    pub async fn connect(&self, target: &Target, address: SocketAddr) -> Result<Socket, DialError> {
        let way = self.way_to(target);
        let proxy = way.map(|way| Arc::clone(&way.proxy));
        let stream = tcp::connect(address, self.timeouts.tcp).await.map_err(|source| DialError::Tcp {
            address,
            target: target.clone(),
            proxy: proxy.clone(),
            source,
        })?;
        let transport = Transport::Plain(SharedTcp(Arc::new(stream)));
        let route = Route::new(target.clone(), proxy);
        let Some(way) = way else { return Ok(Socket::new(route, Bytes::new(), transport)) };
        let limit = self.timeouts.proxy;
        let answer = timeout(limit, way.ask(transport, target)).await.unwrap_or_else(|_| {
            Err(DialError::ProxyTooSlow { proxy: Arc::clone(&way.proxy), target: target.clone(), limit })
        })?;
        answer.into_socket(route, &way.proxy).await
    }

    /// Resolves the target and connects to any of its addresses by happy eyeballs (RFC 8305). To be used
    /// where it does not matter which address it is.
    pub async fn connect_any(&self, target: &Target) -> Result<Socket, ConnectAnyError> {
        let addresses = self.resolve(target).await?.addresses;
        let connected = connect_first(&addresses, |address| self.connect(target, address)).await;
        Ok(connected.ok_or_else(|| ConnectAnyError::NoAddress(target.clone()))??)
    }

    fn way_to(&self, target: &Target) -> Option<&Way> {
        self.way.as_ref().filter(|way| !way.exceptions.contains(target))
    }
}

impl Way {
    fn new(
        proxy: Proxy,
        files: ProxyFiles,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ProxyError> {
        let credentials = Credentials::choose(files.credentials, &proxy, environment)?;
        let tls = proxy.is_tls().then(|| ClientTls::for_proxy(files.ca)).transpose()?;
        let exceptions = Exceptions::of(environment);
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
            (Some(tls), Transport::Plain(tcp)) => {
                // A CA is replaced so rarely that its file is looked at when it is needed.
                if let Err(error) = tls.reload() {
                    tracing::warn!(%error, %proxy, "the proxy's CA as read before stays in force");
                }
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
