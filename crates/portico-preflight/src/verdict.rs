//! From an observation to its meaning, and to the party that has to change something: pure functions.
//!
//! The same packet can mean two things. A port that refuses may be reached and idle, or rejected by a
//! firewall. A datagram that does not come back may be dropped, or there is nothing to return it. If any
//! check of the run has shown a responder on the other machine, it is the firewall. Otherwise it is unproven.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use portico_ports::model::Row;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::observation::Observation;
use crate::plan::{Direction, Planned};
use crate::runner::{Outcome, What};
use crate::transport::Transport;

/// The most that clocks may differ: leases of leader election and new tokens break soon above.
const MOST_SKEW_MILLIS: u64 = 5_000;

/// The bytes that VXLAN adds to a packet over IPv4 and over IPv6, and those that IP-in-IP adds.
const VXLAN: u16 = 50;
const VXLAN_IPV6: u16 = 70;
const IP_IN_IP: u16 = 20;

/// A program of ours that has a port: a responder, usually.
const OURS: &str = "portico ";

/// What a check means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The flow does not work.
    Failed,
    /// The flow may work; nothing was there to show it.
    #[serde(rename = "unproven")]
    Inconclusive,
    /// Nothing was tried, by design.
    Skipped,
    /// Worth knowing.
    Note,
    /// The flow works.
    Passed,
}

/// The party that has to change something, and the change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// The party.
    pub who: String,
    /// The change.
    pub what: String,
}

/// The result of one check.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// What it means.
    pub status: Status,
    /// The row of the model.
    #[serde(serialize_with = "row")]
    pub row: &'static Row,
    /// The kind of check.
    pub check: &'static str,
    /// The end that opens the flow.
    pub from: Box<str>,
    /// The end that accepts it.
    pub to: Box<str>,
    /// What is opened.
    pub transport: Option<Transport>,
    /// What was seen.
    pub seen: Observation,
    /// The party that has to change something, and the change. `None` if it works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<Remedy>,
}

/// What is expected beside the model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expectations {
    /// Nothing is installed yet, so every port must be free.
    pub is_new_machine: bool,
    /// The MTU that pods have, or will have.
    pub pod_mtu: Option<u16>,
    /// The other machines run responders, whether or not a check of the run shows it: where every TCP port is
    /// in use, none does.
    pub peers_listen: bool,
    /// What the responder of this machine cannot answer.
    pub silent_here: BTreeSet<Transport>,
}

fn row<S: Serializer>(row: &&'static Row, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("id", row.id)?;
    map.serialize_entry("product", row.product)?;
    map.serialize_entry("source", row.source.name)?;
    map.serialize_entry("component", &row.component)?;
    map.serialize_entry("destination", row.destination.name)?;
    map.serialize_entry("purpose", row.purpose)?;
    map.serialize_entry("reference", row.reference)?;
    map.end()
}

/// The facts that a run has shown about the other machines.
#[derive(Debug, Default)]
struct Peers {
    all_respond: bool,
    responders: BTreeSet<IpAddr>,
    silent: BTreeMap<IpAddr, BTreeSet<Transport>>,
}

impl Peers {
    fn of(checks: &[Planned], outcomes: &[Outcome], expected: &Expectations) -> Self {
        let mut peers = Self { all_respond: expected.peers_listen, ..Self::default() };
        for (planned, outcome) in checks.iter().zip(outcomes) {
            let Some(peer) = planned.peer else { continue };
            // Only a responder returns a datagram, or tries the way back.
            let speaks = matches!(
                (&planned.what, &outcome.seen),
                (What::Datagram { .. } | What::Back { .. }, Observation::Answered { .. })
            );
            if speaks || outcome.responder.is_some() {
                peers.responders.insert(peer);
            }
            if let Some(responder) = &outcome.responder {
                peers.silent.entry(peer).or_default().extend(&responder.banner.silent);
            }
        }
        peers
    }

