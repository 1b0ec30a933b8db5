//! Why there is no connection to a target. Each message says what to do about it, and where.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::client_tls::HandshakeError;
use crate::credentials::{CredentialsError, CredentialsSource};
use crate::proxy::Proxy;
use crate::resolve::ResolveError;
use crate::target::Target;

/// Why an attempt to connect by one address failed. Another attempt may succeed.
#[derive(Debug, Error)]
pub enum DialError {
    /// TCP failed.
    #[error("connecting to {address}{}: {source}", Whose(target, proxy.as_deref()))]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// The target.
        target: Target,
        /// The proxy, if the address is the proxy's.
        proxy: Option<Arc<Proxy>>,
        /// The error of the system.
        source: io::Error,
    },
    /// The file with user and password cannot be used now.
    #[error("proxy {proxy}: {source}")]
    Credentials {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// Why not.
        source: CredentialsError,
    },
    /// TLS to an `https://` proxy failed.
    #[error("proxy {proxy}: {source}")]
    ProxyTls {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The error.
        source: Box<HandshakeError>,
    },
    /// The proxy did not answer in time.
    #[error(
        "proxy {proxy} did not let us through to {target} within {} ms; it may be overloaded, or unable to \
         reach {target} itself",
        limit.as_millis()
    )]
    ProxyTooSlow {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The target.
        target: Target,
        /// The limit.
        limit: Duration,
    },
    /// The connection to the proxy ended or broke before there was an answer.
    #[error("proxy {proxy} hung up on CONNECT {target} without an answer: {source}")]
    ProxyGone {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The target.
        target: Target,
        /// How it ended.
        source: io::Error,
    },
    /// Something answered that is no HTTP proxy.
    #[error(
        "proxy {proxy} does not answer in HTTP ({said}); is this the proxy's port, and is it {}?",
        other_scheme(proxy)
    )]
    NotHttp {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// How the answer begins.
        said: String,
    },
    /// The head of the answer is too large.
    #[error("proxy {proxy} answers CONNECT {target} with a head of more than {limit}; is it an HTTP proxy?")]
    HeadTooLong {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The target.
        target: Target,
        /// The limit.
        limit: HeadLimit,
    },
    /// 407: the proxy wants other credentials, or any.
    #[error("proxy {proxy} asks for credentials for CONNECT {target} (it offers {offered}); \
        {}", sent.advice(offered))]
    AsksForCredentials {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The target.
        target: Target,
        /// The schemes that it offers.
        offered: Schemes,
        /// The credentials that were sent.
        sent: Sent,
    },
    /// The proxy's policy forbids the target.
    #[error("proxy {proxy} forbids CONNECT {target}: {answer}; have {target} allowed for CONNECT there")]
    Forbids {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The target.
        target: Target,
        /// The answer.
        answer: Refused,
    },
    /// 5xx: the proxy cannot reach the target.
    #[error(
        "proxy {proxy} cannot reach {target}: {answer}; it resolves the name and connects by itself: see \
         whether it can"
    )]
    CannotReach {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// The target.
        target: Target,
        /// The answer.
        answer: Refused,
    },
}

/// Why none of the addresses of a target made a connection.
#[derive(Debug, Error)]
pub enum ConnectAnyError {
    /// The name cannot be resolved.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The error of the attempt that ended last.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The name has no address.
    #[error("{0} has no address; see what DNS has for its name")]
    NoAddress(Target),
}

/// A limit of the head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadLimit {
    /// Its length in bytes.
    Bytes(usize),
    /// The bytes of interim answers (1xx) before it.
    Interim(usize),
    /// The number of its header fields.
    Fields(usize),
}

/// The answer of a proxy that is not 200.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The status.
    pub status: u16,
    /// The reason phrase.
    pub reason: Box<str>,
    /// What the body says, in one line. May be empty.
    pub says: Box<str>,
}

/// The authentication schemes of a 407 (RFC 9110 section 11.7.1), as they were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schemes(pub Vec<Box<str>>);

/// The user and password that were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sent {
    /// None are configured.
    Nothing,
    /// Those from this source.
    From(CredentialsSource),
}

impl Schemes {
    fn have_basic(&self) -> bool {
        // An answer that offers nothing may mean Basic.
        self.0.is_empty() || self.0.iter().any(|scheme| scheme.eq_ignore_ascii_case("basic"))
    }
}

impl Sent {
    fn advice(&self, offered: &Schemes) -> String {
        match self {
            _ if !offered.have_basic() => {
                "only Basic can be spoken here: have Basic offered, or this machine let through \
                 without"
                    .into()
            }
            Self::Nothing => {
                "none were sent: give USER:PASSWORD in a file (--proxy-credentials), in PORTICO_PROXY_AUTH \
                 or in the proxy's URL"
                    .into()
            }
            Self::From(source) => format!("those from {source} were sent and not taken"),
        }
    }
}

/// Says whose address was connected to.
struct Whose<'a>(&'a Target, Option<&'a Proxy>);

/// What the proxy may be, seen from its answer.
fn other_scheme(proxy: &Proxy) -> &'static str {
    if proxy.is_tls() { "an HTTP proxy" } else { "an http:// and not an https:// one" }
}

// === Display ===

impl fmt::Display for Whose<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(target, proxy) = self;
        match proxy {
            Some(proxy) => write!(f, " (proxy {proxy}, on the way to {target})"),
            None if target.ip().is_some() => Ok(()),
            None => write!(f, " ({target})"),
        }
    }
}

impl fmt::Display for HeadLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(limit) => write!(f, "{limit} bytes"),
            Self::Interim(limit) => write!(f, "{limit} bytes of interim answers (1xx)"),
            Self::Fields(limit) => write!(f, "{limit} fields"),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, reason, says } = self;
        write!(f, "{status}")?;
        if !reason.is_empty() {
            write!(f, " {reason}")?;
        }
        if says.is_empty() { Ok(()) } else { write!(f, ": {says}") }
    }
}

impl fmt::Display for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("no kind of them") } else { f.write_str(&self.0.join(", ")) }
    }
}
