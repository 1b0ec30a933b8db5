//! Keeps one connection to each server: one attempt at a time, as upstream, unless one takes longer than the
//! interval. Then another address is tried meanwhile: one that hangs holds up no other.
//!
//! How many servers there are says each of them when it answers, or their Leases, or both. While fewer are
//! connected, the supervisor tries, up to [`MAX_SESSIONS`]. With `--sync-forever` it tries on, and so finds
//! servers that were added.

use std::collections::HashSet;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use portico_api::text::printable;
use portico_dial::{ResolveError, Target};
use portico_net::line_limit::{LineLimit, Pace};
use portico_net::random;
use portico_wire::konnectivity::Code;
use thiserror::Error;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::leases;
use super::pool::{self, Attempt, choose};
use super::server::{JoinError, Joined, join};
use super::session::{Ended, Session};
use super::sessions::Sessions;
use super::shared::Shared;

/// Connections to servers at once, with those that are about to leave. A cluster has a few servers; one that
/// says another name each time, or leaves each time, would have connections without end.
const MAX_SESSIONS: usize = 256;

/// Why an attempt failed.
#[derive(Debug, Error)]
enum AttemptError {
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error("{0} has no address")]
    NoAddress(Box<str>),
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl AttemptError {
    /// Whether this passes without an operator. There is no server then, or none that is able to serve.
    fn is_absence(&self) -> bool {
        match self {
            Self::Resolve(_) | Self::NoAddress(_) => true,
            Self::Join(error) => error.is_absence(),
        }
    }
}

/// Runs until dropped, and all connections with it.
pub(super) async fn supervise(shared: Arc<Shared>, sessions: Arc<Sessions>) {
    let settings = &shared.settings;
    let mut leases = leases::count(&shared);
    let mut supervisor = Supervisor {
        pace: pool::Pace::new(settings.sync_interval, settings.sync_interval_cap, settings.sync_forever),
        sessions,
        tasks: JoinSet::new(),
        responses: 1,
        attempts: 0,
        next_draw: None,
        under_way: FuturesUnordered::new(),
        trying: Trying::default(),
        ended_early: Arc::default(),
        lines: Arc::new(Lines::new()),
        shared: Arc::clone(&shared),
    };
    let mut draining = shared.draining();
    let mut ended = None;
    loop {
        let wanted = supervisor.wanted(leases.servers());
        shared.known_servers.store(wanted, Relaxed);
        let lacks = lacks(&shared, &supervisor.sessions);
        let pause = match ended.take() {
            // The next one need not wait: the count fills up quickly at first.
            Some(Attempt::Joined) if lacks => Duration::ZERO,
            Some(Attempt::Duplicate) => supervisor.rest_from_draws(wanted),
            Some(attempt) => supervisor.pace.after(attempt, wanted, random()),
            None => {
                draining.mark_unchanged();
                if tries(&shared, &supervisor.sessions) && supervisor.has_room() {
                    supervisor.begin();
                }
                supervisor.pace.rest(random())
            }
        };
        tokio::select! {
            Some(attempt) = supervisor.under_way.next() => ended = Some(supervisor.conclude(attempt)),
            () = sleep(pause) => {}
            // A session is lost: another server may be at its address.
            () = lost(&mut supervisor.tasks) => supervisor.draw_anew(),
            Ok(()) = draining.changed() => {}
            () = leases.changed() => supervisor.draw_anew(),
        }
    }
}

/// Ready when a server is gone that had been there for an interval. One that ends each connection at once is
/// tried again after a pause, like one that refuses.
async fn lost(tasks: &mut JoinSet<bool>) {
    while let Some(ended) = tasks.join_next().await {
        if ended.unwrap_or(true) {
            return;
        }
    }
    pending().await
}

/// Whether fewer servers are connected than there are.
fn lacks(shared: &Shared, sessions: &Sessions) -> bool {
    sessions.staying() < shared.known_servers.load(Relaxed) as usize
}

