//! As many tunnels as asked for, whatever happens to gateways and networks; and a stream on one of them for whoever asks.
//!
//! One task keeps each tunnel ([`Pool::keep`]): it dials, hands the connection to a task of its own, waits until new streams should not go there
//! any more, and dials again. So a tunnel that drains or is suspect has a successor while its streams go on.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{HeaderValue, StatusCode, uri};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::address::Security;
use super::backoff::{Backoff, Failed, random};
use super::candidates::{Candidates, Place};
use super::settings::ClientSettings;
use super::stream::Stream;
use super::tunnel::{self, Ended, IdentityState, RequestError, Tunnel, TunnelState};
use crate::io::Wire;

/// Between two attempts to better what works: to move one of two tunnels that go to one address, or to replace one that shows an old
/// certificate.
const TEND_AGAIN: Duration = Duration::from_secs(30);

/// A tunnel that is lost is replaced within this time, and not by all nodes at once.
const REPLACE_WITHIN: Duration = Duration::from_secs(2);

/// The same while somebody waits for it.
const RETURN_WITHIN: Duration = Duration::from_millis(200);

/// Between two times a gateway that does not accept our identity is asked whether it does by now.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// A name whose gateways fail is resolved again, but not more often than this.
const RESOLVE_AGAIN: Duration = Duration::from_secs(1);

/// Tunnels to gateways. Clones are handles to the same.
#[derive(Debug, Clone)]
pub struct Client {
    pool: Arc<Pool>,
}

/// Why there is no stream.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The gateway says no.
    #[error("gateway {gateway} refused with {status}: {reason}")]
    Refused {
        /// Which.
        gateway: String,
        /// The status of its answer.
        status: StatusCode,
        /// Its reason.
        reason: Box<str>,
    },
    /// No tunnel came up in time.
    #[error("no tunnel to a gateway within {waited:?}: {last}")]
    NoTunnel {
        /// How long that was.
        waited: Duration,
        /// What failed last.
        last: String,
    },
    /// The gateways that were asked did not answer.
    #[error("no gateway answered within {waited:?}; last asked: {gateway}")]
    Unanswered {
        /// How long that was.
        waited: Duration,
        /// The one asked last.
        gateway: String,
    },
    /// No request can be made of the authority or the token.
    #[error("{0}")]
    Unsendable(String),
    /// [`Client::drain`] was called.
    #[error("no new streams: stopping")]
    Stopping,
}

/// One tunnel, or the attempt to have one.
#[derive(Debug, Clone)]
pub struct TunnelStatus {
    /// The gateway as configured; `None` while none is chosen.
    pub gateway: Option<String>,
    /// The address connected to: the gateway's, or that of the proxy.
    pub address: Option<SocketAddr>,
    /// `None`: being connected.
    pub state: Option<TunnelState>,
    /// Streams open on it.
    pub streams: u32,
    /// For how long it has been up.
    pub age: Option<Duration>,
    /// What the gateway thinks of us.
    pub identity: IdentityState,
    /// Why the last attempt failed, while there is no tunnel.
    pub error: Option<String>,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tunnels that came up.
    pub tunnels_opened: u64,
    /// Attempts that failed.
    pub tunnel_failures: u64,
    /// Tunnels that became suspect.
    pub tunnels_suspect: u64,
    /// Streams opened.
    pub streams_opened: u64,
    /// Requests a gateway refused.
    pub streams_refused: u64,
    /// Requests that had to be sent again on another tunnel.
    pub streams_retried: u64,
}

#[derive(Debug, Default)]
struct Counters {
    tunnels_opened: AtomicU64,
    tunnel_failures: AtomicU64,
    tunnels_suspect: AtomicU64,
    streams_opened: AtomicU64,
    streams_refused: AtomicU64,
    streams_retried: AtomicU64,
}

#[derive(Debug)]
struct Pool {
    settings: ClientSettings,
    tunnels: Mutex<Vec<Arc<Tunnel>>>,
    attempts: Mutex<Vec<Attempt>>,
    addresses: tokio::sync::Mutex<Addresses>,
    /// A tunnel came up, or came back.
    arrived: Notify,
    /// Somebody waits for a tunnel.
    waiting: AtomicU32,
    wanted: Notify,
    /// A tunnel is not live any more.
    left: Notify,
    /// Counts up when tunnels are to be replaced by ones with a new certificate.
    renewals: watch::Sender<u64>,
    stopping: watch::Sender<bool>,
    counters: Counters,
}

/// What a keeper is doing while it has no tunnel.
#[derive(Debug, Clone, Default)]
struct Attempt {
    /// Whether it is without one.
    connecting: bool,
    place: Option<Place>,
    error: Option<String>,
}

