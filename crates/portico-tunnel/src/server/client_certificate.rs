//! Which tenant a client certificate stands for, by the CAs and the revocation lists that are in force.
//!
//! TLS accepts any certificate whose key the client holds ([`AnyCertificate`]), because a TLS alert tells a
//! client next to nothing. Under TLS 1.3 it also comes only after the client's handshake is done. The chain
//! is verified for the first request, and its problem becomes a sentence in the response.
//! [`Presented::still_identifies`] verifies it again when the files change, which is how a revocation reaches
//! open connections.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use portico_api::names::Tenant;
use portico_dial::check_chain;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme};
use thiserror::Error;
use webpki::{Cert, EndEntityCert, KeyUsage, VerifiedPath};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::client_ca::{Authorities, Ca, ClientCas, List, TenantPattern, verifies};
use super::identity::tenant_of;
use super::x509::{at, shown, validity_of};

/// Longest chain of a client, in bytes: more than five CAs take. It is kept as long as the connection, for
/// revocations.
pub(super) const LONGEST_CHAIN: usize = 16 * 1024;

/// Why a certificate identifies no tenant: one sentence, for the client and for the log.
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
    /// Its CA is bound to tenants, and it names another one.
    #[error("the client certificate was issued by {issuer}, which may not name this cluster here")]
    Bound {
        /// The issuer's name, as the certificate has it.
        issuer: Box<str>,
    },
    /// It is valid, and names no tenant.
    #[error(
        "the client certificate names no cluster; it needs organisation portico:cluster:NAME \
         or URI spiffe://DOMAIN/cluster/NAME"
    )]
    NoTenant,
    /// Something else, seen only with broken certificates.
    #[error("the client certificate cannot be verified: {0}")]
    Other(Box<str>),
}

/// The trust by which certificates are judged: CAs, the tenants that these may name, and their revocations.
#[derive(Debug)]
pub(crate) struct Trust {
    anchors: Box<[TrustAnchor<'static>]>,
    /// The tenants that a CA may name, by its key; none for a CA that may name any.
    bound: Box<[(Box<[u8]>, TenantPattern)]>,
    lists: Box<[Arc<List>]>,
}

impl Trust {
    pub(crate) fn new(authorities: &Authorities) -> Self {
        let Authorities { cas, lists } = authorities;
        let trusted = cas.iter().filter(|ca| !is_revoked_ca(ca, authorities));
        // Anchors were made of all of them before.
        let anchors = trusted.filter_map(|ca| webpki::anchor_from_trusted_cert(&ca.certificate).ok());
        Self {
            anchors: anchors.map(|anchor| anchor.to_owned()).collect(),
            bound: cas.iter().filter_map(|ca| Some((ca.key.clone(), ca.tenants.clone()?))).collect(),
            lists: lists.iter().cloned().collect(),
        }
    }

    /// Which tenant the chain names at `now`, and for how long.
    fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<Valid, CertificateProblem> {
        let (leaf, between) = chain.split_first().ok_or(CertificateProblem::NoTenant)?;
        let tenant = tenant_of(leaf);
        let unusable = |error| problem(leaf, now, &error);
        let certificate = EndEntityCert::try_from(leaf).map_err(unusable)?;
        // Another path may be fine; if none is, this is why.
        let refused = RefCell::new(None);
        let examine = |path: &VerifiedPath<'_>| {
            self.examine(path, tenant.as_ref()).map_err(|problem| {
                refused.replace(Some(problem));
                webpki::Error::CertRevoked
            })
        };
        let verified = certificate.verify_for_usage(
            aws_lc_rs::default_provider().signature_verification_algorithms.all,
            &self.anchors,
            between,
            now,
            KeyUsage::client_auth(),
            None,
            Some(&examine),
        );
        let path = match verified {
            Ok(path) => path,
            Err(error) => return Err(refused.take().unwrap_or_else(|| unusable(error))),
        };
        let tenant = tenant.ok_or(CertificateProblem::NoTenant)?;
        let used = path.intermediate_certificates().map(|certificate| validity_of_der(&certificate.der()));
        let valid = used.fold(validity_of_der(leaf), |all, next| (all.0.max(next.0), all.1.min(next.1)));
        Ok(Valid { tenant, from: valid.0, until: valid.1 })
    }

