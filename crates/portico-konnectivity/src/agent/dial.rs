//! From the address in a DIAL_REQ to a connected socket, or to the text that says why there is none.
//!
//! The texts are those of Go's `net.Dial`: frontends, tests and the HTTP status of `http-connect` go by them.

use std::fmt::Display;
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use portico_dial::{Dialer, ResolveError, Target, connect_direct};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::policy::Policy;
use crate::streams::NO_ROOM;

/// The limit of a dial, names included. As upstream.
pub(super) const LIMIT: Duration = Duration::from_secs(5);

/// Why a dial failed, as metrics count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DialFailure {
    /// It took too long.
    Timeout,
    /// The endpoint refused, does not exist, or is no address.
    Unknown,
    /// `--allow-destination` does not list it.
    NotAllowed,
    /// The agent has as many dials or connections as it takes.
    Limit,
}

impl DialFailure {
    /// All, in the order of the counters. The first two are upstream's.
    pub const ALL: [(Self, &'static str); 4] = [
        (Self::Timeout, "timeout"),
        (Self::Unknown, "unknown"),
        (Self::NotAllowed, "not_allowed"),
        (Self::Limit, "limit"),
    ];
}

/// The answer to the server, and the counted result.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) text: String,
    pub(super) failure: DialFailure,
}

impl Refusal {
    /// The agent has `most` of these already.
    pub(super) fn limit(most: impl Display, what: &str) -> Self {
        Self { text: format!("{NO_ROOM}{most} {what}, the most it takes"), failure: DialFailure::Limit }
    }

    pub(super) fn unknown(text: String) -> Self {
        Self { text, failure: DialFailure::Unknown }
    }
}

/// Dials, within [`LIMIT`].
pub(super) async fn dial(
    dialer: &Dialer,
    policy: &Policy,
    protocol: &str,
    address: &str,
) -> Result<TcpStream, Refusal> {
    if !matches!(protocol, "tcp" | "tcp4" | "tcp6") {
        return Err(Refusal::unknown(format!("dial {protocol}: unknown network {protocol}")));
    }
    let target = target(address).map_err(|why| Refusal::unknown(format!("dial {protocol}: {why}")))?;
    let fits = |address: &SocketAddr| match protocol {
        "tcp4" => address.is_ipv4(),
        "tcp6" => address.is_ipv6(),
        _ => true,
    };
    let connected = timeout(LIMIT, connect(dialer, policy, protocol, &target, fits)).await;
    connected.unwrap_or_else(|_| {
        let text = format!("dial {protocol} {target}: i/o timeout");
        Err(Refusal { text, failure: DialFailure::Timeout })
    })
}

async fn connect(
    dialer: &Dialer,
    policy: &Policy,
    protocol: &str,
    target: &Target,
    fits: impl Fn(&SocketAddr) -> bool,
) -> Result<TcpStream, Refusal> {
    let host = &target.host;
    let resolved = dialer.resolve(target).await.map_err(|error| not_resolved(protocol, host, &error))?;
    let addresses: Vec<SocketAddr> = resolved.addresses.iter().copied().filter(fits).collect();
    let allowed: Vec<SocketAddr> =
        addresses.iter().copied().filter(|address| policy.allows(*address)).collect();
    match (connect_direct(&allowed, LIMIT).await, addresses.first()) {
        (Some(Ok(stream)), _) => Ok(stream),
        (Some(Err((address, error))), _) => Err(not_connected(protocol, address, &error)),
        (None, Some(address)) => Err(Refusal {
            text: format!("dial {protocol} {address}: the agent's --allow-destination does not list it"),
            failure: DialFailure::NotAllowed,
        }),
        (None, None) => {
            Err(Refusal::unknown(format!("dial {protocol}: address {host}: no suitable address found")))
        }
    }
}

fn not_resolved(protocol: &str, host: &str, error: &ResolveError) -> Refusal {
    match error {
        ResolveError::TooSlow { .. } => Refusal {
            text: format!("dial {protocol}: lookup {host}: i/o timeout"),
            failure: DialFailure::Timeout,
        },
        ResolveError::Configuration { .. } => {
            Refusal::unknown(format!("dial {protocol}: lookup {host}: {error}"))
        }
        // No name server has it, or none answers: Go tells them apart by texts that contain this one.
        ResolveError::NoAddress { .. } => {
            Refusal::unknown(format!("dial {protocol}: lookup {host}: no such host"))
        }
    }
}

fn not_connected(protocol: &str, address: SocketAddr, error: &io::Error) -> Refusal {
    if error.kind() == io::ErrorKind::TimedOut {
        let text = format!("dial {protocol} {address}: i/o timeout");
        return Refusal { text, failure: DialFailure::Timeout };
    }
    // Without a descriptor there was no connect(2).
    let call = if error.raw_os_error().is_some_and(is_out_of_files) { "socket" } else { "connect" };
    Refusal::unknown(format!("dial {protocol} {address}: {call}: {}", system_text(error)))
}

