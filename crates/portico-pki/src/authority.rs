//! Certificate authorities: making one, reading one, and signing with it.

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P521_SHA512, SanType,
};
use rustls_pki_types::CertificateDer;
use thiserror::Error;
use time::OffsetDateTime;

use crate::certificate;
use crate::pair::{KeyKind, Pair};
use crate::profile::Profile;

/// Validity of an authority, as in KKP: ten years.
const AUTHORITY_LIFETIME: SignedDuration = SignedDuration::from_hours(3650 * 24);

/// A certificate is valid this much earlier than it is made. Machines whose clocks are an hour late, by a
/// wrong time zone for one, accept it at once.
const BACKDATED: SignedDuration = SignedDuration::from_hours(2);

/// An authority that can sign now.
pub struct Authority {
    /// Its certificate.
    pub(crate) der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

/// Why an authority cannot be used. It is never replaced by itself: nothing that it signed would be trusted
/// any more.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unusable {
    /// The certificate or the key cannot be read.
    #[error("{0}; restore the Secret from a backup")]
    Unreadable(String),
    /// A bundle: which of them signs?
    #[error("it holds more than one certificate; leave only the one that its key belongs to")]
    Several,
    /// The certificate of a server or client.
    #[error("its certificate is no CA certificate; restore the Secret from a backup")]
    NotAuthority,
    /// The key is that of another certificate.
    #[error("its private key belongs to another certificate; restore the Secret from a backup")]
    KeyMismatch,
    /// The key is on P-521. What it signs cannot be verified here, and would be issued again for ever.
    #[error("its key is on P-521, which is not supported; use one on P-256 or P-384, RSA or Ed25519")]
    UnsupportedKey,
    /// Not valid yet: somebody's clock is wrong.
    #[error("it is not valid before {0}; correct the clock of this machine")]
    NotYetValid(Timestamp),
    /// Everything that it signed is refused.
    #[error("it expired on {0}, and so did everything that it signed; replace it, and what trusts it")]
    Expired(Timestamp),
}

/// Why a certificate cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IssueError {
    /// A DNS name has other characters than ASCII.
    #[error("the certificate of {common_name:?} cannot have the name {name:?}: it is not ASCII")]
    Name {
        /// The certificate.
        common_name: String,
        /// The name.
        name: String,
    },
    /// The end of its validity lies beyond the calendar.
    #[error("the certificate of {common_name:?} would be valid for too long")]
    Lifetime {
        /// The certificate.
        common_name: String,
    },
    /// A key cannot be made, or signing failed.
    #[error("cannot make the certificate of {common_name:?}: {why}")]
    Signing {
        /// The certificate.
        common_name: String,
        /// What the library says.
        why: String,
    },
}

impl Authority {
    /// Makes a new authority of this common name, valid for ten years.
    pub fn create(common_name: &str, kind: KeyKind, now: Timestamp) -> Result<Pair, IssueError> {
        let failed = |error| signing(common_name, &error);
        let mut params = params(common_name, AUTHORITY_LIFETIME, now)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let key = kind.generate().map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?;
        Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// Reads an authority that can sign now, Portico's or another: ECDSA on P-256 or P-384, RSA or Ed25519.
    pub fn read(pair: &Pair, now: Timestamp) -> Result<Self, Unusable> {
        let (der, several) = certificate::first(&pair.certificate).map_err(Unusable::Unreadable)?;
        if several {
            return Err(Unusable::Several);
        }
        let key = certificate::key(&pair.key).map_err(Unusable::Unreadable)?;
        let parsed = certificate::parse(&der).map_err(Unusable::Unreadable)?;
        let may_sign = match parsed.key_usage() {
            Ok(usage) => usage.is_none_or(|usage| usage.value.key_cert_sign()),
            Err(_) => false,
        };
        if !parsed.is_ca() || !may_sign {
            return Err(Unusable::NotAuthority);
        }
        if !certificate::fits(&parsed, &key) {
            return Err(Unusable::KeyMismatch);
        }
        if key.algorithm() == &PKCS_ECDSA_P521_SHA512 {
            return Err(Unusable::UnsupportedKey);
        }
        let (from, end) = certificate::validity(&parsed);
        if now < from {
            return Err(Unusable::NotYetValid(from));
        }
        if now > end {
            return Err(Unusable::Expired(end));
        }
        let unreadable = |error: rcgen::Error| Unusable::Unreadable(error.to_string());
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(unreadable)?;
        Ok(Self { der, issuer })
    }

    /// Makes a key and signs a certificate for it.
    ///
    /// Its validity may end after the authority's own: cut short, it would be issued again and again in the
    /// last month of an authority.
    pub fn issue(&self, profile: &Profile, kind: KeyKind, now: Timestamp) -> Result<Pair, IssueError> {
        let failed = |error| signing(&profile.common_name, &error);
        let mut params = params(&profile.common_name, profile.lifetime, now)?;
        if let Some(organisation) = &profile.organisation {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
        }
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let usages = [
            (profile.usage.is_server(), ExtendedKeyUsagePurpose::ServerAuth),
            (profile.usage.is_client(), ExtendedKeyUsagePurpose::ClientAuth),
        ];
        params.extended_key_usages.extend(usages.into_iter().filter_map(|(set, usage)| set.then_some(usage)));
        for name in &profile.names.dns {
            let name = name.to_ascii_lowercase();
            let text = name.as_str().try_into().map_err(|_| IssueError::Name {
                common_name: profile.common_name.clone(),
                name: name.clone(),
            })?;
            params.subject_alt_names.push(SanType::DnsName(text));
        }
        params.subject_alt_names.extend(profile.names.ips.iter().copied().map(SanType::IpAddress));
        let key = kind.generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn params(
    common_name: &str,
    lifetime: SignedDuration,
    now: Timestamp,
) -> Result<CertificateParams, IssueError> {
    let date = |time: Result<Timestamp, jiff::Error>| {
        let second = time.ok().map(Timestamp::as_second);
        let date = second.and_then(|second| OffsetDateTime::from_unix_timestamp(second).ok());
        date.ok_or_else(|| IssueError::Lifetime { common_name: common_name.to_owned() })
    };
    let mut params = CertificateParams::default();
    params.not_before = date(now.checked_sub(BACKDATED))?;
    params.not_after = date(now.checked_add(lifetime))?;
    // Without the common name that rcgen puts there.
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

pub(crate) fn signing(common_name: &str, error: &rcgen::Error) -> IssueError {
    IssueError::Signing { common_name: common_name.to_owned(), why: error.to_string() }
}
