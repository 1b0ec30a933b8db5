//! An address that this node holds.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::sync::Arc;

use super::{AddressError, Settings};

/// A way to hold an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A dummy interface.
    Dummy,
    /// A pair of veth interfaces, both on this host.
    Veth,
    /// A further address of the loopback interface.
    Loopback,
}

impl Kind {
    /// All of them, the best first.
    pub const ALL: [Kind; 3] = [Kind::Dummy, Kind::Veth, Kind::Loopback];
}

impl Display for Kind {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dummy => "dummy",
            Self::Veth => "veth",
            Self::Loopback => "loopback",
        })
    }
}

/// How an address is held: for log, metrics and `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct How {
    /// The way.
    pub kind: Kind,
    /// The interface that has the address.
    pub interface: Box<str>,
    /// Whether it was there already, left by another agent or still in use by it.
    pub adopted: bool,
    /// Why it is none of the better ways, as a sentence; empty if it is the best.
    pub why: Box<str>,
    /// Why this node cannot be kept from answering ARP for the address, if so.
    pub unguarded: Option<Box<str>>,
}

/// A view of a [`Held`] address for other tasks.
#[derive(Debug, Clone)]
pub struct Status(Arc<()>);

impl Status {
    /// Whether the address is there at this moment.
    pub fn is_held(&self) -> bool {
        false
    }

    /// How it is held.
    pub fn how(&self) -> Option<Arc<How>> {
        None
    }

    /// How often something had to be put back.
    pub fn repairs(&self) -> u64 {
        0
    }
}

/// An address that this node holds. Dropping it leaves everything in place, as a crash does; [`release`](Self::release) does not.
#[derive(Debug)]
pub struct Held(Status);

impl Held {
    /// Checks as [`check`](super::check) does, then makes interface and address. What an agent left that crashed, or what a running
    /// one has made, is adopted.
    pub async fn take(_settings: Settings) -> Result<Held, AddressError> {
        Err(not_yet())
    }

    /// Puts back what someone removes, the moment the kernel tells. Returns only when that is not possible any more. May be dropped
    /// at any await.
    pub async fn keep(&mut self) -> AddressError {
        not_yet()
    }

    /// A view of it for other tasks, good while [`keep`](Self::keep) runs.
    pub fn status(&self) -> Status {
        self.0.clone()
    }

    /// Removes what agents made, nothing else. What cannot be removed is logged.
    pub async fn release(self) {}

    /// Leaves everything in place: a successor has taken over.
    pub fn leave(self) {}
}

pub(super) fn not_yet() -> AddressError {
    AddressError::Kernel { what: "hold an address".into(), source: io::ErrorKind::Unsupported.into() }
}
