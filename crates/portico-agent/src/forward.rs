//! The listeners of an agent and their targets: `[ADDR:]PORT=AUTHORITY`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use portico_dial::{Target, TargetError};
use thiserror::Error;

/// A forward as an operator writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardSpec {
    /// Where to listen, if not on the address the agent holds.
    pub address: Option<IpAddr>,
    /// The port to listen on.
    pub port: u16,
    /// What the gateway is asked for: `HOST:PORT`.
    pub authority: Box<str>,
}

/// Why a text is no forward.
#[derive(Debug, Error)]
pub enum ForwardSpecError {
    /// It names no authority.
    #[error(
        "{0:?} leads nowhere; write [ADDR:]PORT=AUTHORITY, such as \
         6443=apiserver-external.cluster-a.svc.cluster.local:443"
    )]
    NoAuthority(String),
    /// What stands before the `=` is no port.
    #[error("{0:?} is no port to listen on; write PORT or ADDR:PORT, an IPv6 address in brackets")]
    Listen(String),
    /// What stands behind the `=` is no authority.
    #[error("{authority:?} is no authority: {source}")]
    Authority {
        /// What is written.
        authority: String,
        /// What is wrong with it.
        source: TargetError,
    },
}

impl FromStr for ForwardSpec {
    type Err = ForwardSpecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (listen, authority) =
            text.split_once('=').ok_or_else(|| ForwardSpecError::NoAuthority(text.to_owned()))?;
        let no_port = || ForwardSpecError::Listen(listen.to_owned());
        let (address, port) = match listen.parse::<u16>() {
            Ok(port) => (None, port),
            Err(_) => {
                let listen: SocketAddr = listen.parse().map_err(|_| no_port())?;
                (Some(listen.ip()), listen.port())
            }
        };
        if port == 0 {
            return Err(no_port());
        }
        let authority: Target = authority
            .parse()
            .map_err(|source| ForwardSpecError::Authority { authority: authority.to_owned(), source })?;
        Ok(Self { address, port, authority: authority.to_string().into() })
    }
}

impl fmt::Display for ForwardSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, port, authority } = self;
        match address {
            Some(address) => write!(f, "{}={authority}", SocketAddr::new(*address, *port)),
            None => write!(f, "{port}={authority}"),
        }
    }
}

/// A forward with its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// Where to listen.
    pub listen: SocketAddr,
    /// What the gateway is asked for.
    pub authority: Box<str>,
}

/// Why forwards do not go together.
#[derive(Debug, Error)]
pub enum ForwardError {
    /// There is no address to listen on.
    #[error("--forward {0} names no address, and --address is off; write ADDR:{0}")]
    NoAddress(Box<str>),
    /// Two listen on the same address and port.
    #[error(
        "--forward {first} and --forward {second} both listen on {listen}; give one of them another port"
    )]
    Twice {
        /// The one that comes first.
        first: Box<str>,
        /// The other one.
        second: Box<str>,
        /// Where.
        listen: SocketAddr,
    },
}

/// Returns the forwards with their addresses: `held`, the address the agent holds, for those without one.
pub fn resolve(specs: &[ForwardSpec], held: Option<IpAddr>) -> Result<Vec<Forward>, ForwardError> {
    let mut forwards: Vec<Forward> = Vec::with_capacity(specs.len());
    for spec in specs {
        let address = spec.address.or(held);
        let address = address.ok_or_else(|| ForwardError::NoAddress(spec.to_string().into()))?;
        let listen = SocketAddr::new(address, spec.port);
        let clash = |other: &&Forward| {
            let ips = [other.listen.ip(), address];
            // One of them listens on every address.
            let anywhere = ips.iter().any(IpAddr::is_unspecified);
            other.listen.port() == spec.port && (ips[0] == ips[1] || anywhere)
        };
        if let Some(other) = forwards.iter().find(clash) {
            let first = format!("{}={}", other.listen, other.authority).into();
            return Err(ForwardError::Twice { first, second: spec.to_string().into(), listen });
        }
        forwards.push(Forward { listen, authority: spec.authority.clone() });
    }
    Ok(forwards)
}

/// A forward that is listened on, and its counters.
#[derive(Debug)]
pub struct ForwardState {
    /// Where it listens.
    pub listen: SocketAddr,
    /// What the gateway is asked for.
    pub authority: Box<str>,
    accepted: AtomicU64,
    opened: AtomicU64,
    up: AtomicU64,
    down: AtomicU64,
}

impl ForwardState {
    pub(crate) fn new(forward: Forward) -> Self {
        let Forward { listen, authority } = forward;
        let [accepted, opened, up, down] = Default::default();
        Self { listen, authority, accepted, opened, up, down }
    }

    /// Connections accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Relaxed)
    }

    /// Connections that a gateway has opened.
    pub fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }

    /// Bytes passed to gateways.
    pub fn bytes_up(&self) -> u64 {
        self.up.load(Relaxed)
    }

    /// Bytes passed to clients.
    pub fn bytes_down(&self) -> u64 {
        self.down.load(Relaxed)
    }

    pub(crate) fn count_accepted(&self) {
        self.accepted.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_opened(&self) {
        self.opened.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_bytes(&self, up: u64, down: u64) {
        if up > 0 {
            self.up.fetch_add(up, Relaxed);
        }
        if down > 0 {
            self.down.fetch_add(down, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(texts: &[&str]) -> Vec<ForwardSpec> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_forward_is_read_as_it_is_written() {
        for text in ["6443=api.example.com:443", "127.0.0.1:6443=api:443", "[::1]:1=[2001:db8::1]:443"] {
            assert_eq!(text.parse::<ForwardSpec>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_error_for_what_is_no_forward_says_how_to_write_one() {
        for text in ["6443", "0=a:443", "70000=a:443", "::1:6443=a:443", "6443=a", "6443=", "=a:443", ""] {
            let error = text.parse::<ForwardSpec>().unwrap_err().to_string();
            assert!(!error.is_empty(), "{text}");
        }
    }

    #[test]
    fn the_held_address_is_for_forwards_without_one() {
        let specs = specs(&["6443=a:443", "127.0.0.1:6443=b:443"]);
        let forwards = resolve(&specs, Some([100, 64, 30, 10].into())).unwrap();
        assert_eq!(forwards[0].listen, "100.64.30.10:6443".parse().unwrap());
        assert_eq!(forwards[1].listen, "127.0.0.1:6443".parse().unwrap());
        assert!(matches!(resolve(&specs, None), Err(ForwardError::NoAddress(_))));
    }

    #[test]
    fn two_forwards_on_one_port_are_both_named() {
        for texts in [["1=a:443", "1=b:443"], ["0.0.0.0:1=a:443", "1=b:443"], ["[::]:1=a:1", "[::1]:1=b:1"]] {
            let error = resolve(&specs(&texts), Some([10, 0, 0, 1].into())).unwrap_err().to_string();
            assert!(error.contains("=a:") && error.contains("=b:"), "{error}");
        }
    }
}
