//! Certificates as they are found in Secrets.

use std::collections::BTreeSet;
use std::net::IpAddr;

use jiff::Timestamp;
use portico_api::text::pem_problem;
use rcgen::{KeyPair, PublicKeyData};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::{self, PemObject};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::time::ASN1Time;

/// The first certificate of a PEM text, and whether others follow it.
pub(crate) fn first(text: &str) -> Result<(CertificateDer<'static>, bool), String> {
    let mut all = CertificateDer::pem_slice_iter(text.as_bytes());
    match all.next() {
        Some(Ok(certificate)) => Ok((certificate, all.next().is_some())),
        None | Some(Err(pem::Error::NoItemsFound)) => Err("it holds no PEM certificate".to_owned()),
        Some(Err(error)) => Err(format!("it is no PEM: {}", pem_problem(&error))),
    }
}

/// Reads a certificate.
pub(crate) fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match X509Certificate::from_der(der) {
        Ok((_, certificate)) => Ok(certificate),
        Err(error) => Err(format!("it is no X.509 certificate: {error}")),
    }
}

/// Reads a private key.
pub(crate) fn key(text: &str) -> Result<KeyPair, String> {
    KeyPair::from_pem(text).map_err(|error| format!("its private key cannot be read: {error}"))
}

/// Whether the private key belongs to the certificate.
pub(crate) fn fits(certificate: &X509Certificate<'_>, key: &KeyPair) -> bool {
    certificate.public_key().raw == key.subject_public_key_info()
}

/// From when until when it is valid.
pub(crate) fn validity(certificate: &X509Certificate<'_>) -> (Timestamp, Timestamp) {
    let validity = certificate.validity();
    (timestamp(validity.not_before), timestamp(validity.not_after))
}

/// A time in a certificate; the first or the last there is, if it lies beyond.
fn timestamp(time: ASN1Time) -> Timestamp {
    let edge = if time.timestamp() < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Timestamp::from_second(time.timestamp()).unwrap_or(edge)
}

/// The alternative names: DNS names in lower case, addresses as text, and everything else as it comes.
pub(crate) fn alternative_names(certificate: &X509Certificate<'_>) -> Result<BTreeSet<String>, String> {
    let extension = certificate.subject_alternative_name();
    let extension = extension.map_err(|error| format!("its alternative names cannot be read: {error}"))?;
    let names = extension.map(|found| &*found.value.general_names).unwrap_or_default();
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => name.to_ascii_lowercase(),
        GeneralName::IPAddress(octets) => address(octets).unwrap_or_else(|| format!("{octets:?}")),
        other => other.to_string(),
    };
    Ok(names.iter().map(text).collect())
}

fn address(octets: &[u8]) -> Option<String> {
    let v4 = <[u8; 4]>::try_from(octets).map(IpAddr::from);
    let v6 = <[u8; 16]>::try_from(octets).map(IpAddr::from);
    v4.or(v6).ok().map(|address| address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_half_written_is_said_to_be_that_in_words() {
        let error = first("-----BEGIN CERTIFICATE-----\nAAAA\n").unwrap_err();
        assert_eq!(error, "it is no PEM: the section CERTIFICATE has no line that ends it");
    }
}
