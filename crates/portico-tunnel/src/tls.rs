//! The certificate of the tunnel listener, the CA of its clients and what that CA has revoked, read from files and read again when they
//! change.
//!
//! A connection takes the certificate that is current when it begins and keeps it; renewing one cuts nothing. What the client's own
//! certificate proves is decided in [`trust`](crate::trust), by the CA that is current then. The two are read apart: a certificate that
//! is half written must not keep a revocation from taking effect. Sessions are never resumed: an agent connects rarely, and a full
//! handshake proves that it still has its key.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError};
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::trust::{AnyCertificate, Signer, Trust, signer_of};

/// What agents of Portico ask for by ALPN: HTTP/2 as below, by a name that no API server answers to, so that one port can serve both.
pub const ALPN: &[u8] = b"portico-tunnel";

/// Where the PEM files are.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// The leaf's private key.
    pub key: PathBuf,
    /// The CA certificates that client certificates must lead to. With it clients are asked for one.
    pub client_ca: Option<PathBuf>,
    /// What that CA has revoked.
    pub client_crl: Option<PathBuf>,
}

/// What the files said last, and what was made of it.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    server: ArcSwap<Server>,
    trust: ArcSwapOption<Trust>,
    /// Contents of the files behind the two: comparing them is cheaper than trusting time stamps, and right for symlink swaps.
    read: Mutex<Read>,
}

/// The contents in force.
#[derive(Debug)]
struct Read {
    pair: Pair,
    anchors: Anchors,
    /// Whether the file holds lists by which nobody can be judged.
    has_foreign_lists: bool,
}

/// What a connection begins with.
#[derive(Debug)]
struct Server {
    config: Arc<ServerConfig>,
    /// The DNS names of the certificate, in lower case.
    names: Box<[Box<str>]>,
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
    /// A revocation list of a CA that signs no clients: it would revoke nobody.
    #[error(
        "revocation list {}: the list of {issuer} is signed by none of the client CAs in {}; give the lists of those CAs, or give that CA in --tunnel-client-ca too",
        path.display(),
        ca.display()
    )]
    ForeignList {
        /// The file of lists.
        path: PathBuf,
        /// Who says to have signed it.
        issuer: Box<str>,
        /// The CA file.
        ca: PathBuf,
    },
    /// A revocation list that cannot be used.
    #[error("revocation list {}: {source}; give the lists of the client CA in PEM (X509 CRL)", path.display())]
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

/// Contents of the CA and of what it revoked.
#[derive(Debug, PartialEq, Eq)]
struct Anchors {
    ca: Option<Vec<u8>>,
    revoked: Option<Vec<u8>>,
}

impl std::fmt::Debug for Pair {
    /// Never prints the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pair")
    }
}

/// What CA and lists come to.
struct Judged {
    /// `None`: clients show no certificates.
    trust: Option<Trust>,
    lists: Lists,
}

/// Who signed the lists. What is wrong is about the first that none of the CAs did.
enum Lists {
    /// The CAs; or there are to be none.
    Own,
    /// The CAs, and others.
    SomeForeign(TlsError),
    /// Others.
    AllForeign(TlsError),
}

