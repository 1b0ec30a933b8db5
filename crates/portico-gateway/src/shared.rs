//! The state that all workers share: settings, routes, counters, and the clock.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::time::Duration;

use portico_api::policy::Percent;
use portico_net::access::AccessLog;
use portico_net::line_limit::{LineLimit, Pace};
use portico_net::slots::{Slot, Slots, Source};
use portico_net::{ConnectionId, ConnectionIds};
use portico_routes::route::Front;
use portico_routes::table::Update;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::access::{Line, Refused};
use crate::auth::Identities;
use crate::config::{Config, ProxyMode};
use crate::descriptors::Descriptors;
use crate::fair_share::FairShare;
use crate::outcome::{End, Refusal, Side};
use crate::route_store::{Applied, RouteStore};
use crate::upstream::OwnListeners;

/// What all workers share.
#[derive(Debug)]
pub struct Shared {
    /// The settings of this process.
    pub config: Config,
    /// The routes.
    pub route_store: RouteStore,
    /// Where access lines go.
    pub access: AccessLog,
    /// Authentication of tunnel clients.
    pub identities: Identities,
    /// Where no upstream connection may lead.
    pub(crate) own: OwnListeners,
    /// Whether the Service in front keeps the addresses of clients.
    pub(crate) front_keeps_addresses: AtomicBool,
    started: Instant,
    ids: ConnectionIds,
    handshakes: Arc<Slots>,
    pub(crate) descriptors: Arc<Descriptors>,
    accepted: AtomicU64,
    accept_errors: AtomicU64,
    /// Clients refused, in the order of [`Refusal::ALL`].
    refusals: [AtomicU64; Refusal::ALL.len()],
    ends: [AtomicU64; End::ALL.len()],
    /// Limit of log lines about refused clients whose cluster is not known.
    lines: LineLimit,
    lines_left_out: AtomicU64,
    draining: watch::Sender<bool>,
    alive: AtomicU64,
    all_ended: Notify,
}

/// Counters of the whole process at one moment.
#[derive(Debug, Clone)]
pub struct Totals {
    /// Connections accepted, tunnel streams not included.
    pub accepted: u64,
    /// Calls to accept(2) that failed.
    pub accept_errors: u64,
    /// Whether accepting rests now, on any listener, for lack of descriptors.
    pub accept_rests_now: bool,
    /// Times it began to rest.
    pub accept_rests: u64,
    /// Connections that have not yet sent where they want to go.
    pub handshakes: u32,
    /// Bytes that the connections of all clusters take.
    pub connection_memory: usize,
    /// Descriptors that they take.
    pub connection_descriptors: u32,
    /// Refused clients whose access line was left out.
    pub lines_left_out: u64,
    /// Clients refused, in the order of [`Refusal::ALL`].
    pub refusals: [u64; Refusal::ALL.len()],
    /// Connections ended, in the order of [`End::ALL`].
    pub ends: [u64; End::ALL.len()],
}

impl Shared {
    pub(crate) fn new(config: Config, access: AccessLog) -> Self {
        Self {
            identities: Identities::new(&config),
            handshakes: Slots::new(
                config.max_handshakes,
                "connections that have not said where they want to go",
            ),
            own: OwnListeners::new(&config),
            front_keeps_addresses: AtomicBool::default(),
            route_store: RouteStore::new(FairShare::new(
                config.connection_memory,
                config.connection_descriptors,
                &config.tunnel.memory,
                config.budget.fair_share.unwrap_or(Percent::HALF),
            )),
            config,
            access,
            started: Instant::now(),
            ids: ConnectionIds::default(),
            descriptors: Arc::default(),
            accepted: AtomicU64::default(),
            accept_errors: AtomicU64::default(),
            refusals: Default::default(),
            ends: Default::default(),
            lines: LineLimit::default(),
            lines_left_out: AtomicU64::default(),
            draining: watch::Sender::new(false),
            alive: AtomicU64::default(),
            all_ended: Notify::new(),
        }
    }

    /// Applies what changed about the routes, and about the way to the gateway itself.
    pub(crate) fn apply(&self, update: &Update) -> Applied {
        let mut applied = self.route_store.apply(update);
        if let Some(front) = applied.front.take() {
            self.set_front(front);
        }
        applied
    }

