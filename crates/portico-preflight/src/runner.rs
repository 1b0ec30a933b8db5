//! Many checks: in parallel, within a bound, at a pace, with a progress call after each.
//!
//! The pace counts what opens a conversation: a SYN, or a first datagram. A check that is not answered sends
//! three to five packets in its time.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use portico_dial::{Dialer, Target};

use crate::bucket::Bucket;
use crate::check::tcp::Responder;
use crate::check::{Limits, back, datagram, dns, path_mtu, port, tcp, tls};
use crate::observation::Observation;
use crate::transport::Transport;

/// One check.
#[derive(Debug, Clone)]
pub enum What {
    /// A TCP connection; TLS over it where a service answers, and no responder of ours.
    Tcp {
        /// Where to.
        to: SocketAddr,
        /// What the service should present.
        tls: Option<Box<tls::Server>>,
    },
    /// Like [`What::Tcp`], to a name, at its first address that accepts.
    TcpByName {
        /// Where to.
        target: Target,
        /// What the service should present.
        tls: Option<Box<tls::Server>>,
    },
    /// A datagram that comes back.
    Datagram {
        /// Where to.
        to: IpAddr,
        /// By which protocol.
        transport: Transport,
    },
    /// The largest datagram that comes back.
    PathMtu {
        /// Where to.
        to: IpAddr,
        /// By which protocol.
        transport: Transport,
    },
    /// A name server.
    Dns {
        /// Where it is.
        server: SocketAddr,
        /// By TCP, or by UDP.
        is_tcp: bool,
    },
    /// TLS to a name, through the corporate proxy if one leads there.
    Tls(Box<tls::Server>),
    /// The other direction.
    Back {
        /// Addresses at which the other machine may be asked.
        via: Arc<[SocketAddr]>,
        /// What it is to try.
        transport: Transport,
    },
    /// A port of this machine.
    LocalPort {
        /// The address of this machine.
        address: IpAddr,
        /// The port.
        transport: Transport,
    },
    /// Nothing can be tried.
    Nothing {
        /// Why.
        why: Box<str>,
    },
}

/// The outcome of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// What was seen.
    pub seen: Observation,
    /// The responder that answered over TCP.
    pub responder: Option<Responder>,
    /// How far the other clock is ahead, where it is known.
    pub ahead_millis: Option<i64>,
}

/// How much at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Checks at a time.
    pub parallel: usize,
    /// Checks begun each second.
    pub per_second: u32,
}

impl Default for Pace {
    /// A full mesh of 100 machines begins 200 checks a second everywhere: less than one busy client.
    fn default() -> Self {
        Self { parallel: 64, per_second: 200 }
    }
}

/// What checks need beside their own facts.
#[derive(Debug)]
pub struct Tools {
    /// The way to what is outside, through the corporate proxy.
    pub dialer: Dialer,
    /// The way to machines of the installation.
    pub direct: Dialer,
    /// Time limits.
    pub limits: Limits,
}

/// Runs all checks. `progress` is called for each that has ended, with its place in the list. The result has
/// the order of `checks`.
pub async fn run(
    checks: &[What],
    tools: &Tools,
    pace: Pace,
    mut progress: impl FnMut(usize, &Outcome),
) -> Vec<Outcome> {
    let bucket = Bucket::new(pace.per_second);
    let bucket = &bucket;
    let mut running = stream::iter(checks.iter().enumerate())
        .map(|(index, what)| async move {
            if !matches!(what, What::Nothing { .. } | What::LocalPort { .. }) {
                bucket.wait().await;
            }
            (index, one(what, tools).await)
        })
        .buffer_unordered(pace.parallel.max(1));
    let mut outcomes: Vec<Option<Outcome>> = checks.iter().map(|_| None).collect();
    while let Some((index, outcome)) = running.next().await {
        progress(index, &outcome);
        outcomes[index] = Some(outcome);
    }
    let never = || Outcome::of(Observation::not_tried("the runner has lost it; please report this"));
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(never)).collect()
}

