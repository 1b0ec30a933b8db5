//! The state that all connections of a server share, and the way from a dial to its agent.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use portico_api::text::printable;
use portico_net::MemoryBudget;
use portico_net::line_limit::{LineLimit, Pace};
use portico_net::slots::Slots;
use portico_wire::konnectivity::{ConnectId, DialId, address};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::authentication::Refusal;
use super::backend::{Backend, DialIds, DialLost, Opened};
use super::connections::Connections;
use super::counters::{Counted, Counters};
use super::registry::Registry;
use super::settings::{
    FIRST_AGENT, MAX_AWAY, MAX_IDLE_FRONTENDS, MAX_STARTING, MAX_UNAUTHENTICATED, STARTING, Settings,
};
use crate::streams::NO_ROOM;

/// Agents that are asked for one connection, one after the other. The next one is asked if an agent is lost,
/// has no room, or does not answer within its share of the time left. The last fit agent has all of that
/// time.
const AGENTS_TRIED: u32 = 3;

/// Least share of the time: an agent itself gives up after five seconds, and says why.
const LEAST_SHARE: Duration = Duration::from_secs(6);

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) counters: Counters,
    pub(crate) memory: MemoryBudget,
    /// The part of `memory` that connections of upstream agents hold beyond their buffers.
    pub(crate) excess: MemoryBudget,
    pub(crate) connections: Connections<Backend>,
    registry: Mutex<Registry<Backend>>,
    /// What a dial waits for that finds no agent.
    awaited: watch::Sender<Awaited>,
    /// When the first dial found no agent, or the first agent came if that was earlier.
    first: OnceLock<Instant>,
    /// For dials that wait for an agent, as many as [`MAX_STARTING`].
    starting: Semaphore,
    /// For connections of agents, as many as `max_agents`.
    agents: Arc<Semaphore>,
    /// For connections of upstream agents that are silent, as many as [`MAX_AWAY`].
    pub(crate) away: Semaphore,
    dials: DialIds,
    frontend_ids: AtomicI64,
    /// Connections to the port of agents whose peers have not authenticated.
    pub(crate) unauthenticated_agents: Arc<Slots>,
    /// Connections of frontends that have not asked for anything.
    pub(crate) idle_frontends: Arc<Slots>,
    lines: Lines,
    started: Instant,
    pub(crate) stop: watch::Sender<Stop>,
}

/// Whether a dial that finds no agent has to wait. It changes under the lock of the registry only, or both
/// could differ for a dial.
#[derive(Debug, Default)]
struct Awaited {
    /// Whether an agent's stream is registered.
    has_agent: bool,
    /// Whether the API server has left a review unanswered, and has answered none since.
    is_unanswered: bool,
}

/// What has to end. Agents first, so that frontends learn that their connections are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    NotYet,
    /// There are no more dials: peers that are no agents yet.
    Strangers,
    Agents,
    Everything,
}

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DialError {
    /// No strategy names an agent.
    NoAgent,
    /// The server is about to stop.
    Draining,
    /// The address cannot be one.
    Address,
    /// Agents were lost, or have too many dials waiting.
    Lost(DialLost),
    /// The agent says why.
    Refused(String),
    /// No answer in time.
    Timeout,
}

impl DialError {
    /// The reason in `dial_failure_count`.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::NoAgent | Self::Draining | Self::Address => "no_agent",
            Self::Lost(_) => "backend_close",
            Self::Refused(_) => "error_response",
            Self::Timeout => "backend_dial_timeout",
        }
    }
}

impl fmt::Display for DialError {
    /// In the words of upstream's server, where it has some.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAgent => f.write_str("No agent available"),
            Self::Draining => f.write_str("the server is about to stop; ask another one"),
            Self::Address => write!(f, "the address is longer than {} bytes", address::MAX),
            Self::Lost(lost) => lost.fmt(f),
            Self::Refused(text) => f.write_str(text),
            Self::Timeout => f.write_str("timed out waiting for backend dial"),
        }
    }
}

/// Limits of log lines that anyone can cause. Each kind has a limit of its own, or a scanner would suppress
/// the lines that somebody has to act on.
#[derive(Debug, Default)]
struct Lines {
    /// Agents with an identity that are refused.
    agents: LineLimit,
    /// Agents that come and go.
    comings: LineLimit,
    /// Agents whose token nobody could review.
    reviews: LineLimit,
    /// Agents whose token or metadata is not accepted.
    tokens: LineLimit,
    /// Others at their port.
    strangers: LineLimit,
    frontends: LineLimit,
    descriptors: LineLimit,
}