/// Whether there is anything to try.
fn tries(shared: &Shared, sessions: &Sessions) -> bool {
    !shared.is_draining() && (lacks(shared, sessions) || shared.settings.sync_forever)
}

/// How an attempt at one address of a server went.
struct Answered {
    target: Target,
    result: Result<Joined, AttemptError>,
}

/// Tries one address that no other attempt is made to. It belongs to the server whose turn it is, or to the
/// next one with such an address. `None`: all are being tried, or no server lacks any more.
async fn attempt(
    shared: Arc<Shared>,
    sessions: Arc<Sessions>,
    trying: Trying,
    first: usize,
    may_draw: bool,
) -> Option<Answered> {
    let servers = &shared.settings.servers;
    // A host that names another server each time, or leaves each time, leaves those of other hosts their
    // share. Two at least: one that leaves is replaced.
    let share = (MAX_SESSIONS / servers.len().max(1)).max(2);
    for number in first..first.saturating_add(servers.len()) {
        let target = &servers[number % servers.len()];
        if sessions.of(target) >= share {
            continue;
        }
        let Some(lookup) = trying.claim(target, None) else { continue };
        let resolved = shared.settings.to_servers.resolve(target).await;
        drop(lookup);
        trying.note(target, None, resolved.as_ref().is_ok_and(|resolved| !resolved.addresses.is_empty()));
        // What this is for may be there by now.
        if !tries(&shared, &sessions) {
            return None;
        }
        let answered = |result| Some(Answered { target: target.clone(), result });
        let addresses = match resolved {
            Ok(resolved) if resolved.addresses.is_empty() => {
                return answered(Err(AttemptError::NoAddress(target.host.clone())));
            }
            Ok(resolved) => resolved.addresses,
            Err(error) => return answered(Err(error.into())),
        };
        let untried = trying.untried(target, &addresses);
        let failed = trying.failed(target, &addresses);
        let turn = number / servers.len();
        let Some(address) = choose(&untried, &sessions.by_address(), &failed, turn, may_draw) else {
            continue;
        };
        let _claim = trying.claim(target, Some(address));
        let joined = join(&shared, target, address).await;
        trying.note(target, Some(address), joined.is_ok());
        return answered(joined.map_err(AttemptError::from));
    }
    None
}

/// The target of an attempt: the look-up of a server's name, or one of its addresses. Through a proxy, all
/// servers have the proxy's addresses.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Step {
    target: Target,
    address: Option<SocketAddr>,
}

/// The steps of all attempts.
#[derive(Clone, Default)]
struct Trying(Arc<Mutex<Steps>>);

#[derive(Default)]
struct Steps {
    under_way: Vec<Step>,
    /// Those that failed at the last attempt. Addresses are of those that their names had when they were last
    /// looked up.
    failed: HashSet<Step>,
}

impl Trying {
    fn steps(&self) -> MutexGuard<'_, Steps> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what holds it for this attempt. `None`: another attempt has it.
    fn claim(&self, target: &Target, address: Option<SocketAddr>) -> Option<Claim> {
        let step = Step { target: target.clone(), address };
        let mut steps = self.steps();
        if steps.under_way.contains(&step) {
            return None;
        }
        steps.under_way.push(step.clone());
        Some(Claim { trying: self.clone(), step })
    }

    /// Those of `addresses` that no other attempt is made to.
    fn untried(&self, target: &Target, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        let steps = self.steps();
        let is_tried =
            |at| steps.under_way.iter().any(|step| step.target == *target && step.address == Some(at));
        addresses.iter().copied().filter(|at| !is_tried(*at)).collect()
    }

    /// Those of `addresses` where the last attempt failed. Forgets failures at other addresses of `target`.
    fn failed(&self, target: &Target, addresses: &[SocketAddr]) -> HashSet<SocketAddr> {
        let mut steps = self.steps();
        let is_there = |step: &Step| step.address.is_some_and(|address| addresses.contains(&address));
        steps.failed.retain(|step| step.target != *target || is_there(step));
        steps.failed.iter().filter(|step| step.target == *target).filter_map(|step| step.address).collect()
    }

