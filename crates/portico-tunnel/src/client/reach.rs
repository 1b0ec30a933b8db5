//! From a choice among addresses to a tunnel that is up: dial, TLS, HTTP/2; and what a failure on the way means.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::address::Security;
use super::backoff::{Failed, random};
use super::candidates::Place;
use super::driver::{self, Ended};
use super::pool::Pool;
use super::tunnel::Tunnel;
use portico_dial::{HandshakeError, HandshakeProblem};

/// An attempt that failed, in words.
pub(super) struct Failure {
    pub(super) how: Failed,
    pub(super) message: String,
}

impl Pool {
    /// Chooses an address, connects, and has the tunnel driven. With `unused`, only to an address that no tunnel goes to.
    pub(super) async fn dial(self: &Arc<Self>, keeper: usize, unused: bool) -> Result<Arc<Tunnel>, Failure> {
        self.know_names().await;
        let place = self.choose(keeper, unused)?;
        let dialled = self.dial_to(place).await;
        match &dialled {
            Ok(_) => {
                self.names().candidates.succeeded(place);
                self.signals.arrived.notify_waiters();
                self.signals.changed.notify_waiters();
            }
            Err(_) => {
                let mut names = self.names();
                names.candidates.failed(place, Instant::now());
                names.doubt(place.gateway);
            }
        }
        dialled
    }

    /// An address, which from now on counts as one that a tunnel goes to.
    fn choose(&self, keeper: usize, unused: bool) -> Result<Place, Failure> {
        let mut used: Vec<Place> = self.live().iter().map(|tunnel| tunnel.place).collect();
        let mut attempts = self.attempts();
        let others = attempts.iter().enumerate().filter(|(other, _)| *other != keeper);
        used.extend(others.filter_map(|(_, attempt)| attempt.place));
        let (names, now) = (self.names(), Instant::now());
        let place = if unused {
            names.candidates.unused(&used, now, random())
        } else {
            names.candidates.choose(&used, now, random())
        };
        let place = place.ok_or_else(|| Failure {
            how: Failed::Absent,
            message: names.problem().unwrap_or("no address of a gateway is known").to_owned(),
        })?;
        if let Some(attempt) = attempts.get_mut(keeper) {
            attempt.place = Some(place);
        }
        Ok(place)
    }

    async fn dial_to(self: &Arc<Self>, place: Place) -> Result<Arc<Tunnel>, Failure> {
        let settings = &self.settings;
        // Read before the certificate is.
        let renewal = *self.renewals.borrow();
        let failure = |how, message: String| Failure { how, message };
        let Some(gateway) = settings.gateways.get(place.gateway) else {
            return Err(failure(Failed::Absent, "no gateway is configured".to_owned()));
        };
        let socket = settings.dialer.connect(&gateway.target, place.address).await;
        let socket = socket.map_err(|error| failure(Failed::Absent, error.to_string()))?;
        let deadline = Instant::now() + settings.handshake_timeout;
        let not_served =
            |how, ended: Ended| failure(how, format!("gateway {gateway} at {}: {ended}", place.address));
        match gateway.security {
            Security::Plaintext => {
                let opened = driver::open(socket, place, renewal, settings, &self.signals, deadline).await;
                let (tunnel, driver) = opened.map_err(|ended| {
                    let how = if ended.is_hang_up() { Failed::Absent } else { Failed::Overwhelmed };
                    not_served(how, ended)
                })?;
                Ok(self.begin(tunnel, driver))
            }
            Security::Tls => {
                let Some(tls) = &settings.tls else {
                    let message = format!("gateway {gateway}: no TLS is configured for it");
                    return Err(failure(Failed::Unfit, message));
                };
                let name = settings.server_name.as_deref().unwrap_or(&gateway.target.host);
                let stream = timeout_at(deadline, tls.connect(name, socket)).await;
                let too_slow = |_| not_served(Failed::Overwhelmed, Ended::Silent(settings.handshake_timeout));
                let stream =
                    stream.map_err(too_slow)?.map_err(|error| failure(meaning(&error), error.to_string()))?;
                let opened = driver::open(stream, place, renewal, settings, &self.signals, deadline).await;
                let (tunnel, driver) = opened.map_err(|ended| not_served(Failed::Overwhelmed, ended))?;
                Ok(self.begin(tunnel, driver))
            }
        }
    }
}

/// What a TLS handshake that failed tells of the gateway. One that is hung up on before there was a certificate was with a load balancer
/// or a proxy that has no gateway behind it, or cost the gateway nothing.
fn meaning(error: &HandshakeError) -> Failed {
    match error.problem {
        HandshakeProblem::Closed | HandshakeProblem::Io(_) if error.answered => Failed::Overwhelmed,
        HandshakeProblem::Closed | HandshakeProblem::Io(_) => Failed::Absent,
        _ => Failed::Unfit,
    }
}
