//! TLS as a client: to a gateway with the tunnel inside, to a Konnectivity server, to etcd, to an `https://`
//! proxy.
//!
//! Files are read again when they change. A connection takes the configuration that is current when it
//! begins. When a certificate is not accepted, the error names its issuer, by which a corporate proxy that
//! intercepts TLS is recognised ([`HandshakeError`]). Sessions are not resumed: connections are rare.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use portico_net::ReadAhead;
use rustls::client::Resumption;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::ServerName;
use rustls::server::VerifierBuilderError;
use rustls::{ClientConfig, RootCertStore};
use rustls_native_certs::CertificateResult;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::chain::server_verifier;
use crate::pem::{self, PemFileError};
use crate::provider::{TLS_BUFFER, provider};
use crate::recording_verifier::RecordingVerifier;
use crate::socket::{Route, Socket};

mod error;

pub use error::{HandshakeError, HandshakeProblem};

/// ALPN with a gateway. The first tells a gateway with one port for everything that this is a tunnel.
const TUNNEL: [&[u8]; 2] = [b"portico-tunnel", b"h2"];

/// ALPN with a proxy.
const PROXY: [&[u8]; 1] = [b"http/1.1"];

/// The PEM files of a client.
#[derive(Debug, Clone, Default)]
pub struct ClientTlsFiles {
    /// The CA certificates that the server's certificate must lead to. Without it, the system's roots, or
    /// those of Mozilla where the system has none.
    pub ca: Option<PathBuf>,
    /// Our certificate chain, leaf first.
    pub certificate: Option<PathBuf>,
    /// The leaf's private key.
    pub key: Option<PathBuf>,
}

/// The TLS configuration that files hold.
#[derive(Debug)]
pub struct ClientTls {
    files: Files,
    peer: Peer,
    current: ArcSwap<Current>,
    /// The contents of the files behind `current`.
    contents: Mutex<Contents>,
}

/// The kind of server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Peer {
    Gateway,
    Proxy,
    /// With the protocols that are offered to it.
    Konnectivity(Vec<Vec<u8>>),
    /// Its JSON gateway: HTTP/1.1, for which nothing is offered.
    Etcd,
}

impl Peer {
    fn protocols(&self) -> Vec<Vec<u8>> {
        let owned = |protocols: &[&[u8]]| protocols.iter().map(|name| name.to_vec()).collect();
        match self {
            Self::Gateway => owned(&TUNNEL),
            Self::Proxy => owned(&PROXY),
            Self::Konnectivity(protocols) => protocols.clone(),
            Self::Etcd => Vec::new(),
        }
    }
}

/// [`ClientTlsFiles`] with certificate and key as a pair.
#[derive(Debug)]
struct Files {
    ca: Option<PathBuf>,
    pair: Option<(PathBuf, PathBuf)>,
}

#[derive(PartialEq, Eq)]
struct Contents {
    ca: Option<Vec<u8>>,
    pair: Option<(Vec<u8>, Vec<u8>)>,
}

#[derive(Debug)]
struct Current {
    config: ClientConfig,
    verifier: Arc<dyn ServerCertVerifier>,
}

/// Why the files are no configuration. The one in force, if any, stays.
#[derive(Debug, Error)]
pub enum ClientTlsError {
    /// A certificate without a key, or a key without a certificate.
    #[error("a client certificate and its key go together; give both or none")]
    Half,
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] PemFileError),
    /// Certificate and key do not belong together, or are of a kind that cannot be used.
    #[error("certificate {} with key {}: {source}; give a chain, leaf first, and the leaf's \
        key", certificate.display(), key.display())]
    Pair {
        /// The certificate file.
        certificate: PathBuf,
        /// The key file.
        key: PathBuf,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// The CA file holds a certificate that cannot be a trust anchor.
    #[error("CA {}: {source}; give the certificates of the CA that signs the server's \
        certificate", path.display())]
    Ca {
        /// The CA file.
        path: PathBuf,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// No CA file was given, and the environment names one that has none.
    #[error(
        "SSL_CERT_FILE or SSL_CERT_DIR is set, and leads to no CA certificate ({detail}); correct or unset \
         it, or give a CA file"
    )]
    NoRoots {
        /// What was found instead.
        detail: String,
    },
    /// No verifier can be made of the CA.
    #[error("verifying certificates: {0}")]
    Verifier(#[from] VerifierBuilderError),
    /// The TLS library has no protocol version in common with us.
    #[error("TLS: {0}")]
    Library(#[source] rustls::Error),
}

impl std::fmt::Debug for Contents {
    /// Never prints the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Contents")
    }
}

