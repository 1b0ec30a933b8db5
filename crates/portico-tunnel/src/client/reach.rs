//! From a choice among addresses to a tunnel that is up: dial, TLS, HTTP/2; and what a failure on the way means.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::address::Security;
use super::backoff::{Failed, random};
use super::candidates::Place;
use super::names::Name;
use super::pool::Pool;
use super::tunnel::{self, Ended, Tunnel};

/// An attempt that failed, in words.
pub(super) struct Failure {
    pub(super) how: Failed,
    pub(super) message: String,
}

impl Pool {
    /// Chooses an address, connects, and has the tunnel driven. With `unused`, only to an address that no tunnel goes to.
    pub(super) async fn dial(self: &Arc<Self>, keeper: usize, unused: bool) -> Result<Arc<Tunnel>, Failure> {
        let place = self.choose(unused).await?;
        self.attempt(keeper, |attempt| attempt.place = Some(place));
        let dialled = self.dial_to(place).await;
        let mut addresses = self.addresses.lock().await;
        match &dialled {
            Ok(_) => addresses.candidates.succeeded(place),
            Err(_) => {
                addresses.candidates.failed(place, Instant::now());
                if let Some(name) = addresses.names.get_mut(place.gateway) {
                    name.doubted = true;
                }
            }
        }
        drop(addresses);
        if dialled.is_ok() {
            self.arrived.notify_waiters();
        }
        dialled
    }

    pub(super) async fn choose(&self, unused: bool) -> Result<Place, Failure> {
        let mut addresses = self.addresses.lock().await;
        let mut problem = None;
        for (index, gateway) in self.settings.gateways.iter().enumerate() {
            let now = Instant::now();
            if !addresses.names[index].is_due(now) {
                continue;
            }
            // What it led to before may still be there if it cannot be asked.
            let mut until = Some(now);
            match self.settings.dialer.resolve(&gateway.target).await {
                Ok(resolved) => {
                    addresses.candidates.update(index, &resolved.addresses);
                    until = resolved.until;
                }
                Err(error) => problem = Some(error.to_string()),
            }
            addresses.names[index] = Name { asked: Some(Instant::now()), until, doubted: false };
        }
        let mut used: Vec<Place> =
            self.tunnels().iter().filter(|tunnel| tunnel.is_live()).map(|tunnel| tunnel.place).collect();
        used.extend(self.attempts().iter().filter_map(|attempt| attempt.place));
        let (candidates, now) = (&addresses.candidates, Instant::now());
        let place = if unused {
            candidates.unused(&used, now, random())
        } else {
            candidates.choose(&used, now, random())
        };
        place.ok_or_else(|| Failure {
            how: Failed::Absent,
            message: problem.unwrap_or_else(|| "no address of a gateway is known".to_owned()),
        })
    }

    pub(super) async fn dial_to(self: &Arc<Self>, place: Place) -> Result<Arc<Tunnel>, Failure> {
        let settings = &self.settings;
        // Read before the certificate is.
        let renewal = *self.renewals.borrow();
        let absent = |message: String| Failure { how: Failed::Absent, message };
        let overwhelmed = |message: String| Failure { how: Failed::Overwhelmed, message };
        let Some(gateway) = settings.gateways.get(place.gateway) else {
            return Err(absent("no gateway is configured".to_owned()));
        };
        let socket = settings.dialer.connect(&gateway.target, place.address).await;
        let socket = socket.map_err(|error| absent(error.to_string()))?;
        let deadline = Instant::now() + settings.handshake_timeout;
        let not_served =
            |ended: Ended| overwhelmed(format!("gateway {gateway} at {}: {ended}", place.address));
        match gateway.security {
            Security::Plaintext => {
                let (tunnel, driver) =
                    tunnel::open(socket, place, renewal, settings, deadline).await.map_err(not_served)?;
                Ok(self.begin(tunnel, driver))
            }
            Security::Tls => {
                let Some(tls) = &settings.tls else {
                    return Err(absent(format!("gateway {gateway}: no TLS is configured for it")));
                };
                let name = settings.server_name.as_deref().unwrap_or(&gateway.target.host);
                let stream = timeout_at(deadline, tls.connect(name, socket)).await;
                let stream = stream
                    .map_err(|_| not_served(Ended::Silent(settings.handshake_timeout)))?
                    .map_err(|error| overwhelmed(error.to_string()))?;
                let (tunnel, driver) =
                    tunnel::open(stream, place, renewal, settings, deadline).await.map_err(not_served)?;
                Ok(self.begin(tunnel, driver))
            }
        }
    }
}
