//! Certificate authorities, the certificates they issue and their revocation lists, for every test.
//!
//! A [`Certificate`] says what is to be issued: the common cases are its constructors, and
//! [`Certificate::with`] reaches everything else that rcgen can write. An [`Authority`], a root or an
//! intermediate, signs it and returns an [`Identity`]: certificate and key in PEM. [`Pki`] is an authority
//! with a temporary folder of files, which is what most tests start from.
//!
//! ECDSA P-256 throughout: issuing takes no time worth mentioning. Validity is from 1975 to 4096 unless a
//! test says otherwise.

mod folder;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
    date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

pub use folder::Pki;

// === Certificate ===

/// What a certificate says, before an [`Authority`] signs it.
#[derive(Debug, Clone)]
pub struct Certificate {
    names: Vec<String>,
    uris: Vec<String>,
    params: CertificateParams,
}

impl Certificate {
    /// A server's, for `names`: DNS names and addresses alike. The first one is its common name.
    pub fn server(names: &[impl AsRef<str>]) -> Self {
        let names: Vec<String> = names.iter().map(|name| name.as_ref().to_owned()).collect();
        let common_name = names.first().cloned().unwrap_or_default();
        Self { names, ..Self::leaf(&common_name, ExtendedKeyUsagePurpose::ServerAuth) }
    }

    /// A client's without an organisation. To Kubernetes the common name is the user.
    pub fn client(common_name: &str) -> Self {
        Self::leaf(common_name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// The profile of a tunnel client of cluster `name`: a client of organisation `portico:cluster:NAME`.
    pub fn cluster(name: &str) -> Self {
        Self::client("agent").organisation(&format!("portico:cluster:{name}"))
    }

    /// An authority's own, which signs certificates and revocation lists.
    pub fn authority(common_name: &str) -> Self {
        Self::new(common_name).with(|params| {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![
                KeyUsagePurpose::KeyCertSign,
                KeyUsagePurpose::CrlSign,
                KeyUsagePurpose::DigitalSignature,
            ];
        })
    }

    /// With another common name.
    pub fn common_name(self, name: &str) -> Self {
        self.with(|params| params.distinguished_name.push(DnType::CommonName, name))
    }

    /// With an organisation. To Kubernetes it is a group; to Portico it names the cluster.
    pub fn organisation(self, name: &str) -> Self {
        self.with(|params| params.distinguished_name.push(DnType::OrganizationName, name))
    }

    /// With one more URI as an alternative name: `spiffe://DOMAIN/cluster/NAME` names the cluster, too.
    pub fn uri(mut self, uri: &str) -> Self {
        self.uris.push(uri.to_owned());
        self
    }

    /// With a serial number, big-endian, so that a revocation list can name it.
    pub fn serial(self, serial: &[u8]) -> Self {
        self.with(|params| params.serial_number = Some(serial.to_vec().into()))
    }

    /// Not valid before the first second of a day.
    pub fn not_before(self, year: i32, month: u8, day: u8) -> Self {
        self.with(|params| params.not_before = date_time_ymd(year, month, day))
    }

    /// Not valid after the first second of a day.
    pub fn not_after(self, year: i32, month: u8, day: u8) -> Self {
        self.with(|params| params.not_after = date_time_ymd(year, month, day))
    }

    /// Changed in any way that rcgen knows. Names and URIs are added afterwards.
    pub fn with(mut self, change: impl FnOnce(&mut CertificateParams)) -> Self {
        change(&mut self.params);
        self
    }

    /// Signed by its own key: for what reads a certificate and trusts none.
    pub fn self_signed(self) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let cert = self.into_params()?.self_signed(&key).context("signing a certificate by its own key")?;
        Ok(Identity { cert: cert.pem(), key: key.serialize_pem() })
    }

    /// A request for it by a new key, PEM.
    pub fn request(self) -> Result<String> {
        // Which authority signs it is not known yet.
        let unsigned = self.with(|params| params.use_authority_key_identifier_extension = false);
        let request = unsigned.into_params()?.serialize_request(&KeyPair::generate()?);
        request.and_then(|request| request.pem()).context("making a certificate request")
    }

    fn leaf(common_name: &str, usage: ExtendedKeyUsagePurpose) -> Self {
        Self::new(common_name).with(|params| {
            params.use_authority_key_identifier_extension = true;
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![usage];
        })
    }

    fn new(common_name: &str) -> Self {
        let mut params = CertificateParams::default();
        // Without the common name that rcgen puts there.
        params.distinguished_name = DistinguishedName::new();
        Self { names: Vec::new(), uris: Vec::new(), params }.common_name(common_name)
    }

    fn into_params(self) -> Result<CertificateParams> {
        let mut params = self.params;
        let names = CertificateParams::new(self.names.clone())
            .with_context(|| format!("names of a certificate: {:?}", self.names))?;
        params.subject_alt_names.extend(names.subject_alt_names);
        for uri in self.uris {
            params.subject_alt_names.push(SanType::URI(uri.as_str().try_into()?));
        }
        Ok(params)
    }
}

// === Identity ===

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

