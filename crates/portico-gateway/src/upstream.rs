//! The endpoints of one backend: which one gets the next connection, and how that connection is made.
//!
//! Connections go to the endpoint with the fewest. An endpoint that fails [`FAILURES_UNTIL_SKIPPED`] times in a row is
//! skipped, at first for [`FIRST_SKIP`], then for twice as long each time; when the time is over, one connection goes there
//! to find out. Where every endpoint is skipped, one is tried all the same, as a last resort, since nobody is better: a client is
//! never turned away from an API server that recovered a moment ago. One that *refuses* costs nothing. One that *does not
//! answer* holds a client for a second, so only [`MOST_LAST_RESORTS`] wait for it at a time: thousands that wait for a black hole
//! would take the descriptors of everybody else.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use portico_net::socket::{Keepalive, is_out_of_descriptors, set_keepalive};
use portico_routes::route::{Backend, BackendId};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use smallvec::SmallVec;
use socket2::SockRef;
use tokio::net::TcpStream;

use crate::cluster::Cluster;
use crate::config::Config;
use crate::copy::write_some;
use crate::deadline::within;
use crate::refusal::Refusal;

/// One failure may be chance, two a restart; the third in a row is a pattern.
const FAILURES_UNTIL_SKIPPED: u32 = 3;
/// Short enough for a restarting API server, long enough to spare a dead one.
const FIRST_SKIP: Duration = Duration::from_millis(250);
/// A dead endpoint costs one attempt every ten seconds.
const LONGEST_SKIP: Duration = Duration::from_secs(10);
/// Endpoints tried for one client.
const MOST_ATTEMPTS: usize = 3;
/// Clients that wait at a time for an endpoint that did not answer before: enough that one that is merely slow serves all who
/// come, few enough that a hundred dead clusters take 3,200 descriptors and not 100,000.
const MOST_LAST_RESORTS: u16 = 32;

/// A backend as the workers see it: one identity, while its endpoints and settings change.
#[derive(Debug)]
pub struct Upstream {
    /// Whose it is.
    pub cluster: Arc<Cluster>,
    state: ArcSwap<State>,
}

/// What changes about an upstream.
#[derive(Debug)]
pub(crate) struct State {
    /// As the route table has it.
    pub(crate) backend: Arc<Backend>,
    /// Its endpoints, each with what is known of it.
    pub(crate) endpoints: SmallVec<[Arc<Endpoint>; 1]>,
    /// Those that left, while they have connections: one that comes back is the same one. Nearly always none.
    departed: Option<Box<Departed>>,
}

/// Endpoints that left an upstream.
#[derive(Debug)]
struct Departed(Vec<Weak<Endpoint>>);

impl State {
    fn departed(&self) -> impl Iterator<Item = Arc<Endpoint>> {
        self.departed.iter().flat_map(|departed| &departed.0).filter_map(Weak::upgrade)
    }
}

/// One endpoint and what is known of it.
#[derive(Debug)]
pub struct Endpoint {
    /// Its address.
    pub address: SocketAddr,
    connections: AtomicU32,
    failures: AtomicU32,
    last_failure: AtomicU8,
    /// How often it left its upstream or came back.
    moves: AtomicU32,
    /// Clients that wait for it though it is skipped.
    last_resorts: AtomicU16,
    /// Milliseconds since the gateway started.
    skipped_until: AtomicU64,
}

/// How an endpoint failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// At once.
    Refused = 1,
    /// Not at all: no answer in time.
    Silent = 2,
}

/// A connection to an endpoint, counted while it is held.
#[derive(Debug)]
pub(crate) struct EndpointUse(Arc<Endpoint>);

/// A connection that was made.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) stream: TcpStream,
    pub(crate) endpoint: EndpointUse,
    /// Of the first bytes, those that the socket took.
    pub(crate) sent: usize,
}

/// The endpoint for the next attempt.
#[derive(Debug)]
enum Choice {
    /// One of the healthy ones, or one that is due for a probe.
    Regular(Arc<Endpoint>),
    /// All are skipped.
    LastResort(LastResort),
    /// All are skipped, and enough clients wait for them.
    Full,
}

/// An attempt to connect to an endpoint that is skipped, counted while it is held.
#[derive(Debug)]
struct LastResort(Arc<Endpoint>);

