//! The certificate of the tunnel listener, the CA of its clients and that CA's revocation lists, from files
//! that may change.
//!
//! A connection takes the certificate that is current when it begins, and keeps it: renewing one cuts
//! nothing. The certificate of a client is judged in [`client_certificate`](super::client_certificate) by the
//! CA that is current then. Certificate and CA are read apart: a certificate that is half written must not
//! delay a revocation. Sessions are never resumed: an agent connects rarely, and a full handshake proves that
//! it still has its key.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError};
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::oid_registry::{OID_X509_EXT_DELTA_CRL_INDICATOR, OID_X509_EXT_ISSUER_DISTRIBUTION_POINT};
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use super::client_certificate::{AnyCertificate, Trust, issuer_of, signed_by_one_of};

/// ALPN of Portico's agents: HTTP/2, by a name that no API server accepts, so that one port can serve both.
pub const ALPN: &[u8] = b"portico-tunnel";

/// Where the PEM files are.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// The leaf's private key.
    pub key: PathBuf,
    /// The CA certificates that client certificates must lead to. With it, clients are asked for a
    /// certificate.
    pub client_ca: Option<PathBuf>,
    /// The complete revocation lists of these CAs.
    pub client_crl: Option<PathBuf>,
}

/// The files of a tunnel listener, and what of them is in force.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    server: ArcSwap<Server>,
    trust: ArcSwapOption<Trust>,
    /// Compared with what the files say: cheaper than trusting time stamps, and right for symlink swaps.
    read: Mutex<Read>,
}

/// What was read of the files.
#[derive(Debug)]
struct Read {
    pair: Pair,
    /// `None` while the files cannot be used as they are.
    anchors: Option<Anchors>,
    in_force: Authorities,
}

/// What a connection begins with.
#[derive(Debug)]
struct Server {
    config: Arc<ServerConfig>,
    /// The DNS names of the certificate, in lower case.
    names: Box<[Box<str>]>,
}

/// Why the files make no TLS configuration. The one in force stays.
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
        /// What rustls said.
        source: rustls::Error,
    },
    /// The client CA holds a certificate that cannot be a trust anchor.
    #[error(
        "client CA {}: {source}; give the certificates of the CA that signs the agents' certificates",
        path.display()
    )]
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
    /// A revocation list of a CA that signs no clients: it would revoke nothing.
    #[error(
        "revocation list {}: the list of {issuer} is signed by none of the client CAs in {}; \
         give the lists of those CAs, or give that CA in --tunnel-client-ca too",
        path.display(),
        ca.display()
    )]
    ForeignList {
        /// The file of lists.
        path: PathBuf,
        /// The issuer that it names.
        issuer: Box<str>,
        /// The CA file.
        ca: PathBuf,
    },
    /// A delta list, or a list of some certificates only: what it lacks would count as not revoked.
    #[error(
        "revocation list {}: the list of {issuer} is not complete; \
         give the list of all certificates that this CA revoked",
        path.display()
    )]
    PartialList {
        /// The file of lists.
        path: PathBuf,
        /// The CA.
        issuer: Box<str>,
    },
    /// A revocation list that cannot be used.
    #[error(
        "revocation list {}: {source}; give the lists of the client CA in PEM (X509 CRL)",
        path.display()
    )]
    Revocations {
        /// The file of lists.
        path: PathBuf,
        /// What rustls said.
        source: VerifierBuilderError,
    },
}

/// Contents of certificate and key.
#[derive(PartialEq, Eq)]
struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Contents of the CA and of its revocation lists.
#[derive(Debug, PartialEq, Eq)]
struct Anchors {
    ca: Option<Vec<u8>>,
    lists: Option<Vec<u8>>,
}