    /// The certificate as rustls takes it.
    pub fn certificate(&self) -> Result<CertificateDer<'static>> {
        CertificateDer::from_pem_slice(self.cert.as_bytes()).context("reading a certificate")
    }

    /// The certificate and those that follow it.
    pub fn chain(&self) -> Result<Vec<CertificateDer<'static>>> {
        CertificateDer::pem_slice_iter(self.cert.as_bytes())
            .collect::<Result<_, _>>()
            .context("reading a chain of certificates")
    }

    /// The private key as rustls takes it.
    pub fn private_key(&self) -> Result<PrivateKeyDer<'static>> {
        PrivateKeyDer::from_pem_slice(self.key.as_bytes()).context("reading a private key")
    }

    /// TLS of a server that shows this certificate, asks its clients for none, and speaks `alpn`.
    pub fn server_config(&self, alpn: &[&[u8]]) -> Result<ServerConfig> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config =
            builder.with_no_client_auth().with_single_cert(vec![self.certificate()?], self.private_key()?)?;
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok(config)
    }
}

// === Authority ===

/// A certificate authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// A new root; `name` is its common name. Two roots of one name have different keys.
    pub fn new(name: &str) -> Result<Authority> {
        let params = Certificate::authority(name).into_params()?;
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)
            .with_context(|| format!("making certificate authority {name}"))?;
        Ok(Authority { issuer })
    }

    /// An authority below this one, from a [`Certificate::authority`].
    pub fn intermediate(&self, certificate: Certificate) -> Result<Authority> {
        let issuer =
            CertifiedIssuer::signed_by(certificate.into_params()?, KeyPair::generate()?, &self.issuer)
                .context("making an intermediate certificate authority")?;
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

    /// Signs a certificate with a new key.
    pub fn issue(&self, certificate: Certificate) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let cert =
            certificate.into_params()?.signed_by(&key, &self.issuer).context("signing a certificate")?;
        Ok(Identity { cert: cert.pem(), key: key.serialize_pem() })
    }

    /// A server certificate for `names`: DNS names and addresses alike.
    pub fn server(&self, common_name: &str, names: &[impl AsRef<str>]) -> Result<Identity> {
        self.issue(Certificate::server(names).common_name(common_name))
    }

    /// A client certificate: to Kubernetes the common name is the user, the organisation a group.
    pub fn client(&self, user: &str, group: Option<&str>) -> Result<Identity> {
        let certificate = Certificate::client(user);
        self.issue(match group {
            Some(group) => certificate.organisation(group),
            None => certificate,
        })
    }

    /// The list of what this authority has revoked, by serial numbers, PEM.
    pub fn revocations(&self, serials: &[&[u8]]) -> Result<String> {
        self.revocations_with(serials, |_| ())
    }

    /// A list of revocations, changed in any way that rcgen knows.
    pub fn revocations_with(
        &self,
        serials: &[&[u8]],
        change: impl FnOnce(&mut CertificateRevocationListParams),
    ) -> Result<String> {
        let then = date_time_ymd(2020, 1, 1);
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: serial.to_vec().into(),
            revocation_time: then,
            reason_code: None,
            invalidity_date: None,
        });
        let mut list = CertificateRevocationListParams {
            this_update: then,
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: vec![1].into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        change(&mut list);
        list.signed_by(&self.issuer)?.pem().context("signing a revocation list")
    }

    /// TLS of a client that trusts this authority alone, shows `identity`, and offers `alpn`.
    pub fn client_config(&self, identity: Option<&Identity>, alpn: &[&[u8]]) -> Result<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone())?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => builder.with_client_auth_cert(identity.chain()?, identity.private_key()?)?,
        };
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok(config)
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
        let pki = Pki::new();
        pki.issue("api", Certificate::server(&["api.example.com", "127.0.0.1"]));
        let verdict = std::process::Command::new("openssl")
            .args(["verify", "-purpose", "sslserver", "-verify_hostname", "api.example.com", "-CAfile"])
            .args([pki.file("ca.crt"), pki.file("api.crt")])
            .output()
            .expect("openssl is installed (Debian package openssl)");
        assert!(verdict.status.success(), "{}", String::from_utf8_lossy(&verdict.stderr));
    }
}