impl Upstream {
    pub(crate) fn new(backend: Arc<Backend>, cluster: Arc<Cluster>) -> Self {
        let endpoints = backend.endpoints.iter().map(|&address| Arc::new(Endpoint::new(address))).collect();
        Self { cluster, state: ArcSwap::from_pointee(State { backend, endpoints, departed: None }) }
    }

    /// Which Service port this is; always the same.
    pub fn id(&self) -> BackendId {
        BackendId::clone(&self.state.load().backend.id)
    }

    /// Takes over new endpoints and settings. What is known of an endpoint that stays, or comes back while it has
    /// connections, is kept; those that left are returned.
    pub(crate) fn update(&self, backend: Arc<Backend>) -> Vec<Arc<Endpoint>> {
        let old = self.state.load();
        let stays =
            |address: &SocketAddr| old.endpoints.iter().find(|known| known.address == *address).cloned();
        let returns = |address: &SocketAddr| {
            let endpoint = old.departed().find(|known| known.address == *address)?;
            endpoint.moved();
            // It is said to be ready, and that is newer than what was found.
            endpoint.succeeded();
            Some(endpoint)
        };
        let endpoint = |address: &SocketAddr| {
            stays(address).or_else(|| returns(address)).unwrap_or_else(|| Arc::new(Endpoint::new(*address)))
        };
        let endpoints = backend.endpoints.iter().map(endpoint).collect();
        let is_gone = |endpoint: &Arc<Endpoint>| !backend.endpoints.contains(&endpoint.address);
        let leaving: Vec<_> = old.endpoints.iter().filter(|endpoint| is_gone(endpoint)).cloned().collect();
        leaving.iter().for_each(|endpoint| endpoint.moved());
        let still_gone = old.departed().filter(is_gone);
        let departed: Vec<_> =
            still_gone.chain(leaving.iter().cloned()).map(|gone| Arc::downgrade(&gone)).collect();
        let departed = (!departed.is_empty()).then(|| Box::new(Departed(departed)));
        self.state.store(Arc::new(State { backend, endpoints, departed }));
        leaving
    }

    /// The backend as the route table has it now.
    pub fn backend(&self) -> Arc<Backend> {
        Arc::clone(&self.state.load().backend)
    }

    /// The endpoints now.
    pub fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.state.load().endpoints.to_vec()
    }

    /// [`Self::connect_and_send`] where there is nothing to send yet.
    pub(crate) async fn connect(
        &self,
        config: &Config,
        clock: impl Fn() -> Duration,
        client_first: bool,
    ) -> Result<(TcpStream, EndpointUse), Refusal> {
        let connected = self.connect_and_send(config, clock, client_first, &[]).await?;
        Ok((connected.stream, connected.endpoint))
    }

    /// Connects to one endpoint after the other, at most [`MOST_ATTEMPTS`], and sends the `first` bytes as far as the socket
    /// takes them. `client_first` promises that bytes are sent at once, which lets them travel with the last packet of the TCP
    /// handshake; where the server may speak first this would delay it by 40 ms.
    pub(crate) async fn connect_and_send(
        &self,
        config: &Config,
        clock: impl Fn() -> Duration,
        client_first: bool,
        first: &[u8],
    ) -> Result<Connected, Refusal> {
        let state = self.state.load_full();
        let mut tried: [Option<SocketAddr>; MOST_ATTEMPTS] = [None; MOST_ATTEMPTS];
        let mut refusal = if state.endpoints.is_empty() { Refusal::NotReady } else { Refusal::MaxConnecting };
        for attempt in 0..MOST_ATTEMPTS {
            let (endpoint, last_resort) = match pick(&state.endpoints, &tried[..attempt], clock()) {
                Some(Choice::Regular(endpoint)) => (endpoint, None),
                Some(Choice::LastResort(resort)) => (Arc::clone(&resort.0), Some(resort)),
                Some(Choice::Full) | None => break,
            };
            tried[attempt] = Some(endpoint.address);
            let in_use = EndpointUse::new(endpoint);
            let outcome = match begin_to_connect(in_use.0.address, config.upstream_keepalive, client_first) {
                Ok(stream) => {
                    let sent = within(config.connect_timeout, send_once_connected(&stream, first)).await;
                    sent.map(|sent| sent.map(|sent| (stream, sent)))
                }
                Err(error) => Ok(Err(error)),
            };
            let failure = match outcome {
                Ok(Ok((stream, sent))) => {
                    in_use.0.succeeded();
                    return Ok(Connected { stream, endpoint: in_use, sent });
                }
                // Ours, not the endpoint's: it must not count against it.
                Ok(Err(error)) if is_out_of_descriptors(&error) => return Err(Refusal::OutOfDescriptors),
                Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => Failure::Silent,
                Ok(Err(_)) => Failure::Refused,
                Err(_elapsed) => Failure::Silent,
            };
            self.cluster.count_connect_failure();
            // What it is known for is no news.
            if last_resort.is_none() {
                in_use.0.failed(failure, clock());
            }
            refusal = match failure {
                Failure::Refused => Refusal::ConnectFailed,
                Failure::Silent => Refusal::ConnectTimedOut,
            };
        }
        Err(refusal)
    }
}

