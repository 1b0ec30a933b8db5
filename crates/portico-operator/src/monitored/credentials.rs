//! The credentials of a client that reads the metrics of one cluster.

use std::sync::Arc;

use portico_api::text::pem_problem;
use portico_dial::{AnyCertificate, provider, server_verifier};
use portico_pki::{Credential, Kubeconfig};
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

/// The cluster's certificate for its metrics, and which servers it is shown to.
#[derive(Debug)]
pub struct Credentials {
    /// To servers with a certificate of the cluster's authority.
    pub(super) verified: Arc<ClientConfig>,
    /// To any server. The controller manager and the scheduler make their own certificate when they start, as
    /// everywhere. A machine in between learns nothing by it: it can only lie about numbers.
    pub(super) unverified: Arc<ClientConfig>,
}

impl Credentials {
    /// The credentials in a kubeconfig; `Err` says what is wrong with it.
    pub(super) fn of(kubeconfig: &Kubeconfig) -> Result<Self, String> {
        let Credential::Certificate(pair) = &kubeconfig.credential else {
            return Err("its user has no certificate".to_owned());
        };
        let text = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(kubeconfig.authority.as_bytes()) {
            let certificate = certificate.map_err(|error| text("its authority", &pem_problem(&error)))?;
            roots.add(certificate).map_err(|error| text("its authority", &error))?;
        }
        let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes());
        let chain: Vec<_> =
            chain.collect::<Result<_, _>>().map_err(|error| text("its certificate", &pem_problem(&error)))?;
        let key = || {
            PrivateKeyDer::from_pem_slice(pair.key.as_bytes())
                .map_err(|error| text("its key", &pem_problem(&error)))
        };
        let provider = provider();
        let builder = || {
            ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_safe_default_protocol_versions()
                .map_err(|error| text("TLS", &error))
        };
        let finished = |config: Result<ClientConfig, rustls::Error>| {
            let mut config = config.map_err(|error| text("its certificate and key", &error))?;
            // A connection carries one answer, and the next one comes after half a minute.
            config.resumption = Resumption::disabled();
            Ok::<_, String>(Arc::new(config))
        };
        let verifier = server_verifier(roots).map_err(|error| text("its authority", &error))?;
        let verified = builder()?.dangerous().with_custom_certificate_verifier(verifier);
        let verified = verified.with_client_auth_cert(chain.clone(), key()?);
        let any = Arc::new(AnyCertificate::default());
        let unverified = builder()?.dangerous().with_custom_certificate_verifier(any);
        let unverified = unverified.with_client_auth_cert(chain, key()?);
        Ok(Self { verified: finished(verified)?, unverified: finished(unverified)? })
    }
}