    fn responds(&self, planned: &Planned) -> bool {
        let is_known = planned.peer.is_some_and(|peer| self.all_respond || self.responders.contains(&peer));
        is_known && !self.is_silent(planned)
    }

    fn is_silent(&self, planned: &Planned) -> bool {
        let silent = planned.peer.and_then(|peer| self.silent.get(&peer));
        silent.zip(planned.transport).is_some_and(|(silent, transport)| silent.contains(&transport))
    }
}

/// Judges all checks of a run. Beside them, each clock that was read is judged once.
#[must_use]
pub fn judge(checks: &[Planned], outcomes: &[Outcome], expected: &Expectations) -> Vec<Finding> {
    let peers = Peers::of(checks, outcomes, expected);
    let mut findings: Vec<Finding> = checks
        .iter()
        .zip(outcomes)
        .map(|(planned, outcome)| finding(planned, outcome, &peers, expected))
        .collect();
    let unreached = unreached(checks, &findings);
    for (planned, finding) in checks.iter().zip(&mut findings) {
        let is_unasked =
            matches!((&planned.what, &finding.seen), (What::Back { .. }, Observation::NotTried { .. }));
        if is_unasked && planned.peer.is_some_and(|peer| unreached.contains(&peer)) {
            (finding.status, finding.remedy) = (Status::Skipped, None);
        }
    }
    findings.extend(clocks(checks, outcomes));
    findings
}

/// Machines towards which a TCP flow fails. That they could not be asked for the way back follows from it,
/// and is no finding of its own.
fn unreached(checks: &[Planned], findings: &[Finding]) -> BTreeSet<IpAddr> {
    let fails = checks.iter().zip(findings).filter(|(planned, finding)| {
        finding.status == Status::Failed && matches!(planned.what, What::Tcp { .. })
    });
    fails.filter_map(|(planned, _)| planned.peer).collect()
}

fn finding(planned: &Planned, outcome: &Outcome, peers: &Peers, expected: &Expectations) -> Finding {
    let seen = &outcome.seen;
    let (status, remedy) = match &planned.what {
        What::Nothing { .. } => (Status::Skipped, None),
        What::LocalPort { .. } => local_port(planned, seen, expected),
        What::PathMtu { transport, .. } => path_mtu(planned, seen, *transport, expected),
        What::Back { transport, .. } if expected.silent_here.contains(transport) => {
            let what =
                "run it as root, or with NET_RAW: it cannot answer beside the program that has the port";
            (Status::Inconclusive, remedy("the owner of this machine", what))
        }
        _ => flow(planned, seen, peers),
    };
    Finding {
        status,
        row: planned.row,
        check: kind(&planned.what),
        from: planned.from.clone(),
        to: planned.to.clone(),
        transport: planned.transport,
        seen: seen.clone(),
        remedy,
    }
}

/// The word for a kind of check, in every output.
fn kind(what: &What) -> &'static str {
    match what {
        What::Tcp { tls: None, .. } | What::TcpByName { tls: None, .. } => "tcp",
        What::Tcp { .. } | What::TcpByName { .. } | What::Tls(_) => "tls",
        What::Datagram { transport: Transport::IpInIp, .. } => "ip-in-ip",
        What::Datagram { .. } => "udp",
        What::PathMtu { .. } => "path-mtu",
        What::Dns { .. } => "dns",
        What::Back { .. } => "back",
        What::LocalPort { .. } => "local-port",
        What::Nothing { .. } => "none",
    }
}

fn remedy(who: impl Into<String>, what: impl Into<String>) -> Option<Remedy> {
    Some(Remedy { who: who.into(), what: what.into() })
}