/// What the names of the gateways resolve to, and for how long.
#[derive(Debug, Default)]
struct Addresses {
    candidates: Candidates,
    /// In the order of the settings.
    names: Vec<Name>,
}

/// What is known of one gateway's name.
#[derive(Debug, Clone, Default)]
struct Name {
    asked: Option<Instant>,
    /// When its addresses are to be asked for again, if ever.
    until: Option<Instant>,
    /// An address of it failed: it may lead elsewhere by now.
    doubted: bool,
}

impl Name {
    fn is_due(&self, now: Instant) -> bool {
        let Some(asked) = self.asked else { return true };
        let old = self.until.is_some_and(|until| until <= now);
        (old || self.doubted) && now.duration_since(asked) >= RESOLVE_AGAIN
    }
}

/// An attempt that failed, in words.
struct Failure {
    how: Failed,
    message: String,
}

impl Client {
    /// Begins to keep tunnels up. To be called on a current-thread runtime, where the tasks then live.
    #[must_use]
    pub fn start(settings: ClientSettings) -> Self {
        let gateways = settings.gateways.len();
        let keepers = settings.tunnels.max(1);
        let addresses =
            Addresses { candidates: Candidates::default(), names: vec![Name::default(); gateways] };
        let pool = Arc::new(Pool {
            settings,
            tunnels: Mutex::default(),
            attempts: Mutex::new(vec![Attempt::default(); keepers + 1]),
            addresses: tokio::sync::Mutex::new(addresses),
            arrived: Notify::new(),
            waiting: AtomicU32::new(0),
            wanted: Notify::new(),
            left: Notify::new(),
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
        let counters = &self.pool.counters;
        Totals {
            tunnels_opened: counters.tunnels_opened.load(Relaxed),
            tunnel_failures: counters.tunnel_failures.load(Relaxed),
            tunnels_suspect: counters.tunnels_suspect.load(Relaxed),
            streams_opened: counters.streams_opened.load(Relaxed),
            streams_refused: counters.streams_refused.load(Relaxed),
            streams_retried: counters.streams_retried.load(Relaxed),
        }
    }

    /// The token file has changed: the gateways are shown the new token, before the old one becomes worthless for the streams that
    /// were opened with it.
    pub fn token_changed(&self) {
        let tunnels: Vec<_> = self.pool.tunnels().clone();
        for tunnel in tunnels {
            tokio::spawn(Arc::clone(&self.pool).show_identity(tunnel));
        }
    }

    /// The certificate or a CA has changed: new tunnels take the place of the old ones, whose streams finish.
    pub fn certificate_changed(&self) {
        self.pool.renewals.send_modify(|renewals| *renewals += 1);
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

// === open ===

impl Pool {
    async fn open(&self, authority: &str) -> Result<Stream, OpenError> {
        let unsendable = |error: &dyn fmt::Display| OpenError::Unsendable(format!("{authority}: {error}"));
        let parsed = uri::Authority::try_from(authority).map_err(|error| unsendable(&error))?;
        let token = self.token().map_err(|error| unsendable(&error))?;
        let started = Instant::now();
        let deadline = started + self.settings.open_timeout;
        let mut tried: Vec<Arc<Tunnel>> = Vec::new();
        let mut last_asked = None;
        let mut refused = None;
        loop {
            if *self.stopping.borrow() {
                return Err(OpenError::Stopping);
            }
            let Some(tunnel) = self.best(&tried) else {
                // Every gateway that could be asked has said no; waiting for another would not change its mind.
                if let Some(refused) = refused {
                    return Err(refused);
                }
                if timeout_at(deadline, self.another(&tried)).await.is_ok() {
                    // Also one that was silent before may be back.
                    last_asked = tried.pop().or(last_asked);
                    tried.clear();
                    continue;
                }
                let waited = started.elapsed();
                return Err(match tried.last().or(last_asked.as_ref()) {
                    Some(tunnel) => OpenError::Unanswered { waited, gateway: self.name_of(tunnel) },
                    None => OpenError::NoTunnel { waited, last: self.last_error() },
                });
            };
            if !tried.is_empty() {
                self.counters.streams_retried.fetch_add(1, Relaxed);
            }
            match tunnel.connect(parsed.clone(), token.as_ref(), deadline, &self.settings).await {
                Ok(stream) => {
                    self.counters.streams_opened.fetch_add(1, Relaxed);
                    return Ok(stream);
                }
                Err(RequestError::Refused { status, reason }) => {
                    self.counters.streams_refused.fetch_add(1, Relaxed);
                    let gateway = self.name_of(&tunnel);
                    let no = OpenError::Refused { gateway, status, reason };
                    if !may_differ(status) {
                        return Err(no);
                    }
                    refused = Some(no);
                }
                Err(RequestError::Unsendable(error)) => return Err(unsendable(&error)),
                Err(RequestError::Broken(_) | RequestError::Silent) => {}
            }
            tried.push(tunnel);
        }
    }

    /// The live tunnel with the fewest streams, of those not `tried`.
    fn best(&self, tried: &[Arc<Tunnel>]) -> Option<Arc<Tunnel>> {
        let tunnels = self.tunnels();
        let fit = tunnels.iter().filter(|tunnel| {
            tunnel.is_live() && !tunnel.is_full() && !tried.iter().any(|other| Arc::ptr_eq(other, tunnel))
        });
        fit.min_by_key(|tunnel| tunnel.streams()).cloned()
    }

    /// Waits for a tunnel that was not tried, or has come back since.
    async fn another(&self, tried: &[Arc<Tunnel>]) {
        let _waiting = Waiting::new(self);
        loop {
            let arrived = self.arrived.notified();
            if self.best(tried).is_some() {
                return;
            }
            arrived.await;
            if self.is_any_live() {
                return;
            }
        }
    }

    fn token(&self) -> Result<Option<HeaderValue>, http::header::InvalidHeaderValue> {
        let current = self.settings.token.as_ref().map(|file| file.current());
        current.map(|token| HeaderValue::from_str(&token)).transpose()
    }

    fn name_of(&self, tunnel: &Tunnel) -> String {
        self.gateway_name(tunnel.place.gateway)
    }

    fn gateway_name(&self, gateway: usize) -> String {
        self.settings.gateways.get(gateway).map(ToString::to_string).unwrap_or_default()
    }

    fn last_error(&self) -> String {
        let attempts = self.attempts();
        let error = attempts.iter().find_map(|attempt| attempt.error.clone());
        error.unwrap_or_else(|| "still connecting".to_owned())
    }

    fn tunnels(&self) -> MutexGuard<'_, Vec<Arc<Tunnel>>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attempts(&self) -> MutexGuard<'_, Vec<Attempt>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Vec<TunnelStatus> {
        let up = self
            .tunnels()
            .iter()
            .map(|tunnel| TunnelStatus {
                gateway: Some(self.name_of(tunnel)),
                address: Some(tunnel.place.address),
                state: Some(tunnel.state()),
                streams: tunnel.streams(),
                age: Some(tunnel.since.elapsed()),
                identity: tunnel.identity(),
                error: None,
            })
            .collect::<Vec<_>>();
        let attempts = self.attempts().clone();
        let connecting =
            attempts.into_iter().filter(|attempt| attempt.connecting).map(|attempt| TunnelStatus {
                gateway: attempt.place.map(|place| self.gateway_name(place.gateway)),
                address: attempt.place.map(|place| place.address),
                state: None,
                streams: 0,
                age: None,
                identity: IdentityState::Unknown,
                error: attempt.error,
            });
        up.into_iter().chain(connecting).collect()
    }
}

/// Whether another gateway may have another answer: one that does not know the cluster yet, is over its budget, or stops.
fn may_differ(status: StatusCode) -> bool {
    status == StatusCode::NOT_FOUND || status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}

/// Somebody who waits for a tunnel, counted.
struct Waiting<'a>(&'a Pool);

impl<'a> Waiting<'a> {
    fn new(pool: &'a Pool) -> Self {
        pool.waiting.fetch_add(1, Relaxed);
        pool.wanted.notify_waiters();
        Self(pool)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

// === keep ===

impl Pool {
    /// Fills one place among the live tunnels, again and again, until the client stops.
    async fn keep(self: Arc<Self>, keeper: usize) {
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            _ = stopping.wait_for(|stopping| *stopping) => {}
            () = self.keep_on(keeper) => {}
        }
        self.attempt(keeper, |attempt| *attempt = Attempt::default());
    }

    async fn keep_on(self: &Arc<Self>, keeper: usize) {
        let mut backoff = Backoff::default();
        // The first time nobody has anything to wait for.
        let (mut unwanted, mut wanted) = (Duration::ZERO, Duration::ZERO);
        loop {
            self.needed(keeper).await;
            self.rest(unwanted, wanted).await;
            while let Err(failure) = self.dial(keeper, false).await {
                let wait = backoff.failed(failure.how, random());
                self.note(keeper, failure);
                self.rest(wait.unwanted, wait.wanted).await;
            }
            backoff.succeeded();
            self.attempt(keeper, |attempt| *attempt = Attempt::default());
            self.retire_surplus();
            let spread = random();
            (unwanted, wanted) = (REPLACE_WITHIN.mul_f64(spread), RETURN_WITHIN.mul_f64(spread));
        }
    }

    /// Returns when there is a tunnel too few, and this keeper is the one to replace it.
    async fn needed(&self, keeper: usize) {
        loop {
            let left = self.left.notified();
            if self.claim(keeper) {
                return;
            }
            left.await;
        }
    }

    /// Takes it upon this keeper to connect, unless there are tunnels and attempts enough.
    fn claim(&self, keeper: usize) -> bool {
        let live = self.tunnels().iter().filter(|tunnel| tunnel.is_live()).count();
        let mut attempts = self.attempts();
        let connecting = attempts.iter().filter(|attempt| attempt.connecting).count();
        let few = live + connecting < self.settings.tunnels.max(1);
        if few && let Some(attempt) = attempts.get_mut(keeper) {
            attempt.connecting = true;
        }
        few
    }

    /// Betters the tunnels that are up, until the client stops: after a renewal of the certificate each gets a successor, and where two
    /// go to one address while another has none, one of them moves.
    async fn tend(self: Arc<Self>) {
        let mut renewals = self.renewals.subscribe();
        let mut stopping = self.stopping.subscribe();
        // Its attempts stand behind those of the keepers.
        let own = self.settings.tunnels.max(1);
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stopping| *stopping) => return,
                _ = renewals.changed() => {}
                () = sleep(TEND_AGAIN.mul_f64(0.5 + random())), if self.could_be_better() => {}
            }
            // Not all nodes of a cluster at once, as their certificates may well change at once.
            sleep(REPLACE_WITHIN.mul_f64(random())).await;
            while let Some(old) = self.outdated() {
                if let Err(failure) = self.dial(own, false).await {
                    self.note(own, failure);
                    break;
                }
                old.retire();
            }
            if let Some(doubled) = self.doubled()
                && self.dial(own, true).await.is_ok()
            {
                doubled.retire();
            }
            self.attempt(own, |attempt| *attempt = Attempt::default());
        }
    }

    fn could_be_better(&self) -> bool {
        self.outdated().is_some() || self.doubled().is_some()
    }

    /// A live tunnel from before the last renewal.
    fn outdated(&self) -> Option<Arc<Tunnel>> {
        let renewals = *self.renewals.borrow();
        self.tunnels().iter().find(|tunnel| tunnel.is_live() && tunnel.renewal < renewals).cloned()
    }

    /// Of two live tunnels to one address, the one with fewer streams.
    fn doubled(&self) -> Option<Arc<Tunnel>> {
        let tunnels = self.tunnels();
        let live = || tunnels.iter().filter(|tunnel| tunnel.is_live());
        let doubled = live()
            .filter(|tunnel| live().filter(|other| other.place.address == tunnel.place.address).count() > 1);
        doubled.min_by_key(|tunnel| tunnel.streams()).cloned()
    }

    fn is_any_live(&self) -> bool {
        self.tunnels().iter().any(|tunnel| tunnel.is_live())
    }

    /// Rests: `wanted` while somebody waits for a tunnel, else `unwanted`.
    async fn rest(&self, unwanted: Duration, wanted: Duration) {
        let began = Instant::now();
        let _ = timeout(unwanted, async {
            loop {
                let asked = self.wanted.notified();
                if self.waiting.load(Relaxed) > 0 {
                    return;
                }
                asked.await;
            }
        })
        .await;
        let rest = (began + wanted.min(unwanted)).saturating_duration_since(Instant::now());
        if !rest.is_zero() {
            sleep(rest).await;
        }
    }

    fn attempt(&self, keeper: usize, change: impl FnOnce(&mut Attempt)) {
        if let Some(attempt) = self.attempts().get_mut(keeper) {
            change(attempt);
        }
    }

    /// Takes note of a failed attempt, and writes it down unless it failed like that before.
    fn note(&self, keeper: usize, failure: Failure) {
        self.counters.tunnel_failures.fetch_add(1, Relaxed);
        let message = failure.message;
        self.attempt(keeper, |attempt| {
            if attempt.error.as_ref() == Some(&message) {
                tracing::debug!(error = %message, "still no tunnel");
            } else {
                tracing::warn!(error = %message, "no tunnel; trying on");
                attempt.error = Some(message);
            }
        });
    }

    /// Chooses an address, connects, and has the tunnel driven. With `unused`, only to an address that no tunnel goes to.
    async fn dial(self: &Arc<Self>, keeper: usize, unused: bool) -> Result<Arc<Tunnel>, Failure> {
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

    async fn choose(&self, unused: bool) -> Result<Place, Failure> {
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

    async fn dial_to(self: &Arc<Self>, place: Place) -> Result<Arc<Tunnel>, Failure> {
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

    /// Adds the tunnel, and has a task drive its connection.
    fn begin<S: AsyncRead + AsyncWrite + Wire + Unpin + Send + 'static>(
        self: &Arc<Self>,
        tunnel: Arc<Tunnel>,
        driver: tunnel::Driver<S>,
    ) -> Arc<Tunnel> {
        self.counters.tunnels_opened.fetch_add(1, Relaxed);
        let (gateway, address) = (self.name_of(&tunnel), tunnel.place.address);
        tracing::info!(%gateway, %address, "tunnel up");
        self.tunnels().push(Arc::clone(&tunnel));
        let (pool, driven) = (Arc::clone(self), Arc::clone(&tunnel));
        tokio::spawn(async move {
            let ended = driver.run(&driven).await;
            pool.tunnels().retain(|tunnel| !Arc::ptr_eq(tunnel, &driven));
            pool.left.notify_waiters();
            let (gateway, address) = (pool.name_of(&driven), driven.place.address);
            match ended {
                Ended::Closed => tracing::info!(%gateway, %address, "tunnel closed"),
                ended => tracing::warn!(%gateway, %address, error = %ended, "tunnel lost"),
            }
        });
        tokio::spawn(Arc::clone(self).watch(Arc::clone(&tunnel)));
        tokio::spawn(Arc::clone(self).show_identity(Arc::clone(&tunnel)));
        tunnel
    }

    /// Writes down how the state of a tunnel changes, until it is closed.
    async fn watch(self: Arc<Self>, tunnel: Arc<Tunnel>) {
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
                    self.addresses.lock().await.candidates.failed(tunnel.place, Instant::now());
                }
                (_, TunnelState::Draining) => {
                    tracing::info!(%gateway, %address, streams, "tunnel drains; new streams go elsewhere");
                }
                (TunnelState::Suspect, TunnelState::Live) => {
                    tracing::info!(%gateway, %address, streams, "the gateway speaks again");
                    self.addresses.lock().await.candidates.succeeded(tunnel.place);
                    self.retire_surplus();
                    self.arrived.notify_waiters();
                }
                (_, TunnelState::Live) => {}
            }
            if state != TunnelState::Live {
                self.left.notify_waiters();
            }
            last = state;
        }
    }

