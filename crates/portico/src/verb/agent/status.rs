//! The state of a running agent for the admin listener. Written by [`super::control`], read by
//! [`super::pages`] and [`super::metrics`].

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use portico_agent::Agent;
use portico_agent::address::{self, Placement};
use portico_dial::Dialer;
use portico_tunnel::client::{IdentityState, TunnelState, TunnelStatus};

/// The time in which a gateway says whether it accepts the identity, if it ever does: a round trip and a
/// token review.
const IDENTITY_REPLY_TIME: Duration = Duration::from_secs(4);

/// One agent process.
#[derive(Debug)]
pub(crate) struct Status {
    /// Its name, if it has one.
    pub(crate) instance: Option<Box<str>>,
    /// The address that is to be held.
    pub(crate) address: Option<IpAddr>,
    /// Gateways that are reached without TLS.
    pub(crate) plaintext_gateways: usize,
    held: OnceLock<address::Status>,
    agent: OnceLock<Arc<Agent>>,
    listening: AtomicBool,
    stopping: AtomicBool,
    file_problems: Mutex<Vec<String>>,
    /// Its file is looked at as gateways are dialled.
    dialer: OnceLock<Arc<Dialer>>,
}

/// One of the things that must be so for an agent to be ready.
#[derive(Debug)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) passed: bool,
    pub(crate) detail: String,
}

impl Status {
    pub(crate) fn new(
        instance: Option<Box<str>>,
        address: Option<IpAddr>,
        plaintext_gateways: usize,
    ) -> Self {
        Self {
            instance,
            address,
            plaintext_gateways,
            held: OnceLock::new(),
            agent: OnceLock::new(),
            listening: AtomicBool::default(),
            stopping: AtomicBool::default(),
            file_problems: Mutex::default(),
            dialer: OnceLock::new(),
        }
    }

    /// The address, once it was taken.
    pub(crate) fn held(&self) -> Option<&address::Status> {
        self.held.get()
    }

    /// The address was taken. Once in the life of a process.
    pub(crate) fn set_held(&self, held: address::Status) {
        let _first_stays = self.held.set(held);
    }

    /// The data plane, once it has started.
    pub(crate) fn agent(&self) -> Option<&Arc<Agent>> {
        self.agent.get()
    }

    /// The data plane has started. Once in the life of a process.
    pub(crate) fn set_agent(&self, agent: Arc<Agent>) {
        let _first_stays = self.agent.set(agent);
    }

    pub(crate) fn set_listening(&self) {
        self.listening.store(true, Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Files that cannot be used, with the reason: of the identity, and the CA of the proxy.
    pub(crate) fn file_problems(&self) -> Vec<String> {
        let of_proxy = self.dialer.get().and_then(|dialer| dialer.file_problem());
        self.locked_file_problems().iter().cloned().chain(of_proxy).collect()
    }

    /// How gateways are dialled. Once in the life of a process.
    pub(crate) fn set_dialer(&self, dialer: Arc<Dialer>) {
        let _first_stays = self.dialer.set(dialer);
    }

    pub(crate) fn set_file_problems(&self, problems: Vec<String>) {
        *self.locked_file_problems() = problems;
    }

    /// Tunnels, and attempts to have one.
    pub(crate) fn tunnels(&self) -> Vec<TunnelStatus> {
        self.agent().map(|agent| agent.client().status()).unwrap_or_default()
    }

    /// Whether connections would be carried, listened for or not.
    pub(crate) fn can_carry(&self) -> bool {
        let tunnels = self.tunnels();
        tunnel_check(&tunnels).passed && identity_check(&tunnels).passed
    }

    /// What must be so for this agent to be ready.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let tunnels = self.tunnels();
        vec![self.address_check(), self.listening_check(), tunnel_check(&tunnels), identity_check(&tunnels)]
    }

    fn address_check(&self) -> Check {
        let (passed, detail) = match (self.address, self.held()) {
            (None, _) => (true, "none is to be held".to_owned()),
            (Some(address), None) => (false, format!("{address} is not taken yet")),
            (Some(address), Some(held)) => {
                let Placement { kind, interface, adopted, why, .. } = &*held.placement();
                let adopted = if *adopted { ", adopted" } else { "" };
                let repairs = held.repairs();
                let mut detail =
                    format!("{address} on {interface} ({kind}{adopted}), put back {repairs} times");
                if !why.is_empty() {
                    detail.push_str(&format!("; {why}"));
                }
                match held.problem() {
                    _ if held.is_held() => (true, detail),
                    Some(problem) => {
                        (false, format!("{address} cannot be put back: {problem}; trying again"))
                    }
                    None => (false, format!("{address} is missing, and being put back")),
                }
            }
        };
        Check { name: "address", passed, detail }
    }

    fn listening_check(&self) -> Check {
        let (passed, detail) = if self.is_stopping() {
            (false, "stopping: open connections may finish".to_owned())
        } else if !self.listening.load(Relaxed) {
            (false, "not yet; where there is a predecessor, it goes on until a tunnel is up".to_owned())
        } else {
            let forwards = self.agent().map(|agent| &agent.shared().forwards);
            let each = forwards.into_iter().flatten();
            let each: Vec<_> =
                each.map(|forward| format!("{} for {}", forward.listen, forward.authority)).collect();
            (true, each.join(", "))
        };
        Check { name: "listening", passed, detail }
    }

    fn locked_file_problems(&self) -> MutexGuard<'_, Vec<String>> {
        self.file_problems.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The word for a state. Stable.
pub(super) fn state(tunnel: &TunnelStatus) -> &'static str {
    match tunnel.state {
        None => "connecting",
        Some(TunnelState::Live) => "live",
        Some(TunnelState::Unresponsive) => "suspect",
        Some(TunnelState::Draining) => "draining",
        Some(TunnelState::Closed) => "closed",
    }
}

/// The word for whether a gateway accepts the identity. Stable.
pub(super) fn identity(tunnel: &TunnelStatus) -> &'static str {
    match tunnel.identity {
        IdentityState::Unknown => "unknown",
        IdentityState::Accepted => "accepted",
        IdentityState::Refused { .. } => "refused",
    }
}

