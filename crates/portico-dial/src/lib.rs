//! How Portico reaches something: names to addresses, through a corporate proxy where one is set, TLS as a client, and
//! credential files that reload.
//!
//! [`Target`] is what an operator writes. [`Dialer`] resolves it, connects, and asks a proxy for the rest of the way.
//! [`ClientTls`] speaks TLS to the target or to the proxy. [`TokenFile`] holds a bearer token that is replaced while the
//! process runs. Which address to try, when and how often, is decided by the caller.

mod client_tls;
mod connect;
mod credentials;
mod dialer;
mod environment;
mod error;
mod no_proxy;
pub mod pem;
mod printable;
mod resolve;
mod secret_file;
mod setting;
mod socket;
mod target;
mod tcp;
mod token_file;

pub use client_tls::{ClientTls, ClientTlsError, ClientTlsFiles, HandshakeError, HandshakeProblem};
pub use credentials::{CredentialsError, CredentialsSource};
pub use dialer::{DialTimeouts, Dialer, ProxyFiles};
pub use error::{DialError, HeadLimit, Refused, Schemes, Sent};
pub use resolve::{ResolveError, Resolved};
pub use secret_file::SecretFileError;
pub use setting::{Proxy, ProxyError, ProxySetting, UrlProblem};
pub use socket::{Route, Socket};
pub use target::{Target, TargetError};
pub use token_file::{TokenFile, TokenFileError};