impl Endpoint {
    fn new(address: SocketAddr) -> Self {
        Self {
            address,
            connections: AtomicU32::default(),
            failures: AtomicU32::default(),
            last_failure: AtomicU8::default(),
            moves: AtomicU32::default(),
            last_resorts: AtomicU16::default(),
            skipped_until: AtomicU64::default(),
        }
    }

    /// Connections open to it now, through this gateway.
    pub fn connections(&self) -> u32 {
        self.connections.load(Relaxed)
    }

    /// Attempts to connect that failed since the last one that did not.
    pub fn failures(&self) -> u32 {
        self.failures.load(Relaxed)
    }

    /// How much longer it is skipped, if it is: until then it is tried only where there is no other.
    pub fn skipped_for(&self, now: Duration) -> Option<Duration> {
        self.is_skipped(now)
            .then(|| Duration::from_millis(self.skipped_until.load(Relaxed)).saturating_sub(now))
    }

    /// Whether so many attempts failed that the next one is a probe, or a last resort.
    pub fn is_failing(&self) -> bool {
        self.failures() >= FAILURES_UNTIL_SKIPPED
    }

    /// Changes whenever it leaves its upstream or comes back.
    pub(crate) fn moves(&self) -> u32 {
        self.moves.load(Relaxed)
    }

    fn moved(&self) {
        self.moves.fetch_add(1, Relaxed);
    }

    fn is_skipped(&self, now: Duration) -> bool {
        self.is_failing() && millis(now) < self.skipped_until.load(Relaxed)
    }

    fn last_failure_was_silent(&self) -> bool {
        self.last_failure.load(Relaxed) == Failure::Silent as u8
    }

    fn succeeded(&self) {
        // A plain load first: this line of memory is shared by all workers and nearly always zero.
        if self.failures() != 0 {
            self.failures.store(0, Relaxed);
        }
    }

    fn failed(&self, failure: Failure, now: Duration) {
        let failures = self.failures.fetch_add(1, Relaxed).saturating_add(1);
        self.last_failure.store(failure as u8, Relaxed);
        self.skipped_until.store(millis(now + skip_after(failures)), Relaxed);
    }

    /// Of all who ask at the end of a skip, exactly one may probe; the others see it skipped on.
    fn may_probe(&self, now: Duration) -> bool {
        let until = self.skipped_until.load(Relaxed);
        let next = millis(now + skip_after(self.failures()));
        millis(now) >= until && self.skipped_until.compare_exchange(until, next, Relaxed, Relaxed).is_ok()
    }
}

