//! The client: its tunnels, the tasks that see to them, and the life of each tunnel from its first state to its last.
//!
//! What the tasks decide is in files of their own: `keep` (how many), `tend` (which, while all is well), `names` (which addresses there are),
//! `reach` (the way there), `introduce` (our identity), `open` (streams).

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::HeaderValue;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::candidates::Place;
use super::driver::{Driver, Ended};
use super::names::Names;
use super::open::OpenError;
use super::settings::ClientSettings;
use super::signals::Signals;
use super::status::{Counters, Totals, TunnelStatus};
use super::stream::Stream;
use super::tunnel::{Tunnel, TunnelState};

/// Tunnels to gateways. Clones are handles to the same.
#[derive(Debug, Clone)]
pub struct Client {
    pool: Arc<Pool>,
}

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) settings: ClientSettings,
    pub(super) tunnels: Mutex<Vec<Arc<Tunnel>>>,
    pub(super) attempts: Mutex<Vec<Attempt>>,
    names: Mutex<Names>,
    pub(super) signals: Arc<Signals>,
    /// Somebody waits for a tunnel.
    pub(super) waiting: AtomicU32,
    pub(super) wanted: Notify,
    /// Counts up when tunnels are to be replaced by ones with a new certificate.
    pub(super) renewals: watch::Sender<u64>,
    pub(super) stopping: watch::Sender<bool>,
    pub(super) counters: Counters,
}

/// What a keeper is doing while it has no tunnel.
#[derive(Debug, Clone, Default)]
pub(super) struct Attempt {
    /// Whether it is without one.
    pub(super) connecting: bool,
    pub(super) place: Option<Place>,
    pub(super) error: Option<String>,
}

impl Client {
    /// Begins to keep tunnels up. To be called on a current-thread runtime, where the tasks then live.
    #[must_use]
    pub fn start(settings: ClientSettings) -> Self {
        let gateways = settings.gateways.len();
        let keepers = settings.asked_for();
        let pool = Arc::new(Pool {
            settings,
            tunnels: Mutex::default(),
            attempts: Mutex::new(vec![Attempt::default(); keepers + 1]),
            names: Mutex::new(Names::new(gateways)),
            signals: Arc::default(),
            waiting: AtomicU32::new(0),
            wanted: Notify::new(),
            renewals: watch::Sender::new(0),
            stopping: watch::Sender::new(false),
            counters: Counters::default(),
        });
        for keeper in 0..keepers {
            tokio::spawn(Arc::clone(&pool).keep(keeper));
        }
        tokio::spawn(Arc::clone(&pool).tend());
        Self { pool }
    }

    /// A stream to `authority`: on the tunnel with the fewest, on the next if that one breaks before it answers, on the first that
    /// comes up if there is none.
    pub async fn open(&self, authority: &str) -> Result<Stream, OpenError> {
        self.pool.open(authority).await
    }

    /// Every tunnel, and every attempt to have one.
    #[must_use]
    pub fn status(&self) -> Vec<TunnelStatus> {
        self.pool.status()
    }

    /// Whether new streams have somewhere to go now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.pool.is_any_live()
    }

    /// The counters as they are now.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.pool.counters.totals()
    }

    /// The token file has changed: the gateways are shown the new token, before the old one becomes worthless for the streams that
    /// were opened with it.
    pub fn token_changed(&self) {
        self.pool.tunnels().iter().for_each(|tunnel| tunnel.renewed.notify_one());
    }

    /// The certificate or a CA has changed: new tunnels take the place of the old ones, whose streams finish.
    pub fn certificate_changed(&self) {
        self.pool.renewals.send_modify(|renewals| *renewals += 1);
        self.pool.signals.changed.notify_waiters();
    }

    /// No new streams. Returns when the last one has ended.
    pub async fn drain(&self) {
        self.pool.stopping.send_replace(true);
        let tunnels: Vec<_> = self.pool.tunnels().clone();
        tunnels.iter().for_each(|tunnel| tunnel.retire());
        for tunnel in tunnels {
            tunnel.closed().await;
        }
    }
}

