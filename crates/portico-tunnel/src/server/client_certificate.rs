//! Which cluster a client certificate stands for, by the CA and the revocation lists that are in force.
//!
//! TLS accepts any certificate whose key the client holds ([`AnyCertificate`]): a TLS alert tells a client
//! next to nothing, and under TLS 1.3 only after its handshake is done. The chain is verified for the first
//! request, and what is wrong with it becomes a sentence in the response. [`Presented::still_identifies`]
//! verifies it again when the files change, which is how a revocation reaches open connections.

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

use super::identity::Identity;
use super::tls::Tls;

/// Longest chain of a client, in bytes: ten large certificates. It is kept as long as the connection, for
/// revocations.
const LONGEST_CHAIN: usize = 16 * 1024;

/// Most characters shown of a name or a number that a certificate carries.
const SHOWN: usize = 120;

/// Why a certificate identifies no cluster: one sentence, for the client and for the log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CertificateProblem {
    /// It has expired.
    #[error("the client certificate expired on {since}")]
    Expired {
        /// The last second of its validity.
        since: Timestamp,
    },
    /// It is not valid yet, or a clock is wrong.
    #[error("the client certificate is not valid before {from}")]
    NotYetValid {
        /// The first second of its validity.
        from: Timestamp,
    },
    /// A certificate between it and the CA is not valid now.
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
    /// It is valid, and names no cluster.
    #[error(
        "the client certificate names no cluster; it needs organisation portico:cluster:NAME \
         or URI spiffe://DOMAIN/cluster/NAME"
    )]
    NoCluster,
    /// Something else, seen only with broken certificates.
    #[error("the client certificate cannot be verified: {0}")]
    Other(Box<str>),
}

/// The CA of the clients with its revocation lists.
#[derive(Debug)]
pub(crate) struct Trust {
    /// `None` where no CA is left.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl Trust {
    pub(crate) fn new(
        roots: RootCertStore,
        lists: Vec<CertificateRevocationListDer<'static>>,
    ) -> Result<Self, VerifierBuilderError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        // A CA without a list has revoked nothing. A list whose time is over still says what was revoked.
        let verifier = builder.with_crls(lists).allow_unknown_revocation_status().build()?;
        Ok(Self { verifier: Some(verifier) })
    }

    /// Trusts no CA.
    pub(crate) fn nobody() -> Self {
        Self { verifier: None }
    }

    /// Which cluster the chain names at `now`, and until when.
    fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<Valid, CertificateProblem> {
        let (leaf, between) = chain.split_first().ok_or(CertificateProblem::NoCluster)?;
        let verified = match &self.verifier {
            Some(verifier) => verifier.verify_client_cert(leaf, between, now),
            None => Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)),
        };
        if let Err(error) = verified {
            return Err(problem(leaf, now, &error));
        }
        let identity = Identity::from_certificate(leaf).ok_or(CertificateProblem::NoCluster)?;
        // Expired ones were not needed.
        let ends = chain.iter().map(|certificate| end_of(certificate)).filter(|end| *end >= now.as_secs());
        Ok(Valid { identity, until: ends.min().unwrap_or_default() })
    }
}

/// What a chain stands for.
#[derive(Debug, Clone)]
struct Valid {
    identity: Identity,
    /// The last second for which that holds: when the first certificate of the chain expires.
    until: u64,
}

/// The certificates a client presented, its own first. It holds the key of that one.
#[derive(Debug)]
pub struct Presented {
    tls: Arc<Tls>,
    chain: Box<[CertificateDer<'static>]>,
    /// The last verdict. Verifying costs a tenth of a millisecond and more, which a request should not.
    found: Mutex<Option<Found>>,
}

#[derive(Debug)]
struct Found {
    by: Arc<Trust>,
    result: Result<Valid, CertificateProblem>,
}

impl Presented {
    pub(crate) fn new(tls: &Arc<Tls>, chain: &[CertificateDer<'_>]) -> Self {
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Self { tls: Arc::clone(tls), chain, found: Mutex::new(None) }
    }

    /// The cluster they stand for now.
    pub fn identity(&self) -> Result<Identity, CertificateProblem> {
        self.identity_at(UnixTime::now())
    }

    fn identity_at(&self, now: UnixTime) -> Result<Identity, CertificateProblem> {
        let Some(trust) = self.tls.trust() else { return Err(CertificateProblem::NoCluster) };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match &*found {
            Some(Found { by, result }) if Arc::ptr_eq(by, &trust) => match result {
                Ok(valid) if now.as_secs() > valid.until => self.verify(&trust, now),
                // It may be valid by now.
                Err(CertificateProblem::NotYetValid { .. }) => self.verify(&trust, now),
                known => known.clone(),
            },
            _ => self.verify(&trust, now),
        };
        let answer = result.as_ref().map(|valid| valid.identity.clone()).map_err(CertificateProblem::clone);
        *found = Some(Found { by: trust, result });
        answer
    }

    /// Whether they still stand for `cluster`. Expiry does not cut what is open; everything else does: the CA
    /// is gone from the file, or one of them was revoked.
    pub fn still_identifies(&self, cluster: &str) -> Result<(), CertificateProblem> {
        let Some(trust) = self.tls.trust() else { return Err(CertificateProblem::NoCluster) };
        let valid = match self.verify(&trust, UnixTime::now()) {
            // Judged as of the last moment at which all of them were valid.
            Err(CertificateProblem::Expired { .. } | CertificateProblem::ChainNotValid) => {
                let last = self.chain.iter().map(|certificate| end_of(certificate)).min().unwrap_or_default();
                self.verify(&trust, UnixTime::since_unix_epoch(Duration::from_secs(last)))?
            }
            judged => judged?,
        };
        if valid.identity.cluster() == cluster { Ok(()) } else { Err(CertificateProblem::NoCluster) }
    }

    fn verify(&self, trust: &Trust, now: UnixTime) -> Result<Valid, CertificateProblem> {
        trust.verify(&self.chain, now)
    }
}

/// Accepts any client certificate whose key the client proves to have; the chain is verified afterwards.
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

