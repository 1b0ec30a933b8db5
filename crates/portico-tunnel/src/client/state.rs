//! Which tunnels are wanted, and the next step from those that are there. Pure: no I/O, and the caller has
//! the clock.
//!
//! As many live tunnels as configured are wanted, with room for streams. They are spread over the gateway
//! addresses that DNS gives, and each is opened with the current certificate. [`State::steps`] returns what
//! to do next. Two things are done:
//!
//! * A *missing* tunnel is connected, with back-off. A tunnel that drains, is unresponsive or is full counts
//!   as missing, but beyond the configured number there are at most `max_tunnels`.
//! * A tunnel that could be *better* is replaced, one at a time and without haste: its successor comes up
//!   first. A tunnel too many is retired when the others have room for its streams.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::time::Duration;

use portico_dial::{ResolveError, Resolved};
use tokio::time::Instant;

use super::backoff::{Backoff, Failed, Wait};
use super::endpoints::Endpoint;
use super::event::{AttemptId, Failure};
use super::resolve::Names;
use super::status::AttemptStatus;
use super::tunnel::{TunnelId, TunnelOrigin, TunnelState};

/// A tunnel that is lost is replaced within this time, at random: nodes that lose theirs together do not
/// return together.
const REPLACE_WITHIN: Duration = Duration::from_secs(2);

/// A lost tunnel is replaced within this time while a stream waits.
const REPLACE_WITHIN_WANTED: Duration = Duration::from_millis(200);

/// How long a tunnel on which our identity is refused stays at first, give or take a half. The cause may
/// pass: an API server that was away, a token that comes late.
const REPLACE_REFUSED: Duration = Duration::from_secs(10);

/// Between two attempts to better the same, give or take a half.
const REBALANCE_AGAIN: Duration = Duration::from_secs(30);

/// Wanted tunnels, and what is under way to have them.
#[derive(Debug)]
pub(super) struct State {
    wanted: usize,
    max_tunnels: usize,
    /// How often the certificate was renewed.
    renewals: u64,
    names: Names,
    /// One a wanted tunnel, and a last one for replacements.
    attempts: Vec<Attempt>,
    /// The purpose of the last attempt, while it is under way.
    replacement: Option<(Reason, TunnelId)>,
    /// When each of [`REASONS`] is acted on. `None` while there is nothing to act on.
    timers: [Option<Instant>; REASONS.len()],
    /// Returns a number between 0 and 1.
    random: fn() -> f64,
}

/// The facts about a tunnel that the state needs.
#[derive(Debug, Clone)]
pub(super) struct TunnelFacts {
    pub(super) origin: TunnelOrigin,
    pub(super) state: TunnelState,
    pub(super) streams: u32,
    pub(super) max_streams: u32,
    /// Its gateway answers 401.
    pub(super) is_unauthorized: bool,
    pub(super) since: Instant,
}

impl TunnelFacts {
    fn is_live(&self) -> bool {
        self.state == TunnelState::Live
    }

    fn is_full(&self) -> bool {
        self.streams >= self.max_streams
    }
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Resolve the name of a gateway.
    Resolve(usize),
    /// Connect, with the certificate as it is after so many renewals or later.
    Connect { attempt: AttemptId, endpoint: Endpoint, renewals: u64 },
    /// Give a tunnel no new streams, and close it after its last one.
    Retire(TunnelId),
    /// Count and log a failed attempt.
    Report(Report),
}

/// A failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) message: String,
    /// Whether the attempt before failed otherwise.
    pub(super) is_new: bool,
    /// Whether it was for the successor of a tunnel that is up.
    pub(super) replaces: bool,
}

/// Why a tunnel is replaced or retired though it is live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// It was opened with a certificate that has been renewed since.
    Renew,
    /// It goes to an address that no name leads to any more.
    Follow,
    /// The gateway refuses our identity on it. Another gateway, or the same one on another connection, may
    /// know better.
    Refused,
    /// It shares an address with another tunnel while an address has none.
    Spread,
    /// There are more tunnels than wanted.
    Shrink,
}

const REASONS: [Reason; 5] = [Reason::Renew, Reason::Follow, Reason::Refused, Reason::Spread, Reason::Shrink];

