//! The certificates of the server's ports, from files that may change.
//!
//! A connection takes what is current when it begins and keeps it. Where a CA is given, a client must have a
//! certificate of it for client authentication.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use portico_dial::check_chain;
use portico_dial::pem::{self, PemFileError};
use rustls::SupportedProtocolVersion;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme};
use thiserror::Error;

/// Where the PEM files are.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// The leaf's private key.
    pub key: PathBuf,
    /// The CA of clients. Without it, they are not asked for a certificate.
    pub client_ca: Option<PathBuf>,
}

/// What TLS may use.
#[derive(Debug, Clone)]
pub struct TlsOptions {
    /// Versions.
    pub versions: Vec<&'static SupportedProtocolVersion>,
    /// Cipher suites and the rest.
    pub provider: Arc<CryptoProvider>,
}

impl Default for TlsOptions {
    fn default() -> Self {
        Self { versions: rustls::ALL_VERSIONS.to_vec(), provider: portico_dial::provider() }
    }
}

/// Why the files make no TLS configuration. The one in force stays.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] PemFileError),
    /// Certificate and key do not belong together, or are of a kind that cannot be used.
    #[error("certificate {} with key {}: {source}; give a chain, leaf first, and the leaf's key",
        certificate.display(), key.display())]
    Pair {
        /// The certificate file.
        certificate: PathBuf,
        /// The key file.
        key: PathBuf,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// The CA file holds what is no CA.
    #[error("client CA {}: {source}; give the certificates of the clients' CA", path.display())]
    Ca {
        /// The CA file.
        path: PathBuf,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// The CAs make no verifier.
    #[error("client CA {}: {source}", path.display())]
    Verifier {
        /// The CA file.
        path: PathBuf,
        /// The error of rustls.
        source: VerifierBuilderError,
    },
}

/// The TLS of one port.
pub struct ServerTls {
    files: TlsFiles,
    options: TlsOptions,
    alpn: &'static [u8],
    current: ArcSwap<ServerConfig>,
    /// The content that was read last: comparing is cheaper than trusting time stamps.
    read: Mutex<Contents>,
}

/// Contents of the files.
#[derive(PartialEq, Eq)]
struct Contents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl std::fmt::Debug for Contents {
    /// Never prints the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Contents")
    }
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The log names the files. What is in them is long.
        f.debug_struct("ServerTls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Reads the files. `alpn` is the one protocol that is spoken.
    pub fn load(files: TlsFiles, options: TlsOptions, alpn: &'static [u8]) -> Result<Self, TlsError> {
        let read = Contents::read(&files)?;
        let current = ArcSwap::new(config(&files, &read, &options, alpn)?);
        Ok(Self { files, options, alpn, current, read: Mutex::new(read) })
    }

    /// Reads the files again. Returns true if they changed and are in force for connections to come. On an
    /// error what was in force stays. Blocks for as long as it reads.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let contents = Contents::read(&self.files)?;
        // A panic elsewhere leaves nothing half done here.
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if *read == contents {
            return Ok(false);
        }
        self.current.store(config(&self.files, &contents, &self.options, self.alpn)?);
        *read = contents;
        Ok(true)
    }

    /// The files to watch.
    #[must_use]
    pub fn paths(&self) -> Vec<PathBuf> {
        let TlsFiles { certificate, key, client_ca } = &self.files;
        [certificate, key].into_iter().chain(client_ca).cloned().collect()
    }

    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        self.current.load_full()
    }
}

impl Contents {
    fn read(files: &TlsFiles) -> Result<Self, PemFileError> {
        let client_ca = files.client_ca.as_deref().map(pem::read).transpose()?;
        Ok(Self { certificate: pem::read(&files.certificate)?, key: pem::read(&files.key)?, client_ca })
    }
}

fn config(
    files: &TlsFiles,
    contents: &Contents,
    options: &TlsOptions,
    alpn: &'static [u8],
) -> Result<Arc<ServerConfig>, TlsError> {
    let pair =
        |source| TlsError::Pair { certificate: files.certificate.clone(), key: files.key.clone(), source };
    let chain = pem::certificates(&files.certificate, &contents.certificate)?;
    let key = pem::private_key(&files.key, &contents.key)?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&options.provider))
        .with_protocol_versions(&options.versions)
        .map_err(pair)?;
    let builder = match files.client_ca.as_deref().zip(contents.client_ca.as_deref()) {
        None => builder.with_no_client_auth(),
        Some((path, contents)) => {
            let roots = pem::certificates(path, contents)?;
            builder.with_client_cert_verifier(verifier(path, roots, options)?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![alpn.to_vec()];
    // Peers connect rarely, and a full handshake proves that a peer still has its key.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn verifier(
    path: &Path,
    cas: Vec<CertificateDer<'static>>,
    options: &TlsOptions,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    for ca in cas {
        roots.add(ca).map_err(|source| TlsError::Ca { path: path.to_owned(), source })?;
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&options.provider))
            .build()
            .map_err(|source| TlsError::Verifier { path: path.to_owned(), source })?;
    Ok(Arc::new(ShortChains(verifier)))
}

/// Verifies as rustls does, unless there is too much to be verified.
#[derive(Debug)]
struct ShortChains(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for ShortChains {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        check_chain(intermediates)?;
        self.0.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
