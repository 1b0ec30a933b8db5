//! Keeps one connection to each server: one attempt at a time, as upstream.
//!
//! How many servers there are says each of them when it answers, or their Leases, or both. While fewer are
//! connected, the supervisor tries, up to [`MAX_SESSIONS`]; with `--sync-forever` it tries on, and so finds
//! servers that were added.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

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
    /// Whether this passes without an operator: there is no server, or none that is able to serve.
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
        pace: pool::Pace::new(settings.sync_interval, settings.sync_interval_cap),
        sessions,
        tasks: JoinSet::new(),
        responses: 1,
        attempts: 0,
        ended_early: Arc::default(),
        lines: LineLimit::default(),
        started: Instant::now(),
        shared: Arc::clone(&shared),
    };
    let mut draining = shared.draining();
    loop {
        let before = supervisor.wanted(leases.servers());
        shared.known_servers.store(before, Relaxed);
        let lacks = |supervisor: &Supervisor, wanted| supervisor.sessions.staying() < wanted as usize;
        let tries = !*draining.borrow_and_update() && (lacks(&supervisor, before) || settings.sync_forever);
        let tries = tries && supervisor.has_room();
        let attempt = if tries { Some(supervisor.attempt().await) } else { None };
        let wanted = supervisor.wanted(leases.servers());
        shared.known_servers.store(wanted, Relaxed);
        let pause = match attempt {
            // The next one need not wait: the count fills up quickly at first.
            Some(Attempt::Joined) if lacks(&supervisor, wanted) => continue,
            Some(attempt) => supervisor.pace.after(attempt, wanted, random()),
            None => supervisor.pace.rest(random()),
        };
        tokio::select! {
            () = sleep(pause) => {}
            // Another one may be there.
            () = supervisor.lost() => {}
            Ok(()) = draining.changed() => {}
            () = leases.changed() => {}
        }
    }
}

struct Supervisor {
    shared: Arc<Shared>,
    pace: pool::Pace,
    sessions: Arc<Sessions>,
    /// One for each session: returns whether it has lasted.
    tasks: JoinSet<bool>,
    /// Servers by the word of the last one that was new.
    responses: u32,
    attempts: usize,
    /// Whether a session has ended within an interval, since the last one began.
    ended_early: Arc<AtomicBool>,
    /// Of log lines about attempts that failed: there may be one each second, for ever.
    lines: LineLimit,
    started: Instant,
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
        let has_room = self.sessions.all().len() < MAX_SESSIONS;
        if !has_room && let Some(left_out) = self.lines.admit(Pace::WARNINGS, self.started.elapsed()) {
            tracing::warn!(
                servers = MAX_SESSIONS,
                left_out,
                "connected to as many servers as may be; check what the servers say of their number and names"
            );
        }
        has_room
    }

    /// Ready when a server is gone that had been there for an interval. One that ends each connection at
    /// once is tried again after a pause, like one that refuses.
    async fn lost(&mut self) {
        while let Some(ended) = self.tasks.join_next().await {
            if ended.unwrap_or(true) {
                return;
            }
        }
        pending().await
    }

    async fn attempt(&mut self) -> Attempt {
        let servers = &self.shared.settings.servers;
        let target = servers[self.attempts % servers.len()].clone();
        let result = self.try_to_join(&target).await;
        self.attempts = self.attempts.wrapping_add(1);
        let counters = &self.shared.counters;
        match result {
            Err(error) => {
                counters.join_failures.fetch_add(1, Relaxed);
                if let Some(left_out) = self.lines.admit(Pace::WARNINGS, self.started.elapsed()) {
                    tracing::warn!(server = %target, %error, left_out, "cannot connect to a server");
                }
                if error.is_absence() { Attempt::Absent } else { Attempt::Refused }
            }
            Ok(joined) if self.sessions.has_staying(joined.session.server()) => {
                counters.duplicates.fetch_add(1, Relaxed);
                tracing::debug!(server = %joined.session.server(), "the server is connected already");
                Attempt::Duplicate
            }
            Ok(joined) => {
                counters.joined.fetch_add(1, Relaxed);
                self.add(joined);
                // Or servers that end each connection at once would be tried as fast as handshakes go.
                if self.ended_early.swap(false, Relaxed) { Attempt::Unsteady } else { Attempt::Joined }
            }
        }
    }

    async fn try_to_join(&self, target: &Target) -> Result<Joined, AttemptError> {
        let settings = &self.shared.settings;
        self.reload();
        let resolved = settings.to_servers.resolve(target).await?;
        let turn = self.attempts / settings.servers.len();
        let address = choose(&resolved.addresses, &self.sessions.by_address(), turn);
        let address = address.ok_or_else(|| AttemptError::NoAddress(target.host.clone()))?;
        Ok(join(&self.shared, target, address).await?)
    }

    /// Reads certificate, CA and token again: connections are rare, and the files are small.
    fn reload(&self) {
        let settings = &self.shared.settings;
        if let Err(error) = settings.tls.reload() {
            tracing::warn!(%error, "the certificate files as read before stay in force");
        }
        if let Some(Err(error)) = settings.token.as_ref().map(|token| token.reload()) {
            tracing::warn!(%error, "the token as read before stays in force");
        }
    }

    fn add(&mut self, joined: Joined) {
        let session = Arc::clone(&joined.session);
        tracing::info!(
            server = %session.server(),
            address = %session.address(),
            servers = joined.count,
            streams = session.has_streams(),
            "connected to a server"
        );
        self.responses = joined.count;
        let listed = Listed::new(&self.shared, &self.sessions, session);
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
    session: Arc<Session>,
}

impl Listed {
    fn new(shared: &Arc<Shared>, sessions: &Arc<Sessions>, session: Arc<Session>) -> Self {
        sessions.add(Arc::clone(&session));
        if shared.is_draining() {
            session.drain();
        }
        Self { shared: Arc::clone(shared), sessions: Arc::clone(sessions), session }
    }

    fn ended(self, ended: &Ended) {
        let counters = &self.shared.counters;
        let counter = if matches!(ended, Ended::Silent(_)) { &counters.silent } else { &counters.lost };
        counter.fetch_add(1, Relaxed);
        let code = usize::from(ended.code().number());
        counters.stream_errors[code.min(Code::COUNT - 1)].fetch_add(1, Relaxed);
        let connections = self.session.connections();
        tracing::warn!(server = %self.session.server(), connections, reason = %ended, "a server is gone");
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.session.over();
        self.sessions.remove(&self.session);
    }
}
