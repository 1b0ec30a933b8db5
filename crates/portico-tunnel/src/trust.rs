//! What a client certificate proves, by the CA and the revocation lists that are in the files at this moment.
//!
//! TLS itself takes any certificate whose key the client holds ([`AnyCertificate`]): a client that is turned away by a TLS alert learns
//! next to nothing, and with TLS 1.3 only after it believed to be in. So the chain is verified afterwards, for the first request, and what
//! is wrong with it becomes a sentence in the answer. It is verified again whenever the files changed ([`Presented::standing`]), which
//! is how a revocation reaches connections that are open.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use thiserror::Error;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use crate::identity::Identity;
use crate::tls::Tls;

/// Longest chain of a client, in bytes: ten large certificates. It is kept as long as the connection, so that a revocation finds it.
const LONGEST_CHAIN: usize = 16 * 1024;

/// Most characters shown of a name or a number that a certificate carries.
const SHOWN: usize = 120;

/// Why a certificate proves nothing: one sentence, for the client and for the log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unproven {
    /// Its time is over.
    #[error("the client certificate expired on {since}")]
    Expired {
        /// The last second of its time.
        since: Timestamp,
    },
    /// Its time has not come; or a clock is wrong.
    #[error("the client certificate is not valid before {from}")]
    NotYetValid {
        /// The first second of its time.
        from: Timestamp,
    },
    /// The time of a certificate between it and the CA is over.
    #[error("a CA certificate in the client's chain is not valid at this time")]
    ChainNotValid,
    /// No CA of the file signed it.
    #[error("the client certificate was issued by {issuer}, which is none of this gateway's client CAs")]
    UnknownIssuer {
        /// The issuer's name, as the certificate has it.
        issuer: Box<str>,
    },
    /// It, or a CA certificate between, is on a revocation list.
    #[error("the client certificate with serial {serial} of {issuer} was revoked")]
    Revoked {
        /// In hex.
        serial: Box<str>,
        /// Whose serial.
        issuer: Box<str>,
    },
    /// Its extended key usage is for something else.
    #[error(
        "the client certificate is not meant for TLS clients; it needs the extended key usage clientAuth"
    )]
    Purpose,
    /// It is valid, and says nothing about a cluster.
    #[error(
        "the client certificate names no cluster; it needs organisation portico:cluster:NAME or URI spiffe://DOMAIN/cluster/NAME"
    )]
    NamesNobody,
    /// Something else; seen only with broken certificates.
    #[error("the client certificate cannot be verified: {0}")]
    Other(Box<str>),
}

/// The CA of the clients with its revocation lists.
#[derive(Debug)]
pub(crate) struct Trust {
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Trust {
    pub(crate) fn new(
        roots: RootCertStore,
        lists: Vec<CertificateRevocationListDer<'static>>,
    ) -> Result<Self, VerifierBuilderError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        // A CA without a list has revoked nobody. A list whose time is over still says who was revoked.
        let verifier = builder.with_crls(lists).allow_unknown_revocation_status().build()?;
        Ok(Self { verifier })
    }

    /// Who the chain says its bearer is, at `now`; and until when.
    fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<Valid, Unproven> {
        let (leaf, between) = chain.split_first().ok_or(Unproven::NamesNobody)?;
        if let Err(error) = self.verifier.verify_client_cert(leaf, between, now) {
            return Err(unproven(leaf, now, &error));
        }
        let identity = Identity::from_certificate(leaf).ok_or(Unproven::NamesNobody)?;
        // Those that are over already were not needed.
        let ends = chain.iter().map(|certificate| end_of(certificate)).filter(|end| *end >= now.as_secs());
        Ok(Valid { identity, until: ends.min().unwrap_or_default() })
    }
}

/// What a chain was found to prove.
#[derive(Debug, Clone)]
struct Valid {
    identity: Identity,
    /// Last second at which that need not be looked at again: of whichever certificate of the chain ends first.
    until: u64,
}

