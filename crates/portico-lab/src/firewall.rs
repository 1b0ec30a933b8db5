//! Firewalls on a host: put up in the middle of a story, and lifted again.
//!
//! Each [`Firewall`] is an nftables table of its own, so several on one host add up, and lifting one
//! leaves the others. Incoming traffic is judged as it arrives, before a Service address is
//! translated: the rule names the port the sender used. Outgoing traffic is judged where it leaves,
//! pods' forwarded traffic included, after the translation: the rule names the real endpoint.
//! Both look at the wire only; what pods of one node say to each other is [`Direction::Through`], and what
//! the host says to itself [`Direction::Within`].

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use crate::host::Host;

/// What happens to a packet that a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is dropped without a notice: a black hole.
    Drop,
    /// It is rejected: a TCP connection is reset.
    Reject,
}

/// Which way packets go, seen from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the wire, to this host or its pods.
    In,
    /// To the wire, from this host or its pods.
    Out,
    /// To a pod of this host, from other pods or from the wire. Not from the host itself.
    Through,
    /// From the host to itself, pods left out.
    Within,
}

/// The traffic a firewall stops. Everything not narrowed down matches.
#[derive(Debug, Clone)]
pub struct Traffic {
    direction: Direction,
    peer: Option<Ipv4Addr>,
    pod: Option<Ipv4Addr>,
    port: Option<u16>,
    source_port: Option<u16>,
}

impl Traffic {
    /// All traffic in one direction.
    pub fn all(direction: Direction) -> Traffic {
        Traffic { direction, peer: None, pod: None, port: None, source_port: None }
    }

    /// Only from (in) or to (out, through) this address.
    pub fn with(mut self, peer: Ipv4Addr) -> Traffic {
        self.peer = Some(peer);
        self
    }

    /// Only from the pod of this address, on its way out.
    pub fn of_pod(mut self, pod: Ipv4Addr) -> Traffic {
        self.pod = Some(pod);
        self
    }

    /// Only TCP to this port.
    pub fn to_port(mut self, port: u16) -> Traffic {
        self.port = Some(port);
        self
    }

    /// Only TCP from this port.
    pub fn from_port(mut self, port: u16) -> Traffic {
        self.source_port = Some(port);
        self
    }
}

/// Rules in force on a host, until dropped.
pub struct Firewall {
    host: Host,
    table: String,
}

impl Firewall {
    /// Stops some traffic, connections that exist included.
    pub fn stop(host: &Host, traffic: &Traffic, verdict: Verdict) -> Result<Firewall> {
        Firewall::put_up(host, traffic.direction, &stopping(traffic, verdict))
    }

    /// Lets in new TCP connections to these ports only; the rest is dropped. Connections that exist,
    /// and answers to what the host itself asked, go on.
    pub fn allow_in_only(host: &Host, ports: &[u16]) -> Result<Firewall> {
        Firewall::put_up(host, Direction::In, &allowing_only(to_ports(ports)))
    }

    /// Lets out new TCP connections to these ports only; the rest is dropped. Connections that
    /// exist, and answers to what others asked, go on.
    pub fn allow_out_only(host: &Host, ports: &[u16]) -> Result<Firewall> {
        Firewall::put_up(host, Direction::Out, &allowing_only(to_ports(ports)))
    }

    /// Lets out new TCP connections to these addresses and ports only; the rest is dropped. Connections that
    /// exist, and answers to what others asked, go on.
    pub fn allow_out_only_to(host: &Host, places: &[(Ipv4Addr, u16)]) -> Result<Firewall> {
        let accepted = places.iter().map(|(address, port)| format!("ip daddr {address} tcp dport {port}"));
        Firewall::put_up(host, Direction::Out, &allowing_only(accepted))
    }

    /// Takes the rules away, and fails if that fails; dropping does the same quietly.
    pub fn lift(mut self) -> Result<()> {
        self.remove()
    }

    fn put_up(host: &Host, direction: Direction, rules: &str) -> Result<Firewall> {
        // The tables of two firewalls on one host need two names.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let table = format!("lab{}", NEXT.fetch_add(1, Ordering::Relaxed));
        host.run_with_input(&["nft", "-f", "-"], &ruleset(&table, direction, rules))
            .with_context(|| format!("putting up a firewall on {}", host.name()))?;
        Ok(Firewall { host: host.clone(), table })
    }

    fn remove(&mut self) -> Result<()> {
        let table = std::mem::take(&mut self.table);
        if !table.is_empty() {
            self.host.run(&["nft", "delete", "table", "inet", &table])?;
        }
        Ok(())
    }
}

impl Drop for Firewall {
    fn drop(&mut self) {
        // The rules go with the host at the latest.
        let _ = self.remove();
    }
}

fn stopping(traffic: &Traffic, verdict: Verdict) -> String {
    let mut rule = String::new();
    if let Some(peer) = traffic.peer {
        let side = if traffic.direction == Direction::In { "saddr" } else { "daddr" };
        // Writing to a String cannot fail.
        let _ = write!(rule, "ip {side} {peer} ");
    }
    // Judged before its address is translated to the host's.
    if let Some(pod) = traffic.pod {
        let _ = write!(rule, "ip saddr {pod} ");
    }
    if let Some(port) = traffic.port {
        let _ = write!(rule, "tcp dport {port} ");
    }
    if let Some(port) = traffic.source_port {
        let _ = write!(rule, "tcp sport {port} ");
    }
    match (verdict, traffic.port.or(traffic.source_port)) {
        (Verdict::Drop, _) => rule.push_str("drop"),
        (Verdict::Reject, Some(_)) => rule.push_str("reject with tcp reset"),
        (Verdict::Reject, None) => rule.push_str("reject"),
    }
    rule
}

fn to_ports(ports: &[u16]) -> impl Iterator<Item = String> {
    ports.iter().map(|port| format!("tcp dport {port}"))
}

fn allowing_only(accepted: impl Iterator<Item = String>) -> String {
    let mut rules = vec!["ct state established,related accept".to_owned()];
    rules.extend(accepted.map(|matching| format!("{matching} accept")));
    rules.push("meta l4proto { icmp, ipv6-icmp } accept".to_owned());
    rules.push("drop".to_owned());
    rules.join("; ")
}

fn ruleset(table: &str, direction: Direction, rules: &str) -> String {
    // -150: after connections are recognised (-200), before Service addresses are translated (-100).
    // 0: the usual place of filters, after translation.
    // eth0 is every host's only wire.
    let (chains, exempt): (&[(&str, i32)], &str) = match direction {
        Direction::In => (&[("prerouting", -150)], "iifname != eth0 accept; "),
        // What a Service address was just translated to may be this host's own: the interface is the one from
        // before that.
        Direction::Out => {
            (&[("output", 0), ("forward", 0)], "oifname != eth0 accept; fib daddr type local accept; ")
        }
        Direction::Through => (&[("forward", 0)], "oifname eth0 accept; "),
        Direction::Within => (&[("output", 0)], "oifname != lo accept; "),
    };
    let mut text = format!("table inet {table} {{\n");
    for (hook, priority) in chains {
        let _ = writeln!(
            text,
            "  chain {hook} {{ type filter hook {hook} priority {priority}; {exempt}{rules}; }}"
        );
    }
    text.push_str("}\n");
    text
}