    /// A step has succeeded, or failed.
    fn note(&self, target: &Target, address: Option<SocketAddr>, has_succeeded: bool) {
        let step = Step { target: target.clone(), address };
        let mut steps = self.steps();
        if has_succeeded {
            steps.failed.remove(&step)
        } else {
            steps.failed.insert(step)
        };
    }
}

struct Claim {
    trying: Trying,
    step: Step,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.trying.steps().under_way.retain(|step| *step != self.step);
    }
}

struct Supervisor {
    shared: Arc<Shared>,
    pace: pool::Pace,
    sessions: Arc<Sessions>,
    /// One for each session: returns whether it has lasted.
    tasks: JoinSet<bool>,
    /// The number of servers that the last new server reported.
    responses: u32,
    attempts: usize,
    /// When an address may be tried again that leads to a server which is connected already.
    next_draw: Option<Instant>,
    under_way: FuturesUnordered<BoxFuture<'static, Option<Answered>>>,
    trying: Trying,
    /// Whether a session has ended within an interval, since the last one began.
    ended_early: Arc<AtomicBool>,
    lines: Arc<Lines>,
}

/// Limits of log lines. What they are about may happen each second, for ever.
struct Lines {
    /// Attempts that failed.
    attempts: LineLimit,
    /// Files that cannot be used.
    files: LineLimit,
    /// Servers that come.
    comings: LineLimit,
    /// Servers that are lost.
    losses: LineLimit,
    started: Instant,
}

impl Lines {
    fn new() -> Self {
        Self {
            attempts: LineLimit::default(),
            files: LineLimit::default(),
            comings: LineLimit::default(),
            losses: LineLimit::default(),
            started: Instant::now(),
        }
    }

    /// Whether a line may be written, and how many were not.
    fn admit(&self, of: &LineLimit) -> Option<u64> {
        of.admit(Pace::WARNINGS, self.started.elapsed())
    }
}

impl Supervisor {
    /// How many servers there are. Not fewer than addresses were given: each names one, or several.
    fn wanted(&self, leases: Option<u32>) -> u32 {
        let settings = &self.shared.settings;
        let known = settings.count.servers(self.responses, leases);
        known.max(u32::try_from(settings.servers.len()).unwrap_or(u32::MAX))
    }

    /// Whether there may be another session.
    fn has_room(&self) -> bool {
        let has_room = self.sessions.all().len() + self.under_way.len() < MAX_SESSIONS;
        if !has_room && let Some(left_out) = self.lines.admit(&self.lines.attempts) {
            tracing::warn!(
                servers = MAX_SESSIONS,
                left_out,
                "connected to as many servers as may be; check what the servers say of their number and names"
            );
        }
        has_room
    }

    /// Begins an attempt.
    fn begin(&mut self) {
        self.reload();
        let (shared, sessions) = (Arc::clone(&self.shared), Arc::clone(&self.sessions));
        let may_draw = self.next_draw.is_none_or(|at| at <= Instant::now());
        self.under_way.push(Box::pin(attempt(
            shared,
            sessions,
            self.trying.clone(),
            self.attempts,
            may_draw,
        )));
        self.attempts = self.attempts.wrapping_add(1);
    }

    /// The wait after an attempt that led to a server which is connected already. Steps that lead nowhere do
    /// not wait for the next draw: each draw costs a server a handshake, and these cost it nothing.
    fn rest_from_draws(&mut self, wanted: u32) -> Duration {
        let pause = self.pace.after(Attempt::Duplicate, wanted, random());
        self.next_draw = Some(Instant::now() + pause);
        if self.trying.steps().failed.is_empty() { pause } else { Duration::ZERO }
    }

    /// The servers have changed: a draw may lead to another one again.
    fn draw_anew(&mut self) {
        self.next_draw = None;
        self.pace.draw_anew();
    }

