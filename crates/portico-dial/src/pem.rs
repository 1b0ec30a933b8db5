//! Certificates of PEM files.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{Error, PemObject};

/// Returns the certificates of a PEM file, at least one.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let chain = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>()?;
    if chain.is_empty() { Err(Error::NoItemsFound) } else { Ok(chain) }
}
