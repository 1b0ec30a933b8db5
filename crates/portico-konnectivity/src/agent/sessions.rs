//! The servers that are connected.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portico_dial::Target;

use super::session::Session;

/// Every session that is open.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<Vec<Arc<Session>>>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Session>>> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.lock().clone()
    }

    pub(super) fn add(&self, session: Arc<Session>) {
        self.lock().push(session);
    }

    pub(super) fn remove(&self, session: &Arc<Session>) {
        self.lock().retain(|listed| !Arc::ptr_eq(listed, session));
    }

    /// Asks all servers to prefer other agents.
    pub(super) fn drain(&self) {
        self.lock().iter().for_each(|session| session.drain());
    }

    /// How many sessions servers will keep.
    pub(super) fn staying(&self) -> usize {
        self.lock().iter().filter(|session| !session.is_leaving()).count()
    }

    /// Whether there is one to the server that will stay. One that leaves is replaced.
    pub(super) fn has_staying(&self, server: &str) -> bool {
        self.lock().iter().any(|session| **session.server() == *server && !session.is_leaving())
    }

    /// How many lead to servers of this host and port.
    pub(super) fn of(&self, target: &Target) -> usize {
        let host = target.to_string();
        self.lock().iter().filter(|session| session.authority() == host.as_str()).count()
    }

    /// How many lead to each address.
    pub(super) fn by_address(&self) -> HashMap<SocketAddr, usize> {
        let mut connected = HashMap::new();
        for session in self.lock().iter() {
            *connected.entry(session.address()).or_default() += 1;
        }
        connected
    }
}
