//! The verifier that records what a server presents.

use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

/// Verifies as another verifier does, and records the certificates, of which rustls drops those that are not
/// accepted.
#[derive(Debug)]
pub struct RecordingVerifier {
    verifier: Arc<dyn ServerCertVerifier>,
    presented: Mutex<Vec<CertificateDer<'static>>>,
}

impl RecordingVerifier {
    /// Verifies as `verifier` does.
    #[must_use]
    pub fn new(verifier: Arc<dyn ServerCertVerifier>) -> Self {
        Self { verifier, presented: Mutex::default() }
    }

    /// Takes the chain out that was presented, leaf first; it is empty before the server has answered. A
    /// connection holds its verifier, and has no use for the chain.
    pub fn take_presented(&self) -> Vec<CertificateDer<'static>> {
        take(&mut *self.presented())
    }

    fn presented(&self) -> MutexGuard<'_, Vec<CertificateDer<'static>>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.presented.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerCertVerifier for RecordingVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        *self.presented() = chain.map(|certificate| certificate.clone().into_owned()).collect();
        self.verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
