//! Which agent gets a dial: the strategies of upstream's server, in the order in which they are configured.
//!
//! | Strategy | Its agents | Picks |
//! |---|---|---|
//! | `default` | all | any |
//! | `defaultRoute` | with `default-route=true` | any |
//! | `destHost` | with `ipv4`, `ipv6` or `host` | any that claims the dialled host |
//!
//! With `--route-cidr`, an address that nobody claims goes to the longest `cidr` around it (`destHost`).
//! "Any" begins at random and passes over agents that drain, unless all do. An agent has several streams for
//! a moment when it finds a server twice, or has come back beside its dead one. The oldest counts, and the
//! others after all other agents. Nothing here waits or reads a clock.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use portico_wire::konnectivity::Identifiers;

/// How an agent is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// By the dialled host.
    DestHost,
    /// Among agents that take what nobody else is named for.
    DefaultRoute,
    /// Among all.
    Default,
}

impl Strategy {
    /// The name in flags and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DestHost => "destHost",
            Self::DefaultRoute => "defaultRoute",
            Self::Default => "default",
        }
    }
}

/// One stream of an agent, as far as choosing goes.
pub(crate) trait Candidate {
    /// The agent's name for itself.
    fn agent(&self) -> &str;
    /// What it says it reaches.
    fn identifiers(&self) -> &Identifiers;
    /// Whether it asked for no more dials.
    fn is_draining(&self) -> bool;
}

/// The agents of each strategy.
#[derive(Debug)]
pub(crate) struct Registry<C> {
    strategies: Vec<Strategy>,
    routes_networks: bool,
    all: Agents<C>,
    default_route: Agents<C>,
    hosts: HashMap<Box<str>, Agents<C>>,
    networks: HashMap<IpNet, Agents<C>>,
}

/// Streams by agent, the oldest of each agent first.
#[derive(Debug)]
struct Agents<C>(Vec<Vec<Arc<C>>>);

impl<C: Candidate> Registry<C> {
    /// `routes_networks` is `--route-cidr`.
    pub(crate) fn new(strategies: Vec<Strategy>, routes_networks: bool) -> Self {
        let (hosts, networks) = (HashMap::new(), HashMap::new());
        let (all, default_route) = (Agents::default(), Agents::default());
        Self { strategies, routes_networks, all, default_route, hosts, networks }
    }

    /// Adds a stream.
    pub(crate) fn add(&mut self, stream: &Arc<C>) {
        let identifiers = stream.identifiers();
        self.all.add(stream);
        if identifiers.default_route {
            self.default_route.add(stream);
        }
        for host in identifiers.hosts() {
            self.hosts.entry(host.into()).or_default().add(stream);
        }
        for network in identifiers.networks() {
            self.networks.entry(network).or_default().add(stream);
        }
    }

    /// Removes a stream.
    pub(crate) fn remove(&mut self, stream: &Arc<C>) {
        let identifiers = stream.identifiers();
        self.all.remove(stream);
        self.default_route.remove(stream);
        for host in identifiers.hosts() {
            let is_empty = self.hosts.get_mut(host).is_some_and(|agents| agents.remove(stream));
            if is_empty {
                self.hosts.remove(host);
            }
        }
        for network in identifiers.networks() {
            let is_empty = self.networks.get_mut(&network).is_some_and(|agents| agents.remove(stream));
            if is_empty {
                self.networks.remove(&network);
            }
        }
    }

