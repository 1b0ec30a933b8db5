//! Connections that have not shown an accepted identity yet: they may stay while there is room, and the oldest makes room for the next.
//!
//! An honest client proves itself with its certificate or its first request, within a round trip or two of its hello. Who never does is a
//! misconfigured agent, which is left to try again and again as long as that costs nobody anything, or a flood, which pushes out itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Everybody who is unproven now.
#[derive(Debug)]
pub(super) struct Unproven {
    most: usize,
    crowd: Mutex<Crowd>,
}

#[derive(Debug, Default)]
struct Crowd {
    next: u64,
    /// In the order they came.
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
}

/// A place among them, given back on drop.
#[derive(Debug)]
pub(crate) struct Place {
    among: Arc<Unproven>,
    number: u64,
}

/// Tells a connection that its place is needed.
pub(crate) type Eviction = oneshot::Receiver<()>;

impl Unproven {
    pub(super) fn new(most: u32) -> Self {
        Self { most: most as usize, crowd: Mutex::default() }
    }

    /// Takes a place; if there is none left, that of whoever has had one longest.
    pub(super) fn enter(self: &Arc<Self>) -> (Place, Eviction) {
        let (evict, eviction) = oneshot::channel();
        let mut crowd = self.lock();
        let number = crowd.next;
        crowd.next += 1;
        crowd.waiting.insert(number, evict);
        if crowd.waiting.len() > self.most
            && let Some((_, evict)) = crowd.waiting.pop_first()
        {
            // An error says that it ends just now.
            let _ = evict.send(());
        }
        (Place { among: Arc::clone(self), number }, eviction)
    }

    pub(super) fn count(&self) -> usize {
        self.lock().waiting.len()
    }

    fn lock(&self) -> MutexGuard<'_, Crowd> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.crowd.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.among.lock().waiting.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_makes_room_and_who_proved_itself_is_left_alone() {
        let unproven = Arc::new(Unproven::new(2));
        let (proves, mut left_alone) = unproven.enter();
        let (_second, mut evicted) = unproven.enter();
        drop(proves);
        let (_third, mut stays) = unproven.enter();
        assert!(evicted.try_recv().is_err() && unproven.count() == 2, "there was room");
        let (_fourth, _) = unproven.enter();
        assert_eq!(evicted.try_recv(), Ok(()));
        assert!(left_alone.try_recv().is_err() && stays.try_recv().is_err());
        assert_eq!(unproven.count(), 2);
    }

    #[test]
    fn ten_thousand_that_prove_themselves_at_once_all_get_through() {
        let unproven = Arc::new(Unproven::new(3));
        let mut agents: Vec<_> = (0..10_000)
            .map(|_| {
                let (place, eviction) = unproven.enter();
                drop(place);
                eviction
            })
            .collect();
        assert!(agents.iter_mut().all(|eviction| eviction.try_recv().is_err()));
        assert_eq!(unproven.count(), 0);
    }
}
