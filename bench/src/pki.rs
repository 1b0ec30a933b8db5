//! Certificates of a run: a CA, a certificate for the gateway, and one for each cluster whose agents
//! authenticate.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// The folder with the PEM files.
#[derive(Clone, Debug)]
pub(crate) struct Pki {
    dir: PathBuf,
}

/// Where a certificate and its key are.
#[derive(Clone, Debug)]
pub(crate) struct KeyFiles {
    /// The certificate.
    pub(crate) certificate: PathBuf,
    /// Its private key.
    pub(crate) key: PathBuf,
}

impl Pki {
    /// Makes all of them: ECDSA with P-256, as Kubernetes' own are.
    pub(crate) fn make<'a>(dir: PathBuf, clusters: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let pki = Self { dir };
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "portico-bench");
        let ca = CertifiedIssuer::self_signed(params, key()?).context("cannot make a CA")?;
        write(&pki.ca(), &ca.pem())?;

        let mut params =
            CertificateParams::new(vec!["127.0.0.1".to_owned()]).context("an address is a name")?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        pki.gateway().issue(&params, &ca)?;
        for cluster in clusters {
            let mut params = CertificateParams::default();
            // What the gateway reads the cluster from.
            params.distinguished_name.push(DnType::OrganizationName, format!("portico:cluster:{cluster}"));
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            pki.cluster(cluster).issue(&params, &ca)?;
        }
        Ok(pki)
    }

    /// Opens what [`make`](Self::make) has made.
    pub(crate) fn open(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Where it is.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The CA of all.
    pub(crate) fn ca(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    /// The gateway's.
    pub(crate) fn gateway(&self) -> KeyFiles {
        self.files("gateway")
    }

    /// Shared by all agents of the cluster.
    pub(crate) fn cluster(&self, cluster: &str) -> KeyFiles {
        self.files(cluster)
    }

    fn files(&self, name: &str) -> KeyFiles {
        KeyFiles {
            certificate: self.dir.join(format!("{name}.pem")),
            key: self.dir.join(format!("{name}.key")),
        }
    }
}

impl KeyFiles {
    fn issue(&self, params: &CertificateParams, ca: &CertifiedIssuer<'_, KeyPair>) -> Result<()> {
        let key = key()?;
        let certificate = params.signed_by(&key, ca).context("cannot sign a certificate")?;
        write(&self.certificate, &certificate.pem())?;
        write(&self.key, &key.serialize_pem())
    }
}

fn key() -> Result<KeyPair> {
    KeyPair::generate().context("cannot make a key")
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