impl Reason {
    /// Whether a failure to replace a tunnel for it is news. An address without a tunnel is usually one that
    /// is down.
    fn is_required(self) -> bool {
        matches!(self, Self::Renew | Self::Follow)
    }
}

/// One attempt at a time to connect a tunnel.
#[derive(Debug, Default)]
struct Attempt {
    phase: Phase,
    backoff: Backoff,
    /// To wait before connecting: nothing at the start.
    wait: Wait,
    /// Renewals of the certificate when it began to connect.
    renewals: u64,
    /// Where it connects, or failed to connect.
    endpoint: Option<Endpoint>,
    /// Why it failed, until it succeeds.
    error: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// There is no tunnel to connect.
    #[default]
    Idle,
    /// Waits before it connects.
    Waiting { since: Instant },
    /// Waits for name servers.
    Resolving,
    /// Connects.
    Connecting,
}

impl State {
    /// `random` returns a number between 0 and 1.
    pub(super) fn new(gateways: usize, wanted: usize, max_tunnels: usize, random: fn() -> f64) -> Self {
        Self {
            wanted,
            max_tunnels,
            renewals: 0,
            names: Names::new(gateways),
            attempts: (0..=wanted).map(|_| Attempt::default()).collect(),
            replacement: None,
            timers: [None; REASONS.len()],
            random,
        }
    }

    // === Events ===

    /// Applies the answer of a name server.
    pub(super) fn resolved(&mut self, gateway: usize, result: Result<Resolved, ResolveError>, now: Instant) {
        let random = (self.random)();
        self.names.resolved(gateway, result, now, random);
    }

    /// An attempt succeeded. Returns the tunnel that is to be retired in turn.
    pub(super) fn connected(&mut self, AttemptId(id): AttemptId, now: Instant) -> Option<TunnelId> {
        let spread = self.spread();
        let again = now + self.rebalance_again();
        let attempt = self.attempts.get_mut(id)?;
        if let Some(endpoint) = attempt.endpoint {
            self.names.endpoints.succeeded(endpoint);
        }
        *attempt = Attempt { wait: spread, ..Attempt::default() };
        if id < self.wanted {
            return None;
        }
        let (reason, old) = self.replacement.take()?;
        // The next tunnel that must be replaced for the same reason need not wait.
        self.timers[reason as usize] = Some(if reason.is_required() { now } else { again });
        Some(old)
    }

    /// An attempt failed. Returns what to count and log.
    pub(super) fn failed(
        &mut self,
        AttemptId(id): AttemptId,
        failure: Failure,
        now: Instant,
    ) -> Option<Report> {
        let (spread, again, random) = (self.spread(), self.rebalance_again(), (self.random)());
        let attempt = self.attempts.get_mut(id)?;
        if let Some(endpoint) = attempt.endpoint {
            self.names.endpoints.failed(endpoint, now);
            self.names.mark_stale(endpoint.gateway);
        }
        if id < self.wanted {
            attempt.phase = Phase::Waiting { since: now };
            attempt.wait = attempt.backoff.failed(failure.how, random);
            if attempt.renewals < self.renewals {
                attempt.retry_soon(now, spread);
            }
        } else {
            (attempt.phase, attempt.endpoint) = (Phase::Idle, None);
            let (reason, _) = self.replacement.take()?;
            if !reason.is_required() {
                self.timers[reason as usize] = Some(now + again);
                return None;
            }
            // While an address is left that has not failed just now, the next attempt goes there, and soon:
            // before the one that failed is chosen again.
            let again = if self.names.endpoints.has_choice(now) {
                again / 6
            } else {
                again * attempt.backoff.failed_to_replace()
            };
            // The files may have changed meanwhile. `None` then: soon, and not together with other nodes.
            self.timers[reason as usize] = (attempt.renewals == self.renewals).then_some(now + again);
        }
        let message = failure.message;
        let is_new = attempt.error.as_ref() != Some(&message);
        attempt.error = Some(message.clone());
        Some(Report { message, is_new, replaces: id >= self.wanted })
    }

