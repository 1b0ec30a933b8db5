//! Keeps one connection to each server: one attempt at a time, as upstream.
//!
//! How many servers there are says each of them when it answers, or their Leases, or both. While fewer are
//! connected, the supervisor tries; with `--sync-forever` it tries on, and so finds servers that were added.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use portico_dial::{ResolveError, Target};
use portico_net::random;
use thiserror::Error;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::leases;
use super::pool::{Attempt, Pace, choose};
use super::server::{JoinError, Joined, join};
use super::session::{Ended, Session};
use super::settings::CountSource;
use super::shared::{CODES, Shared};

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
    /// Whether there seems to be no server at all. One that refuses us needs an operator.
    fn is_absence(&self) -> bool {
        !matches!(self, Self::Join(JoinError::Refused(..) | JoinError::Tls(_)))
    }
}

/// Runs until dropped, and all connections with it.
pub(super) async fn supervise(shared: Arc<Shared>) {
    let settings = &shared.settings;
    let mut leases = leases::count(&shared);
    let mut supervisor = Supervisor {
        pace: Pace::new(settings.sync_interval, settings.sync_interval_cap),
        sessions: JoinSet::new(),
        responses: 1,
        attempts: 0,
        shared: Arc::clone(&shared),
    };
    let mut draining = shared.draining();
    loop {
        let before = supervisor.wanted(leases.servers());
        shared.known_servers.store(before, Relaxed);
        let lacks = |supervisor: &Supervisor, wanted| supervisor.live() < wanted as usize;
        let tries = !*draining.borrow_and_update() && (lacks(&supervisor, before) || settings.sync_forever);
        let attempt = if tries { Some(supervisor.attempt().await) } else { None };
        let wanted = supervisor.wanted(leases.servers());
        shared.known_servers.store(wanted, Relaxed);
        let pause = match attempt {
            // The next one need not wait.
            Some(Attempt::Joined) if lacks(&supervisor, wanted) => continue,
            Some(attempt) => supervisor.pace.after(attempt, wanted, random()),
            None => supervisor.pace.rest(random()),
        };
        tokio::select! {
            () = sleep(pause) => {}
            // A server is gone: another one may be there.
            Some(_) = supervisor.sessions.join_next() => {}
            Ok(()) = draining.changed() => {}
            () = leases.changed() => {}
        }
    }
}

struct Supervisor {
    shared: Arc<Shared>,
    pace: Pace,
    sessions: JoinSet<()>,
    /// Servers by the word of the last one that was new.
    responses: u32,
    attempts: usize,
}

impl Supervisor {
    /// Connections that servers will keep.
    fn live(&self) -> usize {
        self.shared.sessions().iter().filter(|session| !session.is_leaving()).count()
    }

    /// How many servers there are. Not fewer than addresses were given: each names one, or several.
    fn wanted(&self, leases: Option<u32>) -> u32 {
        let settings = &self.shared.settings;
        let known = match settings.count {
            CountSource::Responses => self.responses,
            CountSource::Leases(_) => leases.unwrap_or(1),
            CountSource::Max(_) => self.responses.max(leases.unwrap_or(1)),
        };
        known.max(u32::try_from(settings.servers.len()).unwrap_or(u32::MAX))
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
                tracing::warn!(server = %target, %error, "cannot connect to a server");
                if error.is_absence() && self.live() == 0 { Attempt::Absent } else { Attempt::Failed }
            }
            Ok(joined) if self.is_connected(&joined) => {
                counters.duplicates.fetch_add(1, Relaxed);
                tracing::debug!(server = %joined.session.server(), "the server is connected already");
                Attempt::Duplicate
            }
            Ok(joined) => {
                counters.joined.fetch_add(1, Relaxed);
                self.add(joined);
                Attempt::Joined
            }
        }
    }

    async fn try_to_join(&self, target: &Target) -> Result<Joined, AttemptError> {
        let settings = &self.shared.settings;
        self.reload();
        let resolved = settings.to_servers.resolve(target).await?;
        let mut connected: HashMap<SocketAddr, usize> = HashMap::new();
        for session in self.shared.sessions().iter() {
            *connected.entry(session.address()).or_default() += 1;
        }
        let turn = self.attempts / settings.servers.len();
        let address = choose(&resolved.addresses, &connected, turn);
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

    /// Whether there is a connection to the server that will stay. One that leaves is replaced.
    fn is_connected(&self, joined: &Joined) -> bool {
        let is_same = |session: &Arc<Session>| session.server() == joined.session.server();
        self.shared.sessions().iter().any(|session| is_same(session) && !session.is_leaving())
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
        let listed = Listed::new(&self.shared, session);
        self.sessions.spawn(async move {
            let ended = joined.run().await;
            listed.ended(&ended);
        });
    }
}

/// A session in the list of all while it is held.
struct Listed {
    shared: Arc<Shared>,
    session: Arc<Session>,
}

impl Listed {
    fn new(shared: &Arc<Shared>, session: Arc<Session>) -> Self {
        shared.sessions().push(Arc::clone(&session));
        if shared.is_draining() {
            session.drain();
        }
        Self { shared: Arc::clone(shared), session }
    }

    fn ended(self, ended: &Ended) {
        let counters = &self.shared.counters;
        let counter = if matches!(ended, Ended::Silent(_)) { &counters.silent } else { &counters.lost };
        counter.fetch_add(1, Relaxed);
        let code = usize::from(ended.code().number());
        counters.stream_errors[code.min(CODES - 1)].fetch_add(1, Relaxed);
        let connections = self.session.connections();
        tracing::warn!(server = %self.session.server(), connections, reason = %ended, "a server is gone");
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.session.over();
        self.shared.sessions().retain(|session| !Arc::ptr_eq(session, &self.session));
    }
}
