//! A set of port numbers that finds its n-th free one quickly, however full it is.

use portico_api::port_range::PortRange;

/// A set of ports, one bit each. It takes 8 KiB; the n-th free port is found in 1,024 steps at most.
#[derive(Debug, Clone)]
pub(super) struct PortSet(Box<[u64]>);

impl Default for PortSet {
    fn default() -> Self {
        Self(vec![0; 1_024].into())
    }
}

impl PortSet {
    pub(super) fn insert(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] |= 1 << (port & 63);
    }

    pub(super) fn remove(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] &= !(1 << (port & 63));
    }

    pub(super) fn count(&self, range: PortRange) -> u32 {
        words(range).map(|(index, mask)| (self.0[index] & mask).count_ones()).sum()
    }

    /// The free port of `range` that has `skip` free ones before it.
    pub(super) fn free(&self, range: PortRange, mut skip: u32) -> Option<u16> {
        for (index, mask) in words(range) {
            let mut free = !self.0[index] & mask;
            if skip >= free.count_ones() {
                skip -= free.count_ones();
                continue;
            }
            for _ in 0..skip {
                free &= free - 1;
            }
            return u16::try_from(index * 64).ok()?.checked_add(u16::try_from(free.trailing_zeros()).ok()?);
        }
        None
    }
}

/// The words that hold `range`, each with a mask of the bits that belong to it.
fn words(range: PortRange) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (usize::from(range.first()), usize::from(range.last()));
    (first / 64..=last / 64).map(move |index| {
        let mut mask = u64::MAX;
        if index == first / 64 {
            mask &= u64::MAX << (first % 64);
        }
        if index == last / 64 {
            mask &= u64::MAX >> (63 - last % 64);
        }
        (index, mask)
    })
}