fn live(tunnels: &[TunnelStatus]) -> impl Iterator<Item = &TunnelStatus> {
    tunnels.iter().filter(|tunnel| tunnel.state == Some(TunnelState::Live))
}

fn tunnel_check(tunnels: &[TunnelStatus]) -> Check {
    let up: Vec<String> = live(tunnels).map(name).collect();
    let passed = !up.is_empty();
    let detail = if passed {
        format!("{} up: {}", up.len(), up.join(", "))
    } else {
        let error = tunnels.iter().find_map(|tunnel| tunnel.error.as_deref());
        format!("none is up: {}", error.unwrap_or("still connecting"))
    };
    Check { name: "tunnels", passed, detail }
}

/// Passed if a gateway accepts the identity, though another with a token file of its own may refuse. A
/// gateway of another make never says: then a tunnel that has been up for [`IDENTITY_REPLY_TIME`] is enough.
/// Before that nothing is known, and a successor must not replace an agent that works.
fn identity_check(tunnels: &[TunnelStatus]) -> Check {
    let refused: Vec<String> = live(tunnels)
        .filter_map(|tunnel| match &tunnel.identity {
            IdentityState::Refused { status, reason } => {
                Some(format!("{}: {status}: {reason}", name(tunnel)))
            }
            IdentityState::Accepted | IdentityState::Unknown => None,
        })
        .collect();
    let accepted = live(tunnels).any(|tunnel| tunnel.identity == IdentityState::Accepted);
    let silent = live(tunnels).any(|tunnel| {
        tunnel.identity == IdentityState::Unknown && tunnel.age.is_some_and(|age| age >= IDENTITY_REPLY_TIME)
    });
    let detail = if !refused.is_empty() {
        format!("refused by {} of {}: {}", refused.len(), live(tunnels).count(), refused.join(", "))
    } else if accepted {
        "accepted".to_owned()
    } else if silent {
        "no gateway says whether it accepts our identity".to_owned()
    } else {
        "no gateway has said yet whether it accepts our identity".to_owned()
    };
    Check { name: "identity", passed: accepted || silent, detail }
}

fn name(tunnel: &TunnelStatus) -> String {
    let gateway = tunnel.gateway.as_deref().unwrap_or("?");
    match tunnel.address {
        Some(address) => format!("{gateway} at {address}"),
        None => gateway.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use portico_tunnel::StatusCode;

    use super::*;

    fn tunnel(identity: IdentityState, age: u64) -> TunnelStatus {
        TunnelStatus {
            gateway: Some("tls://gateway:8088".to_owned()),
            address: None,
            state: Some(TunnelState::Live),
            streams: 0,
            age: Some(Duration::from_secs(age)),
            identity,
            error: None,
        }
    }

    fn refused() -> IdentityState {
        IdentityState::Refused { status: StatusCode::FORBIDDEN, reason: "no".into() }
    }

    #[test]
    fn an_identity_counts_once_a_gateway_has_accepted_it_or_had_time_to_refuse() {
        use IdentityState::{Accepted, Unknown};
        let passed = |tunnels: &[TunnelStatus]| identity_check(tunnels).passed;
        assert!(passed(&[tunnel(Accepted, 0)]));
        assert!(passed(&[tunnel(Accepted, 0), tunnel(refused(), 9)]));
        assert!(!passed(&[tunnel(Unknown, 0)]));
        assert!(passed(&[tunnel(Unknown, 9)]), "a gateway of another make");
        assert!(!passed(&[tunnel(refused(), 9), tunnel(Unknown, 0)]));
        assert!(!passed(&[]));
    }
}
