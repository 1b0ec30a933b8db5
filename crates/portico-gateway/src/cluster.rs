//! The counters and bounds of one user cluster on a gateway. Shared by all workers; nothing here waits.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use portico_api::listener::ListenerKind;
use portico_api::names::Tenant;
use portico_api::policy::{Budget, Percent};
use portico_net::MemoryBudget;
use portico_net::line_limit::LineLimit;
use portico_net::rate::Rate;

use crate::doors::{Client, DoorSnapshot, Doors};
use crate::fair_share::{Cost, FairShare, ShareUse, Taken};
use crate::outcome::{End, Refusal, Side};

/// Upper bounds, in seconds, of the handshake time histogram. A connect on the same network takes well below
/// a millisecond. The slowest one admitted takes three timeouts of one second.
pub const HANDSHAKE_BUCKETS: [f64; 8] = [0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 3.0];

/// One user cluster on this gateway.
#[derive(Debug)]
pub struct Cluster {
    /// Its name.
    pub name: Tenant,
    /// When counting began here. Nothing is known of the time before.
    pub since: Timestamp,
    open: AtomicU32,
    connecting: AtomicU32,
    tunnels: AtomicU32,
    taken: Taken,
    fair_share: Arc<FairShare>,
    rate: Rate,
    /// Limit of log lines about its refused clients.
    pub(crate) lines: LineLimit,
    /// Made when there is something to count. Of ten thousand clusters many get no connection here, and these
    /// counters are most of the size of one.
    counters: OnceLock<Box<Counters>>,
}

/// What only ever grows.
#[derive(Debug, Default)]
struct Counters {
    doors: Doors,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
    connect_failures: AtomicU64,
    refusals: [AtomicU64; Refusal::ALL.len()],
    handshakes: [AtomicU64; HANDSHAKE_BUCKETS.len() + 1],
    handshake_nanos: AtomicU64,
}

impl Cluster {
    pub(crate) fn new(name: Tenant, fair_share: Arc<FairShare>) -> Self {
        Self {
            name,
            since: Timestamp::now(),
            open: AtomicU32::default(),
            connecting: AtomicU32::default(),
            tunnels: AtomicU32::default(),
            taken: Taken::default(),
            fair_share,
            rate: Rate::default(),
            lines: LineLimit::default(),
            counters: OnceLock::new(),
        }
    }

    /// What bounds the bytes that its tunnels hold.
    pub(crate) fn memory(&self) -> &MemoryBudget {
        self.fair_share.held(&self.taken)
    }

    /// Its own part of the gateway, or none.
    pub(crate) fn set_fair_share(&self, part: Option<Percent>) {
        self.taken.set_part(part);
    }

    /// What it takes of the gateway, and may.
    pub fn share_use(&self) -> ShareUse {
        self.fair_share.used_by(&self.taken)
    }

    fn counters(&self) -> &Counters {
        self.counters.get_or_init(Box::default)
    }

    /// Takes one connection out of the budget, or says why not. `now` is the time since the gateway started.
    pub(crate) fn admit(
        self: &Arc<Self>,
        budget: Budget,
        cost: Cost,
        now: Duration,
    ) -> Result<OpenGuard, Refusal> {
        let most = budget.max_connections.unwrap_or(u32::MAX);
        let open = OpenGuard::take(self, |cluster| &cluster.open, most, Refusal::MaxConnections, cost)?;
        if budget.max_connections_per_second.is_some_and(|rate| !self.rate.take(rate, now)) {
            return Err(Refusal::ConnectionRate);
        }
        Ok(open)
    }

    /// Takes what a tunnel connection needs that has authenticated for this cluster. Its streams are admitted
    /// one by one.
    pub(crate) fn admit_tunnel(self: &Arc<Self>) -> Result<OpenGuard, Refusal> {
        OpenGuard::take(self, |cluster| &cluster.tunnels, u32::MAX, Refusal::FairShare, Cost::TUNNEL)
    }

