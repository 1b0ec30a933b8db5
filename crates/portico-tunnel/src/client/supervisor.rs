//! The one task that keeps the tunnels as they are wanted: takes an event, has [`State`] compute the next
//! steps, and starts them. It logs and counts what becomes of tunnels.
//!
//! Each connection has a task of its own, which runs its driver, and one that authenticates. Both end with
//! it.

use std::sync::Arc;

use portico_net::random;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::authenticate::authenticate;
use super::connect::connect;
use super::event::{Connection, Ended, Event, Signals};
use super::settings::ClientSettings;
use super::state::{Report, State, Step, TunnelFacts};
use super::tunnel::{Tunnel, TunnelId, TunnelOrigin, TunnelState};
use super::view::View;

pub(super) struct Supervisor {
    view: Arc<View>,
    state: State,
    tunnels: Vec<Supervised>,
    /// The id of the next tunnel.
    next: u64,
}

/// A tunnel, and its state when the supervisor looked last.
struct Supervised {
    tunnel: Arc<Tunnel>,
    last: TunnelState,
}

impl Supervisor {
    /// Starts the task. It ends when the client has stopped and the last tunnel is closed.
    pub(super) fn start(settings: ClientSettings) -> Arc<View> {
        let (signals, events) = Signals::new();
        let state = State::new(settings.gateways.len(), settings.wanted(), settings.max_tunnels, random);
        let view = Arc::new(View::new(settings, signals));
        let supervisor = Self { view: Arc::clone(&view), state, tunnels: Vec::new(), next: 0 };
        tokio::spawn(supervisor.run(events));
        view
    }

    async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        while let Some(wake) = self.reconcile(Instant::now()) {
            let wake = async {
                match wake {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(event) = events.recv() => self.apply(event, Instant::now()),
                () = wake => {}
            }
        }
    }

    /// Notes what has happened. What follows from it is up to [`Supervisor::reconcile`].
    fn apply(&mut self, event: Event, now: Instant) {
        match event {
            Event::Changed => {}
            Event::Resolved { gateway, result } => self.state.resolved(gateway, result, now),
            Event::Connected { .. } if self.view.is_stopping() => {}
            Event::Connected { attempt, result: Ok(connection) } => {
                self.add(connection);
                if let Some(old) = self.state.connected(attempt, now) {
                    self.retire(old);
                }
            }
            Event::Connected { attempt, result: Err(failure) } => {
                let report = self.state.failed(attempt, failure, now);
                report.into_iter().for_each(|report| self.report(report));
            }
            Event::Closed { tunnel, ended } => self.remove(&tunnel, &ended),
        }
    }

    /// Compares the wanted tunnels with the present ones, and starts the next steps. Returns when to do so
    /// again if nothing happens before. `None` if there is nothing left to do for ever.
    fn reconcile(&mut self, now: Instant) -> Option<Option<Instant>> {
        self.look_at_tunnels(now);
        if self.view.is_stopping() {
            self.view.attempts().clear();
            self.tunnels.iter().for_each(|supervised| supervised.tunnel.retire());
            return (!self.tunnels.is_empty()).then_some(None);
        }
        let facts: Vec<_> = self.tunnels.iter().map(|supervised| facts(&supervised.tunnel)).collect();
        let demand = self.view.has_demand();
        for step in self.state.steps(&facts, demand, self.view.renewals(), now) {
            self.start_step(step);
        }
        *self.view.attempts() = self.state.attempts();
        Some(self.state.wake_at(demand, now))
    }

    fn start_step(&mut self, step: Step) {
        let view = Arc::clone(&self.view);
        match step {
            Step::Resolve(gateway) => {
                tokio::spawn(async move {
                    let Some(address) = view.settings.gateways.get(gateway) else { return };
                    let result = view.settings.dialer.resolve(&address.target).await;
                    view.signals.send(Event::Resolved { gateway, result }).await;
                });
            }
            Step::Connect { attempt, endpoint, renewals } => {
                let origin = TunnelOrigin { id: TunnelId(self.next), endpoint, renewals };
                self.next += 1;
                tokio::spawn(async move {
                    tokio::select! {
                        () = view.signals.supervisor_ended() => {}
                        result = connect(&view.settings, &view.signals, origin) => {
                            view.signals.send(Event::Connected { attempt, result }).await;
                        }
                    }
                });
            }
            Step::Retire(tunnel) => self.retire(tunnel),
            Step::Report(report) => self.report(report),
        }
    }