impl ClientTls {
    /// Reads the files for TLS to gateways.
    pub fn load(files: ClientTlsFiles) -> Result<Self, ClientTlsError> {
        let pair = Self::pair(files.certificate, files.key)?;
        Self::of(Files { ca: files.ca, pair }, Peer::Gateway)
    }

    /// Reads the files for TLS to Konnectivity servers. `protocols` are offered by ALPN, in this order.
    pub fn konnectivity(files: ClientTlsFiles, protocols: Vec<Vec<u8>>) -> Result<Self, ClientTlsError> {
        Self::of(
            Files { ca: files.ca, pair: Self::pair(files.certificate, files.key)? },
            Peer::Konnectivity(protocols),
        )
    }

    /// Reads the files for TLS to members of etcd.
    pub fn etcd(files: ClientTlsFiles) -> Result<Self, ClientTlsError> {
        let pair = Self::pair(files.certificate, files.key)?;
        Self::of(Files { ca: files.ca, pair }, Peer::Etcd)
    }

    fn pair(
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> Result<Option<(PathBuf, PathBuf)>, ClientTlsError> {
        match (certificate, key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            _ => Err(ClientTlsError::Half),
        }
    }

    /// Reads the CA for TLS to a proxy.
    pub(crate) fn for_proxy(ca: Option<PathBuf>) -> Result<Self, ClientTlsError> {
        Self::of(Files { ca, pair: None }, Peer::Proxy)
    }

    fn of(files: Files, peer: Peer) -> Result<Self, ClientTlsError> {
        let contents = files.read()?;
        let current = ArcSwap::from_pointee(configure(&files, &contents, &peer)?);
        Ok(Self { files, peer, current, contents: Mutex::new(contents) })
    }

    /// Reads the files again. Returns true if they changed and are in force for the next connection. On an
    /// error the old configuration stays; call again later, because a new certificate may be written before
    /// its key. The system's roots are read once.
    ///
    /// Blocks for the time of reading three small files.
    pub fn reload(&self) -> Result<bool, ClientTlsError> {
        let contents = self.files.read()?;
        let mut known = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == contents {
            return Ok(false);
        }
        self.current.store(Arc::new(configure(&self.files, &contents, &self.peer)?));
        *known = contents;
        Ok(true)
    }

    /// Speaks TLS over a connection to a server, which must have a certificate for this name or IP address.
    /// The protocol inside a gateway's is in `get_ref().1.alpn_protocol()`: `portico-tunnel`, `h2`, or none
    /// from a server without ALPN. The caller bounds the time.
    pub async fn connect(
        &self,
        server_name: &str,
        socket: Socket,
    ) -> Result<TlsStream<ReadAhead<Socket>>, HandshakeError> {
        let route = socket.route().clone();
        self.handshake(server_name, &route, ReadAhead::new(socket)).await
    }

    /// The TLS handshake of [`Self::connect`] over any stream.
    pub(crate) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        server_name: &str,
        route: &Route,
        stream: S,
    ) -> Result<TlsStream<S>, HandshakeError> {
        let failed = |problem| HandshakeError { route: route.clone(), answered: false, problem };
        let name = server_name.strip_suffix('.').unwrap_or(server_name);
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| failed(HandshakeProblem::ServerName { name: server_name.into() }))?;
        let current = self.current.load_full();
        let recorder = Arc::new(RecordingVerifier::new(Arc::clone(&current.verifier)));
        let mut config = current.config.clone();
        config.dangerous().set_certificate_verifier(Arc::clone(&recorder) as Arc<dyn ServerCertVerifier>);
        let connecting = TlsConnector::from(Arc::new(config))
            .connect_with(name, stream, |tls| tls.set_buffer_limit(Some(TLS_BUFFER)));
        let connected = connecting.await;
        let presented = recorder.take_presented();
        connected.map_err(|error| {
            let hint = match self.peer {
                Peer::Gateway => "if this gateway serves no TLS, write h2c://",
                Peer::Proxy => "if it is an http:// proxy, write so",
                Peer::Konnectivity(_) => {
                    "it must be the agent port of a Konnectivity server, 8091 by default"
                }
                Peer::Etcd => "if this etcd serves no TLS, write http://",
            };
            let problem = error::problem(error, presented.first(), self.trust(), hint);
            HandshakeError { answered: !presented.is_empty(), ..failed(problem) }
        })
    }

    /// Returns the configured CA for error messages.
    fn trust(&self) -> String {
        let flag = match &self.peer {
            Peer::Gateway => "--tls-ca",
            Peer::Proxy => "--proxy-ca",
            Peer::Konnectivity(_) => "--ca-cert",
            Peer::Etcd => "--trusted-ca-file",
        };
        match &self.files.ca {
            Some(path) => format!("{flag} {}", path.display()),
            None => format!("public CA certificates, the system's or Mozilla's ({flag} is not set)"),
        }
    }
}

