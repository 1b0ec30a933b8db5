//! The CAs of tunnel clients and their revocation lists, from files that may change.
//!
//! A CA is its key. Each may be bound to tenants ([`pattern`]), and has the newest of its [`lists`] in force.
//! [`ClientCas::reload`] takes a change over as far as it can be honoured. What cannot be is an error, and
//! what was in force stays: no revocation is lost by a file that is broken, cut or replaced by an older one.
//! [`Trust`](super::client_certificate::Trust) judges certificates by what is in force.

mod lists;
mod pattern;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use thiserror::Error;

use super::client_certificate::Trust;

pub use lists::RevocationList;
pub use pattern::{ClientCaFile, ClientCaFileError, TenantPattern};

pub(crate) use lists::{List, verifies};

/// Why the files of CAs and lists cannot be used as they are. What was in force stays.
#[derive(Debug, Error)]
pub enum ClientCaError {
    /// A file cannot be read.
    #[error("reading {}: {source}; give a PEM file this process may read", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
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
    /// A file holds a certificate that cannot be a CA.
    #[error(
        "client CA {}: {source}; give the certificates of the CA that signs the agents' certificates",
        path.display()
    )]
    Anchor {
        /// The CA file.
        path: PathBuf,
        /// What is wrong with it.
        source: webpki::Error,
    },
    /// One CA may name any tenant by one file, and some by another: it would not be bound at all.
    #[error(
        "client CA {}: its key is that of a CA in {}, which is bound to {bound}; \
         take it out of one of the two",
        open.display(),
        path.display()
    )]
    Bound {
        /// The file that binds it.
        path: PathBuf,
        /// To which tenants.
        bound: TenantPattern,
        /// The file that does not.
        open: PathBuf,
    },
    /// A revocation list of a CA that signs no clients: it would revoke nothing.
    #[error(
        "revocation list {}: the list of {issuer} is signed by none of the client CAs; \
         give the lists of those CAs, or give that CA in --tunnel-client-ca too",
        path.display()
    )]
    ForeignList {
        /// The file of lists.
        path: PathBuf,
        /// The issuer that it names.
        issuer: Box<str>,
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
    /// A list with content whose meaning is not known here: it may revoke more than it seems to.
    #[error(
        "revocation list {}: the list of {issuer} cannot be used: {source}; give a list that this CA issued \
         for its own certificates, in version 2 and without critical extensions",
        path.display()
    )]
    List {
        /// The file of lists.
        path: PathBuf,
        /// The issuer that it names.
        issuer: Box<str>,
        /// What is wrong with it.
        source: webpki::Error,
    },
    /// The file has no list of a CA that has one in force.
    #[error(
        "revocation list {}: the list of {issuer} is gone; give its newest list, or take that CA out of \
         --tunnel-client-ca",
        path.display()
    )]
    MissingList {
        /// The file of lists.
        path: PathBuf,
        /// The CA.
        issuer: Box<str>,
    },
    /// The file has an older list than the one in force.
    #[error(
        "revocation list {}: the list of {issuer} is older than the one in force; give its newest list",
        path.display()
    )]
    OlderList {
        /// The file of lists.
        path: PathBuf,
        /// The CA.
        issuer: Box<str>,
    },
}

/// The files, and what of them is in force.
#[derive(Debug)]
pub(crate) struct ClientCas {
    cas: Box<[ClientCaFile]>,
    lists: Option<PathBuf>,
    trust: ArcSwap<Trust>,
    read: Mutex<Read>,
}

#[derive(Debug)]
struct Read {
    /// Compared with what the files say: cheaper than trusting time stamps, and right for symlink swaps.
    /// `None` while they cannot be used as they are.
    contents: Option<Contents>,
    in_force: Authorities,
}

/// Contents of the files.
#[derive(Debug, PartialEq, Eq)]
struct Contents {
    cas: Vec<Vec<u8>>,
    lists: Option<Vec<u8>>,
}

/// CAs and lists that go together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Authorities {
    pub(crate) cas: Vec<Ca>,
    /// The newest of each CA. Several of one age count together.
    pub(crate) lists: Vec<Arc<List>>,
}

/// A CA of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ca {
    pub(crate) certificate: CertificateDer<'static>,
    /// The content of its SubjectPublicKeyInfo.
    pub(crate) key: Box<[u8]>,
    /// The tenants that it may name; `None` for any.
    pub(crate) tenants: Option<TenantPattern>,
}

impl ClientCas {
    pub(crate) fn load(cas: Vec<ClientCaFile>, lists: Option<PathBuf>) -> Result<Self, ClientCaError> {
        let contents = Contents::read(&cas, lists.as_deref())?;
        let (in_force, checked) = Authorities::default().renewed(&contents, &cas, lists.as_deref())?;
        checked?;
        Ok(Self {
            cas: cas.into(),
            lists,
            trust: ArcSwap::from_pointee(Trust::new(&in_force)),
            read: Mutex::new(Read { contents: Some(contents), in_force }),
        })
    }

