//! The CAs of tunnel clients and their revocation lists, from files that may change.
//!
//! A CA is its key. Each may be bound to tenants ([`pattern`]), and has the newest of its [`lists`] in force.
//! [`ClientCas::reload`] applies a change as far as it can be honoured. The rest is an error, and the state
//! in force stays. So no revocation is lost by a file that is broken, cut or replaced by an older one.
//! [`Trust`](super::client_certificate::Trust) judges certificates by what is in force.

mod lists;
mod pattern;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use portico_dial::pem::{self, PemFileError};
use rustls::pki_types::pem::Error::NoItemsFound;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use thiserror::Error;

use super::client_certificate::Trust;

pub use lists::RevocationList;
pub use pattern::{ClientCaFile, ClientCaFileError, TenantPattern};

pub(crate) use lists::{List, verifies};

/// Why the files of CAs and lists cannot be used as they are. What was in force stays.
#[derive(Debug, Error)]
pub enum ClientCaError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] PemFileError),
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
    /// The CAs of each file, as it was when it could be used last.
    cas: Vec<Vec<Ca>>,
    in_force: Authorities,
}

/// Contents of the files; `None` of one that cannot be read.
#[derive(Debug, PartialEq, Eq)]
struct Contents {
    cas: Vec<Option<Vec<u8>>>,
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
        let (contents, mut checked) = Contents::read(&cas, lists.as_deref());
        let mut read =
            Read { contents: None, cas: vec![Vec::new(); cas.len()], in_force: Authorities::default() };
        read.in_force = read.renewed(&contents, &cas, lists.as_deref(), &mut checked);
        checked?;
        read.contents = Some(contents);
        let trust = ArcSwap::from_pointee(Trust::new(&read.in_force));
        Ok(Self { cas: cas.into(), lists, trust, read: Mutex::new(read) })
    }

    /// Reads the files again. Returns true if they changed and something new is in force.
    ///
    /// On an error no CA is added, but what takes trust away counts. A CA that is gone from its file is not
    /// trusted any more, although another file cannot be read. A good list is in force, although another is
    /// not. The error then comes with the next call.
    pub(crate) fn reload(&self) -> Result<bool, ClientCaError> {
        let (contents, mut checked) = Contents::read(&self.cas, self.lists.as_deref());
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if checked.is_ok() && read.contents.as_ref() == Some(&contents) {
            return Ok(false);
        }
        read.contents = None;
        let next = read.renewed(&contents, &self.cas, self.lists.as_deref(), &mut checked);
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

    /// The revocation list in force of each CA. Of several that count together, the first to be late.
    pub(crate) fn revocation_lists(&self) -> Vec<RevocationList> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shown: Vec<_> = read.in_force.lists.iter().map(|list| list.shown()).collect();
        shown.sort_by(|a, b| (&a.public_key, a.next_update).cmp(&(&b.public_key, b.next_update)));
        shown.dedup_by(|later, first| later.public_key == first.public_key);
        shown
    }
}

/// The first thing in the files that cannot be honoured.
type Checked = Result<(), ClientCaError>;

/// Notes what is wrong, unless something was before.
fn note(checked: &mut Checked, wrong: impl Into<ClientCaError>) {
    if checked.is_ok() {
        *checked = Err(wrong.into());
    }
}

impl Contents {
    fn read(cas: &[ClientCaFile], lists: Option<&Path>) -> (Self, Checked) {
        let mut checked = Ok(());
        let mut read = |path| pem::read(path).map_err(|error| note(&mut checked, error)).ok();
        let cas = cas.iter().map(|ca| read(&ca.path)).collect();
        let lists = lists.and_then(&mut read);
        (Self { cas, lists }, checked)
    }
}