/// A connection or a datagram, in either direction.
fn flow(planned: &Planned, seen: &Observation, peers: &Peers) -> (Status, Option<Remedy>) {
    let Planned { from, to, direction, .. } = planned;
    // A responder of this machine accepts what comes in, and a name server is there.
    let is_there = *direction == Direction::In || matches!(planned.what, What::Dns { .. });
    let has_responder = is_there || peers.responds(planned);
    let is_datagram = matches!(planned.transport, Some(Transport::Udp(_) | Transport::IpInIp));
    let open = format!("allow {} ({}: {})", opening(planned), planned.row.id, planned.row.purpose);
    let listen = format!(
        "start the component on {to}, or `portico preflight --role {} --listen`, and try again",
        planned.row.destination.role
    );
    match seen {
        Observation::Answered { .. } | Observation::Tls(_) | Observation::Resolved { .. } => {
            (Status::Passed, None)
        }
        Observation::Refused { by: None } if has_responder => {
            let who = format!("the firewall on {to}, or between it and {from}, which answers with a reset");
            (Status::Failed, remedy(who, open))
        }
        Observation::Refused { by: Some(by) } if has_responder || by.to_string() != **to => {
            (Status::Failed, remedy(format!("the firewall on {by}, which rejects"), open))
        }
        Observation::Refused { .. } => {
            let what = format!("{to} is reached, and nothing listens: {listen}");
            (Status::Inconclusive, remedy(format!("the owner of {to}"), what))
        }
        Observation::TimedOut { .. } if is_datagram && !has_responder => {
            let why = if peers.is_silent(planned) {
                "the responder there cannot answer beside the program that has the port: run it as root, or \
                 with NET_RAW"
                    .to_owned()
            } else {
                format!(
                    "a firewall drops it, or nothing is there to return it: {listen}; if that runs, give \
                     --peers-listen"
                )
            };
            (Status::Inconclusive, remedy(format!("the owner of {to}"), why))
        }
        Observation::TimedOut { .. } => {
            let who = format!("the firewall on {from}, on {to}, or between them, which drops");
            (Status::Failed, remedy(who, open))
        }
        Observation::DeniedHere => {
            let who = if *direction == Direction::In { from } else { "this machine" };
            (Status::Failed, remedy(format!("the outgoing rules of the firewall on {who}"), open))
        }
        Observation::Unreachable { by: Some(by), .. } => {
            (Status::Failed, remedy(format!("the owner of {by}, which sent the ICMP message"), open))
        }
        Observation::Unreachable { by: None, .. } => {
            (Status::Failed, remedy(format!("the owner of {from}"), format!("give it a route to {to}")))
        }
        Observation::Reset => {
            let what = format!(
                "see what closes a connection that was accepted: a load balancer without a backend, a \
                 firewall that inspects, or a responder that does not know the address of {from} \
                 (translated?); then {open}"
            );
            (Status::Failed, remedy(format!("the owner of {to}, or of what stands before it"), what))
        }
        Observation::Intercepted { session } => {
            let who = format!("the team of the proxy or firewall that issues as {}", session.issuer);
            let what = format!("exempt {to} from TLS inspection, or have this machine trust that authority");
            (Status::Failed, remedy(who, what))
        }
        Observation::WrongCertificate { .. } => {
            (Status::Failed, remedy(format!("the owner of {to}"), "renew or replace its certificate"))
        }
        Observation::NoTls { .. } => {
            let what = "see what answers there in place of the service: a portal, a proxy, another program";
            (Status::Failed, remedy(format!("the owner of {to}"), what))
        }
        Observation::Proxy { proxy, .. } => (
            Status::Failed,
            remedy(format!("the owner of the proxy {proxy}"), format!("let {from} reach {to}")),
        ),
        Observation::NotResolved { .. } => {
            let what = format!("have {to} resolve there, see /etc/resolv.conf");
            (Status::Failed, remedy(format!("the owner of {from}, or of its name servers"), what))
        }
        Observation::NotTried { .. } => {
            let who = if *direction == Direction::In { from } else { "this machine" };
            (
                Status::Inconclusive,
                remedy(format!("the owner of {who}"), "remove what kept it from being tried"),
            )
        }
        Observation::PathMtu { .. }
        | Observation::Clock { .. }
        | Observation::Free
        | Observation::Taken { .. } => (Status::Note, None),
    }
}