    /// Whether nothing on this path to a CA was revoked, and its CAs may name the tenant.
    fn examine(&self, path: &VerifiedPath<'_>, tenant: Option<&Tenant>) -> Result<(), CertificateProblem> {
        let mut certificate: &Cert<'_> = path.end_entity();
        for issuer in path.intermediate_certificates() {
            self.examine_one(certificate, content(&issuer.subject_public_key_info()), tenant)?;
            certificate = issuer;
        }
        self.examine_one(certificate, &path.anchor().subject_public_key_info, tenant)
    }

    /// Like [`Self::examine`], for one certificate of the path, and the key that signed it.
    fn examine_one(
        &self,
        certificate: &Cert<'_>,
        issuer: &[u8],
        tenant: Option<&Tenant>,
    ) -> Result<(), CertificateProblem> {
        let mut lists = self.lists.iter().filter(|list| *list.key == *issuer);
        if lists.any(|list| list.revokes(certificate.serial())) {
            let der = certificate.der();
            let serial = X509Certificate::from_der(&der).map(|(_, read)| read.raw_serial_as_string());
            let serial = shown(&serial.unwrap_or_default());
            return Err(CertificateProblem::Revoked { serial, issuer: issuer_of(&der) });
        }
        let mut bound = self.bound.iter().filter(|(key, _)| **key == *issuer).peekable();
        let is_named = |tenant| bound.peek().is_none() || bound.any(|(_, tenants)| tenants.matches(tenant));
        if tenant.is_none_or(is_named) {
            return Ok(());
        }
        Err(CertificateProblem::Bound { issuer: issuer_of(&certificate.der()) })
    }
}

/// Whether another CA of the files has issued this one and revoked it. If an intermediate stands there beside
/// its root, the list of the root counts.
fn is_revoked_ca(ca: &Ca, authorities: &Authorities) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(&ca.certificate) else { return false };
    authorities.lists.iter().filter(|list| list.revokes(certificate.raw_serial())).any(|list| {
        let issuers = authorities.cas.iter().filter(|issuer| issuer.key == list.key);
        let mut issuers = issuers.filter_map(|issuer| X509Certificate::from_der(&issuer.certificate).ok());
        let (message, signature) = (certificate.tbs_certificate.as_ref(), &certificate.signature_value.data);
        issuers.any(|(_, issuer)| verifies(message, signature, &issuer))
    })
}

/// What a chain stands for.
#[derive(Debug, Clone)]
struct Valid {
    tenant: Tenant,
    /// The first second for which that holds: when the last certificate of the path became valid.
    from: u64,
    /// The last one: when the first of them expires.
    until: u64,
}

