//! A request for a certificate (PKCS #10), as a CertificateSigningRequest of Kubernetes holds it.

use rcgen::{CertificateParams, DistinguishedName, DnType};

use crate::authority::{IssueError, signing};
use crate::pair::KeyKind;

/// A request, and the private key whose owner asks, both PEM.
pub struct Request {
    /// What is handed in.
    pub request: String,
    /// What stays here: PKCS #8.
    pub key: String,
}

impl Request {
    /// Makes a key, and asks for a certificate of this user, in this group.
    ///
    /// # Errors
    /// A name that no certificate can have.
    pub fn new(user: &str, group: Option<&str>) -> Result<Self, IssueError> {
        let failed = |error: rcgen::Error| signing(user, &error);
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        let key = KeyKind::EcdsaP256.generate().map_err(failed)?;
        let request = params.serialize_request(&key).and_then(|request| request.pem()).map_err(failed)?;
        Ok(Self { request, key: key.serialize_pem() })
    }
}
