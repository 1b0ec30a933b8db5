//! The state that the supervisor shares with openers of streams and with the status page.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::HeaderValue;

use super::event::Signals;
use super::settings::ClientSettings;
use super::status::{AttemptStatus, Totals, TunnelStatus};
use super::tunnel::{IdentityState, Tunnel};

/// Tunnels and attempts are written by the supervisor only.
#[derive(Debug)]
pub(super) struct View {
    pub(super) settings: ClientSettings,
    pub(super) signals: Arc<Signals>,
    totals: Mutex<Totals>,
    tunnels: Mutex<Vec<Arc<Tunnel>>>,
    attempts: Mutex<Vec<AttemptStatus>>,
    /// Openers that wait for a tunnel.
    waiting: AtomicU32,
    /// How often the certificate was renewed.
    renewals: AtomicU64,
    stopping: AtomicBool,
}

impl View {
    pub(super) fn new(settings: ClientSettings, signals: Arc<Signals>) -> Self {
        Self {
            settings,
            signals,
            totals: Mutex::default(),
            tunnels: Mutex::default(),
            attempts: Mutex::default(),
            waiting: AtomicU32::new(0),
            renewals: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    /// Every tunnel that is not closed.
    pub(super) fn tunnels(&self) -> MutexGuard<'_, Vec<Arc<Tunnel>>> {
        // A panic elsewhere cannot leave the list half changed.
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tunnels that new streams may go to.
    pub(super) fn live(&self) -> Vec<Arc<Tunnel>> {
        self.tunnels().iter().filter(|tunnel| tunnel.is_live()).cloned().collect()
    }

    /// Every attempt to connect a tunnel that is missing, and one for a successor that has failed.
    pub(super) fn attempts(&self) -> MutexGuard<'_, Vec<AttemptStatus>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters.
    pub(super) fn totals(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an opener that waits, until the result is dropped.
    pub(super) fn wait_for_tunnel(&self) -> Demand<'_> {
        self.waiting.fetch_add(1, Relaxed);
        self.signals.changed();
        Demand(self)
    }

    /// Whether an opener waits for a tunnel.
    pub(super) fn has_demand(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }

    /// The certificate or a CA was renewed.
    pub(super) fn renew(&self) {
        self.renewals.fetch_add(1, Relaxed);
        self.signals.changed();
    }

    pub(super) fn renewals(&self) -> u64 {
        self.renewals.load(Relaxed)
    }

    /// No new streams from now on.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Relaxed);
        self.signals.available.notify_waiters();
        self.signals.changed();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    /// The `authorization` header of a request sent now, if a token is configured.
    pub(super) fn token(&self) -> Result<Option<HeaderValue>, http::header::InvalidHeaderValue> {
        let current = self.settings.token.as_ref().map(|file| file.current());
        current.map(|token| HeaderValue::from_str(&token)).transpose()
    }

    pub(super) fn status(&self) -> Vec<TunnelStatus> {
        let mut rows: Vec<TunnelStatus> = self
            .tunnels()
            .iter()
            .map(|tunnel| TunnelStatus {
                gateway: Some(self.gateway_name(tunnel.origin.endpoint.gateway)),
                address: Some(tunnel.origin.endpoint.address),
                state: Some(tunnel.state()),
                streams: tunnel.streams(),
                age: Some(tunnel.since.elapsed()),
                identity: tunnel.identity(),
                error: None,
            })
            .collect();
        rows.extend(self.attempts().iter().map(|attempt| TunnelStatus {
            gateway: attempt.endpoint.map(|endpoint| self.gateway_name(endpoint.gateway)),
            address: attempt.endpoint.map(|endpoint| endpoint.address),
            state: None,
            streams: 0,
            age: None,
            identity: IdentityState::Unknown,
            error: attempt.error.clone(),
        }));
        rows
    }

    /// Returns the address of a gateway as it was configured.
    pub(super) fn gateway_name(&self, gateway: usize) -> String {
        self.settings.gateways.get(gateway).map(ToString::to_string).unwrap_or_default()
    }
}

/// An opener that waits for a tunnel.
pub(super) struct Demand<'a>(&'a View);

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}
