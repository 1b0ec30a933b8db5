//! One revocation list (RFC 5280 section 5): its issuer, its age, and the certificates that it revokes.
//!
//! Only complete lists of a CA for its own certificates are taken. A certificate that is not on the list is
//! not revoked. So a list must not be used if it leaves something out, or has a part that is not understood
//! here.

use std::path::Path;

use jiff::Timestamp;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use webpki::{CertRevocationList, OwnedCertRevocationList};
use x509_parser::oid_registry::{OID_X509_EXT_DELTA_CRL_INDICATOR, OID_X509_EXT_ISSUER_DISTRIBUTION_POINT};
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use super::{Ca, ClientCaError};
use crate::server::x509::{at, shown};

/// The list of one CA.
#[derive(Debug)]
pub(crate) struct List {
    pub(super) der: CertificateRevocationListDer<'static>,
    /// Whose list it is.
    pub(crate) key: Box<[u8]>,
    /// The same key with what is around it.
    public_key: Box<[u8]>,
    pub(crate) issuer: Box<str>,
    /// Grows with each list of a CA; a list may lack it.
    number: Option<Box<[u8]>>,
    this_update: i64,
    next_update: Timestamp,
    revoked: CertRevocationList<'static>,
}

/// What is shown of a list in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationList {
    /// The CA, by a name that others may have as well.
    pub issuer: Box<str>,
    /// The DER of the CA's SubjectPublicKeyInfo, which no other has.
    pub public_key: Box<[u8]>,
    /// When the CA issued it.
    pub this_update: Timestamp,
    /// When the CA promised the next list. A list that is past it still counts, and lacks what was revoked
    /// since.
    pub next_update: Timestamp,
}

impl List {
    /// Reads a list of the file at `path`, which one of `cas` must have issued.
    pub(super) fn read(
        der: CertificateRevocationListDer<'static>,
        cas: &[Ca],
        path: &Path,
    ) -> Result<Self, ClientCaError> {
        let path = path.to_owned();
        let unusable = |issuer, source| ClientCaError::List { path: path.clone(), issuer, source };
        let parsed = CertificateRevocationList::from_der(&der);
        let Ok((_, list)) = parsed else {
            return Err(unusable("an unreadable issuer".into(), webpki::Error::BadDer));
        };
        let issuer = shown(&list.issuer().to_string());
        let signer = cas.iter().find_map(|ca| Some((ca, signer(&list, &ca.certificate)?)));
        let Some((ca, public_key)) = signer else {
            return Err(ClientCaError::ForeignList { path, issuer });
        };
        let partial = [OID_X509_EXT_DELTA_CRL_INDICATOR, OID_X509_EXT_ISSUER_DISTRIBUTION_POINT];
        if list.extensions().iter().any(|extension| partial.contains(&extension.oid)) {
            return Err(ClientCaError::PartialList { path, issuer });
        }
        // Refuses critical extensions that it does not know, and entries of certificates of other CAs.
        let revoked = OwnedCertRevocationList::from_der(&der);
        let revoked = revoked.map_err(|source| unusable(issuer.clone(), source))?.into();
        let next_update = list.next_update().map(|time| time.timestamp()).unwrap_or_default();
        Ok(Self {
            key: ca.key.clone(),
            public_key,
            number: list.crl_number().map(|number| number.to_bytes_be().into()),
            this_update: list.last_update().timestamp(),
            next_update: at(u64::try_from(next_update).unwrap_or_default()),
            issuer,
            revoked,
            der: der.clone(),
        })
    }

    /// Whether the CA issued it after `other`.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        let numbers = self.number.as_ref().zip(other.number.as_ref());
        let by_number = numbers.map(|(own, other)| (own.len(), own).cmp(&(other.len(), other)));
        by_number.unwrap_or(std::cmp::Ordering::Equal).then(self.this_update.cmp(&other.this_update)).is_gt()
    }

    /// Whether it holds the serial number, which is as in DER.
    pub(crate) fn revokes(&self, serial: &[u8]) -> bool {
        // A certificate that cannot be looked up is not known to be good.
        self.revoked.find_serial(serial).map_or(true, |entry| entry.is_some())
    }

    pub(super) fn shown(&self) -> RevocationList {
        RevocationList {
            issuer: self.issuer.clone(),
            public_key: self.public_key.clone(),
            this_update: at(u64::try_from(self.this_update).unwrap_or_default()),
            next_update: self.next_update,
        }
    }
}

impl PartialEq for List {
    fn eq(&self, other: &Self) -> bool {
        self.der == other.der && self.key == other.key
    }
}

impl Eq for List {}

/// The public key of `ca`, in DER, if it issued the list. A CA of the same name with another key is another.
fn signer(list: &CertificateRevocationList<'_>, ca: &CertificateDer<'_>) -> Option<Box<[u8]>> {
    let (_, ca) = X509Certificate::from_der(ca).ok()?;
    let is_of = ca.subject().as_raw() == list.issuer().as_raw()
        && verifies(list.tbs_cert_list.as_ref(), &list.signature_value.data, &ca);
    is_of.then(|| ca.public_key().raw.into())
}

/// Whether the key of `ca` made the signature, which tells the algorithm: no other verifies it.
pub(crate) fn verifies(message: &[u8], signature: &[u8], ca: &X509Certificate<'_>) -> bool {
    let algorithms = aws_lc_rs::default_provider().signature_verification_algorithms.all;
    let key = &ca.public_key().subject_public_key.data;
    algorithms.iter().any(|algorithm| algorithm.verify_signature(key, message, signature).is_ok())
}