/// The certificates a client presented, its own first, and the key of which it has.
#[derive(Debug)]
pub struct Presented {
    tls: Arc<Tls>,
    chain: Box<[CertificateDer<'static>]>,
    /// What was found last, and by which CA. Verifying costs a tenth of a millisecond and more; a request should not.
    found: Mutex<Option<Found>>,
}

#[derive(Debug)]
struct Found {
    by: Arc<Trust>,
    result: Result<Valid, Unproven>,
}

impl Presented {
    pub(crate) fn new(tls: &Arc<Tls>, chain: &[CertificateDer<'_>]) -> Self {
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Self { tls: Arc::clone(tls), chain, found: Mutex::new(None) }
    }

    /// Whom they prove their bearer to be, now.
    pub fn identity(&self) -> Result<Identity, Unproven> {
        self.identity_at(UnixTime::now())
    }

    fn identity_at(&self, now: UnixTime) -> Result<Identity, Unproven> {
        let Some(trust) = self.tls.trust() else { return Err(Unproven::NamesNobody) };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match &*found {
            Some(Found { by, result }) if Arc::ptr_eq(by, &trust) => match result {
                Ok(valid) if now.as_secs() > valid.until => self.verify(&trust, now),
                // Time may heal it.
                Err(Unproven::NotYetValid { .. }) => self.verify(&trust, now),
                known => known.clone(),
            },
            _ => self.verify(&trust, now),
        };
        let answer = result.as_ref().map(|valid| valid.identity.clone()).map_err(Unproven::clone);
        *found = Some(Found { by: trust, result });
        answer
    }

    /// Whether what these certificates once proved for `cluster` still stands. That their time is over does not cut what is open;
    /// everything else does: the CA is gone from the file, or one of them was revoked.
    pub fn standing(&self, cluster: &str) -> Result<(), Unproven> {
        let Some(trust) = self.tls.trust() else { return Err(Unproven::NamesNobody) };
        let valid = match self.verify(&trust, UnixTime::now()) {
            // Judged as of the last moment at which all of them were valid.
            Err(Unproven::Expired { .. } | Unproven::ChainNotValid) => {
                let last = self.chain.iter().map(|certificate| end_of(certificate)).min().unwrap_or_default();
                self.verify(&trust, UnixTime::since_unix_epoch(Duration::from_secs(last)))?
            }
            judged => judged?,
        };
        if valid.identity.cluster() == cluster { Ok(()) } else { Err(Unproven::NamesNobody) }
    }

    fn verify(&self, trust: &Trust, now: UnixTime) -> Result<Valid, Unproven> {
        trust.verify(&self.chain, now)
    }
}

/// Takes any client certificate whose key the client proves to have; what it is worth is found out afterwards.
#[derive(Debug)]
pub(crate) struct AnyCertificate {
    algorithms: WebPkiSupportedAlgorithms,
}

impl AnyCertificate {
    pub(crate) fn new() -> Self {
        Self { algorithms: aws_lc_rs::default_provider().signature_verification_algorithms }
    }
}

impl ClientCertVerifier for AnyCertificate {
    fn offer_client_auth(&self) -> bool {
        true
    }

    /// A client without one may have a token; if it has not, it is told so.
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// None: a client that chooses by them would send no certificate rather than one that we can say something about.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let length =
            intermediates.iter().fold(end_entity.len(), |length, certificate| length + certificate.len());
        if length > LONGEST_CHAIN {
            return Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure));
        }
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Who signed a revocation list.
pub(crate) enum Signer {
    /// One of the CAs.
    Own,
    /// None of them, though it has the name of one: with the list, that CA's certificates could not be verified at all.
    Namesake(Box<str>),
    /// Somebody of another name. Certificates of the CAs are not judged by the list.
    Stranger(Box<str>),
}

/// Who signed the list, seen from `cas`.
pub(crate) fn signer_of(list: &CertificateRevocationListDer<'_>, cas: &[CertificateDer<'_>]) -> Signer {
    let Ok((_, read)) = CertificateRevocationList::from_der(list) else {
        return Signer::Stranger("somebody who does not write X.509".into());
    };
    let algorithms = aws_lc_rs::default_provider().signature_verification_algorithms.all;
    let (message, signature) = (read.tbs_cert_list.as_ref(), &read.signature_value.data);
    // Which algorithm it is, the signature itself tells: no other verifies it.
    let signed = |key: &[u8]| {
        algorithms.iter().any(|algorithm| algorithm.verify_signature(key, message, signature).is_ok())
    };
    let mut signer: fn(Box<str>) -> Signer = Signer::Stranger;
    for ca in cas {
        let Ok((_, ca)) = X509Certificate::from_der(ca) else { continue };
        if ca.subject().as_raw() == read.issuer().as_raw() {
            if signed(&ca.public_key().subject_public_key.data) {
                return Signer::Own;
            }
            signer = Signer::Namesake;
        }
    }
    signer(shown(&read.issuer().to_string()))
}