    /// Takes a slot of those for connections that wait for an endpoint.
    pub(crate) fn start_connecting(self: &Arc<Self>, most: u32) -> Result<OpenGuard, Refusal> {
        OpenGuard::take(self, |cluster| &cluster.connecting, most, Refusal::MaxConnecting, Cost::NOTHING)
    }

    /// Whether a connection of it is open.
    pub(crate) fn is_in_use(&self) -> bool {
        self.open.load(Relaxed) > 0 || self.tunnels.load(Relaxed) > 0
    }

    pub(crate) fn count_refusal(&self, refusal: Refusal) {
        self.counters().refusals[refusal as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn count_connect_failure(&self) {
        self.counters().connect_failures.fetch_add(1, Relaxed);
    }

    /// Counts a connection that has reached an endpoint; [`Self::count_ended`] is its end.
    pub(crate) fn count_established(&self, listener: ListenerKind, handshake: Duration) {
        let counters = self.counters();
        counters.doors.opened(listener);
        let seconds = handshake.as_secs_f64();
        let bucket = HANDSHAKE_BUCKETS.iter().position(|&bound| seconds <= bound);
        counters.handshakes[bucket.unwrap_or(HANDSHAKE_BUCKETS.len())].fetch_add(1, Relaxed);
        let nanos = u64::try_from(handshake.as_nanos()).unwrap_or(u64::MAX);
        counters.handshake_nanos.fetch_add(nanos, Relaxed);
    }

    /// Counts the end of a connection, `now` in the time since the gateway started.
    pub(crate) fn count_ended(
        &self,
        listener: ListenerKind,
        client: IpAddr,
        (up, down): (u64, u64),
        end: End,
        now: Duration,
    ) {
        let counters = self.counters();
        counters.bytes_up.fetch_add(up, Relaxed);
        counters.bytes_down.fetch_add(down, Relaxed);
        // Load balancers and scanners only look whether a port is open. A client that the endpoint resets may
        // have had no time to say anything.
        let used = listener != ListenerKind::NodePort || up > 0 || end == End::Reset(Side::Upstream);
        counters.doors.ended(listener, used.then_some(client), now);
    }

    /// Counts a client that would have been served, but for the gateway or the endpoints.
    pub(crate) fn count_turned_away(&self, listener: ListenerKind, client: IpAddr, now: Duration) {
        self.counters().doors.used(listener, client, now);
    }

    /// The connections by each kind of listener, in the order of [`ListenerKind::ALL`].
    pub fn doors(&self) -> [DoorSnapshot; ListenerKind::ALL.len()] {
        self.counters.get().map(|counters| counters.doors.snapshots()).unwrap_or_default()
    }

    /// The clients that used a kind of listener last, apart from connections that are open: a bounded number.
    pub fn last_clients(&self, listener: ListenerKind) -> Vec<Client> {
        self.counters.get().map(|counters| counters.doors.clients(listener)).unwrap_or_default()
    }

    /// The counters as they are now. Bytes are those of connections that have ended.
    pub fn snapshot(&self) -> ClusterSnapshot {
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        let idle = Counters::default();
        // Not `counters()`: asking is no reason to make them.
        let counters = self.counters.get().map_or(&idle, |counters| &**counters);
        let doors = counters.doors.snapshots();
        ClusterSnapshot {
            open: self.open.load(Relaxed),
            connecting: self.connecting.load(Relaxed),
            tunnels: self.tunnels.load(Relaxed),
            total: doors.iter().map(|door| door.opened).sum(),
            doors,
            bytes_up: load(&counters.bytes_up),
            bytes_down: load(&counters.bytes_down),
            connect_failures: load(&counters.connect_failures),
            refusals: Refusal::ALL.map(|refusal| load(&counters.refusals[refusal as usize])),
            handshakes: std::array::from_fn(|bucket| load(&counters.handshakes[bucket])),
            handshake_seconds: Duration::from_nanos(load(&counters.handshake_nanos)).as_secs_f64(),
        }
    }
}

/// The counters of one cluster at one moment.
#[derive(Debug, Clone)]
pub struct ClusterSnapshot {
    /// Connections and tunnel streams open now, those that still connect included.
    pub open: u32,
    /// How many of the open ones still wait for an endpoint to accept.
    pub connecting: u32,
    /// HTTP/2 connections of its node agents.
    pub tunnels: u32,
    /// Connections and tunnel streams that reached an endpoint, ever.
    pub total: u64,
    /// The connections by each kind of listener, in the order of [`ListenerKind::ALL`].
    pub doors: [DoorSnapshot; ListenerKind::ALL.len()],
    /// Bytes from clients to endpoints, of ended connections.
    pub bytes_up: u64,
    /// Bytes from endpoints to clients, of ended connections.
    pub bytes_down: u64,
    /// Single attempts to connect that failed; a client may still have been served by the next endpoint.
    pub connect_failures: u64,
    /// Clients refused, in the order of [`Refusal::ALL`].
    pub refusals: [u64; Refusal::ALL.len()],
    /// Accepted to upstream connected: counts by [`HANDSHAKE_BUCKETS`], the last for longer ones. Not
    /// cumulative.
    pub handshakes: [u64; HANDSHAKE_BUCKETS.len() + 1],
    /// Sum of all handshake times in seconds.
    pub handshake_seconds: f64,
}

/// One unit of a counter, given back on drop.
#[derive(Debug)]
pub(crate) struct OpenGuard {
    cluster: Arc<Cluster>,
    counter: fn(&Cluster) -> &AtomicU32,
    cost: Cost,
}

impl OpenGuard {
    /// Counts never beyond `most`, not even for a moment: a refused connection must not be why another is
    /// refused. Beyond it the refusal is `over`.
    fn take(
        cluster: &Arc<Cluster>,
        counter: fn(&Cluster) -> &AtomicU32,
        most: u32,
        over: Refusal,
        cost: Cost,
    ) -> Result<Self, Refusal> {
        let up = |count| (count < most).then_some(count + 1);
        counter(cluster).fetch_update(Relaxed, Relaxed, up).map_err(|_| over)?;
        if !cluster.fair_share.take(&cluster.taken, cost) {
            counter(cluster).fetch_sub(1, Relaxed);
            return Err(Refusal::FairShare);
        }
        Ok(Self { cluster: Arc::clone(cluster), counter, cost })
    }
}

impl OpenGuard {
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        (self.counter)(&self.cluster).fetch_sub(1, Relaxed);
        self.cluster.fair_share.give_back(&self.cluster.taken, self.cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> Arc<Cluster> {
        Arc::new(Cluster::new(Tenant::of_text("a"), Arc::new(FairShare::unlimited())))
    }

    #[test]
    fn a_closed_connection_frees_its_slot() {
        let cluster = cluster();
        let budget = Budget { max_connections: Some(2), ..Budget::default() };
        let first = cluster.admit(budget, Cost::CONNECTION, Duration::ZERO).unwrap();
        let _second = cluster.admit(budget, Cost::CONNECTION, Duration::ZERO).unwrap();
        assert_eq!(
            cluster.admit(budget, Cost::CONNECTION, Duration::ZERO).unwrap_err(),
            Refusal::MaxConnections
        );
        assert_eq!(cluster.snapshot().open, 2, "a refused connection takes no slot");
        drop(first);
        cluster.admit(budget, Cost::CONNECTION, Duration::ZERO).unwrap();
    }

    #[test]
    fn a_refused_connection_takes_no_slot_even_for_a_moment() {
        let cluster = cluster();
        let _only = cluster.start_connecting(1).unwrap();
        std::thread::scope(|scope| {
            let refused = scope.spawn(|| (0..100_000).all(|_| cluster.start_connecting(1).is_err()));
            while !refused.is_finished() {
                assert_eq!(cluster.snapshot().connecting, 1);
            }
            assert!(refused.join().unwrap());
        });
    }
}
