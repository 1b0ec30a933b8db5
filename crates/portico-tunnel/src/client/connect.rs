//! From an endpoint to a tunnel that is up: TCP, a proxy, TLS, HTTP/2. Also the meaning of a failure.

use std::sync::Arc;

use portico_dial::{HandshakeError, HandshakeProblem};
use tokio::time::{Instant, timeout_at};

use super::address::Security;
use super::backoff::Failed;
use super::driver;
use super::endpoints::Endpoint;
use super::event::{Connection, Ended, Failure, Signals};
use super::settings::ClientSettings;
use super::tunnel::TunnelOrigin;

/// Connects once.
pub(super) async fn connect(
    settings: &ClientSettings,
    signals: &Arc<Signals>,
    origin: TunnelOrigin,
) -> Result<Connection, Failure> {
    let Endpoint { gateway, address } = origin.endpoint;
    let failure = |how, message: String| Failure { how, message };
    let Some(gateway) = settings.gateways.get(gateway) else {
        return Err(failure(Failed::Absent, "no gateway is configured".to_owned()));
    };
    let socket = settings.dialer.connect(&gateway.target, address).await;
    let socket = socket.map_err(|error| failure(Failed::Absent, error.to_string()))?;
    let deadline = Instant::now() + settings.handshake_timeout;
    let not_served = |how, ended: Ended| failure(how, format!("gateway {gateway} at {address}: {ended}"));
    match gateway.security {
        Security::Plaintext => {
            let opened = driver::open(socket, origin, settings, signals, deadline).await;
            opened.map_err(|ended| {
                let how = if ended.is_hang_up() { Failed::Absent } else { Failed::Overwhelmed };
                not_served(how, ended)
            })
        }
        Security::Tls => {
            let Some(tls) = &settings.tls else {
                let message = format!("gateway {gateway}: no TLS is configured for it");
                return Err(failure(Failed::Unfit, message));
            };
            let name = settings.server_name.as_deref().unwrap_or(&gateway.target.host);
            let stream = timeout_at(deadline, tls.connect(name, socket)).await;
            let too_slow = |_| not_served(Failed::Overwhelmed, Ended::Silent(settings.handshake_timeout));
            let stream = stream.map_err(too_slow)?;
            let stream = stream.map_err(|error| failure(meaning(&error), error.to_string()))?;
            let opened = driver::open(stream, origin, settings, signals, deadline).await;
            opened.map_err(|ended| not_served(Failed::Overwhelmed, ended))
        }
    }
}

/// What a failed handshake says about the gateway. A hang-up before there was a certificate comes from a load
/// balancer or proxy without a gateway behind it, or cost the gateway nothing.
fn meaning(error: &HandshakeError) -> Failed {
    match error.problem {
        HandshakeProblem::Closed | HandshakeProblem::Io(_) if error.answered => Failed::Overwhelmed,
        HandshakeProblem::Closed | HandshakeProblem::Io(_) => Failed::Absent,
        _ => Failed::Unfit,
    }
}
