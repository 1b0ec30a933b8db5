//! The bound of the connections of all clusters together, and the share of one cluster.
//!
//! A cluster may hold a part (default half) of what the others do not hold. One that takes all it can
//! gets 1/2, and the next then 1/4. As connections end and others are made, the two come to 1/3 each.
//! Each may hold one connection, or a tunnel with one stream, while any is left. Memory and descriptors
//! are judged separately.
//!
//! Tunnels hold bytes for receivers. One cluster may hold the same part of all of those.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

use portico_api::policy::Percent;
use portico_net::MemoryBudget;
use serde::Serialize;

/// The cost of one connection, for as long as it is open: a little more than was measured at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Memory of the process and of the kernel in KiB, as a control group counts it.
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
    /// What a cluster may hold however little others leave: a tunnel and its first stream, or a connection of
    /// another kind, which takes no more.
    const FIRST: Self =
        Self { kib: Self::TUNNEL.kib + Self::STREAM.kib, descriptors: Self::CONNECTION.descriptors };
}

/// The cost of the connections of all clusters, and its bound.
#[derive(Debug)]
pub(crate) struct FairShare {
    kib: Pool,
    descriptors: Pool,
    held: MemoryBudget,
    /// The part of a cluster that sets none.
    part: Percent,
}

/// What the connections of one cluster take.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    kib: AtomicU32,
    descriptors: AtomicU32,
    /// Made with the first tunnel.
    held: OnceLock<MemoryBudget>,
    /// Its own part, in percent; 0 if it sets none.
    part: AtomicU8,
}

/// The use of something by a cluster, and the most that it may take now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Use {
    /// What it takes.
    pub taken: usize,
    /// What it may, while all others take what they do.
    pub most: usize,
}

/// The use of a gateway by a cluster, and its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareUse {
    /// The part that it may take of what all others leave.
    pub part: Percent,
    /// Bytes that its connections, streams and tunnels are reckoned to take.
    pub memory: Use,
    /// Their descriptors.
    pub descriptors: Use,
    /// Bytes that its tunnels hold for receivers that have not taken them.
    pub held: Use,
}

#[derive(Debug)]
struct Pool {
    limit: u32,
    /// What each cluster may take of it, as long as it is there.
    first: u32,
    taken: AtomicU32,
}

impl FairShare {
    /// `memory` is in bytes. `held` counts those that all tunnels hold.
    pub(crate) fn new(memory: usize, descriptors: u32, held: &MemoryBudget, part: Percent) -> Self {
        let kib = u32::try_from(memory >> 10).unwrap_or(u32::MAX);
        let kib = Pool::new(kib, Cost::FIRST.kib);
        let descriptors = Pool::new(descriptors, Cost::FIRST.descriptors);
        Self { kib, descriptors, held: held.clone(), part }
    }

    /// For tests about something else.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Self {
        Self::new(usize::MAX, u32::MAX, &MemoryBudget::new(usize::MAX), Percent::HALF)
    }

    fn part_of(&self, own: &Taken) -> Percent {
        Percent::try_from(own.part.load(Relaxed)).unwrap_or(self.part)
    }

    /// Takes the cost of one connection for the cluster that has taken `own`. False, and nothing is taken, if
    /// that is more than is left.
    pub(crate) fn take(&self, own: &Taken, cost: Cost) -> bool {
        let part = self.part_of(own);
        if !self.kib.take(&own.kib, cost.kib, part) {
            return false;
        }
        let took = self.descriptors.take(&own.descriptors, cost.descriptors, part);
        if !took {
            self.kib.give_back(&own.kib, cost.kib);
        }
        took
    }

    pub(crate) fn give_back(&self, own: &Taken, cost: Cost) {
        self.kib.give_back(&own.kib, cost.kib);
        self.descriptors.give_back(&own.descriptors, cost.descriptors);
    }

    /// The budget for the bytes that the tunnels of one cluster hold.
    pub(crate) fn held<'a>(&self, own: &'a Taken) -> &'a MemoryBudget {
        let most = self.part_of(own).of(self.held.limit());
        let held = own.held.get_or_init(|| MemoryBudget::new(most));
        held.set_limit(most);
        held
    }

    /// What one cluster takes, and may.
    pub(crate) fn used_by(&self, own: &Taken) -> ShareUse {
        let part = self.part_of(own);
        let Use { taken, most } = self.kib.used_by(&own.kib, part);
        ShareUse {
            part,
            memory: Use { taken: taken << 10, most: most << 10 },
            descriptors: self.descriptors.used_by(&own.descriptors, part),
            held: Use {
                taken: own.held.get().map_or(0, MemoryBudget::held),
                most: part.of(self.held.limit()),
            },
        }
    }

    /// Bytes of memory, and descriptors, that are taken.
    pub(crate) fn taken(&self) -> (usize, u32) {
        ((self.kib.taken.load(Relaxed) as usize) << 10, self.descriptors.taken.load(Relaxed))
    }
}

impl Taken {
    /// The cluster sets its own part, or none.
    pub(crate) fn set_part(&self, part: Option<Percent>) {
        self.part.store(part.map_or(0, Percent::get), Relaxed);
    }
}

impl ShareUse {
    /// Whether it takes nothing.
    pub fn is_idle(&self) -> bool {
        self.memory.taken == 0 && self.descriptors.taken == 0 && self.held.taken == 0
    }

