//! How long a peer's chain of certificates may be.

use rustls::pki_types::CertificateDer;

/// Certificates between that of a peer and a CA. Each is tried as the issuer of each, and a peer needs no key
/// for those that it makes up: with a hundred of them the search takes seconds, in which its thread serves
/// nobody.
const MAX_INTERMEDIATES: usize = 5;

/// Refuses a chain that is too long to be verified.
pub fn check_chain(intermediates: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
    let sent = intermediates.len();
    if sent > MAX_INTERMEDIATES {
        let why = format!("the peer sent {sent} intermediate certificates; send {MAX_INTERMEDIATES} at most");
        return Err(rustls::Error::General(why));
    }
    Ok(())
}