fn unproven(leaf: &CertificateDer<'_>, now: UnixTime, error: &rustls::Error) -> Unproven {
    let Ok((_, certificate)) = X509Certificate::from_der(leaf) else {
        return Unproven::Other("it is no X.509 certificate".into());
    };
    let rustls::Error::InvalidCertificate(error) = error else {
        return Unproven::Other(shown(&error.to_string()));
    };
    let issuer = || shown(&certificate.issuer().to_string());
    let seconds = |time: i64| u64::try_from(time).unwrap_or_default();
    let from = seconds(certificate.validity().not_before.timestamp());
    let until = seconds(certificate.validity().not_after.timestamp());
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } if now.as_secs() > until => {
            Unproven::Expired { since: at(until) }
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }
            if now.as_secs() < from =>
        {
            Unproven::NotYetValid { from: at(from) }
        }
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => Unproven::ChainNotValid,
        // A CA of the same name with another key is another CA.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            Unproven::UnknownIssuer { issuer: issuer() }
        }
        CertificateError::Revoked => {
            Unproven::Revoked { serial: shown(&certificate.raw_serial_as_string()), issuer: issuer() }
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            Unproven::Purpose
        }
        other => Unproven::Other(shown(&other.to_string())),
    }
}

/// The last second of a certificate's time; of one that cannot be read, the first of all.
fn end_of(certificate: &[u8]) -> u64 {
    let end =
        X509Certificate::from_der(certificate).ok().map(|(_, read)| read.validity().not_after.timestamp());
    end.and_then(|end| u64::try_from(end).ok()).unwrap_or_default()
}

fn at(seconds: u64) -> Timestamp {
    i64::try_from(seconds)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .unwrap_or(Timestamp::MAX)
}

/// Text of a certificate, which anybody may have written, fit for a log line.
fn shown(text: &str) -> Box<str> {
    text.chars().flat_map(char::escape_debug).take(SHOWN).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

    use super::*;
    use crate::tls::TlsFiles;

    /// The first second of a year.
    fn year(year: i32) -> UnixTime {
        let seconds = u64::try_from(date_time_ymd(year, 1, 1).unix_timestamp()).unwrap();
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    #[test]
    fn a_ca_between_that_expires_first_ends_what_was_found_before() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let ca = |name: &str, until: i32| {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(DnType::CommonName, name);
            params.not_after = date_time_ymd(until, 1, 1);
            params
        };
        let (root_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let root = ca("root", 3000);
        let root_certificate = root.self_signed(&root_key).unwrap();
        let root = Issuer::new(root, root_key);
        let between = ca("between", 2500);
        let between_certificate = between.signed_by(&key, &root).unwrap();
        let between = Issuer::new(between, key);
        let mut leaf = CertificateParams::new(vec!["gateway.test".to_owned()]).unwrap();
        leaf.distinguished_name.push(DnType::OrganizationName, "portico:cluster:a");
        leaf.not_after = date_time_ymd(2600, 1, 1);
        let key = KeyPair::generate().unwrap();
        let leaf = leaf.signed_by(&key, &between).unwrap();
        std::fs::write(file("ca.crt"), root_certificate.pem()).unwrap();
        std::fs::write(file("tls.crt"), leaf.pem()).unwrap();
        std::fs::write(file("tls.key"), key.serialize_pem()).unwrap();
        let files = TlsFiles {
            certificate: file("tls.crt"),
            key: file("tls.key"),
            client_ca: Some(file("ca.crt")),
            client_crl: None,
        };
        let tls = Arc::new(Tls::load(files).unwrap());
        let presented = Presented::new(&tls, &[leaf.der().clone(), between_certificate.der().clone()]);
        assert_eq!(presented.identity_at(year(2400)).unwrap().cluster(), "a");
        assert_eq!(presented.identity_at(year(2550)), Err(Unproven::ChainNotValid));
        assert_eq!(presented.standing("a"), Ok(()));
    }
}