    /// A tunnel does not answer: neither should its successor go there.
    pub(super) fn unresponsive(&mut self, endpoint: Endpoint, now: Instant) {
        self.names.endpoints.failed(endpoint, now);
    }

    /// It answers again.
    pub(super) fn responsive(&mut self, endpoint: Endpoint) {
        self.names.endpoints.succeeded(endpoint);
    }

    // === Steps ===

    /// Returns what to do now. To be called after every event, and at [`State::wake_at`]. `demand`: a stream
    /// waits for a tunnel; `renewals`: how often the certificate was renewed.
    pub(super) fn steps(
        &mut self,
        tunnels: &[TunnelFacts],
        demand: bool,
        renewals: u64,
        now: Instant,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.renewals != renewals {
            self.renewals = renewals;
            self.retry_after_renewal(now);
        }
        self.fill(tunnels, now);
        self.rebalance(tunnels, now, &mut steps);
        steps.extend(self.names.refresh(now).into_iter().map(Step::Resolve));
        for id in 0..self.attempts.len() {
            self.advance(id, tunnels, demand, now, &mut steps);
        }
        steps
    }

    /// Returns when [`State::steps`] is to be called again if nothing happens before.
    pub(super) fn wake_at(&self, demand: bool, now: Instant) -> Option<Instant> {
        let attempts = self.attempts.iter().filter_map(|attempt| match attempt.phase {
            Phase::Waiting { since } => Some(attempt.due(since, demand)),
            Phase::Resolving => self.names.worth_waiting(now),
            Phase::Idle | Phase::Connecting => None,
        });
        // One replacement at a time.
        let timers = self.timers.iter().flatten().filter(|_| self.replacement.is_none()).copied();
        attempts.chain(timers).chain(self.names.next_refresh()).min()
    }

    /// Returns the attempts to connect a missing tunnel, and that for a successor once it has failed.
    pub(super) fn attempts(&self) -> Vec<AttemptStatus> {
        let (missing, successor) = self.attempts.split_at(self.wanted);
        let missing = missing.iter().filter(|attempt| attempt.phase != Phase::Idle);
        let successor = successor.iter().filter(|attempt| attempt.error.is_some());
        let status = |attempt: &Attempt, replaces| AttemptStatus {
            endpoint: attempt.endpoint,
            error: attempt.error.clone(),
            replaces,
        };
        let missing = missing.map(|attempt| status(attempt, false));
        missing.chain(successor.map(|attempt| status(attempt, true))).collect()
    }

