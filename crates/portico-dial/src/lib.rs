//! How Portico reaches something: names to addresses, a corporate proxy, TLS as a client, and credential
//! files that reload.
//!
//! A [`Target`] is what an operator writes. [`Dialer`] resolves it, connects, and asks a proxy for the rest
//! of the way. [`ClientTls`] speaks TLS to the target or to the proxy. [`TokenFile`] holds a bearer token,
//! and [`FileSet`] with [`FolderWatch`] says when to read such files again. The caller decides which address
//! to try, when and how often. [`Dialer::connect_any`] is for callers without a preference.

mod any_certificate;
mod chain;
mod client_tls;
mod connect;
mod credentials;
mod dialer;
mod environment;
mod error;
mod file_set;
mod happy_eyeballs;
pub mod pem;
mod provider;
mod proxy;
mod recording_verifier;
mod resolve;
mod secret_file;
mod server_url;
mod setting;
mod socket;
mod target;
mod tcp;
mod token_file;

pub use any_certificate::AnyCertificate;
pub use chain::{check_chain, server_verifier};
pub use client_tls::{
    ClientTls, ClientTlsError, ClientTlsFiles, HandshakeError, HandshakeProblem, system_roots,
};
pub use credentials::{CREDENTIALS_VARIABLE, CredentialsError, CredentialsSource};
pub use dialer::{DialTimeouts, Dialer, ProxyFiles};
pub use error::{ConnectAnyError, DialError, HeadLimit, Refused, Schemes, Sent};
pub use file_set::{FileSet, FolderWatch};
pub use provider::{TLS_BUFFER, install_provider, provider};
pub use proxy::{Proxy, UrlProblem};
pub use recording_verifier::RecordingVerifier;
pub use resolve::{ResolveError, Resolved};
pub use secret_file::SecretFileError;
pub use server_url::server_url;
pub use setting::{ProxyError, ProxySetting, without_credentials};
pub use socket::{Route, Socket};
pub use target::{Target, TargetError};
pub use tcp::{TcpKeepAlive, connect_direct};
pub use token_file::{TokenFile, TokenFileError};
