//! What the connections of all clusters may take together, and how much of it one cluster.
//!
//! One rule: a cluster may take as much as is left. One that takes all it can gets half and leaves half; two
//! get a third each and leave a third. However many take all they can, a cluster that has little gets what
//! it asks for. The rule holds for descriptors and for memory, each by itself.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// What one connection takes, for as long as it is open: a little more than was measured at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Of the process and of the kernel, as a control group counts it.
    kib: u32,
    descriptors: u32,
}

impl Cost {
    /// A connection by name or by port: two sockets.
    pub(crate) const CONNECTION: Self = Self { kib: 10, descriptors: 2 };
    /// A CONNECT stream: a socket, and its part of its tunnel.
    pub(crate) const STREAM: Self = Self { kib: 6, descriptors: 1 };
    /// CONNECT over HTTP/1.1, which makes a tunnel of the whole connection: two sockets and TLS.
    pub(crate) const HTTP1: Self = Self { kib: 48, descriptors: 2 };
    /// A tunnel connection that has authenticated: mostly TLS and HTTP/2.
    pub(crate) const TUNNEL: Self = Self { kib: 48, descriptors: 1 };
    /// Nothing more than what is counted elsewhere.
    pub(crate) const NOTHING: Self = Self { kib: 0, descriptors: 0 };
}

/// What the connections of all clusters take, and the most they may.
#[derive(Debug)]
pub(crate) struct FairShare {
    kib: Pool,
    descriptors: Pool,
}

/// What the connections of one cluster take.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    kib: AtomicU32,
    descriptors: AtomicU32,
}

#[derive(Debug)]
struct Pool {
    limit: u32,
    taken: AtomicU32,
}

impl FairShare {
    /// `memory` is in bytes.
    pub(crate) fn new(memory: usize, descriptors: u32) -> Self {
        let kib = u32::try_from(memory >> 10).unwrap_or(u32::MAX);
        Self { kib: Pool::new(kib), descriptors: Pool::new(descriptors) }
    }

    /// Takes the cost of one connection for the cluster that has taken `own`. False, and nothing is taken, if
    /// that is more than is left.
    pub(crate) fn take(&self, own: &Taken, cost: Cost) -> bool {
        if !self.kib.take(&own.kib, cost.kib) {
            return false;
        }
        let took = self.descriptors.take(&own.descriptors, cost.descriptors);
        if !took {
            self.kib.give_back(&own.kib, cost.kib);
        }
        took
    }

    pub(crate) fn give_back(&self, own: &Taken, cost: Cost) {
        self.kib.give_back(&own.kib, cost.kib);
        self.descriptors.give_back(&own.descriptors, cost.descriptors);
    }

    /// Bytes of memory, and descriptors, that are taken.
    pub(crate) fn taken(&self) -> (usize, u32) {
        ((self.kib.taken.load(Relaxed) as usize) << 10, self.descriptors.taken.load(Relaxed))
    }
}

impl Pool {
    fn new(limit: u32) -> Self {
        Self { limit, taken: AtomicU32::default() }
    }

    fn take(&self, own: &AtomicU32, cost: u32) -> bool {
        let up = |taken: u32| {
            let left = self.limit.saturating_sub(taken);
            (own.load(Relaxed).saturating_add(cost) <= left).then(|| taken + cost)
        };
        let took = self.taken.fetch_update(Relaxed, Relaxed, up).is_ok();
        if took {
            own.fetch_add(cost, Relaxed);
        }
        took
    }

    fn give_back(&self, own: &AtomicU32, cost: u32) {
        own.fetch_sub(cost, Relaxed);
        self.taken.fetch_sub(cost, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams a cluster gets if it takes all it can.
    fn fill(fair: &FairShare, own: &Taken) -> u32 {
        (0..).take_while(|_| fair.take(own, Cost::STREAM)).count().try_into().unwrap()
    }

    #[test]
    fn a_cluster_that_takes_all_it_can_leaves_as_much_to_others() {
        let fair = FairShare::new(usize::MAX, 1_000);
        let [a, b, c] = [(); 3].map(|()| Taken::default());
        assert_eq!(fill(&fair, &a), 500);
        assert_eq!(fill(&fair, &b), 250);
        assert_eq!(fill(&fair, &c), 125);
        assert_eq!(fair.taken().1, 875);
        // What the first gives back, others can have, and it itself no more than they.
        (0..500).for_each(|_| fair.give_back(&a, Cost::STREAM));
        assert_eq!((fill(&fair, &c), fill(&fair, &b)), (250, 63));
        assert!(fair.take(&a, Cost::CONNECTION), "there is always something left");
    }

    #[test]
    fn memory_bounds_as_descriptors_do_and_what_is_refused_takes_neither() {
        let fair = FairShare::new(1 << 20, u32::MAX);
        let own = Taken::default();
        assert_eq!(fill(&fair, &own), 85);
        let fair = FairShare::new(1 << 20, 7);
        let own = Taken::default();
        assert_eq!(fill(&fair, &own), 4);
        assert_eq!(fair.taken(), (24 << 10, 4));
    }

    #[test]
    fn the_least_gateway_serves_one_connection() {
        let fair = FairShare::new(12 << 10, 2);
        assert!(fair.take(&Taken::default(), Cost::CONNECTION));
    }
}
