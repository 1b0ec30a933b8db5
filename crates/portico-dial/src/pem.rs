//! PEM files: certificates and keys of either side, and why one cannot be used.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use portico_api::text::pem_problem;
use rustls::pki_types::pem::{Error, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;

/// Why a PEM file cannot be used.
#[derive(Debug, Error)]
pub enum PemFileError {
    /// It cannot be read.
    #[error("reading {}: {source}; give a PEM file this process may read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It does not hold what it should.
    #[error("{}: no {expected}: {why}; give it in PEM", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        expected: &'static str,
        /// What was found instead.
        why: String,
    },
}

/// Reads the file at `path`.
pub fn read(path: &Path) -> Result<Vec<u8>, PemFileError> {
    fs::read(path).map_err(|source| PemFileError::Read { path: path.to_owned(), source })
}

/// Returns the certificates of the file at `path`, at least one.
pub fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemFileError> {
    let chain = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let chain = chain.and_then(|chain| if chain.is_empty() { Err(Error::NoItemsFound) } else { Ok(chain) });
    chain.map_err(|error| content(path, "certificate", error))
}

/// Returns the private key of the file at `path`.
pub fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, PemFileError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| content(path, "private key", error))
}

/// The file at `path` holds nothing of what is `expected`.
pub fn content(path: &Path, expected: &'static str, error: Error) -> PemFileError {
    PemFileError::Content { path: path.to_owned(), expected, why: pem_problem(&error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_half_written_is_told_from_one_that_is_not_there() {
        let error = |pem: &[u8]| private_key(Path::new("tls.key"), pem).unwrap_err().to_string();
        assert_eq!(
            error(b"-----BEGIN PRIVATE KEY-----\nAAAA\n"),
            "tls.key: no private key: the section PRIVATE KEY has no line that ends it; give it in PEM"
        );
        assert_eq!(error(b"\n"), "tls.key: no private key: no items found; give it in PEM");
    }
}
