//! The certificate of the tunnel listener and the CA of its clients, read from files and read again when they change.
//!
//! A connection takes the configuration that is current when it begins and keeps it; renewing a certificate cuts nothing.
//! Sessions are never resumed: an agent connects rarely, and a full handshake is what checks its certificate against the CA and
//! the clock of this moment.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use thiserror::Error;

/// Where the PEM files are.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// The leaf's private key.
    pub key: PathBuf,
    /// The CA certificates that client certificates must lead to. With it every TLS client must present one.
    pub client_ca: Option<PathBuf>,
}

/// What the files said last, and the configuration made of it.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    current: ArcSwap<ServerConfig>,
    /// Contents of the files behind `current`: comparing them is cheaper than trusting time stamps, and right for symlink swaps.
    contents: Mutex<Contents>,
}

/// Why the files make no TLS configuration. The one in force, if any, stays.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("reading {}: {source}; give a PEM file this process may read", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not the PEM expected.
    #[error("{}: no {expected}: {source}; give it in PEM", path.display())]
    Pem {
        /// Which file.
        path: PathBuf,
        /// What was looked for.
        expected: &'static str,
        /// What was found instead.
        source: pem::Error,
    },
    /// Certificate and key do not belong together, or are of a kind that cannot be used.
    #[error("certificate {} with key {}: {source}; give a chain, leaf first, and the leaf's key", certificate.display(), key.display())]
    Pair {
        /// The certificate file.
        certificate: PathBuf,
        /// The key file.
        key: PathBuf,
        /// What rustls said.
        source: rustls::Error,
    },
    /// The client CA holds a certificate that cannot be a trust anchor.
    #[error("client CA {}: {source}; give the certificates of the CA that signs the agents' certificates", path.display())]
    ClientCa {
        /// The CA file.
        path: PathBuf,
        /// What rustls said.
        source: rustls::Error,
    },
    /// No verifier can be made of the client CA.
    #[error("client CA {}: {source}; the file must hold at least one CA certificate", path.display())]
    Verifier {
        /// The CA file.
        path: PathBuf,
        /// What rustls said.
        source: VerifierBuilderError,
    },
}

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

impl Tls {
    /// Reads the files and makes a configuration of them.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let contents = read_all(&files)?;
        let config = configure(&files, &contents)?;
        Ok(Self { files, current: ArcSwap::from_pointee(config), contents: Mutex::new(contents) })
    }

    /// Reads the files again; true if they changed and the new ones are in force for connections to come. On an error (also the
    /// short moment when the certificate is new and its key is not yet) the old configuration stays; call again later.
    ///
    /// Blocks for the time of reading three small files; call it every some seconds from a thread that serves nobody.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let contents = read_all(&self.files)?;
        let mut known = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == contents {
            return Ok(false);
        }
        let config = configure(&self.files, &contents)?;
        self.current.store(Arc::new(config));
        *known = contents;
        Ok(true)
    }

    /// Whether clients must present a certificate, and are held to the cluster it names.
    #[must_use]
    pub fn asks_for_identity(&self) -> bool {
        self.files.client_ca.is_some()
    }

    /// The configuration for a connection that begins now.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        self.current.load_full()
    }
}

fn read_all(files: &TlsFiles) -> Result<Contents, TlsError> {
    let read =
        |path: &Path| fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source });
    Ok(Contents {
        certificate: read(&files.certificate)?,
        key: read(&files.key)?,
        client_ca: files.client_ca.as_deref().map(read).transpose()?,
    })
}

fn configure(files: &TlsFiles, contents: &Contents) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let pair =
        |source| TlsError::Pair { certificate: files.certificate.clone(), key: files.key.clone(), source };
    let chain = certificates(&files.certificate, &contents.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|source| TlsError::Pem {
        path: files.key.clone(),
        expected: "private key",
        source,
    })?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(pair)?;
    let builder = match (&files.client_ca, &contents.client_ca) {
        (Some(path), Some(pem)) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path, pem)? {
                roots.add(certificate).map_err(|source| TlsError::ClientCa { path: path.clone(), source })?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|source| TlsError::Verifier { path: path.clone(), source })?;
            builder.with_client_cert_verifier(verifier)
        }
        _ => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// The certificates of a PEM file, at least one.
fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |source| TlsError::Pem { path: path.to_owned(), expected: "certificate", source };
    let chain = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    if chain.is_empty() { Err(wrong(pem::Error::NoItemsFound)) } else { Ok(chain) }
}