impl Files {
    fn read(&self) -> Result<Contents, ClientTlsError> {
        let pair = match &self.pair {
            None => None,
            Some((certificate, key)) => Some((pem::read(certificate)?, pem::read(key)?)),
        };
        Ok(Contents { ca: self.ca.as_deref().map(pem::read).transpose()?, pair })
    }
}

fn configure(files: &Files, contents: &Contents, peer: &Peer) -> Result<Current, ClientTlsError> {
    let provider = provider();
    let roots = match (&files.ca, &contents.ca) {
        (Some(path), Some(pem)) => roots_of(path, pem)?,
        _ => system_roots()?,
    };
    let verifier = server_verifier(roots)?;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(ClientTlsError::Library)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&verifier));
    let mut config = match (&files.pair, &contents.pair) {
        (Some((certificate, key)), Some((chain, secret))) => {
            let chain = pem::certificates(certificate, chain)?;
            let secret = pem::private_key(key, secret)?;
            builder.with_client_auth_cert(chain, secret).map_err(|source| ClientTlsError::Pair {
                certificate: certificate.clone(),
                key: key.clone(),
                source,
            })?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = peer.protocols();
    config.resumption = Resumption::disabled();
    Ok(Current { config, verifier })
}

fn roots_of(path: &Path, pem: &[u8]) -> Result<RootCertStore, ClientTlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in pem::certificates(path, pem)? {
        roots.add(certificate).map_err(|source| ClientTlsError::Ca { path: path.to_owned(), source })?;
    }
    Ok(roots)
}

/// Returns the system's roots, or those of Mozilla where the system has none.
pub fn system_roots() -> Result<RootCertStore, ClientTlsError> {
    let is_configured = ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|name| std::env::var_os(name).is_some());
    roots_among(rustls_native_certs::load_native_certs(), is_configured)
}

/// Returns the roots that were `found`. Single certificates that cannot be used are left out, as other
/// programs do. A system without any, such as an image of one file, has those of Mozilla, unless
/// `is_configured` says that an operator has chosen others.
fn roots_among(found: CertificateResult, is_configured: bool) -> Result<RootCertStore, ClientTlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() && is_configured {
        let detail = found.errors.first().map_or_else(|| "none were found".to_owned(), ToString::to_string);
        return Err(ClientTlsError::NoRoots { detail });
    }
    if roots.is_empty() {
        tracing::info!("this system has no CA certificates: trusting those of Mozilla, as of this build");
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_without_ca_certificates_trusts_those_of_mozilla() {
        let roots = roots_among(CertificateResult::default(), false).unwrap();
        assert_eq!(roots.len(), webpki_roots::TLS_SERVER_ROOTS.len());
    }

    #[test]
    fn ca_certificates_that_were_chosen_and_are_not_there_have_no_substitute() {
        let error = roots_among(CertificateResult::default(), true).unwrap_err().to_string();
        assert!(error.contains("SSL_CERT_FILE") && error.contains("none were found"), "{error}");
    }
}