impl Tls {
    /// Reads the files and makes a configuration of them.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let pair = Pair::read(&files)?;
        let anchors = Anchors::read(&files)?;
        let server = server(&files, &pair)?;
        let Judged { trust, lists } = anchors.judge(&files)?;
        let has_foreign_lists = match lists {
            Lists::Own => false,
            Lists::SomeForeign(_) => true,
            Lists::AllForeign(error) => return Err(error),
        };
        Ok(Self {
            files,
            server: ArcSwap::from_pointee(server),
            trust: ArcSwapOption::from(trust.map(Arc::new)),
            read: Mutex::new(Read { pair, anchors, has_foreign_lists }),
        })
    }

    /// Reads certificate and key again; true if they changed and the new ones are in force for connections to come. On an error (also
    /// the short moment when the certificate is new and its key is not yet) the old ones stay; call again later.
    ///
    /// Blocks for the time of reading small files, like [`reload_trust`](Self::reload_trust); call them from a thread that serves nobody.
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

    /// Reads the client CA and its revocation lists again; true if they changed. From then on every certificate is judged by the new
    /// ones, also those of connections that are open, which the caller has to see to. On an error the old ones stay.
    ///
    /// Lists that none of the CAs signed revoke nobody: they are an error, told from the next call on, but hold back neither a list beside
    /// them nor the end of a CA that was taken out. Only if there is no other list do the old ones stay: a wrong file pardons nobody.
    pub fn reload_trust(&self) -> Result<bool, TlsError> {
        let mut anchors = Anchors::read(&self.files)?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let same = read.anchors == anchors;
        if same && !read.has_foreign_lists {
            return Ok(false);
        }
        let Judged { mut trust, lists } = anchors.judge(&self.files)?;
        let has_foreign_lists = match lists {
            Lists::Own => false,
            Lists::SomeForeign(error) | Lists::AllForeign(error) if same => return Err(error),
            Lists::SomeForeign(_) => true,
            Lists::AllForeign(error) if anchors.ca == read.anchors.ca => return Err(error),
            Lists::AllForeign(_) => {
                anchors.revoked.clone_from(&read.anchors.revoked);
                trust = anchors.judge(&self.files)?.trust;
                true
            }
        };
        self.trust.store(trust.map(Arc::new));
        (read.anchors, read.has_foreign_lists) = (anchors, has_foreign_lists);
        Ok(true)
    }

    /// Whether clients are asked for a certificate.
    #[must_use]
    pub fn asks_for_certificate(&self) -> bool {
        self.files.client_ca.is_some()
    }

    /// Whether the certificate of the listener is for this server name, given in lower case and without a dot at its end.
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

    /// What client certificates are judged by now; `None` where nobody is asked for one.
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
        Ok(Self { ca: read(&files.client_ca)?, revoked: read(&files.client_crl)? })
    }

    /// What certificates are judged by with these, and whose lists are among them.
    fn judge(&self, files: &TlsFiles) -> Result<Judged, TlsError> {
        let (Some(path), Some(ca)) = (&files.client_ca, &self.ca) else {
            return Ok(Judged { trust: None, lists: Lists::Own });
        };
        let cas = certificates(path, ca)?;
        let mut roots = RootCertStore::empty();
        for certificate in &cas {
            roots
                .add(certificate.clone())
                .map_err(|source| TlsError::ClientCa { path: path.clone(), source })?;
        }
        let (mut lists, mut has_own, mut foreign) = (Vec::new(), false, None);
        if let (Some(crl), Some(pem)) = (&files.client_crl, &self.revoked) {
            for list in CertificateRevocationListDer::pem_slice_iter(pem) {
                let wrong = |source| TlsError::Pem { path: crl.clone(), expected: "X509 CRL", source };
                let list = list.map_err(wrong)?;
                let (keep, stranger) = match signer_of(&list, &cas) {
                    Signer::Own => {
                        has_own = true;
                        (true, None)
                    }
                    Signer::Stranger(issuer) => (true, Some(issuer)),
                    Signer::Namesake(issuer) => (false, Some(issuer)),
                };
                if keep {
                    lists.push(list);
                }
                let told = |issuer| TlsError::ForeignList { path: crl.clone(), issuer, ca: path.clone() };
                foreign = foreign.or(stranger.map(told));
            }
            // A file that was cut to nothing must not pardon everybody.
            if !has_own && foreign.is_none() {
                let source = pem::Error::NoItemsFound;
                return Err(TlsError::Pem { path: crl.clone(), expected: "X509 CRL", source });
            }
        }
        let trust = Trust::new(roots, lists).map_err(|source| match (&source, &files.client_crl) {
            (VerifierBuilderError::InvalidCrl(_), Some(list)) => {
                TlsError::Revocations { path: list.clone(), source }
            }
            _ => TlsError::Verifier { path: path.clone(), source },
        })?;
        let lists = match foreign {
            None => Lists::Own,
            Some(error) if has_own => Lists::SomeForeign(error),
            Some(error) => Lists::AllForeign(error),
        };
        Ok(Judged { trust: Some(trust), lists })
    }
}

fn server(files: &TlsFiles, contents: &Pair) -> Result<Server, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
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
