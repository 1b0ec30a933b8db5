//! The CA of a user cluster's API server, as the annotation
//! [`API_SERVER_CA`](crate::annotations::API_SERVER_CA) gives it.
//!
//! The gateway trusts only this CA when it asks that API server to review a token. It is stored as DER, once
//! for each Cluster or Service that names it. All routes share that copy.

use std::sync::Arc;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::{self, PemObject};
use thiserror::Error;

use crate::text::pem_problem;

/// Most certificates in the annotation. A rotation needs two; this leaves room for intermediate states.
const MOST_CERTIFICATES: usize = 16;

/// Longest annotation that is read, in bytes. Kubernetes allows 256 KiB for all annotations of an object.
const LONGEST: usize = 16 * 1024;

/// CA certificates: at least one, each a valid trust anchor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiServerCa(Arc<Box<[CertificateDer<'static>]>>);

/// Why an annotation names no CA.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadCa {
    /// Longer than 16 KiB.
    #[error("it is longer than 16 KiB")]
    TooLong,
    /// Malformed PEM.
    #[error("it is no PEM: {0}")]
    NoPem(Box<str>),
    /// PEM, but no `CERTIFICATE` in it.
    #[error("it holds no certificate")]
    NoCertificate,
    /// More certificates than a CA has: most likely a system's CA bundle.
    #[error("it holds more than {MOST_CERTIFICATES} certificates")]
    TooMany,
    /// A certificate that cannot verify another.
    #[error("certificate {number} in it cannot be a trust anchor: {why}")]
    NoAnchor {
        /// Which, counted from one.
        number: usize,
        /// What is wrong with it.
        why: Box<str>,
    },
}

impl ApiServerCa {
    /// Reads PEM.
    ///
    /// # Errors
    /// Why the text is no CA.
    pub fn parse(text: &str) -> Result<Self, BadCa> {
        if text.len() > LONGEST {
            return Err(BadCa::TooLong);
        }
        let mut certificates = Vec::new();
        for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
            let certificate = certificate.map_err(|error| match error {
                pem::Error::NoItemsFound => BadCa::NoCertificate,
                error => BadCa::NoPem(pem_problem(&error).into()),
            })?;
            if certificates.len() == MOST_CERTIFICATES {
                return Err(BadCa::TooMany);
            }
            if let Err(error) = webpki::anchor_from_trusted_cert(&certificate) {
                let (number, why) = (certificates.len() + 1, error.to_string().into());
                return Err(BadCa::NoAnchor { number, why });
            }
            certificates.push(certificate);
        }
        if certificates.is_empty() {
            Err(BadCa::NoCertificate)
        } else {
            Ok(Self(Arc::new(certificates.into())))
        }
    }

    /// The certificates.
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A self-signed CA that OpenSSL made: P-256, valid for ten years.
    const PEM: &str = include_str!("testdata/ca.pem");

    #[test]
    fn a_ca_is_read_and_copies_share_it() {
        let ca = ApiServerCa::parse(PEM).unwrap();
        assert_eq!(ca.certificates().len(), 1);
        assert!(Arc::ptr_eq(&ca.0, &ca.clone().0));
        assert_eq!(
            ApiServerCa::parse(&format!("# old and new\n{PEM}{PEM}")).unwrap().certificates().len(),
            2
        );
    }

    #[test]
    fn each_reason_why_a_text_is_no_ca_is_named() {
        let error = |text: &str| ApiServerCa::parse(text).unwrap_err().to_string();
        assert_eq!(error(""), "it holds no certificate");
        assert_eq!(error("/etc/kubernetes/pki/ca.crt"), "it holds no certificate");
        let cut = &PEM[..PEM.len() / 2];
        assert_eq!(error(cut), "it is no PEM: the section CERTIFICATE has no line that ends it");
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(
            error(garbage).starts_with("certificate 1 in it cannot be a trust anchor: "),
            "{}",
            error(garbage)
        );
        assert_eq!(error(&PEM.repeat(17)), "it holds more than 16 certificates");
        assert_eq!(error(&"#".repeat(LONGEST + 1)), "it is longer than 16 KiB");
    }
}
