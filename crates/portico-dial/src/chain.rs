//! How long a peer's chain of certificates may be.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::VerifierBuilderError;
use rustls::{CertificateError, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme};
use thiserror::Error;

use crate::provider;

/// CA certificates that a peer may send behind its own. Each is tried as the issuer of each, and a peer can
/// make them up without any key. With a hundred of them the search takes seconds. The thread serves nobody
/// else meanwhile.
const MAX_INTERMEDIATES: usize = 5;

#[derive(Error)]
#[error("{0} CA certificates came behind it, and at most {MAX_INTERMEDIATES} are looked at")]
struct TooLong(usize);

/// That is how rustls shows it to people.
impl fmt::Debug for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Refuses a chain that is too long to be searched.
pub fn check_chain(intermediates: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
    if intermediates.len() <= MAX_INTERMEDIATES {
        return Ok(());
    }
    let why = OtherError(Arc::new(TooLong(intermediates.len())));
    Err(rustls::Error::InvalidCertificate(CertificateError::Other(why)))
}

/// Verifies servers as rustls does with these roots, unless their chain is too long to be searched.
/// Fails without any root.
pub fn server_verifier(
    roots: impl Into<Arc<RootCertStore>>,
) -> Result<Arc<dyn ServerCertVerifier>, VerifierBuilderError> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider()).build()?;
    Ok(Arc::new(ShortChains(verifier)))
}

#[derive(Debug)]
struct ShortChains(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for ShortChains {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        check_chain(intermediates)?;
        self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::pki::{Authority, Certificate};

    use super::*;

    #[test]
    fn a_server_with_more_than_five_cas_in_its_chain_is_refused() {
        let ca = Authority::new("ca").unwrap();
        let leaf = ca.issue(Certificate::server(&["a.test"])).unwrap().certificate().unwrap();
        let ca = ca.identity().certificate().unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone()).unwrap();
        let verifier = server_verifier(roots).unwrap();
        let name = ServerName::try_from("a.test").unwrap();
        let verdict = |count| {
            let cas = vec![ca.clone(); count];
            verifier.verify_server_cert(&leaf, &cas, &name, &[], UnixTime::now()).map(drop)
        };
        assert_eq!(verdict(5), Ok(()));
        let refused = verdict(6).unwrap_err().to_string();
        assert!(refused.contains("6 CA certificates came behind it"), "{refused}");
    }
}