    /// The problem may be gone with the renewed certificate or CA. Other nodes learn of it too, so not at
    /// once.
    fn retry_after_renewal(&mut self, now: Instant) {
        let random = self.random;
        let waiting = |attempt: &&mut Attempt| matches!(attempt.phase, Phase::Waiting { .. });
        for attempt in self.attempts.iter_mut().filter(waiting) {
            if attempt.error.is_some() {
                attempt.retry_soon(now, spread(random));
            }
        }
        self.timers[Reason::Renew as usize] = None;
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.backoff.succeeded();
        }
    }

    /// Starts an attempt for each missing tunnel.
    fn fill(&mut self, tunnels: &[TunnelFacts], now: Instant) {
        let live = tunnels.iter().filter(|tunnel| tunnel.is_live());
        let (live, with_room) = (live.clone().count(), live.filter(|tunnel| !tunnel.is_full()).count());
        let (wanted, max_tunnels) = (self.wanted, self.max_tunnels);
        let mut under_way =
            self.attempts[..wanted].iter().filter(|attempt| attempt.phase != Phase::Idle).count();
        for attempt in &mut self.attempts[..wanted] {
            let too_few = live + under_way < wanted;
            let too_full = with_room + under_way < wanted && tunnels.len() + under_way < max_tunnels;
            if attempt.phase == Phase::Idle && (too_few || too_full) {
                attempt.phase = Phase::Waiting { since: now };
                under_way += 1;
            }
        }
    }

    /// Moves one attempt on: from waiting to resolving names, and from there to connecting.
    fn advance(
        &mut self,
        id: usize,
        tunnels: &[TunnelFacts],
        demand: bool,
        now: Instant,
        steps: &mut Vec<Step>,
    ) {
        let Some(attempt) = self.attempts.get_mut(id) else { return };
        if let Phase::Waiting { since } = attempt.phase
            && now >= attempt.due(since, demand)
        {
            attempt.phase = Phase::Resolving;
            steps.extend(self.names.due(now).into_iter().map(Step::Resolve));
        }
        if attempt.phase != Phase::Resolving || self.names.worth_waiting(now).is_some() {
            return;
        }
        let endpoint = self.choose(id, tunnels, now);
        let renewals = self.renewals;
        let Some(attempt) = self.attempts.get_mut(id) else { return };
        (attempt.endpoint, attempt.renewals) = (endpoint, renewals);
        match endpoint {
            Some(endpoint) => {
                attempt.phase = Phase::Connecting;
                steps.push(Step::Connect { attempt: AttemptId(id), endpoint, renewals });
            }
            None => {
                let message = self.names.problem().unwrap_or("no address of a gateway is known").to_owned();
                let failure = Failure { how: Failed::Absent, message };
                steps.extend(self.failed(AttemptId(id), failure, now).map(Step::Report));
            }
        }
    }

    /// Returns the endpoint for an attempt. Endpoints of other attempts count as used, that of the tunnel it
    /// replaces does not.
    fn choose(&self, id: usize, tunnels: &[TunnelFacts], now: Instant) -> Option<Endpoint> {
        let replacement = self.replacement.filter(|_| id == self.wanted);
        let old = replacement.map(|(_, old)| old);
        let live = tunnels.iter().filter(|tunnel| tunnel.is_live() && Some(tunnel.origin.id) != old);
        let mut used: Vec<_> = live.map(|tunnel| tunnel.origin.endpoint.address).collect();
        let others = self.attempts.iter().enumerate().filter(|(other, _)| *other != id);
        used.extend(others.filter_map(|(_, attempt)| Some(attempt.endpoint?.address)));
        let random = (self.random)();
        if matches!(replacement, Some((Reason::Spread, _))) {
            self.names.endpoints.choose_unused(&used, now, random)
        } else {
            self.names.endpoints.choose(&used, now, random)
        }
    }

    // === Rebalancing ===

    /// Starts the next replacement that is due, unless one is under way. Retires a surplus tunnel that is
    /// due.
    fn rebalance(&mut self, tunnels: &[TunnelFacts], now: Instant, steps: &mut Vec<Step>) {
        for reason in REASONS {
            if self.replacement.is_some() {
                return;
            }
            let candidate = self.candidate(reason, tunnels);
            let is_called_for = match reason {
                // Whether the others have room changes with every stream: it is looked at when it is due.
                Reason::Shrink => tunnels.iter().filter(|tunnel| tunnel.is_live()).count() > self.wanted,
                Reason::Renew | Reason::Follow | Reason::Refused | Reason::Spread => candidate.is_some(),
            };
            if !is_called_for {
                self.timers[reason as usize] = None;
                continue;
            }
            let first = self.rebalance_first(reason);
            let due = *self.timers[reason as usize].get_or_insert(now + first);
            if now < due {
                continue;
            }
            self.timers[reason as usize] = Some(now + self.rebalance_again());
            match (reason, candidate) {
                (_, None) => {}
                (Reason::Shrink, Some(surplus)) => steps.push(Step::Retire(surplus)),
                (_, Some(old)) => {
                    self.replacement = Some((reason, old));
                    if let Some(attempt) = self.attempts.last_mut() {
                        (attempt.phase, attempt.wait) = (Phase::Waiting { since: now }, Wait::default());
                    }
                }
            }
        }
        let required = REASONS.into_iter().filter(|reason| reason.is_required());
        if required.filter_map(|reason| self.timers[reason as usize]).next().is_none()
            && let Some(attempt) = self.attempts.last_mut()
        {
            attempt.error = None;
            attempt.backoff.succeeded();
        }
    }

    /// Returns the tunnel to be replaced or retired for a reason.
    fn candidate(&self, reason: Reason, tunnels: &[TunnelFacts]) -> Option<TunnelId> {
        let endpoints = &self.names.endpoints;
        let used = addresses(tunnels);
        let mut live = tunnels.iter().filter(|tunnel| tunnel.is_live());
        let found = match reason {
            Reason::Renew => live.find(|tunnel| tunnel.origin.renewals < self.renewals),
            Reason::Follow if endpoints.is_empty() => None,
            Reason::Follow => live.find(|tunnel| !endpoints.is_known(tunnel.origin.endpoint.address)),
            Reason::Refused => live.filter(|tunnel| tunnel.is_unauthorized).min_by_key(|tunnel| tunnel.since),
            Reason::Spread if !endpoints.has_unused(&used) => None,
            Reason::Spread => live
                .filter(|tunnel| count(&used, tunnel.origin.endpoint.address) > 1)
                .min_by_key(|tunnel| tunnel.streams),
            Reason::Shrink => return self.surplus(tunnels),
        };
        found.map(|tunnel| tunnel.origin.id)
    }

    /// Returns a surplus tunnel to retire: from the gateway address with the most tunnels, the one with the
    /// fewest streams. `None` while the remaining tunnels would be more than half full, or too few of them
    /// would have room: another would be opened again soon.
    fn surplus(&self, tunnels: &[TunnelFacts]) -> Option<TunnelId> {
        let live: Vec<&TunnelFacts> = tunnels.iter().filter(|tunnel| tunnel.is_live()).collect();
        if live.len() <= self.wanted {
            return None;
        }
        let used = addresses(tunnels);
        let surplus = live.iter().min_by_key(|tunnel| {
            (Reverse(count(&used, tunnel.origin.endpoint.address)), tunnel.streams, Reverse(tunnel.since))
        })?;
        let others = || live.iter().filter(|tunnel| tunnel.origin.id != surplus.origin.id);
        let streams: u64 = live.iter().map(|tunnel| u64::from(tunnel.streams)).sum();
        let room: u64 = others().map(|tunnel| u64::from(tunnel.max_streams)).sum();
        let with_room = others().filter(|tunnel| !tunnel.is_full()).count();
        (streams <= room / 2 && with_room >= self.wanted).then_some(surplus.origin.id)
    }

    // === Time ===

    /// How long after it became possible a tunnel is first replaced for a reason. Nodes learn of it together,
    /// and do not act together.
    fn rebalance_first(&self, reason: Reason) -> Duration {
        match reason {
            Reason::Renew | Reason::Follow => REPLACE_WITHIN.mul_f64((self.random)()),
            Reason::Refused => REPLACE_REFUSED.mul_f64(0.5 + (self.random)()),
            // A gateway that just came up has missing tunnels to serve first, and a surplus may be needed in
            // a moment.
            Reason::Spread | Reason::Shrink => self.rebalance_again(),
        }
    }

    fn rebalance_again(&self) -> Duration {
        REBALANCE_AGAIN.mul_f64(0.5 + (self.random)())
    }

    fn spread(&self) -> Wait {
        spread(self.random)
    }
}

impl Attempt {
    fn due(&self, since: Instant, demand: bool) -> Instant {
        since + if demand { self.wait.wanted.min(self.wait.idle) } else { self.wait.idle }
    }

    fn retry_soon(&mut self, now: Instant, wait: Wait) {
        self.backoff.succeeded();
        (self.phase, self.wait) = (Phase::Waiting { since: now }, wait);
    }
}

/// The wait before a lost tunnel is replaced.
fn spread(random: fn() -> f64) -> Wait {
    let random = random();
    Wait { idle: REPLACE_WITHIN.mul_f64(random), wanted: REPLACE_WITHIN_WANTED.mul_f64(random) }
}

/// The addresses of live tunnels, once for each tunnel.
fn addresses(tunnels: &[TunnelFacts]) -> Vec<SocketAddr> {
    tunnels.iter().filter(|tunnel| tunnel.is_live()).map(|tunnel| tunnel.origin.endpoint.address).collect()
}

fn count(addresses: &[SocketAddr], address: SocketAddr) -> usize {
    addresses.iter().filter(|other| **other == address).count()
}

#[cfg(test)]
mod tests;