impl EndpointUse {
    fn new(endpoint: Arc<Endpoint>) -> Self {
        endpoint.connections.fetch_add(1, Relaxed);
        Self(endpoint)
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for EndpointUse {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

impl LastResort {
    /// `None` if enough wait.
    fn new(endpoint: &Arc<Endpoint>) -> Option<Self> {
        let waiting = endpoint.last_resorts.fetch_add(1, Relaxed);
        // Given back on drop, also where there were too many.
        let resort = Self(Arc::clone(endpoint));
        (waiting < MOST_LAST_RESORTS).then_some(resort)
    }
}

impl Drop for LastResort {
    fn drop(&mut self) {
        self.0.last_resorts.fetch_sub(1, Relaxed);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn skip_after(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(FAILURES_UNTIL_SKIPPED).min(6);
    (FIRST_SKIP * 2u32.pow(doublings)).min(LONGEST_SKIP)
}

/// The endpoint for the next attempt: healthy ones first, then one due for a probe, then one that at least refuses fast, then one
/// that does not answer. `None` if all were tried.
fn pick(endpoints: &[Arc<Endpoint>], tried: &[Option<SocketAddr>], now: Duration) -> Option<Choice> {
    let untried = || endpoints.iter().filter(|endpoint| !tried.contains(&Some(endpoint.address)));
    // A probe must happen while healthy endpoints take the load, or a recovered one would never be seen again.
    let probe = || untried().find(|endpoint| endpoint.is_failing() && endpoint.may_probe(now));
    let healthy =
        || untried().filter(|endpoint| !endpoint.is_failing()).min_by_key(|endpoint| endpoint.connections());
    let first_attempt = tried.is_empty();
    let regular = if first_attempt { probe().or_else(healthy) } else { healthy().or_else(probe) };
    if let Some(endpoint) = regular {
        return Some(Choice::Regular(Arc::clone(endpoint)));
    }
    if let Some(refusing) = untried().find(|endpoint| !endpoint.last_failure_was_silent()) {
        return Some(Choice::Regular(Arc::clone(refusing)));
    }
    let silent = untried().min_by_key(|endpoint| endpoint.last_resorts.load(Relaxed))?;
    Some(LastResort::new(silent).map_or(Choice::Full, Choice::LastResort))
}

/// Starts the TCP handshake. Not by tokio, which asks every socket for its error once it is connected: one system call that
/// the first bytes make superfluous.
fn begin_to_connect(address: SocketAddr, keepalive: Keepalive, client_first: bool) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    set_keepalive(&SockRef::from(&socket), keepalive)?;
    if client_first {
        rustix::net::sockopt::set_tcp_quickack(&socket, false)?;
    }
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => TcpStream::from_std(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Waits for the end of the TCP handshake and sends the `first` bytes, if there are any; returns how many the socket took. A
/// handshake that failed is what sending fails with.
async fn send_once_connected(stream: &TcpStream, first: &[u8]) -> io::Result<usize> {
    loop {
        poll_fn(|cx| stream.poll_write_ready(cx)).await?;
        if first.is_empty() {
            return stream.take_error()?.map_or(Ok(0), Err);
        }
        match write_some(stream, first) {
            Ok(sent) => return Ok(sent),
            Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use portico_api::meta::ObjectKey;
    use portico_api::names::ClusterName;
    use portico_api::policy::ClusterPolicy;

    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn endpoints(count: u16) -> Vec<Arc<Endpoint>> {
        (1..=count).map(|port| Arc::new(Endpoint::new(([127, 0, 0, 1], port).into()))).collect()
    }

    fn break_(endpoint: &Endpoint, failure: Failure) {
        for _ in 0..FAILURES_UNTIL_SKIPPED {
            endpoint.failed(failure, NOW);
        }
    }

    fn port_of(choice: Option<Choice>) -> Option<u16> {
        match choice? {
            Choice::Regular(endpoint) => Some(endpoint.address.port()),
            Choice::LastResort(resort) => Some(resort.0.address.port()),
            Choice::Full => None,
        }
    }

    #[test]
    fn the_endpoint_with_the_fewest_connections_is_next() {
        let all = endpoints(3);
        let _held: Vec<_> = [0, 0, 1, 2, 2].map(|index| EndpointUse::new(Arc::clone(&all[index]))).into();
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(2));
    }

    #[test]
    fn one_failure_does_not_cost_an_endpoint_its_place() {
        let all = endpoints(1);
        all[0].failed(Failure::Refused, NOW);
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(1));
    }

    #[test]
    fn a_failing_endpoint_is_skipped_while_another_is_healthy() {
        let all = endpoints(2);
        break_(&all[0], Failure::Refused);
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(2));
    }

    #[test]
    fn after_a_skip_exactly_one_connection_probes() {
        let all = endpoints(2);
        break_(&all[0], Failure::Silent);
        let later = NOW + FIRST_SKIP;
        assert_eq!(port_of(pick(&all, &[], later)), Some(1));
        assert_eq!(port_of(pick(&all, &[], later)), Some(2));
        all[0].succeeded();
        assert_eq!(port_of(pick(&all, &[], later)), Some(1), "a successful probe brings it back");
    }

    #[test]
    fn each_failed_probe_doubles_the_skip_up_to_a_bound() {
        assert_eq!(skip_after(FAILURES_UNTIL_SKIPPED), FIRST_SKIP);
        assert_eq!(skip_after(FAILURES_UNTIL_SKIPPED + 1), FIRST_SKIP * 2);
        assert_eq!(skip_after(u32::MAX), LONGEST_SKIP);
    }

    #[test]
    fn where_all_fail_one_is_tried_all_the_same_and_first_one_that_refuses() {
        let all = endpoints(3);
        for (endpoint, failure) in all.iter().zip([Failure::Silent, Failure::Refused, Failure::Silent]) {
            break_(endpoint, failure);
        }
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(2));
        let refusing = Some(all[1].address);
        assert_eq!(port_of(pick(&all, &[refusing], NOW)), Some(1));
    }

    #[test]
    fn few_wait_for_endpoints_that_do_not_answer_and_they_are_shared_out() {
        let all = endpoints(2);
        all.iter().for_each(|endpoint| break_(endpoint, Failure::Silent));
        let most = 2 * usize::from(MOST_LAST_RESORTS);
        let mut waiting: Vec<_> = (0..most).filter_map(|_| pick(&all, &[], NOW)).collect();
        let of = |waiting: &[Choice], port: u16| {
            let at =
                |choice: &&Choice| matches!(choice, Choice::LastResort(it) if it.0.address.port() == port);
            waiting.iter().filter(at).count()
        };
        assert_eq!((of(&waiting, 1), of(&waiting, 2)), (most / 2, most / 2));
        assert!(matches!(pick(&all, &[], NOW), Some(Choice::Full)));
        waiting.pop();
        assert!(matches!(pick(&all, &[], NOW), Some(Choice::LastResort(_))), "one that leaves makes room");
    }

    #[test]
    fn a_skipped_endpoint_says_for_how_long() {
        let all = endpoints(1);
        assert_eq!(all[0].skipped_for(NOW), None);
        break_(&all[0], Failure::Silent);
        assert_eq!(all[0].skipped_for(NOW), Some(FIRST_SKIP));
        assert_eq!(all[0].skipped_for(NOW + FIRST_SKIP), None);
    }

    fn upstream(ports: &[u16]) -> (Upstream, impl Fn(&[u16]) -> Arc<Backend>) {
        let backend = |ports: &[u16]| {
            Arc::new(Backend {
                id: BackendId { service: ObjectKey::new("a", "api"), port_name: "".into(), port: 443 }.into(),
                endpoints: ports.iter().map(|&port| ([127, 0, 0, 1], port).into()).collect(),
                policy: ClusterPolicy::open_for_namespace("a"),
                send_proxy: false,
                api_server_ca: None,
            })
        };
        let cluster = Arc::new(Cluster::new(ClusterName::new("a")));
        (Upstream::new(backend(ports), cluster), backend)
    }

    #[test]
    fn an_endpoint_that_comes_back_while_it_has_connections_is_the_same_one() {
        let (upstream, backend) = upstream(&[1]);
        let first = upstream.endpoints().remove(0);
        let held = EndpointUse::new(Arc::clone(&first));
        break_(&first, Failure::Silent);
        let left = upstream.update(backend(&[2]));
        assert!(Arc::ptr_eq(&left[0], &first));
        let when_it_left = first.moves();
        upstream.update(backend(&[2, 3]));
        assert_eq!(first.moves(), when_it_left, "others came");
        upstream.update(backend(&[1, 2]));
        assert_ne!(first.moves(), when_it_left, "it came back");
        let back = upstream.endpoints().remove(0);
        assert!(Arc::ptr_eq(&back, &first) && back.connections() == 1 && !back.is_failing());
        drop((held, first, left, back));
        upstream.update(backend(&[2]));
        assert!(upstream.state.load().departed().next().is_none(), "nobody uses it, so it is forgotten");
    }

    #[test]
    fn no_endpoint_is_tried_twice_for_one_client() {
        let all = endpoints(2);
        let first = all[0].address;
        assert_eq!(port_of(pick(&all, &[Some(first)], NOW)), Some(2));
        assert_eq!(port_of(pick(&all[..1], &[Some(first)], NOW)), None);
    }
}