impl Outcome {
    /// The outcome of a check without a clock.
    #[must_use]
    pub fn of(seen: Observation) -> Self {
        Self { seen, responder: None, ahead_millis: None }
    }

    fn of_greeting(greeting: tcp::Greeting) -> Self {
        let ahead_millis = greeting.responder.as_ref().map(|responder| responder.ahead_millis);
        Self { seen: greeting.seen, responder: greeting.responder, ahead_millis }
    }
}

async fn one(what: &What, tools: &Tools) -> Outcome {
    let limits = tools.limits;
    let seen = match what {
        What::Tcp { to, tls } => return tcp_then_tls(*to, tls.as_deref(), tools).await,
        What::TcpByName { target, tls } => return by_name(target, tls.as_deref(), tools).await,
        What::Tls(server) => return shake_hands(&tools.dialer, server, limits).await,
        What::Datagram { to, transport } => datagram::check(*to, *transport, limits).await,
        What::PathMtu { to, transport } => path_mtu::check(*to, *transport, limits).await,
        What::Dns { server, is_tcp } => dns::check(*server, *is_tcp, limits).await,
        What::Back { via, transport } => back::check(via, *transport, limits).await,
        What::LocalPort { address, transport } => port::check(*address, *transport).await,
        What::Nothing { why } => Observation::NotTried { why: why.clone() },
    };
    Outcome::of(seen)
}

/// A service is asked for TLS, a responder is not. Where the server's name is an address, an alert may only
/// mean that the service wants a name: then the open port is the answer.
async fn tcp_then_tls(to: SocketAddr, tls: Option<&tls::Server>, tools: &Tools) -> Outcome {
    let greeting = tcp::check(to, tools.limits).await;
    match (tls, &greeting) {
        (Some(server), tcp::Greeting { seen: Observation::Answered { .. }, responder: None }) => {
            let shaken = shake_hands(&tools.direct, server, tools.limits).await;
            match shaken.seen {
                Observation::NoTls { .. } | Observation::Reset if server.name.parse::<IpAddr>().is_ok() => {
                    Outcome::of_greeting(greeting)
                }
                _ => shaken,
            }
        }
        _ => Outcome::of_greeting(greeting),
    }
}

async fn shake_hands(dialer: &Dialer, server: &tls::Server, limits: Limits) -> Outcome {
    let tls::Handshake { seen, ahead_millis } = tls::check(dialer, server, limits).await;
    Outcome { seen, responder: None, ahead_millis }
}

async fn by_name(target: &Target, tls: Option<&tls::Server>, tools: &Tools) -> Outcome {
    let addresses = match tools.direct.resolve(target).await {
        Ok(resolved) => resolved.addresses,
        Err(error) => return Outcome::of(Observation::NotResolved { why: error.to_string().into() }),
    };
    let mut last = Outcome::of(Observation::NotResolved { why: "the name has no address".into() });
    for address in &addresses {
        last = tcp_then_tls(*address, tls, tools).await;
        if !matches!(
            last.seen,
            Observation::Refused { .. } | Observation::TimedOut { .. } | Observation::Unreachable { .. }
        ) {
            return last;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use portico_dial::{ProxyFiles, ProxySetting};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn checks_begin_at_a_pace_and_each_is_reported() {
        // Port 0 is refused by the kernel at once.
        let to = SocketAddr::from(([127, 0, 0, 1], 0));
        let checks: Vec<_> = (0..100).map(|_| What::Tcp { to, tls: None }).collect();
        let dialer = || Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None).unwrap();
        let tools = Tools { dialer: dialer(), direct: dialer(), limits: Limits::default() };
        let start = Instant::now();
        let mut reported = Vec::new();
        let outcomes = run(&checks, &tools, Pace { parallel: 10, per_second: 100 }, |index, outcome| {
            reported.push(index);
            assert_ne!(outcome.seen.kind(), "answered");
        });
        let outcomes = outcomes.await;
        assert_eq!(start.elapsed(), Duration::from_secs(1));
        assert_eq!(outcomes.len(), 100);
        reported.sort_unstable();
        assert_eq!(reported, (0..100).collect::<Vec<_>>());
    }
}