impl Lines {
    /// Of agents that are refused for this reason.
    fn of_refusals(&self, reason: &str) -> &LineLimit {
        match reason {
            "identifiers" | "full" => &self.agents,
            "review" => &self.reviews,
            "token" | "metadata" => &self.tokens,
            _ => &self.strangers,
        }
    }
}

impl Shared {
    pub(crate) fn new(settings: Settings) -> Arc<Self> {
        let registry = Registry::new(settings.strategies.clone(), settings.route_cidr);
        Arc::new(Self {
            memory: MemoryBudget::new(settings.memory),
            agents: Arc::new(Semaphore::new(settings.max_agents)),
            away: Semaphore::new(MAX_AWAY),
            excess: MemoryBudget::new(settings.memory / 2),
            settings,
            counters: Counters::default(),
            connections: Connections::new(),
            registry: Mutex::new(registry),
            awaited: watch::Sender::default(),
            first: OnceLock::new(),
            starting: Semaphore::new(MAX_STARTING),
            dials: DialIds::default(),
            frontend_ids: AtomicI64::new(1),
            unauthenticated_agents: Slots::new(
                MAX_UNAUTHENTICATED,
                "connections to the agent port that are no agent's yet",
            ),
            idle_frontends: Slots::new(
                MAX_IDLE_FRONTENDS,
                "connections of the API server that have not asked for anything yet",
            ),
            lines: Lines::default(),
            started: Instant::now(),
            stop: watch::Sender::new(Stop::NotYet),
        })
    }

    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry<Backend>> {
        // A panic elsewhere leaves nothing half done here.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a stream of an agent, which gets dials from now on.
    pub(crate) fn register(&self, backend: &Arc<Backend>) {
        self.first.get_or_init(Instant::now);
        self.change(|registry| registry.add(backend));
    }

    /// Takes a stream of an agent back, which gets no more dials.
    pub(crate) fn unregister(&self, backend: &Arc<Backend>) {
        self.change(|registry| registry.remove(backend));
    }

    fn change(&self, change: impl FnOnce(&mut Registry<Backend>)) {
        let mut registry = self.registry();
        change(&mut registry);
        self.awaited.send_modify(|awaited| awaited.has_agent = !registry.is_empty());
    }

    /// Whether the API server has answered the last review in its time. Until it does, no dial waits for an
    /// agent. It may itself wait for a webhook in the cluster, and so for an agent.
    pub(crate) fn reviews_are_answered(&self, answered: bool) {
        let _registry = self.registry();
        self.awaited.send_if_modified(|awaited| {
            let changes = awaited.is_unanswered == answered;
            awaited.is_unanswered = !answered;
            changes
        });
    }

    /// Held while an agent has its connection.
    pub(crate) fn agent_permit(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        Arc::clone(&self.agents).try_acquire_owned().map_err(|_| Refusal::Full(self.settings.max_agents))
    }

    pub(crate) fn next_dial(&self) -> DialId {
        self.dials.next()
    }

    /// A number that no other connection of a frontend has.
    pub(crate) fn next_connection(&self) -> ConnectId {
        ConnectId(self.frontend_ids.fetch_add(1, Relaxed))
    }

    /// Counts a connection to the agent port that becomes no agent's, and says why.
    pub(crate) fn refused(&self, reason: &'static str, peer: SocketAddr, why: &impl fmt::Display) {
        self.counters.agent_refused(reason);
        if let Some(left_out) = self.lines.of_refusals(reason).admit(Pace::WARNINGS, self.started.elapsed()) {
            // It may repeat what the peer sent.
            let why = printable(&why.to_string());
            tracing::warn!(%peer, reason, %why, left_out, "refused an agent");
        }
    }

    /// Whether a line about an agent that comes or goes may be written, and how many were not.
    pub(crate) fn admits_coming(&self) -> Option<u64> {
        self.lines.comings.admit(Pace::ACCESS, self.started.elapsed())
    }

    /// Says why a connection to the API server's port becomes no frontend's.
    pub(crate) fn refused_frontend(&self, peer: SocketAddr, why: &impl fmt::Display) {
        if let Some(left_out) = self.lines.frontends.admit(Pace::WARNINGS, self.started.elapsed()) {
            let why = printable(&why.to_string());
            tracing::warn!(%peer, %why, left_out, "refused a frontend");
        }
    }

    /// Says that a connection cannot be accepted.
    pub(crate) fn out_of_descriptors(&self, error: &io::Error) {
        if let Some(left_out) = self.lines.descriptors.admit(Pace::WARNINGS, self.started.elapsed()) {
            let remedy = "raise the limit of file descriptors";
            tracing::warn!(%error, left_out, "cannot accept a connection; {remedy}");
        }
    }

    /// No more dials from now on.
    pub(crate) fn drain(&self) {
        self.stop.send_replace(Stop::Strangers);
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.stop.borrow() != Stop::NotYet
    }

    /// Ready once there are no more dials.
    pub(crate) async fn drained(&self) {
        self.stops(Stop::Strangers).await;
    }

    /// Ready once frontends have to end.
    pub(crate) async fn stopped(&self) {
        self.stops(Stop::Everything).await;
    }

    /// Ready once agents have to end.
    pub(crate) async fn agents_stopped(&self) {
        self.stops(Stop::Agents).await;
    }

    async fn stops(&self, what: Stop) {
        // The sender is in here.
        let _ = self.stop.subscribe().wait_for(|stop| *stop >= what).await;
    }

    /// Has an agent connect to `address`. An agent that is lost meanwhile, has no room or does not answer is
    /// replaced by the next fit one. If the future is dropped before its end, the agent is notified.
    pub(crate) async fn dial(&self, address: &str) -> Result<(Opened, Arc<Backend>), DialError> {
        let _pending = Counted::new(&self.counters.pending);
        let begun = Instant::now();
        let mut abandoned = Abandoned(Some((&self.counters, begun)));
        let dialled = self.dial_agents(address, begun).await;
        abandoned.0 = None;
        let result = dialled.as_ref().map(drop).map_err(DialError::reason);
        self.counters.dialled(result, begun.elapsed());
        dialled
    }

    /// The next agent for `host`. While there is none at all, a dial waits for one in the first two minutes.
    /// An API server that has just become ready asks at once. That may be a moment before agents find the
    /// server beside it.
    async fn pick(&self, host: &str, tried: &[Arc<Backend>], until: Instant) -> Option<Arc<Backend>> {
        loop {
            {
                let registry = self.registry();
                let picked = registry.pick(host, random(), tried);
                if picked.is_some() || !registry.is_empty() {
                    return picked;
                }
            }
            if !self.agent_comes(until).await {
                return None;
            }
        }
    }

    /// Ready once there is an agent (true), or a dial need not wait for one any more.
    async fn agent_comes(&self, until: Instant) -> bool {
        let until = until.min(*self.first.get_or_init(Instant::now) + STARTING);
        let Ok(_permit) = self.starting.try_acquire() else { return false };
        let mut awaited = self.awaited.subscribe();
        let changed = awaited.wait_for(|awaited| awaited.has_agent || awaited.is_unanswered);
        tokio::select! {
            changed = timeout_at(until, changed) => {
                matches!(changed, Ok(Ok(awaited)) if awaited.has_agent)
            }
            () = self.drained() => false,
        }
    }

    async fn dial_agents(&self, address: &str, begun: Instant) -> Result<(Opened, Arc<Backend>), DialError> {
        if address.len() > address::MAX {
            return Err(DialError::Address);
        }
        let deadline = begun + self.settings.dial_timeout;
        let waits_until = deadline.min(begun + FIRST_AGENT);
        let host = address::host(address);
        let mut tried: Vec<Arc<Backend>> = Vec::new();
        let mut error = DialError::NoAgent;
        for number in 0..AGENTS_TRIED {
            let picked = self.pick(host, &tried, waits_until).await;
            if number == 0 && self.is_draining() {
                return Err(DialError::Draining);
            }
            let Some(backend) = picked else { break };
            let left = deadline - Instant::now();
            if number > 0 && left.is_zero() {
                break;
            }
            tried.push(Arc::clone(&backend));
            let mut dial = pin!(backend.dial(address));
            let share = LEAST_SHARE.max(left / (AGENTS_TRIED - number));
            let mut answer = timeout(share.min(left), dial.as_mut()).await;
            if answer.is_err() && self.registry().pick(host, 0, &tried).is_none() {
                answer = timeout_at(deadline, dial).await;
            }
            match answer {
                Err(_) => error = DialError::Timeout,
                Ok(Ok(Ok(opened))) => return Ok((opened, Arc::clone(&backend))),
                Ok(Ok(Err(text))) if text.starts_with(NO_ROOM) => error = DialError::Refused(text),
                Ok(Ok(Err(text))) => return Err(DialError::Refused(text)),
                Ok(Err(lost)) => error = DialError::Lost(lost),
            }
        }
        Err(error)
    }
}

/// The standard library's hasher is seeded by the system, anew each time.
fn random() -> usize {
    usize::try_from(RandomState::new().hash_one("agent") >> 32).unwrap_or_default()
}

/// Counts a dial that nobody waits for any more.
struct Abandoned<'a>(Option<(&'a Counters, Instant)>);

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if let Some((counters, begun)) = self.0 {
            counters.dialled(Err("frontend_close"), begun.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use http::{HeaderMap, Request};
    use portico_tunnel::connection::Activity;
    use portico_wire::konnectivity::Identifiers;
    use tokio::time::advance;

    use super::super::backend::Authenticated;
    use super::*;
    use crate::grpc::Call;

    /// A stream of an agent that says nothing, registered.
    async fn agent(shared: &Arc<Shared>) -> Arc<Backend> {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let (client, server) = tokio::join!(h2::client::handshake(ours), h2::server::handshake(theirs));
        let ((mut client, connection), mut server) = (client.unwrap(), server.unwrap());
        tokio::spawn(connection);
        let request = Request::post("http://server/connect").header("content-type", "application/grpc");
        let _stream = client.send_request(request.body(()).unwrap(), false).unwrap();
        let (request, respond) = server.accept().await.unwrap().unwrap();
        let activity = Arc::new(Activity::within(&shared.memory, shared.memory.limit()));
        let call = Call::accept(request, respond).unwrap();
        let started = call.start(HeaderMap::new(), &activity, std::slice::from_ref(&shared.memory));
        let authenticated = Authenticated {
            agent: "agent".into(),
            identifiers: Identifiers::default(),
            peer: SocketAddr::from(([127, 0, 0, 1], 1)),
            version: "".into(),
            is_native: false,
        };
        let mut receiver = started.unwrap().1;
        let (backend, _) = Backend::new(authenticated, &mut receiver, &activity, shared);
        shared.register(&backend);
        backend
    }

    /// The stream of an agent is gone.
    fn leaves(shared: &Shared, agent: &Arc<Backend>) {
        shared.unregister(agent);
        agent.end();
    }

    #[test]
    fn what_somebody_has_to_act_on_is_logged_however_many_strangers_there_are() {
        let lines = Lines::default();
        let admits = |reason| lines.of_refusals(reason).admit(Pace::WARNINGS, Duration::ZERO).is_some();
        for stranger in ["tls", "silent", "http2"] {
            while admits(stranger) {}
        }
        assert!(admits("review"));
        while admits("review") {}
        assert!(admits("token"));
        while admits("token") {}
        assert!(admits("identifiers"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_review_without_an_answer_ends_the_waiting_until_one_is_answered() {
        let shared = Shared::new(Settings::default());
        let begun = Instant::now();
        let mut dial = pin!(shared.dial("node:10250"));
        assert!(poll!(dial.as_mut()).is_pending());
        shared.reviews_are_answered(false);
        assert_eq!(dial.await.err(), Some(DialError::NoAgent));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(refused_after(&shared).await, Duration::ZERO);
        let agent = agent(&shared).await;
        leaves(&shared, &agent);
        assert_eq!(refused_after(&shared).await, Duration::ZERO);
        shared.reviews_are_answered(true);
        assert!(refused_after(&shared).await >= FIRST_AGENT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_that_waits_gets_an_agent_that_comes_just_before_a_review_without_an_answer() {
        let shared = Shared::new(Settings::default());
        let mut dial = pin!(shared.dial("node:10250"));
        assert!(poll!(dial.as_mut()).is_pending());
        let agent = agent(&shared).await;
        shared.reviews_are_answered(false);
        assert!(poll!(dial.as_mut()).is_pending());
        assert_eq!(agent.dials(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_waits_on_when_the_first_agent_leaves_at_once() {
        let shared = Shared::new(Settings::default());
        let mut before = pin!(shared.dial("node:10250"));
        assert!(poll!(before.as_mut()).is_pending());
        let first = agent(&shared).await;
        assert!(poll!(before.as_mut()).is_pending());
        assert_eq!(first.dials(), 1);
        leaves(&shared, &first);
        assert!(poll!(before.as_mut()).is_pending(), "it lost its agent, and waits for another");
        let mut between = pin!(shared.dial("node:10250"));
        assert!(poll!(between.as_mut()).is_pending());
        // Too short for both to see.
        leaves(&shared, &agent(&shared).await);
        assert!(poll!(before.as_mut()).is_pending() && poll!(between.as_mut()).is_pending());
        let last = agent(&shared).await;
        assert!(poll!(before.as_mut()).is_pending() && poll!(between.as_mut()).is_pending());
        assert_eq!(last.dials(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_that_lost_its_agent_waits_within_its_own_time() {
        let shared = Shared::new(Settings::default());
        let agent = agent(&shared).await;
        let begun = Instant::now();
        let mut dial = pin!(shared.dial("node:10250"));
        assert!(poll!(dial.as_mut()).is_pending());
        advance(FIRST_AGENT / 4).await;
        assert!(poll!(dial.as_mut()).is_pending());
        leaves(&shared, &agent);
        assert_eq!(dial.await.err(), Some(DialError::Lost(DialLost::Agent)));
        assert!(begun.elapsed().abs_diff(FIRST_AGENT) < Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_waits_once_there_has_been_an_agent_for_two_minutes() {
        let shared = Shared::new(Settings::default());
        let agent = agent(&shared).await;
        advance(STARTING).await;
        let mut dial = pin!(shared.dial("node:10250"));
        assert!(poll!(dial.as_mut()).is_pending());
        leaves(&shared, &agent);
        let begun = Instant::now();
        assert_eq!(dial.await.err(), Some(DialError::Lost(DialLost::Agent)));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(refused_after(&shared).await, Duration::ZERO);
    }

    /// How long a dial takes that finds no agent.
    async fn refused_after(shared: &Shared) -> Duration {
        let begun = Instant::now();
        let refused = shared.dial("node:10250").await.err();
        assert!(matches!(refused, Some(DialError::NoAgent)), "{refused:?}");
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn each_dial_waits_a_while_for_the_first_agent_for_two_minutes_from_the_first_dial() {
        let shared = Shared::new(Settings::default());
        // Before the first dial, time does not count.
        advance(10 * STARTING).await;
        let begun = Instant::now();
        let is_about = |took: Duration, expected: Duration| took.abs_diff(expected) < Duration::from_secs(1);
        assert!(is_about(refused_after(&shared).await, FIRST_AGENT));
        advance(STARTING - FIRST_AGENT - FIRST_AGENT / 2).await;
        assert!(is_about(refused_after(&shared).await, FIRST_AGENT / 2));
        assert!(is_about(begun.elapsed(), STARTING));
        assert!(is_about(refused_after(&shared).await, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_waits_for_the_first_agent_within_its_own_time() {
        let shared = Shared::new(Settings { dial_timeout: FIRST_AGENT / 2, ..Settings::default() });
        assert!(refused_after(&shared).await < FIRST_AGENT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_that_waits_for_the_first_agent_ends_with_the_server() {
        let shared = Shared::new(Settings::default());
        let begun = Instant::now();
        let mut dial = pin!(shared.dial("node:10250"));
        assert!(poll!(dial.as_mut()).is_pending());
        shared.drain();
        assert_eq!(dial.await.err(), Some(DialError::Draining));
        assert!(begun.elapsed() < STARTING);
    }

    #[tokio::test(start_paused = true)]
    async fn more_dials_than_may_wait_for_the_first_agent_are_refused_at_once() {
        let shared = Shared::new(Settings::default());
        // An agent that comes first takes twice as many.
        assert_eq!(MAX_STARTING, 500);
        let mut waiting: Vec<_> = (0..MAX_STARTING).map(|_| Box::pin(shared.dial("node:1"))).collect();
        for dial in &mut waiting {
            assert!(poll!(dial).is_pending());
        }
        assert_eq!(refused_after(&shared).await, Duration::ZERO);
        drop(waiting);
        assert!(refused_after(&shared).await > Duration::ZERO);
    }
}