/// The rule that is missing, as firewall teams write it.
fn opening(planned: &Planned) -> String {
    let what = match planned.transport {
        Some(Transport::Tcp(port)) => format!("TCP {port}"),
        Some(Transport::Udp(port)) => format!("UDP {port}"),
        Some(Transport::IpInIp) => "IP protocol 4".to_owned(),
        None => "it".to_owned(),
    };
    format!("{what} from {} to {}", planned.from, planned.to)
}

fn local_port(planned: &Planned, seen: &Observation, expected: &Expectations) -> (Status, Option<Remedy>) {
    match seen {
        Observation::Free => (Status::Passed, None),
        Observation::Taken { by } if expected.is_new_machine && !by.starts_with(OURS) => {
            let port = planned.transport.map(|transport| transport.to_string()).unwrap_or_default();
            let what = format!("stop {by}, or have it use another port than {port}");
            (Status::Failed, remedy("the owner of this machine", what))
        }
        // A port in use is the best evidence that what is installed there runs.
        Observation::Taken { .. } => (Status::Note, None),
        _ => (
            Status::Inconclusive,
            remedy("the owner of this machine", "see why the port cannot be looked at"),
        ),
    }
}

fn path_mtu(
    planned: &Planned,
    seen: &Observation,
    transport: Transport,
    expected: &Expectations,
) -> (Status, Option<Remedy>) {
    let Observation::PathMtu { mtu, interface, by } = seen else {
        // That the flow itself does not work is a finding of its own.
        return (Status::Skipped, None);
    };
    let overhead = match (transport, planned.peer) {
        (Transport::IpInIp, _) => IP_IN_IP,
        (_, Some(IpAddr::V6(_))) => VXLAN_IPV6,
        _ => VXLAN,
    };
    let most = mtu.saturating_sub(overhead);
    let who = "the owner of the network plugin";
    match expected.pod_mtu {
        Some(pods) if pods > most => {
            let what = format!(
                "set the MTU of pods to {most} or less: {pods} and {overhead} of the tunnel exceed the path"
            );
            (Status::Failed, remedy(who, what))
        }
        None if mtu < interface && by.is_none() => {
            let what = format!(
                "let ICMP \"fragmentation needed\" and \"packet too big\" through, or set the MTU of pods to \
                 {most} and give it as --pod-mtu"
            );
            (Status::Failed, remedy("the owner of the network between", what))
        }
        _ => (Status::Passed, None),
    }
}

/// Each clock that was read, once a machine; with the largest difference.
fn clocks(checks: &[Planned], outcomes: &[Outcome]) -> Vec<Finding> {
    let mut clocks: BTreeMap<&str, (&Planned, i64)> = BTreeMap::new();
    for (planned, outcome) in checks.iter().zip(outcomes) {
        let Some(ahead) = outcome.ahead_millis else { continue };
        let known = clocks.entry(&planned.to).or_insert((planned, ahead));
        if known.1.unsigned_abs() < ahead.unsigned_abs() {
            *known = (planned, ahead);
        }
    }
    let judged = clocks.into_values().map(|(planned, ahead_millis)| {
        let is_off = ahead_millis.unsigned_abs() > MOST_SKEW_MILLIS;
        let what = "have its clock and that of this machine follow the same time servers (chronyc tracking)";
        Finding {
            status: if is_off { Status::Failed } else { Status::Passed },
            row: planned.row,
            check: "clock",
            from: planned.from.clone(),
            to: planned.to.clone(),
            transport: None,
            seen: Observation::Clock { ahead_millis },
            remedy: is_off
                .then(|| Remedy { who: format!("the owner of {}", planned.to), what: what.to_owned() }),
        }
    });
    judged.collect()
}

#[cfg(test)]
#[path = "verdict/tests.rs"]
mod tests;