    fn conclude(&mut self, answered: Option<Answered>) -> Attempt {
        let Some(Answered { target, result }) = answered else { return Attempt::Busy };
        let joined = match result {
            Ok(joined) => joined,
            Err(error) => return self.failed(&target, &error),
        };
        let counters = &self.shared.counters;
        if self.sessions.has_staying(joined.session.server()) {
            counters.duplicates.fetch_add(1, Relaxed);
            tracing::debug!(server = %joined.session.server(), "the server is connected already");
            return Attempt::Duplicate;
        }
        counters.joined.fetch_add(1, Relaxed);
        self.next_draw = None;
        self.add(joined);
        // Otherwise servers that end each connection at once would be tried as fast as handshakes go.
        if self.ended_early.swap(false, Relaxed) { Attempt::Unsteady } else { Attempt::Joined }
    }

    fn failed(&self, target: &Target, error: &AttemptError) -> Attempt {
        self.shared.counters.join_failures.fetch_add(1, Relaxed);
        if let Some(left_out) = self.lines.admit(&self.lines.attempts) {
            // It may repeat what the server sent.
            let error = printable(&error.to_string());
            tracing::warn!(server = %target, %error, left_out, "cannot connect to a server");
        }
        if error.is_absence() { Attempt::Absent } else { Attempt::Refused }
    }

    /// Reads certificate, CA and token again: connections are rare, and the files are small.
    fn reload(&self) {
        let settings = &self.shared.settings;
        let admitted = || self.lines.admit(&self.lines.files);
        if let Err(error) = settings.tls.reload()
            && let Some(left_out) = admitted()
        {
            tracing::warn!(%error, left_out, "the certificate files as read before stay in force");
        }
        if let Some(Err(error)) = settings.token.as_ref().map(|token| token.reload())
            && let Some(left_out) = admitted()
        {
            tracing::warn!(%error, left_out, "the token as read before stays in force");
        }
    }

    fn add(&mut self, joined: Joined) {
        let session = Arc::clone(&joined.session);
        if let Some(left_out) = self.lines.admit(&self.lines.comings) {
            tracing::info!(
                server = &**session.server(),
                address = %session.address(),
                servers = joined.count,
                streams = session.has_streams(),
                left_out,
                "connected to a server"
            );
        }
        self.responses = joined.count;
        let listed = Listed::new(self, session);
        let interval = self.shared.settings.sync_interval;
        let ended_early = Arc::clone(&self.ended_early);
        self.tasks.spawn(async move {
            let since = joined.session.since();
            let ended = joined.run().await;
            let has_lasted = since.elapsed() >= interval;
            if !has_lasted {
                // Before it leaves the list: an attempt that finds it gone knows why.
                ended_early.store(true, Relaxed);
            }
            listed.ended(&ended);
            has_lasted
        });
    }
}

/// A session in the list of all while it is held.
struct Listed {
    shared: Arc<Shared>,
    sessions: Arc<Sessions>,
    lines: Arc<Lines>,
    session: Arc<Session>,
}

impl Listed {
    fn new(supervisor: &Supervisor, session: Arc<Session>) -> Self {
        let Supervisor { shared, sessions, lines, .. } = supervisor;
        sessions.add(Arc::clone(&session));
        if shared.is_draining() {
            session.drain();
        }
        let (shared, sessions, lines) = (Arc::clone(shared), Arc::clone(sessions), Arc::clone(lines));
        Self { shared, sessions, lines, session }
    }

    fn ended(self, ended: &Ended) {
        let counters = &self.shared.counters;
        let counter = if matches!(ended, Ended::Silent(_)) { &counters.silent } else { &counters.lost };
        counter.fetch_add(1, Relaxed);
        let code = usize::from(ended.code().number());
        counters.stream_errors[code.min(Code::COUNT - 1)].fetch_add(1, Relaxed);
        let Some(left_out) = self.lines.admit(&self.lines.losses) else { return };
        let (server, connections) = (&**self.session.server(), self.session.connections());
        tracing::warn!(server, connections, reason = %ended, left_out, "a server is gone");
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.session.over();
        self.sessions.remove(&self.session);
    }
}