/// The certificates a client presented, its own first. It holds the key of that one.
#[derive(Debug)]
pub struct Presented {
    client_cas: Arc<ClientCas>,
    chain: Box<[CertificateDer<'static>]>,
    /// The last verdict. Verifying costs a tenth of a millisecond and more, which a request should not.
    found: Mutex<Option<Found>>,
}

#[derive(Debug)]
struct Found {
    by: Arc<Trust>,
    /// The seconds of the clock for which it is the verdict.
    holds: RangeInclusive<u64>,
    result: Result<Tenant, CertificateProblem>,
}

impl Found {
    fn by(trust: Arc<Trust>, chain: &[CertificateDer<'_>], now: UnixTime) -> Self {
        match trust.verify(chain, now) {
            Ok(Valid { tenant, from, until }) => Self { by: trust, holds: from..=until, result: Ok(tenant) },
            Err(problem) => Self { by: trust, holds: unchanged(chain, now.as_secs()), result: Err(problem) },
        }
    }

    /// Whether it still is the verdict.
    fn holds(&self, trust: &Arc<Trust>, now: u64) -> bool {
        Arc::ptr_eq(&self.by, trust) && self.holds.contains(&now)
    }
}

/// The seconds around `now` in which no certificate of the chain becomes valid or expires. A no holds for all
/// of them, since the clock decides nothing else. If it held for less, a client without identity could have
/// its chain verified again and again.
fn unchanged(chain: &[CertificateDer<'_>], now: u64) -> RangeInclusive<u64> {
    let validities = chain.iter().map(|certificate| validity_of_der(certificate));
    // Of each span, the first second that differs from the one before.
    let changes = validities.flat_map(|(from, until)| [from, until.saturating_add(1)]);
    let (from, until) = changes.fold((0, u64::MAX), |(from, until), change| {
        if change <= now { (from.max(change), until) } else { (from, until.min(change - 1)) }
    });
    from..=until
}

impl Presented {
    pub(super) fn new(client_cas: Arc<ClientCas>, chain: &[CertificateDer<'_>]) -> Self {
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Self { client_cas, chain, found: Mutex::new(None) }
    }

    /// The tenant they stand for now.
    pub fn identity(&self) -> Result<Tenant, CertificateProblem> {
        self.identity_at(UnixTime::now())
    }

    fn identity_at(&self, now: UnixTime) -> Result<Tenant, CertificateProblem> {
        let trust = self.client_cas.trust();
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let known = found.take().filter(|found| found.holds(&trust, now.as_secs()));
        let known = known.unwrap_or_else(|| Found::by(trust, &self.chain, now));
        let answer = known.result.clone();
        *found = Some(known);
        answer
    }

    /// Whether they still stand for `tenant`. Expiry does not cut what is open, nor does a clock that is
    /// wrong. Everything else does: the CA is gone from the file, or one of them was revoked.
    pub fn still_identifies(&self, tenant: &Tenant) -> Result<(), CertificateProblem> {
        self.still_identifies_at(tenant, UnixTime::now())
    }

    fn still_identifies_at(&self, tenant: &Tenant, now: UnixTime) -> Result<(), CertificateProblem> {
        let trust = self.client_cas.trust();
        let valid = match trust.verify(&self.chain, now) {
            // Judged as of the nearest moment at which all of them were valid.
            Err(
                CertificateProblem::Expired { .. }
                | CertificateProblem::NotYetValid { .. }
                | CertificateProblem::ChainNotValid,
            ) => {
                let validities = self.chain.iter().map(|certificate| validity_of_der(certificate));
                let (from, until) =
                    validities.fold((0, u64::MAX), |all, next| (all.0.max(next.0), all.1.min(next.1)));
                let moment = Duration::from_secs(now.as_secs().max(from).min(until));
                trust.verify(&self.chain, UnixTime::since_unix_epoch(moment))?
            }
            judged => judged?,
        };
        if valid.tenant == *tenant { Ok(()) } else { Err(CertificateProblem::NoTenant) }
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

    /// No hints are sent. A client that chooses by them would send no certificate, and the response could not
    /// say what is wrong with it.
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
        check_chain(intermediates)?;
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

fn problem(leaf: &CertificateDer<'_>, now: UnixTime, error: &webpki::Error) -> CertificateProblem {
    use webpki::Error as E;
    let (from, until) = validity_of_der(leaf);
    match error {
        E::CertExpired { .. } | E::InvalidCertValidity if now.as_secs() > until => {
            CertificateProblem::Expired { since: at(until) }
        }
        E::CertNotValidYet { .. } if now.as_secs() < from => {
            CertificateProblem::NotYetValid { from: at(from) }
        }
        E::CertExpired { .. } | E::CertNotValidYet { .. } | E::InvalidCertValidity => {
            CertificateProblem::ChainNotValid
        }
        // A CA of the same name with another key is another CA.
        E::UnknownIssuer | E::InvalidSignatureForPublicKey => {
            CertificateProblem::UnknownIssuer { issuer: issuer_of(leaf) }
        }
        E::RequiredEkuNotFoundContext(_) => CertificateProblem::Purpose,
        other => CertificateProblem::Other(shown(&other.to_string())),
    }
}

/// The name of a certificate's issuer, as the certificate has it.
fn issuer_of(certificate: &[u8]) -> Box<str> {
    let name = X509Certificate::from_der(certificate).map(|(_, read)| read.issuer().to_string());
    shown(&name.unwrap_or_default())
}

/// Like [`validity_of`]; no second at all if the certificate cannot be read.
fn validity_of_der(certificate: &[u8]) -> (u64, u64) {
    X509Certificate::from_der(certificate).map_or((u64::MAX, 0), |(_, certificate)| validity_of(&certificate))
}

/// What is inside of a DER sequence.
fn content(sequence: &[u8]) -> &[u8] {
    let header = match sequence.get(1) {
        // The long form of a length says how many bytes it has.
        Some(length) if length & 0x80 != 0 => 2 + usize::from(length & 0x7f),
        _ => 2,
    };
    sequence.get(header..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use portico_lab::pki::{Authority, Certificate, Pki};

    use super::*;

    /// The CA of `pki`, for clients.
    fn client_cas(pki: &Pki) -> Arc<ClientCas> {
        Arc::new(ClientCas::load(vec![pki.file("ca.crt").into()], None).unwrap())
    }

    /// The first second of a year.
    fn year(year: i32) -> UnixTime {
        let seconds = u64::try_from(rcgen::date_time_ymd(year, 1, 1).unix_timestamp()).unwrap();
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    #[test]
    fn an_intermediate_that_expires_first_ends_the_verdict() {
        let pki = Pki::new();
        let between = Certificate::authority("between").not_after(2500, 1, 1);
        let between = pki.authority().intermediate(between).unwrap();
        let leaf = between.issue(Certificate::cluster("a").not_after(2600, 1, 1)).unwrap();
        let chain = [leaf, between.identity()].map(|identity| identity.certificate().unwrap());
        let presented = Presented::new(client_cas(&pki), &chain);
        let a = Tenant::of_text("a");
        assert_eq!(presented.identity_at(year(2400)), Ok(a.clone()));
        assert_eq!(presented.identity_at(year(2550)), Err(CertificateProblem::ChainNotValid));
        assert_eq!(presented.still_identifies_at(&a, year(2550)), Ok(()));
    }

    #[test]
    fn a_clock_that_jumps_and_comes_back_leaves_no_verdict_behind() {
        let pki = Pki::new();
        let leaf = Certificate::cluster("a").not_before(2020, 1, 1).not_after(2100, 1, 1);
        let leaf = pki.authority().issue(leaf).unwrap().certificate().unwrap();
        let presented = Presented::new(client_cas(&pki), &[leaf]);
        let a = Tenant::of_text("a");
        for _ in 0..2 {
            assert!(matches!(presented.identity_at(year(2200)), Err(CertificateProblem::Expired { .. })));
            assert_eq!(presented.identity_at(year(2050)), Ok(a.clone()));
            assert!(matches!(presented.identity_at(year(2000)), Err(CertificateProblem::NotYetValid { .. })));
            assert_eq!(presented.identity_at(year(2050)), Ok(a.clone()));
        }
        for wrong in [2000, 2200] {
            assert_eq!(presented.still_identifies_at(&a, year(wrong)), Ok(()), "a clock is no revocation");
        }
    }

    #[test]
    fn a_no_is_kept_until_the_trust_changes_or_a_certificate_becomes_valid_or_expires() {
        let (pki, other) = (Pki::new(), Authority::new("other").unwrap());
        let cas = client_cas(&pki);
        let leaf = |issuer: &Authority| {
            let leaf = Certificate::cluster("a").not_before(2020, 1, 1).not_after(2100, 1, 1);
            issuer.issue(leaf).unwrap().certificate().unwrap()
        };
        let mut presented = Presented::new(Arc::clone(&cas), &[leaf(&other)]);
        let unknown = presented.identity_at(year(2050));
        assert!(matches!(unknown, Err(CertificateProblem::UnknownIssuer { .. })), "{unknown:?}");
        // Another verification would accept this one.
        let of_other = std::mem::replace(&mut presented.chain, [leaf(pki.authority())].into());
        assert_eq!(presented.identity_at(year(2099)), unknown, "seconds and decades later");
        assert_eq!(presented.identity_at(year(2020)), unknown);
        assert!(matches!(presented.identity_at(year(2101)), Err(CertificateProblem::Expired { .. })));
        assert_eq!(presented.identity_at(year(2050)), Ok(Tenant::of_text("a")));

        let presented = Presented::new(Arc::clone(&cas), &of_other);
        assert_eq!(presented.identity_at(year(2050)), unknown);
        fs::write(pki.file("ca.crt"), other.cert()).unwrap();
        assert!(cas.reload().unwrap());
        assert_eq!(presented.identity_at(year(2050)), Ok(Tenant::of_text("a")));
    }

    #[test]
    fn each_second_in_which_a_certificate_becomes_valid_or_expires_ends_a_no() {
        let ca = Authority::new("ca").unwrap();
        let valid = |from, until| {
            let certificate = Certificate::client("a").not_before(from, 1, 1).not_after(until, 1, 1);
            ca.issue(certificate).unwrap().certificate().unwrap()
        };
        let unreadable = CertificateDer::from(vec![1, 2, 3]);
        let chain = [valid(2020, 2100), unreadable, valid(2030, 2090)];
        let [y2020, y2030, y2090, y2100] = [2020, 2030, 2090, 2100].map(|at| year(at).as_secs());
        let spans = [1..=y2020 - 1, y2020..=y2030 - 1, y2030..=y2090, y2090 + 1..=y2100];
        for span in spans {
            assert_eq!(unchanged(&chain, *span.start()), span);
            assert_eq!(unchanged(&chain, *span.end()), span);
        }
    }
}