impl Read {
    /// What is in force after these contents. Each file stands for itself: if one cannot be used, its former
    /// content counts.
    fn renewed(
        &mut self,
        contents: &Contents,
        files: &[ClientCaFile],
        lists: Option<&Path>,
        checked: &mut Checked,
    ) -> Authorities {
        for ((file, pem), known) in files.iter().zip(&contents.cas).zip(&mut self.cas) {
            match pem.as_ref().map(|pem| read_cas(file, pem)) {
                Some(Ok(cas)) => *known = cas,
                Some(Err(error)) => note(checked, error),
                None => {}
            }
        }
        self.check_bounds(files, checked);
        let cas: Vec<Ca> = self.cas.iter().flatten().cloned().collect();
        let lists = lists.map(|path| self.renewed_lists(path, contents.lists.as_deref(), &cas, checked));
        let mut next = Authorities { cas, lists: lists.unwrap_or_default() };
        if checked.is_err() {
            // Trust is not extended while something is wrong: what is wrong may be the list of the new CA.
            next.cas.retain(|ca| self.in_force.cas.contains(ca));
            next.lists.retain(|list| next.cas.iter().any(|ca| ca.key == list.key));
        }
        next
    }

    /// Whether a CA is given with tenants by one file, and without by another.
    fn check_bounds(&self, files: &[ClientCaFile], checked: &mut Checked) {
        let all = || files.iter().zip(&self.cas).flat_map(|(file, cas)| cas.iter().map(move |ca| (file, ca)));
        for (file, ca) in all() {
            let Some(bound) = &ca.tenants else { continue };
            if let Some((open, _)) = all().find(|(_, other)| other.key == ca.key && other.tenants.is_none()) {
                let (path, bound, open) = (file.path.clone(), bound.clone(), open.path.clone());
                return note(checked, ClientCaError::Bound { path, bound, open });
            }
        }
    }

    /// The lists in force of these CAs, by the file at `path`. It holds nothing if it cannot be read.
    fn renewed_lists(
        &self,
        path: &Path,
        pem: Option<&[u8]>,
        cas: &[Ca],
        checked: &mut Checked,
    ) -> Vec<Arc<List>> {
        let new = pem.map(|pem| read_lists(path, pem, cas, checked));
        let mut lists = newest(new.unwrap_or_default());
        for old in self.in_force.lists.iter().filter(|old| cas.iter().any(|ca| ca.key == old.key)) {
            let (path, issuer) = (path.to_owned(), old.issuer.clone());
            match lists.iter().find(|list| list.key == old.key) {
                Some(successor) if !old.is_newer_than(successor) => continue,
                Some(_) => note(checked, ClientCaError::OlderList { path, issuer }),
                None => note(checked, ClientCaError::MissingList { path, issuer }),
            }
            lists.push(Arc::clone(old));
        }
        newest(lists)
    }
}

/// The CAs of one file.
fn read_cas(file: &ClientCaFile, pem: &[u8]) -> Result<Vec<Ca>, ClientCaError> {
    let ClientCaFile { path, tenants } = file;
    let ca = |certificate: CertificateDer<'static>| {
        let anchor = webpki::anchor_from_trusted_cert(&certificate)
            .map_err(|source| ClientCaError::Anchor { path: path.clone(), source })?;
        let key = Box::from(anchor.subject_public_key_info.as_ref());
        Ok(Ca { certificate, key, tenants: tenants.clone() })
    };
    pem::certificates(path, pem)?.into_iter().map(ca).collect()
}

/// The lists of the file that can be used.
fn read_lists(path: &Path, pem: &[u8], cas: &[Ca], checked: &mut Checked) -> Vec<Arc<List>> {
    let malformed = |source| ClientCaError::File(pem::content(path, "X509 CRL", source));
    let mut lists = Vec::new();
    for list in CertificateRevocationListDer::pem_slice_iter(pem) {
        match list.map_err(malformed).and_then(|list| List::read(list, cas, path)) {
            Ok(list) => lists.push(Arc::new(list)),
            Err(error) => note(checked, error),
        }
    }
    // A file that was cut to nothing revokes nothing: it must not replace one that does.
    if lists.is_empty() {
        note(checked, malformed(NoItemsFound));
    }
    lists
}

/// The lists less those of which the same CA has issued a newer one, in an order of their own.
fn newest(lists: Vec<Arc<List>>) -> Vec<Arc<List>> {
    let outdated = |list: &List| lists.iter().any(|other| other.key == list.key && other.is_newer_than(list));
    let mut newest: Vec<_> = lists.iter().filter(|list| !outdated(list)).cloned().collect();
    newest.sort_by(|one, other| one.der.as_ref().cmp(other.der.as_ref()));
    newest
}
