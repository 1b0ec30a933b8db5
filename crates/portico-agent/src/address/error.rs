//! Why an address cannot be held.

use std::io;
use std::net::IpAddr;

use thiserror::Error;

use super::collision::Collision;

/// Why an address cannot be held, or not any longer.
#[derive(Debug, Error)]
pub enum AddressError {
    /// No host can hold such an address for itself.
    #[error("{address} cannot be held: it is {what}; choose an address of one host with --address")]
    Unusable {
        /// The address asked for.
        address: IpAddr,
        /// What it is instead.
        what: &'static str,
    },
    /// The kernel would not take the name.
    #[error("{0:?} is no name for an interface: use 1 to 15 letters, digits, -, _ or . with --interface")]
    InterfaceName(Box<str>),
    /// Someone else has the address or the interface, or might.
    #[error("{}", sentences(.0))]
    Collisions(Vec<Collision>),
    /// A right is missing.
    #[error(
        "cannot {what}: the process needs {capability}; add it to the container's securityContext.capabilities, or run as root"
    )]
    Capability {
        /// What was tried.
        what: Box<str>,
        /// `CAP_NET_ADMIN` or `CAP_NET_RAW`.
        capability: &'static str,
    },
    /// None of the ways to hold an address works here.
    #[error("no way to hold {address} works on this host: {tried}")]
    NoWay {
        /// The address asked for.
        address: IpAddr,
        /// Each way and why it does not work.
        tried: Box<str>,
    },
    /// The kernel refused something else.
    #[error("cannot {what}: {source}")]
    Kernel {
        /// What was tried, on what.
        what: Box<str>,
        /// What it said.
        source: io::Error,
    },
}

impl AddressError {
    /// The error for something that needs `capability` to be done.
    pub(super) fn of(what: impl Into<Box<str>>, capability: &'static str, source: io::Error) -> Self {
        let what = what.into();
        if is_right_missing(&source) {
            return Self::Capability { what, capability };
        }
        Self::Kernel { what, source }
    }
}

/// Whether the kernel says that the process may not. Not EACCES, which means other things here, such as IPv6 being off.
pub(super) fn is_right_missing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPERM)
}

fn sentences(collisions: &[Collision]) -> String {
    let each: Vec<String> = collisions.iter().map(ToString::to_string).collect();
    each.join(". Also: ")
}