/// The CAs of the clients, with their revocation lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Authorities {
    certificates: Vec<CertificateDer<'static>>,
    lists: Vec<CertificateRevocationListDer<'static>>,
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
        let anchors = Anchors::read(&files)?;
        let server = server(&files, &pair)?;
        let (in_force, checked) = anchors.authorities(&files)?;
        checked?;
        let trust = in_force.trust(&files)?;
        Ok(Self {
            files,
            server: ArcSwap::from_pointee(server),
            trust: ArcSwapOption::from(trust.map(Arc::new)),
            read: Mutex::new(Read { pair, anchors: Some(anchors), in_force }),
        })
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
        if read.pair == pair {
            return Ok(false);
        }
        self.server.store(Arc::new(server(&self.files, &pair)?));
        read.pair = pair;
        Ok(true)
    }

    /// Reads the client CA and its revocation lists again. Returns true if they changed. From then on every
    /// certificate is judged by the new ones, those of open connections too, which the caller has to look at.
    ///
    /// On an error the old ones stay, but for what takes trust away: a CA that is gone from the file is not
    /// trusted any more, and a good list is in force although another is not. The error then comes with the
    /// next call.
    pub fn reload_trust(&self) -> Result<bool, TlsError> {
        let anchors = Anchors::read(&self.files)?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if read.anchors.as_ref() == Some(&anchors) {
            return Ok(false);
        }
        read.anchors = None;
        let (new, checked) = anchors.authorities(&self.files)?;
        let next = match &checked {
            Ok(()) => new,
            Err(_) => read.in_force.less_trusting(new),
        };
        let changed = next != read.in_force;
        if changed {
            self.trust.store(next.trust(&self.files)?.map(Arc::new));
            read.in_force = next;
        }
        match checked {
            Ok(()) => read.anchors = Some(anchors),
            Err(error) if !changed => return Err(error),
            Err(_) => {}
        }
        Ok(changed)
    }

    /// Returns the paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let TlsFiles { certificate, key, client_ca, client_crl } = &self.files;
        [Some(certificate), Some(key), client_ca.as_ref(), client_crl.as_ref()]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    /// Whether clients are asked for a certificate.
    #[must_use]
    pub fn asks_for_certificate(&self) -> bool {
        self.files.client_ca.is_some()
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

    /// The configuration for a connection that begins now.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server.load().config)
    }

    /// What client certificates are judged by now; `None` where clients are not asked for one.
    pub(crate) fn trust(&self) -> Option<Arc<Trust>> {
        self.trust.load_full()
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

impl Pair {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        Ok(Self { certificate: read_file(&files.certificate)?, key: read_file(&files.key)? })
    }
}

impl Anchors {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let read = |path: &Option<PathBuf>| path.as_deref().map(read_file).transpose();
        Ok(Self { ca: read(&files.client_ca)?, lists: read(&files.client_crl)? })
    }

    /// The CAs with their lists, and what is wrong with the first list that cannot be used.
    fn authorities(&self, files: &TlsFiles) -> Result<(Authorities, Result<(), TlsError>), TlsError> {
        let mut authorities = Authorities::default();
        let (Some(path), Some(ca)) = (&files.client_ca, &self.ca) else { return Ok((authorities, Ok(()))) };
        authorities.certificates = certificates(path, ca)?;
        let (Some(crl), Some(pem)) = (&files.client_crl, &self.lists) else {
            return Ok((authorities, Ok(())));
        };
        let mut checked = Ok(());
        let malformed = |source| TlsError::Pem { path: crl.clone(), expected: "X509 CRL", source };
        for list in CertificateRevocationListDer::pem_slice_iter(pem) {
            let usable = list.map_err(malformed).and_then(|list| {
                authorities.check(&list, crl, path)?;
                Ok(list)
            });
            match usable {
                Ok(list) => authorities.lists.push(list),
                Err(error) => checked = checked.and(Err(error)),
            }
        }
        // A file that was cut to nothing revokes nothing: it must not replace one that does.
        if authorities.lists.is_empty() {
            checked = checked.and(Err(malformed(pem::Error::NoItemsFound)));
        }
        Ok((authorities, checked))
    }
}