    /// Adds a tunnel that came up, and has its connection run.
    fn add(&mut self, Connection { tunnel, driver }: Connection) {
        let (gateway, address) =
            (self.view.gateway_name(tunnel.origin.endpoint.gateway), tunnel.origin.endpoint.address);
        tracing::info!(%gateway, %address, "tunnel up");
        self.view.totals().tunnels_opened += 1;
        self.tunnels.push(Supervised { tunnel: Arc::clone(&tunnel), last: TunnelState::Live });
        self.view.tunnels().push(Arc::clone(&tunnel));
        let (signals, driven) = (Arc::clone(&self.view.signals), Arc::clone(&tunnel));
        tokio::spawn(async move {
            let ended = driver.await;
            signals.send(Event::Closed { tunnel: driven, ended }).await;
        });
        tokio::spawn(authenticate(Arc::clone(&self.view), tunnel));
        self.view.signals.available.notify_waiters();
    }

    fn remove(&mut self, closed: &Arc<Tunnel>, ended: &Ended) {
        self.tunnels.retain(|supervised| supervised.tunnel.origin.id != closed.origin.id);
        self.view.tunnels().retain(|tunnel| tunnel.origin.id != closed.origin.id);
        let (gateway, address) =
            (self.view.gateway_name(closed.origin.endpoint.gateway), closed.origin.endpoint.address);
        match ended {
            Ended::Closed => tracing::info!(%gateway, %address, "tunnel closed"),
            ended => tracing::warn!(%gateway, %address, error = %ended, "tunnel lost"),
        }
    }

    /// Acts on tunnels that have changed their state since the last look.
    fn look_at_tunnels(&mut self, now: Instant) {
        for Supervised { tunnel, last } in &mut self.tunnels {
            let state = tunnel.state();
            let before = std::mem::replace(last, state);
            if state == before {
                continue;
            }
            let gateway = self.view.gateway_name(tunnel.origin.endpoint.gateway);
            let (address, streams) = (tunnel.origin.endpoint.address, tunnel.streams());
            match state {
                TunnelState::Live => {
                    tracing::info!(%gateway, %address, streams, "the gateway speaks again");
                    self.state.responsive(tunnel.origin.endpoint);
                    self.view.signals.available.notify_waiters();
                }
                TunnelState::Unresponsive => {
                    self.view.totals().tunnels_unresponsive += 1;
                    let message = "the gateway is silent; new streams go elsewhere";
                    tracing::warn!(%gateway, %address, streams, "{message}");
                    self.state.unresponsive(tunnel.origin.endpoint, now);
                }
                TunnelState::Draining => {
                    tracing::info!(%gateway, %address, streams, "tunnel drains; new streams go elsewhere");
                }
                // Its driver reports how it ended.
                TunnelState::Closed => {}
            }
        }
    }

    fn retire(&self, id: TunnelId) {
        let found = self.tunnels.iter().find(|supervised| supervised.tunnel.origin.id == id);
        found.into_iter().for_each(|supervised| supervised.tunnel.retire());
    }

    /// Counts a failed attempt, and logs it unless the one before failed the same way. One for a successor is
    /// always logged: it is rare, and nothing else is amiss as long as the old tunnel is up.
    fn report(&self, Report { message, is_new, replaces }: Report) {
        self.view.totals().tunnel_failures += 1;
        if replaces {
            tracing::warn!(error = %message, "no successor for a tunnel that is up; it stays; trying on");
        } else if is_new {
            tracing::warn!(error = %message, "no tunnel; trying on");
        } else {
            tracing::debug!(error = %message, "still no tunnel");
        }
    }
}

fn facts(tunnel: &Tunnel) -> TunnelFacts {
    TunnelFacts {
        origin: tunnel.origin,
        state: tunnel.state(),
        streams: tunnel.streams(),
        max_streams: tunnel.max_streams(),
        is_unauthorized: tunnel.is_unauthorized(),
        since: tunnel.since,
    }
}
