//! What connections are called in logs.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

/// Names one connection or stream wherever it is seen: in access lines, in `/connections`, in PROXY headers.
/// Written in hex, also in JSON, whose numbers lose digits beyond 2^53 in most readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// The ids of one process.
#[derive(Debug)]
pub struct ConnectionIds(AtomicU64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl Serialize for ConnectionId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// They start at a random number, so that ids of two processes do not meet in one log.
impl Default for ConnectionIds {
    fn default() -> Self {
        // The standard library's hasher is seeded by the system. The upper half is random, the lower one
        // counts.
        Self(AtomicU64::new(RandomState::new().hash_one("connection ids") << 32))
    }
}

impl ConnectionIds {
    /// One that no other connection of this process has.
    pub fn next(&self) -> ConnectionId {
        ConnectionId(self.0.fetch_add(1, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_connections_have_the_same_id_and_it_is_written_in_hex() {
        let ids = ConnectionIds::default();
        assert_ne!(ids.next(), ids.next());
        assert_ne!(ids.next(), ConnectionIds::default().next());
        assert_eq!(serde_json::to_string(&ConnectionId(u64::MAX)).unwrap(), "\"ffffffffffffffff\"");
    }
}
