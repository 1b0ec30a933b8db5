//! The certificate of the tunnel listener, from files that may change.
//!
//! A connection keeps the certificate that is current when it begins: renewing one cuts nothing. The
//! certificate of a client is judged in [`client_certificate`](super::client_certificate) by the
//! [`client_ca`](super::client_ca) that is current then. The two are read apart: a certificate that is half
//! written must not delay a revocation. Sessions are never resumed: an agent connects rarely, and a full
//! handshake proves that it still has its key.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use portico_dial::pem::{self, PemFileError};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::server::NoServerSessionStorage;
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::client_ca::{ClientCaError, ClientCaFile, ClientCas, RevocationList};
use super::client_certificate::{AnyCertificate, Presented};
use super::x509::{at, validity_of};

/// ALPN of Portico's agents. It means HTTP/2, by a name that no API server accepts, so that one port can
/// serve both.
pub const ALPN: &[u8] = b"portico-tunnel";

/// Where the PEM files are.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// The leaf's private key.
    pub key: PathBuf,
    /// The CA certificates that client certificates must lead to. With any, clients are asked for a
    /// certificate.
    pub client_ca: Vec<ClientCaFile>,
    /// The complete revocation lists of these CAs.
    pub client_crl: Option<PathBuf>,
}

/// The files of a tunnel listener, and what of them is in force.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    server: ArcSwap<Server>,
    /// The content that was read last. Comparing is cheaper than trusting time stamps, and right for symlink
    /// swaps.
    read: Mutex<Pair>,
    /// `None` where clients are not asked for a certificate.
    client_cas: Option<Arc<ClientCas>>,
}

/// What a connection begins with.
#[derive(Debug)]
struct Server {
    config: Arc<ServerConfig>,
    /// The DNS names of the certificate, in lower case.
    names: Box<[Box<str>]>,
    /// From when to when the certificate is valid; `None` for one that cannot be read.
    validity: Option<RangeInclusive<Timestamp>>,
}

/// Why the files make no TLS configuration. The one in force stays.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] PemFileError),
    /// Certificate and key do not belong together, or are of a kind that cannot be used.
    #[error(
        "certificate {} with key {}: {source}; give a chain, leaf first, and the leaf's key",
        certificate.display(),
        key.display()
    )]
    Pair {
        /// The certificate file.
        certificate: PathBuf,
        /// The key file.
        key: PathBuf,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// The CAs of the clients, or their revocation lists.
    #[error(transparent)]
    ClientCa(#[from] ClientCaError),
}

/// Contents of certificate and key.
#[derive(PartialEq, Eq)]
struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl std::fmt::Debug for Pair {
    /// Never prints the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pair")
    }
}

impl Tls {
    /// Reads the files and makes a configuration of them.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let pair = Pair::read(&files)?;
        let server = server(&files, &pair)?;
        let TlsFiles { client_ca, client_crl, .. } = &files;
        let asks = !client_ca.is_empty();
        let client_cas = asks.then(|| ClientCas::load(client_ca.clone(), client_crl.clone())).transpose()?;
        let client_cas = client_cas.map(Arc::new);
        Ok(Self { files, server: ArcSwap::from_pointee(server), read: Mutex::new(pair), client_cas })
    }

    /// Reads certificate and key again. Returns true if they changed and the new ones are in force for
    /// connections to come. On an error the old ones stay, also in the moment when the certificate is new and
    /// its key is not yet; call again later.
    ///
    /// Blocks while it reads small files, like [`reload_trust`](Self::reload_trust): not for a thread that
    /// serves connections.
    pub fn reload_certificate(&self) -> Result<bool, TlsError> {
        let pair = Pair::read(&self.files)?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if *read == pair {
            return Ok(false);
        }
        self.server.store(Arc::new(server(&self.files, &pair)?));
        *read = pair;
        Ok(true)
    }

    /// Reads the client CAs and their revocation lists again. Returns true if they changed. From then on
    /// every certificate is judged by the new ones. That includes those of open connections, which the caller
    /// has to look at.
    ///
    /// On an error no CA is added, but what takes trust away counts. A CA that is gone from its file is not
    /// trusted any more, although another file cannot be read. A good list is in force, although another is
    /// not. The error then comes with the next call.
    pub fn reload_trust(&self) -> Result<bool, TlsError> {
        Ok(self.client_cas.as_ref().map_or(Ok(false), |cas| cas.reload())?)
    }

    /// The revocation list in force of each CA. Of several that count together, the first to be late.
    #[must_use]
    pub fn revocation_lists(&self) -> Vec<RevocationList> {
        self.client_cas.as_ref().map(|cas| cas.revocation_lists()).unwrap_or_default()
    }

    /// Returns the paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let TlsFiles { certificate, key, .. } = &self.files;
        let of_clients = self.client_cas.iter().flat_map(|cas| cas.paths());
        [certificate, key].into_iter().map(PathBuf::as_path).chain(of_clients)
    }

    /// Whether clients are asked for a certificate.
    #[must_use]
    pub fn asks_for_certificate(&self) -> bool {
        self.client_cas.is_some()
    }

    /// Whether the certificate of the listener is for this server name, in lower case and without a dot at
    /// its end.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        let parent = name.split_once('.').map(|(_, parent)| parent);
        self.server.load().names.iter().any(|own| match own.strip_prefix("*.") {
            Some(own) => parent == Some(own),
            None => **own == *name,
        })
    }

    /// From when to when the certificate of the listener is valid, the last second included; `None` for one
    /// that cannot be read.
    #[must_use]
    pub fn certificate_validity(&self) -> Option<RangeInclusive<Timestamp>> {
        self.server.load().validity.clone()
    }

    /// The configuration for a connection that begins now.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server.load().config)
    }

    /// The certificates that a client presented; `None` where clients are not asked for one.
    pub(crate) fn presented(&self, chain: &[CertificateDer<'_>]) -> Option<Presented> {
        Some(Presented::new(Arc::clone(self.client_cas.as_ref()?), chain))
    }
}

impl Pair {
    fn read(files: &TlsFiles) -> Result<Self, PemFileError> {
        Ok(Self { certificate: pem::read(&files.certificate)?, key: pem::read(&files.key)? })
    }
}

fn server(files: &TlsFiles, contents: &Pair) -> Result<Server, TlsError> {
    let provider = portico_dial::provider();
    let pair =
        |source| TlsError::Pair { certificate: files.certificate.clone(), key: files.key.clone(), source };
    let chain = pem::certificates(&files.certificate, &contents.certificate)?;
    let (names, validity) = match chain.first().map(|leaf| X509Certificate::from_der(leaf)) {
        Some(Ok((_, leaf))) => {
            let (start, end) = validity_of(&leaf);
            (dns_names(&leaf), Some(at(start)..=at(end)))
        }
        _ => (Box::default(), None),
    };
    let key = pem::private_key(&files.key, &contents.key)?;
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(pair)?;
    let builder = if files.client_ca.is_empty() {
        builder.with_no_client_auth()
    } else {
        builder.with_client_cert_verifier(Arc::new(AnyCertificate::new()))
    };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![ALPN.to_vec(), b"h2".to_vec(), b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Server { config: Arc::new(config), names, validity })
}

/// The DNS names a certificate is for, in lower case.
fn dns_names(certificate: &X509Certificate<'_>) -> Box<[Box<str>]> {
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let names = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let dns = names.filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase().into()),
        _ => None,
    });
    dns.collect()
}