    fn set_front(&self, front: Option<Front>) {
        self.front_keeps_addresses.store(front.as_ref().is_some_and(|front| front.keeps_addresses), Relaxed);
        self.own.set_replicas(front.map(|front| front.replicas).unwrap_or_default());
    }

    /// Time since the gateway started: the clock of everything that is not shown to people.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The counters as they are now.
    pub fn totals(&self) -> Totals {
        let (connection_memory, connection_descriptors) = self.route_store.fair_share().taken();
        Totals {
            connection_memory,
            connection_descriptors,
            accepted: self.accepted.load(Relaxed),
            accept_errors: self.accept_errors.load(Relaxed),
            accept_rests_now: self.descriptors.are_short(),
            accept_rests: self.descriptors.rests(),
            handshakes: self.handshakes.count(),
            lines_left_out: self.lines_left_out.load(Relaxed),
            refusals: std::array::from_fn(|index| self.refusals[index].load(Relaxed)),
            ends: std::array::from_fn(|index| self.ends[index].load(Relaxed)),
        }
    }

    /// Whether the gateway is stopping.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    pub(crate) fn draining(&self) -> &watch::Sender<bool> {
        &self.draining
    }

    /// Keeps the gateway from having ended while the returned guard is held.
    pub(crate) fn alive(self: &Arc<Self>) -> Alive {
        self.alive.fetch_add(1, SeqCst);
        Alive(Arc::clone(self))
    }

    /// Returns once no [`Alive`] is held.
    pub(crate) async fn all_ended(&self) {
        loop {
            let ended = self.all_ended.notified();
            if self.alive.load(SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }

    pub(crate) fn next_id(&self) -> ConnectionId {
        self.ids.next()
    }

    pub(crate) fn count_accepted(&self) {
        self.accepted.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_accept_error(&self) {
        self.accept_errors.fetch_add(1, Relaxed);
    }

    /// Logs that descriptors are out, unless it did so just now.
    pub(crate) fn warn_of_descriptors(&self) {
        if self.descriptors.may_warn(self.now()) {
            tracing::error!(
                "out of file descriptors: open connections go on, new ones wait in the kernel; raise \
                 the limit (ulimit -n)"
            );
        }
    }

    pub(crate) fn count_end(&self, end: End) {
        self.ends[end.index()].fetch_add(1, Relaxed);
    }

    /// Counts a refused client and writes its access line. The cluster counts it too, where that is known.
    pub(crate) fn refuse(&self, refused: &Refused<'_>) {
        self.refusals[refused.refusal as usize].fetch_add(1, Relaxed);
        let now = self.now();
        if let Some(upstream) = refused.upstream {
            upstream.cluster.count_refusal(refused.refusal);
            // A client that is itself the cause does not count as a user of this way in.
            if refused.refusal.side() != Side::Downstream {
                upstream.cluster.count_turned_away(refused.listener.kind(), refused.client.ip(), now);
            }
        }
        if refused.refusal == Refusal::OutOfDescriptors {
            self.warn_of_descriptors();
        }
        let limit = refused.upstream.map_or(&self.lines, |upstream| &upstream.cluster.lines);
        match limit.admit(Pace::ACCESS, now) {
            Some(left_out) => self.access.write(|| Line::refused(now, refused, left_out)),
            None => drop(self.lines_left_out.fetch_add(1, Relaxed)),
        }
    }

    /// Takes a slot of those for connections that have not yet sent where they want to go.
    pub(crate) fn start_handshake(&self, peer: IpAddr, mode: ProxyMode) -> Slot {
        let is_hop = mode != ProxyMode::Off && self.config.proxy_protocol.trusts(peer);
        self.handshakes.enter((!is_hop).then(|| Source::of(peer)))
    }
}

/// An accepted connection that has not ended.
#[derive(Debug)]
pub(crate) struct Alive(Arc<Shared>);

impl Drop for Alive {
    fn drop(&mut self) {
        if self.0.alive.fetch_sub(1, SeqCst) == 1 && self.0.is_draining() {
            self.0.all_ended.notify_waiters();
        }
    }
}
