//! What can stand between us and a target, each said so that whoever reads the log knows whom to ask for
//! what.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::client_tls::HandshakeError;
use crate::credentials::{CredentialsError, CredentialsSource};
use crate::resolve::ResolveError;
use crate::setting::Proxy;
use crate::target::Target;

/// Why one attempt at one address made no connection to the target. Another attempt may.
#[derive(Debug, Error)]
pub enum DialError {
    /// No TCP connection.
    #[error("connecting to {address}{}: {source}", Whose(target, proxy.as_deref()))]
    Tcp {
        /// What was connected to.
        address: SocketAddr,
        /// Where the connection should lead.
        target: Target,
        /// Whose address it is, if not the target's.
        proxy: Option<Arc<Proxy>>,
        /// What the system said.
        source: io::Error,
    },
    /// User and password are in a file that cannot be used now.
    #[error("proxy {proxy}: {source}")]
    Credentials {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// What is wrong with them.
        source: CredentialsError,
    },
    /// An `https://` proxy with which there is no TLS.
    #[error("proxy {proxy}: {source}")]
    ProxyTls {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// What is wrong.
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
        /// Where the connection should lead.
        target: Target,
        /// How long we waited.
        limit: Duration,
    },
    /// The connection to the proxy ended or broke before there was an answer.
    #[error("proxy {proxy} hung up on CONNECT {target} without an answer: {source}")]
    ProxyGone {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// Where the connection should lead.
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
        /// How its answer begins.
        said: String,
    },
    /// The head of the answer does not end, or has more in it than there is sense in.
    #[error("proxy {proxy} answers CONNECT {target} with a head of more than {limit}")]
    HeadTooLong {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// Where the connection should lead.
        target: Target,
        /// What we take of it at most.
        limit: HeadLimit,
    },
    /// 407: the proxy wants to know who we are, and does not know yet or does not like it.
    #[error("proxy {proxy} asks for credentials for CONNECT {target} (it offers {offered}); \
        {}", sent.advice(offered))]
    AsksForCredentials {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// Where the connection should lead.
        target: Target,
        /// The kinds of authentication it would take.
        offered: Schemes,
        /// What we said.
        sent: Sent,
    },
    /// The proxy may not, or does not want to, lead us to the target.
    #[error("proxy {proxy} forbids CONNECT {target}: {answer}; have {target} allowed for CONNECT there")]
    Forbids {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// Where the connection should lead.
        target: Target,
        /// What it said.
        answer: Refused,
    },
    /// 5xx: the proxy would lead us to the target, and cannot.
    #[error(
        "proxy {proxy} cannot reach {target}: {answer}; it resolves the name and connects by itself: see \
         whether it can"
    )]
    CannotReach {
        /// The proxy.
        proxy: Arc<Proxy>,
        /// Where the connection should lead.
        target: Target,
        /// What it said.
        answer: Refused,
    },
}

/// Why none of the addresses of a target made a connection.
#[derive(Debug, Error)]
pub enum ConnectAnyError {
    /// Its name cannot be resolved.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The attempt that ended last failed like this.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// Its name leads to no address.
    #[error("{0} has no address")]
    NoAddress(Target),
}

/// What bounds the head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadLimit {
    /// Its length.
    Bytes(usize),
    /// Its header fields.
    Fields(usize),
}

/// What a proxy said instead of 200.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The status.
    pub status: u16,
    /// The words behind the status.
    pub reason: Box<str>,
    /// What the answer's body says, in a line. Empty: nothing.
    pub says: Box<str>,
}

/// The authentication schemes of a 407 (RFC 9110 section 11.7.1), as they were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schemes(pub Vec<Box<str>>);

/// The user and password that were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sent {
    /// None are set.
    Nothing,
    /// Those from here.
    From(CredentialsSource),
}

impl Schemes {
    fn have_basic(&self) -> bool {
        // Without a word of what it wants we cannot tell.
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

/// Whose address it was that was connected to.
struct Whose<'a>(&'a Target, Option<&'a Proxy>);

/// What the proxy may be instead.
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
