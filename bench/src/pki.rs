//! Certificates of a run: a CA, a certificate for the gateway, and one for each cluster whose agents
//! authenticate.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use portico_lab::pki::{Authority, Certificate};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// Name of the gateway's files.
const GATEWAY: &str = "gateway";

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
        let authority = Authority::new("portico-bench")?;
        fs::write(pki.ca(), authority.cert()).context("cannot write the CA")?;
        authority.issue(Certificate::server(&["127.0.0.1"]))?.write(&pki.dir, GATEWAY)?;
        for cluster in clusters {
            authority.issue(Certificate::cluster(cluster))?.write(&pki.dir, cluster)?;
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
        self.dir.join("ca.crt")
    }

    /// TLS of a client that knows the CA, has no certificate, and speaks HTTP/2.
    pub(crate) fn stranger(&self) -> Result<ClientConfig> {
        let ca = CertificateDer::from_pem_file(self.ca()).context("cannot read the CA")?;
        let mut roots = RootCertStore::empty();
        roots.add(ca)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    /// The gateway's.
    pub(crate) fn gateway(&self) -> KeyFiles {
        self.files(GATEWAY)
    }

    /// Shared by all agents of the cluster.
    pub(crate) fn cluster(&self, cluster: &str) -> KeyFiles {
        self.files(cluster)
    }

    fn files(&self, name: &str) -> KeyFiles {
        KeyFiles {
            certificate: self.dir.join(format!("{name}.crt")),
            key: self.dir.join(format!("{name}.key")),
        }
    }
}
