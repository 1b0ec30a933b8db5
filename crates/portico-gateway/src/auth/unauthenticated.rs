//! Bounds connections that have not shown an accepted credential: the oldest is evicted for the next.
//!
//! An agent authenticates by its certificate or its first request, within a round trip or two. A connection
//! that never does belongs to a misconfigured agent, which may stay while there is room, or to a flood, which
//! evicts itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The unauthenticated connections of this process.
#[derive(Debug)]
pub(super) struct Unauthenticated {
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In the order of arrival.
    connections: BTreeMap<u64, oneshot::Sender<()>>,
}

/// The slot of one unauthenticated connection, freed on drop.
#[derive(Debug)]
pub(crate) struct Slot {
    of: Arc<Unauthenticated>,
    number: u64,
}

/// Resolves to `Ok` when the connection must make room.
pub(crate) type Eviction = oneshot::Receiver<()>;

impl Unauthenticated {
    pub(super) fn new(max: u32) -> Self {
        Self { max: max as usize, state: Mutex::default() }
    }

    /// Takes a slot. If there were `max` already, the oldest connection is evicted.
    pub(super) fn enter(self: &Arc<Self>) -> (Slot, Eviction) {
        let (evict, eviction) = oneshot::channel();
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.connections.insert(number, evict);
        if state.connections.len() > self.max
            && let Some((_, evict)) = state.connections.pop_first()
        {
            // Fails only for a connection that is closing anyway.
            let _ = evict.send(());
        }
        (Slot { of: Arc::clone(self), number }, eviction)
    }

    pub(super) fn count(&self) -> usize {
        self.lock().connections.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.of.lock().connections.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_evicted_and_an_authenticated_connection_is_not() {
        let unauthenticated = Arc::new(Unauthenticated::new(2));
        let (authenticates, mut left_alone) = unauthenticated.enter();
        let (_second, mut evicted) = unauthenticated.enter();
        drop(authenticates);
        let (_third, mut stays) = unauthenticated.enter();
        assert!(evicted.try_recv().is_err() && unauthenticated.count() == 2, "there was room");
        let (_fourth, _) = unauthenticated.enter();
        assert_eq!(evicted.try_recv(), Ok(()));
        assert!(left_alone.try_recv().is_err() && stays.try_recv().is_err());
        assert_eq!(unauthenticated.count(), 2);
    }

    #[test]
    fn ten_thousand_that_authenticate_at_once_all_stay() {
        let unauthenticated = Arc::new(Unauthenticated::new(3));
        let mut agents: Vec<_> = (0..10_000)
            .map(|_| {
                let (slot, eviction) = unauthenticated.enter();
                drop(slot);
                eviction
            })
            .collect();
        assert!(agents.iter_mut().all(|eviction| eviction.try_recv().is_err()));
        assert_eq!(unauthenticated.count(), 0);
    }
}