    /// How much of its share is taken, from 0 to 1, of what is scarcest.
    pub fn ratio(&self) -> f64 {
        let each = [self.memory, self.descriptors, self.held];
        let ratios = each.map(|part| part.taken as f64 / part.most.max(1) as f64);
        ratios.into_iter().fold(0.0, f64::max)
    }
}

impl Pool {
    fn new(limit: u32, first: u32) -> Self {
        Self { limit, first, taken: AtomicU32::default() }
    }

    fn take(&self, own: &AtomicU32, cost: u32, part: Percent) -> bool {
        let up = |taken: u32| {
            let own = own.load(Relaxed);
            // What was admitted is also connected, which takes nothing more.
            let fits = cost == 0 || own.saturating_add(cost) <= self.most(taken, own, part);
            (fits && cost <= self.limit.saturating_sub(taken)).then(|| taken + cost)
        };
        let took = self.taken.fetch_update(Relaxed, Relaxed, up).is_ok();
        if took {
            own.fetch_add(cost, Relaxed);
        }
        took
    }

    fn used_by(&self, own: &AtomicU32, part: Percent) -> Use {
        let taken = own.load(Relaxed);
        Use { taken: taken as usize, most: self.most(self.taken.load(Relaxed), taken, part) as usize }
    }

    /// What a cluster may take that has its `own` of what is `taken`.
    fn most(&self, taken: u32, own: u32, part: Percent) -> u32 {
        let left = self.limit.saturating_sub(taken.saturating_sub(own));
        u32::try_from(part.of(left as usize)).unwrap_or(left).max(self.first).min(left)
    }

    fn give_back(&self, own: &AtomicU32, cost: u32) {
        own.fetch_sub(cost, Relaxed);
        self.taken.fetch_sub(cost, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(memory: usize, descriptors: u32) -> FairShare {
        FairShare::new(memory, descriptors, &MemoryBudget::new(1_000), Percent::HALF)
    }

    /// Streams a cluster gets if it takes all it can.
    fn fill(fair: &FairShare, own: &Taken) -> u32 {
        (0..).take_while(|_| fair.take(own, Cost::STREAM)).count().try_into().unwrap()
    }

    #[test]
    fn a_cluster_that_takes_all_it_can_leaves_as_much_to_others() {
        let fair = share(usize::MAX, 1_000);
        let [a, b, c] = [(); 3].map(|()| Taken::default());
        assert_eq!(fill(&fair, &a), 500);
        assert_eq!(fill(&fair, &b), 250);
        assert_eq!(fill(&fair, &c), 125);
        assert_eq!(fair.taken().1, 875);
        // The first gives its share back. Others can have it, and the first itself gets no more than they.
        (0..500).for_each(|_| fair.give_back(&a, Cost::STREAM));
        assert_eq!((fill(&fair, &c), fill(&fair, &b)), (250, 62));
        assert!(fair.take(&a, Cost::CONNECTION), "there is always something left");
    }

    #[test]
    fn memory_bounds_as_descriptors_do_and_what_is_refused_takes_neither() {
        let fair = share(1 << 20, u32::MAX);
        let own = Taken::default();
        assert_eq!(fill(&fair, &own), 85);
        let fair = share(1 << 20, 7);
        let own = Taken::default();
        assert_eq!(fill(&fair, &own), 3);
        assert_eq!(fair.taken(), (18 << 10, 3));
    }

    #[test]
    fn the_least_gateway_serves_one_connection() {
        let fair = share(12 << 10, 2);
        let own = Taken::default();
        assert!(fair.take(&own, Cost::CONNECTION));
        assert!(fair.take(&own, Cost::NOTHING), "it is connected to an endpoint");
        assert!(!fair.take(&own, Cost::CONNECTION));
    }

    #[test]
    fn a_clusters_first_tunnel_has_room_for_its_first_stream() {
        let fair = share(1 << 20, 1_000);
        let greedy = Taken::default();
        greedy.set_part(Some(Percent::try_from(90).unwrap()));
        fill(&fair, &greedy);
        let own = Taken::default();
        assert!(fair.take(&own, Cost::TUNNEL), "{:?}", fair.used_by(&own));
        assert!(fair.take(&own, Cost::STREAM), "{:?}", fair.used_by(&own));
        assert!(!fair.take(&own, Cost::STREAM), "half of what the other leaves is less");
    }

    #[test]
    fn a_cluster_with_another_part_gets_that_of_what_others_leave() {
        let fair = share(usize::MAX, 1_000);
        let [large, small, all] = [Some(75), Some(10), Some(100)].map(|part| {
            let taken = Taken::default();
            taken.set_part(part.map(|part| part.try_into().unwrap()));
            taken
        });
        assert_eq!((fill(&fair, &large), fill(&fair, &small)), (750, 25));
        let used = fair.used_by(&large);
        assert_eq!((used.part.get(), used.descriptors), (75, Use { taken: 750, most: 731 }));
        assert!(used.ratio() > 1.0, "others have come since");
        assert_eq!(fair.held(&large).limit(), 750);
        assert_eq!(fill(&fair, &all), 225);
        large.set_part(None);
        assert_eq!(fair.used_by(&large).part, Percent::HALF);
        assert_eq!(fair.held(&large).limit(), 500);
        assert!(!fair.take(&Taken::default(), Cost::STREAM), "100 leaves nothing");
    }
}
