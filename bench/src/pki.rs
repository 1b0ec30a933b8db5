//! Certificates of a run: a CA, a certificate for the gateway, and one for each cluster whose agents
//! authenticate.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use portico_lab::pki::{Authority, Certificate};

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