impl Authorities {
    /// Whether the list is the complete one of one of these CAs.
    fn check(
        &self,
        list: &CertificateRevocationListDer<'static>,
        path: &Path,
        ca: &Path,
    ) -> Result<(), TlsError> {
        let (path, issuer) = (path.to_owned(), || issuer_of(list));
        if !signed_by_one_of(list, &self.certificates) {
            return Err(TlsError::ForeignList { path, issuer: issuer(), ca: ca.to_owned() });
        }
        if is_partial(list) {
            return Err(TlsError::PartialList { path, issuer: issuer() });
        }
        // rustls has the last word on a list: it must accept the list before that is in force.
        let unusable = |source| TlsError::Revocations { path: path.clone(), source };
        Trust::new(self.roots(ca)?, vec![list.clone()]).map(drop).map_err(unusable)
    }

    /// These, less the CAs that `new` lacks, with its lists before their own.
    fn less_trusting(&self, new: Self) -> Self {
        let mut next = self.clone();
        next.certificates.retain(|certificate| new.certificates.contains(certificate));
        // The first list of a CA counts.
        next.lists.retain(|list| !new.lists.contains(list));
        next.lists = new.lists.into_iter().chain(next.lists).collect();
        next.lists.retain(|list| signed_by_one_of(list, &next.certificates));
        next
    }

    /// What certificates are judged by; `None` where clients are not asked for one.
    fn trust(&self, files: &TlsFiles) -> Result<Option<Trust>, TlsError> {
        let Some(path) = &files.client_ca else { return Ok(None) };
        if self.certificates.is_empty() {
            return Ok(Some(Trust::nobody()));
        }
        let trust = Trust::new(self.roots(path)?, self.lists.clone());
        trust.map(Some).map_err(|source| TlsError::Verifier { path: path.clone(), source })
    }

    fn roots(&self, path: &Path) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in &self.certificates {
            let wrong = |source| TlsError::ClientCa { path: path.to_owned(), source };
            roots.add(certificate.clone()).map_err(wrong)?;
        }
        Ok(roots)
    }
}

/// Whether the list is a delta (RFC 5280 section 5.2.4), or one for certain certificates only (section
/// 5.2.5).
fn is_partial(list: &[u8]) -> bool {
    let Ok((_, list)) = CertificateRevocationList::from_der(list) else { return true };
    let partial = [OID_X509_EXT_DELTA_CRL_INDICATOR, OID_X509_EXT_ISSUER_DISTRIBUTION_POINT];
    list.extensions().iter().any(|extension| partial.contains(&extension.oid))
}

fn server(files: &TlsFiles, contents: &Pair) -> Result<Server, TlsError> {
    let provider = portico_dial::provider();
    let pair =
        |source| TlsError::Pair { certificate: files.certificate.clone(), key: files.key.clone(), source };
    let chain = certificates(&files.certificate, &contents.certificate)?;
    let names = chain.first().map(|leaf| dns_names(leaf)).unwrap_or_default();
    let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|source| TlsError::Pem {
        path: files.key.clone(),
        expected: "private key",
        source,
    })?;
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(pair)?;
    let builder = match files.client_ca {
        Some(_) => builder.with_client_cert_verifier(Arc::new(AnyCertificate::new())),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![ALPN.to_vec(), b"h2".to_vec(), b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Server { config: Arc::new(config), names })
}

/// The DNS names a certificate is for, in lower case; of one that cannot be read, none.
fn dns_names(der: &[u8]) -> Box<[Box<str>]> {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Box::default() };
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let names = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let dns = names.filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase().into()),
        _ => None,
    });
    dns.collect()
}

/// The certificates of the PEM file at `path`.
fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |source| TlsError::Pem { path: path.to_owned(), expected: "certificate", source };
    portico_dial::pem::certificates(pem).map_err(wrong)
}
