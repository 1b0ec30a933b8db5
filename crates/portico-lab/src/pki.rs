//! Certificate authorities and the certificates they issue.
//!
//! One authority a cluster signs everything in it, servers and clients alike, as small Kubernetes
//! installations do. ECDSA P-256: issuing takes no time worth mentioning.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose,
};

/// A certificate with its private key, both PEM.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The certificate, not followed by its issuer.
    pub cert: String,
    /// The private key (PKCS #8).
    pub key: String,
}

impl Identity {
    /// Writes `NAME.crt` and `NAME.key` into `dir`.
    pub fn write(&self, dir: &Path, name: &str) -> Result<()> {
        write(&dir.join(format!("{name}.crt")), &self.cert)?;
        write(&dir.join(format!("{name}.key")), &self.key)
    }
}

/// A self-signed certificate authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// A new authority; `name` is its common name.
    pub fn new(name: &str) -> Result<Authority> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)
            .with_context(|| format!("making certificate authority {name}"))?;
        Ok(Authority { issuer })
    }

    /// The authority's own certificate, PEM.
    pub fn cert(&self) -> String {
        self.issuer.pem()
    }

    /// The authority as a key pair, for a controller manager that signs certificate requests.
    pub fn identity(&self) -> Identity {
        Identity { cert: self.cert(), key: self.issuer.key().serialize_pem() }
    }

    /// A server certificate for `names`: DNS names and addresses alike.
    pub fn server(&self, common_name: &str, names: &[String]) -> Result<Identity> {
        self.issue(common_name, None, names, &[ExtendedKeyUsagePurpose::ServerAuth])
    }

    /// A client certificate: to Kubernetes the common name is the user, the organisation a group.
    pub fn client(&self, user: &str, group: Option<&str>) -> Result<Identity> {
        self.issue(user, group, &[], &[ExtendedKeyUsagePurpose::ClientAuth])
    }

    fn issue(
        &self,
        common_name: &str,
        organisation: Option<&str>,
        names: &[String],
        usages: &[ExtendedKeyUsagePurpose],
    ) -> Result<Identity> {
        let mut params = CertificateParams::new(names.to_vec())
            .with_context(|| format!("names of the certificate of {common_name}: {names:?}"))?;
        params.distinguished_name = DistinguishedName::new();
        if let Some(organisation) = organisation {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
        }
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages.to_vec();
        let key = KeyPair::generate()?;
        let cert = params
            .signed_by(&key, &self.issuer)
            .with_context(|| format!("signing the certificate of {common_name}"))?;
        Ok(Identity { cert: cert.pem(), key: key.serialize_pem() })
    }
}

/// Writes `NAME.key` and `NAME.pub`, a key pair that belongs to no certificate: Kubernetes signs
/// service account tokens with it. Two files, since an API server finds a public key in a private
/// one only in older formats than PKCS #8.
pub fn write_signing_key(dir: &Path, name: &str) -> Result<()> {
    let key = KeyPair::generate()?;
    write(&dir.join(format!("{name}.key")), &key.serialize_pem())?;
    write(&dir.join(format!("{name}.pub")), &key.public_key_pem())
}

/// Writes a file and names it when that fails.
pub(crate) fn write(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openssl_accepts_a_chain_of_the_labs_making() {
        let dir = std::env::temp_dir().join(format!("portico-lab-pki-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let authority = Authority::new("test authority").unwrap();
        write(&dir.join("ca.crt"), &authority.cert()).unwrap();
        let names = ["api.example.com".to_owned(), "127.0.0.1".to_owned()];
        authority.server("api", &names).unwrap().write(&dir, "api").unwrap();
        let verdict = std::process::Command::new("openssl")
            .args(["verify", "-purpose", "sslserver", "-verify_hostname", "api.example.com", "-CAfile"])
            .args([dir.join("ca.crt"), dir.join("api.crt")])
            .output()
            .expect("openssl is installed (Debian package openssl)");
        fs::remove_dir_all(&dir).unwrap();
        assert!(verdict.status.success(), "{}", String::from_utf8_lossy(&verdict.stderr));
    }
}