    /// Whether no agent has a stream.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.0.is_empty()
    }

    /// Whether the agent of this name has a stream.
    pub(crate) fn has(&self, agent: &str) -> bool {
        self.all.0.iter().any(|streams| streams[0].agent() == agent)
    }

    /// The stream of the agent for `host`, none of `tried`. `start` is a random number.
    pub(crate) fn pick(&self, host: &str, start: usize, tried: &[Arc<C>]) -> Option<Arc<C>> {
        self.strategies.iter().find_map(|strategy| match strategy {
            Strategy::Default => self.all.pick(start, tried),
            Strategy::DefaultRoute => self.default_route.pick(start, tried),
            Strategy::DestHost => self
                .hosts
                .get(host)
                .and_then(|agents| agents.pick(start, tried))
                .or_else(|| self.by_network(host, start, tried)),
        })
    }

    fn by_network(&self, host: &str, start: usize, tried: &[Arc<C>]) -> Option<Arc<C>> {
        if !self.routes_networks || self.networks.is_empty() {
            return None;
        }
        let address: IpAddr = host.parse().ok()?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        (0..=longest).rev().find_map(|prefix| {
            let network = IpNet::new(address, prefix).ok()?.trunc();
            self.networks.get(&network)?.pick(start, tried)
        })
    }

    /// How many agents a strategy has. Those of `destHost` count once, however many identifiers and streams
    /// they have.
    pub(crate) fn count(&self, strategy: Strategy) -> usize {
        match strategy {
            Strategy::Default => self.all.0.len(),
            Strategy::DefaultRoute => self.default_route.0.len(),
            Strategy::DestHost => {
                let all = self.all.0.iter();
                all.filter(|streams| streams.iter().any(|stream| self.is_routed_by_host(stream))).count()
            }
        }
    }

    /// Whether a stream gets dials for the host that they name.
    fn is_routed_by_host(&self, stream: &C) -> bool {
        let identifiers = stream.identifiers();
        identifiers.hosts().next().is_some()
            || self.routes_networks && identifiers.networks().next().is_some()
    }

    /// Whether the first strategy has an agent.
    pub(crate) fn is_ready(&self) -> bool {
        self.strategies.first().is_some_and(|strategy| self.count(*strategy) > 0)
    }

    /// The strategies in their order.
    pub(crate) fn strategies(&self) -> &[Strategy] {
        &self.strategies
    }

    /// Every stream.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &Arc<C>> {
        self.all.0.iter().flatten()
    }
}

impl<C> Default for Agents<C> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<C: Candidate> Agents<C> {
    fn add(&mut self, stream: &Arc<C>) {
        let of_agent = self.0.iter_mut().find(|streams| streams[0].agent() == stream.agent());
        match of_agent {
            // An agent may repeat an identifier.
            Some(streams) if streams.iter().any(|known| Arc::ptr_eq(known, stream)) => {}
            Some(streams) => streams.push(Arc::clone(stream)),
            None => self.0.push(vec![Arc::clone(stream)]),
        }
    }

    /// Returns whether none is left.
    fn remove(&mut self, stream: &Arc<C>) -> bool {
        for streams in &mut self.0 {
            streams.retain(|known| !Arc::ptr_eq(known, stream));
        }
        self.0.retain(|streams| !streams.is_empty());
        self.0.is_empty()
    }

    fn pick(&self, start: usize, tried: &[Arc<C>]) -> Option<Arc<C>> {
        let count = self.0.len();
        let from = start.checked_rem(count)?;
        let mut less_fit: Option<((bool, bool), &Arc<C>)> = None;
        for offset in 0..count {
            let streams = &self.0[(from + offset) % count];
            let is_tried = |stream: &Arc<C>| tried.iter().any(|known| Arc::ptr_eq(known, stream));
            let mut left = streams.iter().filter(|stream| !is_tried(stream));
            // The oldest, but for those that drain: the old pod of a node, beside the new one of its name.
            let Some(stream) = left.clone().find(|stream| !stream.is_draining()).or_else(|| left.next())
            else {
                continue;
            };
            // An agent that has been tried may have come back by another stream, beside its own dead one.
            let rank = (stream.is_draining(), streams.iter().any(is_tried));
            if rank == (false, false) {
                return Some(Arc::clone(stream));
            }
            if less_fit.is_none_or(|(least, _)| rank < least) {
                less_fit = Some((rank, stream));
            }
        }
        less_fit.map(|(_, stream)| Arc::clone(stream))
    }
}

#[cfg(test)]
mod tests;