    /// After a silence there may be more live tunnels than asked for: those with the fewest streams go.
    fn retire_surplus(&self) {
        let live: Vec<_> = self.tunnels().iter().filter(|tunnel| tunnel.is_live()).cloned().collect();
        let surplus = live.len().saturating_sub(self.settings.tunnels.max(1));
        let mut by_streams = live;
        by_streams.sort_by_key(|tunnel| (tunnel.streams(), std::cmp::Reverse(tunnel.since)));
        by_streams.iter().take(surplus).for_each(|tunnel| tunnel.retire());
    }

    /// Has the gateway say what it thinks of our identity, before the first pod needs to know; and again while it does not accept it, for
    /// what it knows of us may be older than what we show.
    async fn show_identity(self: Arc<Self>, tunnel: Arc<Tunnel>) {
        let gateway = self.name_of(&tunnel);
        let authority = match uri::Authority::try_from(&*self.settings.authority) {
            Ok(authority) => authority,
            Err(error) => {
                tracing::error!(authority = %self.settings.authority, %error, "not an authority");
                return;
            }
        };
        let mut known = None;
        loop {
            let Ok(token) = self.token() else {
                tracing::error!("the token cannot be sent: it holds characters that no header may have");
                return;
            };
            let asked = tunnel.refresh_identity(authority.clone(), token.as_ref(), &self.settings).await;
            if let Err(error) = asked {
                tracing::debug!(%gateway, %error, "the gateway was not asked about our identity");
                return;
            }
            let identity = tunnel.identity();
            match &identity {
                IdentityState::Refused { status, reason } if known.as_ref() != Some(&identity) => {
                    tracing::error!(%gateway, %status, %reason, "the gateway does not accept our identity");
                }
                IdentityState::Refused { .. } => {}
                IdentityState::Accepted | IdentityState::Unknown => {
                    if known.is_some() {
                        tracing::info!(%gateway, "the gateway accepts our identity now");
                    }
                    return;
                }
            }
            known = Some(identity);
            tokio::select! {
                () = sleep(ASK_AGAIN.mul_f64(0.5 + random())) => {}
                () = tunnel.closed() => return,
            }
        }
    }
}
