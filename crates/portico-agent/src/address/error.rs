//! Why an address cannot be held.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use thiserror::Error;

use super::collision::Collision;

/// The right that every change needs.
const CAPABILITY: &str = "CAP_NET_ADMIN";

/// `EPERM` of errno(3). Not `EACCES`, which the kernel uses for other things here, such as IPv6 being off.
const EPERM: i32 = 1;

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
    /// The kernel does not take the name.
    #[error("{0:?} is no name for an interface: use 1 to 15 letters, digits, -, _ or . with --interface")]
    InterfaceName(Box<str>),
    /// Something else has the address or the interface, or may have it.
    #[error("{}", sentences(.0))]
    Collisions(Vec<Collision>),
    /// The process may not change the network.
    #[error(
        "cannot {what}: the process needs {CAPABILITY}; add it to the container's \
         securityContext.capabilities, \
         or run as root"
    )]
    Capability {
        /// What was tried.
        what: Box<str>,
    },
    /// No kind of interface works here.
    #[error("no way to hold {address} works on this host: {tried}")]
    NoWay {
        /// The address asked for.
        address: IpAddr,
        /// Each kind, and why it does not work.
        tried: Box<str>,
    },
    /// Other agents of this node cannot be known.
    #[error(
        "cannot lock {}, by which agents of a node know of each other: {source}; its folder must be there \
         and writable to this process",
        path.display()
    )]
    Users {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The kernel refused something else.
    #[error("cannot {what}: {source}")]
    Kernel {
        /// What was tried, on what.
        what: Box<str>,
        /// The kernel's error.
        source: io::Error,
    },
}

impl AddressError {
    /// The error for `what` was tried.
    pub(super) fn of(what: impl Into<Box<str>>, source: io::Error) -> Self {
        let what = what.into();
        if is_right_missing(&source) { Self::Capability { what } } else { Self::Kernel { what, source } }
    }
}

/// Whether the kernel says that the process may not.
pub(super) fn is_right_missing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(EPERM)
}

fn sentences(collisions: &[Collision]) -> String {
    let each: Vec<String> = collisions.iter().map(ToString::to_string).collect();
    each.join(". Also: ")
}