impl Pool {
    pub(super) fn token(&self) -> Result<Option<HeaderValue>, http::header::InvalidHeaderValue> {
        let current = self.settings.token.as_ref().map(|file| file.current());
        current.map(|token| HeaderValue::from_str(&token)).transpose()
    }

    pub(super) fn name_of(&self, tunnel: &Tunnel) -> String {
        self.gateway_name(tunnel.place.gateway)
    }

    pub(super) fn gateway_name(&self, gateway: usize) -> String {
        self.settings.gateways.get(gateway).map(ToString::to_string).unwrap_or_default()
    }

    pub(super) fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tunnels(&self) -> MutexGuard<'_, Vec<Arc<Tunnel>>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn attempts(&self) -> MutexGuard<'_, Vec<Attempt>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tunnels that new streams may go to.
    pub(super) fn live(&self) -> Vec<Arc<Tunnel>> {
        self.tunnels().iter().filter(|tunnel| tunnel.is_live()).cloned().collect()
    }

    pub(super) fn is_any_live(&self) -> bool {
        self.tunnels().iter().any(|tunnel| tunnel.is_live())
    }

    /// Adds the tunnel, and has a task drive its connection.
    pub(super) fn begin<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        self: &Arc<Self>,
        tunnel: Arc<Tunnel>,
        driver: Driver<S>,
    ) -> Arc<Tunnel> {
        self.counters.tunnels_opened.fetch_add(1, Relaxed);
        let (gateway, address) = (self.name_of(&tunnel), tunnel.place.address);
        tracing::info!(%gateway, %address, "tunnel up");
        self.tunnels().push(Arc::clone(&tunnel));
        let (pool, driven) = (Arc::clone(self), Arc::clone(&tunnel));
        tokio::spawn(async move {
            let ended = driver.run(&driven).await;
            pool.tunnels().retain(|tunnel| !Arc::ptr_eq(tunnel, &driven));
            pool.signals.left.notify_waiters();
            let (gateway, address) = (pool.name_of(&driven), driven.place.address);
            match ended {
                Ended::Closed => tracing::info!(%gateway, %address, "tunnel closed"),
                ended => tracing::warn!(%gateway, %address, error = %ended, "tunnel lost"),
            }
        });
        tokio::spawn(Arc::clone(self).watch(Arc::clone(&tunnel)));
        tokio::spawn(Arc::clone(self).introduce(Arc::clone(&tunnel)));
        tunnel
    }

    /// Writes down how the state of a tunnel changes, until it is closed.
    pub(super) async fn watch(self: Arc<Self>, tunnel: Arc<Tunnel>) {
        let mut states = tunnel.states();
        let mut last = TunnelState::Live;
        while states.changed().await.is_ok() {
            let state = *states.borrow_and_update();
            let (gateway, address, streams) = (self.name_of(&tunnel), tunnel.place.address, tunnel.streams());
            match (last, state) {
                (_, TunnelState::Closed) => {}
                (_, TunnelState::Suspect) => {
                    self.counters.tunnels_suspect.fetch_add(1, Relaxed);
                    tracing::warn!(%gateway, %address, streams, "the gateway is silent; new streams go elsewhere");
                    // Nor is it the place for the tunnel that stands in: a handshake there would have to run out of time first.
                    self.names().candidates.failed(tunnel.place, Instant::now());
                }
                (_, TunnelState::Draining) => {
                    tracing::info!(%gateway, %address, streams, "tunnel drains; new streams go elsewhere");
                }
                (TunnelState::Suspect, TunnelState::Live) => {
                    tracing::info!(%gateway, %address, streams, "the gateway speaks again");
                    self.names().candidates.succeeded(tunnel.place);
                    self.retire_surplus();
                    self.signals.arrived.notify_waiters();
                }
                (_, TunnelState::Live) => {}
            }
            if state != TunnelState::Live {
                self.signals.left.notify_waiters();
            }
            self.signals.changed.notify_waiters();
            if state == TunnelState::Closed {
                return;
            }
            last = state;
        }
    }
}