    /// Reads the files again. Returns true if they changed and something new is in force.
    ///
    /// On an error what was in force stays, but for what takes trust away: a CA that is gone from the files
    /// is not trusted any more, and a good list is in force although another is not. The error then comes
    /// with the next call.
    pub(crate) fn reload(&self) -> Result<bool, ClientCaError> {
        let contents = Contents::read(&self.cas, self.lists.as_deref())?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if read.contents.as_ref() == Some(&contents) {
            return Ok(false);
        }
        read.contents = None;
        let (next, checked) = read.in_force.renewed(&contents, &self.cas, self.lists.as_deref())?;
        let changed = next != read.in_force;
        if changed {
            self.trust.store(Arc::new(Trust::new(&next)));
            read.in_force = next;
        }
        match checked {
            Ok(()) => read.contents = Some(contents),
            Err(error) if !changed => return Err(error),
            Err(_) => {}
        }
        Ok(changed)
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.cas.iter().map(|ca| &*ca.path).chain(self.lists.as_deref())
    }

    pub(crate) fn trust(&self) -> Arc<Trust> {
        self.trust.load_full()
    }

    /// The revocation lists in force.
    pub(crate) fn revocation_lists(&self) -> Vec<RevocationList> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.in_force.lists.iter().map(|list| list.shown()).collect()
    }
}

impl Contents {
    fn read(cas: &[ClientCaFile], lists: Option<&Path>) -> Result<Self, ClientCaError> {
        let read = |path: &Path| {
            fs::read(path).map_err(|source| ClientCaError::Read { path: path.to_owned(), source })
        };
        let cas = cas.iter().map(|ca| read(&ca.path)).collect::<Result<_, _>>()?;
        Ok(Self { cas, lists: lists.map(read).transpose()? })
    }
}

impl Authorities {
    /// What is in force after these, and the first thing in the files that cannot be honoured.
    fn renewed(
        &self,
        contents: &Contents,
        files: &[ClientCaFile],
        path: Option<&Path>,
    ) -> Result<(Self, Result<(), ClientCaError>), ClientCaError> {
        let cas = read_cas(contents, files)?;
        let (Some(path), Some(pem)) = (path, &contents.lists) else {
            return Ok((Self { cas, lists: Vec::new() }, Ok(())));
        };
        let (new, mut checked) = read_lists(path, pem, &cas);
        let mut lists = newest(new);
        for old in self.lists.iter().filter(|old| cas.iter().any(|ca| ca.key == old.key)) {
            let (path, issuer) = (path.to_owned(), old.issuer.clone());
            let lost = match lists.iter().find(|list| list.key == old.key) {
                Some(successor) if !old.is_newer_than(successor) => continue,
                Some(_) => ClientCaError::OlderList { path, issuer },
                None => ClientCaError::MissingList { path, issuer },
            };
            checked = checked.and(Err(lost));
            lists.push(Arc::clone(old));
        }
        let mut next = Self { cas, lists: newest(lists) };
        if checked.is_err() {
            // Trust is not extended while something is wrong: what is wrong may be the list of the new CA.
            next.cas.retain(|ca| self.cas.contains(ca));
            next.lists.retain(|list| next.cas.iter().any(|ca| ca.key == list.key));
        }
        Ok((next, checked))
    }
}

/// The CAs of all files.
fn read_cas(contents: &Contents, files: &[ClientCaFile]) -> Result<Vec<Ca>, ClientCaError> {
    let mut cas: Vec<(Ca, &Path)> = Vec::new();
    for (ClientCaFile { path, tenants }, pem) in files.iter().zip(&contents.cas) {
        let wrong = |source| ClientCaError::Pem { path: path.clone(), expected: "certificate", source };
        for certificate in portico_dial::pem::certificates(pem).map_err(wrong)? {
            let anchor = webpki::anchor_from_trusted_cert(&certificate)
                .map_err(|source| ClientCaError::Anchor { path: path.clone(), source })?;
            let key = Box::from(anchor.subject_public_key_info.as_ref());
            cas.push((Ca { certificate, key, tenants: tenants.clone() }, path));
        }
    }
    for (ca, path) in &cas {
        let Some(bound) = &ca.tenants else { continue };
        if let Some((_, open)) = cas.iter().find(|(other, _)| other.key == ca.key && other.tenants.is_none())
        {
            let (path, bound, open) = (path.to_path_buf(), bound.clone(), open.to_path_buf());
            return Err(ClientCaError::Bound { path, bound, open });
        }
    }
    Ok(cas.into_iter().map(|(ca, _)| ca).collect())
}

/// The lists of the file that can be used, and the first thing that is wrong with the others.
fn read_lists(path: &Path, pem: &[u8], cas: &[Ca]) -> (Vec<Arc<List>>, Result<(), ClientCaError>) {
    let malformed = |source| ClientCaError::Pem { path: path.to_owned(), expected: "X509 CRL", source };
    let (mut lists, mut checked) = (Vec::new(), Ok(()));
    for list in CertificateRevocationListDer::pem_slice_iter(pem) {
        match list.map_err(malformed).and_then(|list| List::read(list, cas, path)) {
            Ok(list) => lists.push(Arc::new(list)),
            Err(error) => checked = checked.and(Err(error)),
        }
    }
    // A file that was cut to nothing revokes nothing: it must not replace one that does.
    if lists.is_empty() {
        checked = checked.and(Err(malformed(pem::Error::NoItemsFound)));
    }
    (lists, checked)
}

/// The lists less those of which the same CA has issued a newer one, in an order of their own.
fn newest(lists: Vec<Arc<List>>) -> Vec<Arc<List>> {
    let outdated = |list: &List| lists.iter().any(|other| other.key == list.key && other.is_newer_than(list));
    let mut newest: Vec<_> = lists.iter().filter(|list| !outdated(list)).cloned().collect();
    newest.sort_by(|one, other| one.der.as_ref().cmp(other.der.as_ref()));
    newest
}