    /// A client without one may have a token. Without either, the response to its request says so.
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// None: a client that chooses by them would send no certificate, and the response could not say what is
    /// wrong with it.
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

/// Whether one of `cas` signed the list. A CA of the same name with another key is another CA.
pub(crate) fn signed_by_one_of(list: &CertificateRevocationListDer<'_>, cas: &[CertificateDer<'_>]) -> bool {
    let Ok((_, list)) = CertificateRevocationList::from_der(list) else { return false };
    let algorithms = aws_lc_rs::default_provider().signature_verification_algorithms.all;
    let (message, signature) = (list.tbs_cert_list.as_ref(), &list.signature_value.data);
    cas.iter().any(|ca| {
        let Ok((_, ca)) = X509Certificate::from_der(ca) else { return false };
        let key = &ca.public_key().subject_public_key.data;
        // The signature itself tells the algorithm: no other verifies it.
        ca.subject().as_raw() == list.issuer().as_raw()
            && algorithms.iter().any(|algorithm| algorithm.verify_signature(key, message, signature).is_ok())
    })
}

/// The name of the CA that signed the list, as the list says.
pub(crate) fn issuer_of(list: &CertificateRevocationListDer<'_>) -> Box<str> {
    match CertificateRevocationList::from_der(list) {
        Ok((_, list)) => shown(&list.issuer().to_string()),
        Err(_) => "an unreadable issuer".into(),
    }
}

fn problem(leaf: &CertificateDer<'_>, now: UnixTime, error: &rustls::Error) -> CertificateProblem {
    let Ok((_, certificate)) = X509Certificate::from_der(leaf) else {
        return CertificateProblem::Other("it is no X.509 certificate".into());
    };
    let rustls::Error::InvalidCertificate(error) = error else {
        return CertificateProblem::Other(shown(&error.to_string()));
    };
    let issuer = || shown(&certificate.issuer().to_string());
    let seconds = |time: i64| u64::try_from(time).unwrap_or_default();
    let from = seconds(certificate.validity().not_before.timestamp());
    let until = seconds(certificate.validity().not_after.timestamp());
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } if now.as_secs() > until => {
            CertificateProblem::Expired { since: at(until) }
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }
            if now.as_secs() < from =>
        {
            CertificateProblem::NotYetValid { from: at(from) }
        }
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => CertificateProblem::ChainNotValid,
        // A CA of the same name with another key is another CA.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            CertificateProblem::UnknownIssuer { issuer: issuer() }
        }
        CertificateError::Revoked => CertificateProblem::Revoked {
            serial: shown(&certificate.raw_serial_as_string()),
            issuer: issuer(),
        },
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            CertificateProblem::Purpose
        }
        other => CertificateProblem::Other(shown(&other.to_string())),
    }
}

/// The last second of a certificate's validity; 0 if it cannot be read.
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

/// Text of a certificate, which is untrusted input, made fit for a log line.
fn shown(text: &str) -> Box<str> {
    text.chars().flat_map(char::escape_debug).take(SHOWN).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use portico_lab::pki::{Certificate, Pki};

    use super::*;
    use crate::TlsFiles;

    /// The first second of a year.
    fn year(year: i32) -> UnixTime {
        let seconds = u64::try_from(rcgen::date_time_ymd(year, 1, 1).unix_timestamp()).unwrap();
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    #[test]
    fn an_intermediate_that_expires_first_ends_the_verdict() {
        let pki = Pki::new();
        pki.issue("tls", Certificate::server(&["gateway.test"]));
        let between = Certificate::authority("between").not_after(2500, 1, 1);
        let between = pki.authority().intermediate(between).unwrap();
        let leaf = between.issue(Certificate::cluster("a").not_after(2600, 1, 1)).unwrap();
        let files = TlsFiles {
            certificate: pki.file("tls.crt"),
            key: pki.file("tls.key"),
            client_ca: Some(pki.file("ca.crt")),
            client_crl: None,
        };
        let tls = Arc::new(Tls::load(files).unwrap());
        let chain = [leaf, between.identity()].map(|identity| identity.certificate().unwrap());
        let presented = Presented::new(&tls, &chain);
        assert_eq!(presented.identity_at(year(2400)).unwrap().cluster(), "a");
        assert_eq!(presented.identity_at(year(2550)), Err(CertificateProblem::ChainNotValid));
        assert_eq!(presented.still_identifies("a"), Ok(()));
    }
}