fn is_out_of_files(errno: i32) -> bool {
    let errno = rustix::io::Errno::from_raw_os_error(errno);
    matches!(errno, rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)
}

/// Go's words for an error of the system are those of the C library, in lower case.
fn system_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut characters = text.chars();
    characters.next().map(|first| first.to_lowercase().chain(characters).collect()).unwrap_or_default()
}

/// Splits an address as Go does, with its words for what is wrong.
fn target(address: &str) -> Result<Target, String> {
    if address.is_empty() {
        return Err("missing address".to_owned());
    }
    let wrong = |what: &str| Err(format!("address {address}: {what}"));
    let (host, port) = match address.strip_prefix('[') {
        Some(rest) => {
            let Some((host, rest)) = rest.split_once(']') else { return wrong("missing ']' in address") };
            match rest.strip_prefix(':') {
                Some(port) if !port.contains(':') => (host, port),
                Some(_) => return wrong("too many colons in address"),
                None => return wrong("missing port in address"),
            }
        }
        None => match address.rsplit_once(':') {
            None => return wrong("missing port in address"),
            Some((host, _)) if host.contains(':') => return wrong("too many colons in address"),
            Some(split) => split,
        },
    };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("lookup tcp/{port}: unknown port"));
    }
    let Ok(number) = port.parse::<u16>() else { return Err(format!("address {port}: invalid port")) };
    // The resolver takes an address of IPv6 as it is, and names as DNS has them.
    let target = match host.parse::<Ipv6Addr>() {
        Ok(_) => Target { host: host.into(), port: number },
        Err(_) => match format!("{host}:{}", number.max(1)).parse::<Target>() {
            Ok(target) => Target { port: number, ..target },
            Err(_) => return Err(format!("lookup {host}: no such host")),
        },
    };
    Ok(target)
}

#[cfg(test)]
mod tests {
    use portico_dial::{ProxyFiles, ProxySetting};
    use portico_lab::refusing::Refusing;
    use tokio::net::TcpListener;

    use super::*;

    async fn refusal(policy: &Policy, protocol: &str, address: &str) -> Refusal {
        let dialer = Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None).unwrap();
        dial(&dialer, policy, protocol, address).await.unwrap_err()
    }

    #[tokio::test]
    async fn a_dial_that_fails_says_so_in_the_words_of_go() {
        let refusing = Refusing::start().unwrap();
        let closed = refusing.address();
        for (protocol, address, text) in [
            (
                "tcp",
                closed.to_string().as_str(),
                format!("dial tcp {closed}: connect: connection refused").as_str(),
            ),
            ("foo", "127.0.0.1:1", "dial foo: unknown network foo"),
            ("udp", "127.0.0.1:1", "dial udp: unknown network udp"),
            ("tcp", "", "dial tcp: missing address"),
            ("tcp", "x", "dial tcp: address x: missing port in address"),
            ("tcp", "[::1]", "dial tcp: address [::1]: missing port in address"),
            ("tcp", "[::1", "dial tcp: address [::1: missing ']' in address"),
            ("tcp", "::1:80", "dial tcp: address ::1:80: too many colons in address"),
            ("tcp", "h:http", "dial tcp: lookup tcp/http: unknown port"),
            ("tcp", "127.0.0.1:70000", "dial tcp: address 70000: invalid port"),
            ("tcp", "a b:80", "dial tcp: lookup a b: no such host"),
            ("tcp6", "127.0.0.1:80", "dial tcp6: address 127.0.0.1: no suitable address found"),
        ] {
            assert_eq!(refusal(&Policy::default(), protocol, address).await.text, text);
        }
    }

    #[tokio::test]
    async fn what_is_not_allowed_is_not_dialled() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let policy = Policy::new(["10.0.0.0/8".parse().unwrap()]);
        let refused = refusal(&policy, "tcp", &format!("localhost:{}", address.port())).await;
        assert_eq!(refused.failure, DialFailure::NotAllowed);
        assert!(
            refused.text.ends_with("the agent's --allow-destination does not list it"),
            "{}",
            refused.text
        );
    }

    #[test]
    fn a_time_out_is_reported_in_words_that_become_status_504() {
        let slow = io::Error::from(io::ErrorKind::TimedOut);
        let refused = not_connected("tcp", "192.0.2.1:80".parse().unwrap(), &slow);
        assert_eq!(
            (refused.text.as_str(), refused.failure),
            ("dial tcp 192.0.2.1:80: i/o timeout", DialFailure::Timeout)
        );
        let full = io::Error::from_raw_os_error(24);
        let refused = not_connected("tcp", "192.0.2.1:80".parse().unwrap(), &full);
        assert_eq!(refused.text, "dial tcp 192.0.2.1:80: socket: too many open files");
    }
}
