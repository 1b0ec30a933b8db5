//! Who may ask an API server now: bounds for each cluster and for all of them, such that nobody waits for another's trouble.
//!
//! Newcomers (tokens that were never accepted; anybody can make them up) never have all places: some are left for tokens that were
//! accepted and are in use. An API server that does not answer in time is asked about one token at a time, from places of their own, until
//! it does: what waits for it takes no place of a cluster that answers.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use smallvec::SmallVec;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Exchanges at a time with API servers that answer; and as many with those that do not.
const MOST: usize = 64;

/// Those of them for newcomers.
const NEWCOMERS: usize = 48;

/// Exchanges at a time with the API server of one cluster: agents that all come back at once must not look like an attack to it.
pub(super) const MOST_PER_CLUSTER: usize = 8;

/// Those of them for newcomers.
const NEWCOMERS_PER_CLUSTER: usize = 6;

/// Exchanges about newcomers that one connection may have under way: an agent has one token, and while it changes two.
pub(super) const MOST_PER_CONNECTION: usize = 2;

/// The places of one cluster.
#[derive(Debug)]
pub(crate) struct ClusterPlaces {
    all: Semaphore,
    newcomers: Semaphore,
    /// The one place while its API server does not answer.
    probe: Semaphore,
    hangs: AtomicBool,
}

impl Default for ClusterPlaces {
    fn default() -> Self {
        Self {
            all: Semaphore::new(MOST_PER_CLUSTER),
            newcomers: Semaphore::new(NEWCOMERS_PER_CLUSTER),
            probe: Semaphore::new(1),
            hangs: AtomicBool::default(),
        }
    }
}

impl ClusterPlaces {
    /// Notes whether its API server kept its asker waiting to the end.
    pub(super) fn note(&self, hangs: bool) {
        self.hangs.store(hangs, Relaxed);
    }
}

/// The places that all clusters share.
#[derive(Debug)]
pub(super) struct Places {
    all: Semaphore,
    newcomers: Semaphore,
    hanging: Semaphore,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            all: Semaphore::new(MOST),
            newcomers: Semaphore::new(NEWCOMERS),
            hanging: Semaphore::new(MOST),
        }
    }
}

/// A place, given back on drop.
#[derive(Debug)]
pub(super) struct Place<'a>(#[expect(dead_code, reason = "held")] SmallVec<[SemaphorePermit<'a>; 4]>);

impl Places {
    /// Waits for a place for one exchange with the API server of `cluster`.
    pub(super) async fn take<'a>(&'a self, cluster: &'a ClusterPlaces, is_newcomer: bool) -> Place<'a> {
        loop {
            let hangs = cluster.hangs.load(Relaxed);
            // That of the cluster first: who waits for its own cluster holds nothing of the others.
            let way: &[&Semaphore] = match (hangs, is_newcomer) {
                (true, _) => &[&cluster.probe, &self.hanging],
                (false, true) => &[&cluster.newcomers, &cluster.all, &self.newcomers, &self.all],
                (false, false) => &[&cluster.all, &self.all],
            };
            let mut permits = SmallVec::new();
            for semaphore in way {
                // None of them is ever closed.
                permits.extend(semaphore.acquire().await.ok());
            }
            // It may have begun to hang, or to answer, while we waited.
            if cluster.hangs.load(Relaxed) == hangs {
                return Place(permits);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    /// As many places as there are at once.
    fn all<'a>(places: &'a Places, cluster: &'a ClusterPlaces, is_newcomer: bool) -> Vec<Place<'a>> {
        std::iter::from_fn(|| places.take(cluster, is_newcomer).now_or_never()).collect()
    }

    #[test]
    fn newcomers_leave_places_to_those_that_were_accepted() {
        let (places, cluster) = (Places::default(), ClusterPlaces::default());
        assert_eq!(all(&places, &cluster, true).len(), NEWCOMERS_PER_CLUSTER);
        let newcomers = all(&places, &cluster, true);
        assert_eq!(all(&places, &cluster, false).len(), MOST_PER_CLUSTER - newcomers.len());
        let clusters: Vec<_> = (0..MOST).map(|_| ClusterPlaces::default()).collect();
        let flood: Vec<_> = clusters.iter().flat_map(|cluster| all(&places, cluster, true)).collect();
        assert_eq!(flood.len() + newcomers.len(), NEWCOMERS);
        assert!(!all(&places, &ClusterPlaces::default(), false).is_empty());
    }

    #[test]
    fn clusters_that_hang_take_no_place_of_those_that_answer() {
        let (places, clusters) = (Places::default(), (0..2 * MOST).map(|_| ClusterPlaces::default()));
        let hanging: Vec<_> = clusters.inspect(|cluster| cluster.note(true)).collect();
        let taken: Vec<_> = hanging.iter().flat_map(|cluster| all(&places, cluster, true)).collect();
        assert_eq!(taken.len(), MOST, "one each, and no more than that");
        let answers = ClusterPlaces::default();
        assert_eq!(all(&places, &answers, true).len(), NEWCOMERS_PER_CLUSTER);
    }

    #[test]
    fn who_waited_for_a_cluster_that_began_to_hang_waits_for_its_one_place() {
        let (places, cluster) = (Places::default(), ClusterPlaces::default());
        let taken = all(&places, &cluster, false);
        let mut first = Box::pin(places.take(&cluster, false));
        let mut second = Box::pin(places.take(&cluster, false));
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        cluster.note(true);
        drop(taken);
        let probe = first.now_or_never();
        assert!(probe.is_some() && second.as_mut().now_or_never().is_none());
        cluster.note(false);
        drop(probe);
        assert!(second.now_or_never().is_some(), "it answers again");
    }
}
