//! Whether the certificate of an API server holds for a name by which nobody reaches it yet.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use portico_api::api_server_ca::ApiServerCa;
use portico_api::text::one_line;
use portico_dial::{Dialer, Target, provider, server_verifier};
use thiserror::Error;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, Error as TlsError, RootCertStore};

/// Time limit of a connection with its handshake.
const LIMIT: Duration = Duration::from_secs(10);

/// Most characters of what came of it: a certificate holds what its issuer liked.
const QUOTED: usize = 300;

/// Why a certificate does not hold.
#[derive(Debug, Error)]
pub(super) enum NotPresented {
    /// It could not be asked.
    #[error("{0}")]
    Unreachable(String),
    /// It is for other names, or of another authority.
    #[error("its certificate does not hold for {name}: {why}")]
    Other {
        /// The name that it should hold for.
        name: String,
        /// What is in the way.
        why: String,
    },
}

/// Connects to `server`, and speaks TLS as if it were reached by `name`, a host name or an address.
pub(super) async fn presents(server: SocketAddr, authority: &str, name: &str) -> Result<(), NotPresented> {
    let unreachable =
        |why: &dyn std::error::Error| NotPresented::Unreachable(one_line(&why.to_string(), QUOTED));
    let target = Target { host: server.ip().to_string().into(), port: server.port() };
    let config = trusting(authority).map_err(|why| NotPresented::Unreachable(why.to_string()))?;
    let server_name = ServerName::try_from(name.to_owned()).map_err(|error| unreachable(&error))?;
    let handshake = async {
        let socket = Dialer::direct().connect_any(&target).await.map_err(|error| unreachable(&error))?;
        let shaken = TlsConnector::from(Arc::new(config)).connect(server_name, socket).await;
        shaken.map(drop).map_err(|error| match error.get_ref().and_then(|cause| cause.downcast_ref()) {
            Some(TlsError::InvalidCertificate(why)) => {
                NotPresented::Other { name: name.to_owned(), why: one_line(&why.to_string(), QUOTED) }
            }
            _ => unreachable(&error),
        })
    };
    let late = || NotPresented::Unreachable(format!("no handshake within {LIMIT:?}"));
    timeout(LIMIT, handshake).await.unwrap_or_else(|_| Err(late()))
}

/// TLS by these authorities.
fn trusting(authority: &str) -> Result<ClientConfig, Box<dyn std::error::Error + Send + Sync>> {
    let mut roots = RootCertStore::empty();
    for certificate in ApiServerCa::parse(authority)?.certificates() {
        roots.add(certificate.clone())?;
    }
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let verifier = server_verifier(roots)?;
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use portico_lab::hostile_api::HostileApi;
    use portico_lab::pki::Authority;

    use super::*;

    #[tokio::test]
    async fn a_certificate_holds_for_its_own_names_by_its_own_authority_alone() {
        let api = HostileApi::start("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", false).unwrap();
        let server: SocketAddr = api.url("127.0.0.1").trim_start_matches("https://").parse().unwrap();
        let ca = api.authority().cert();
        for name in ["localhost", "127.0.0.1"] {
            presents(server, &ca, name).await.unwrap();
        }
        for name in ["a.example.com", "203.0.113.9", "::1"] {
            let error = presents(server, &ca, name).await.unwrap_err().to_string();
            assert!(error.starts_with(&format!("its certificate does not hold for {name}: ")), "{error}");
        }
        let other = Authority::new("other").unwrap().cert();
        let error = presents(server, &other, "localhost").await.unwrap_err();
        assert!(matches!(error, NotPresented::Other { .. }), "{error}");
        let error = presents(SocketAddr::from(([127, 0, 0, 1], 1)), &ca, "localhost").await.unwrap_err();
        assert!(matches!(error, NotPresented::Unreachable(_)), "{error}");
    }
}
