//! The counts of both halves: times in buckets, and packets by type.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use portico_wire::konnectivity::Packet;

/// A histogram whose buckets are not cumulative; the last has what is above all bounds.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    buckets: [AtomicU64; N],
    above: AtomicU64,
    nanos: AtomicU64,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; N], above: AtomicU64::new(0), nanos: AtomicU64::new(0) }
    }
}

impl<const N: usize> Histogram<N> {
    pub(crate) fn observe(&self, bounds: &[f64; N], took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = bounds.iter().position(|bound| seconds <= *bound);
        bucket.map_or(&self.above, |bucket| &self.buckets[bucket]).fetch_add(1, Relaxed);
        self.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Each bound of `bounds` with its count; those above all of them last.
    #[must_use]
    pub fn buckets(&self, bounds: &[f64; N]) -> Vec<(f64, u64)> {
        bounds.iter().copied().chain([f64::INFINITY]).zip(self.counts()).collect()
    }

    /// The counts, those above all bounds last.
    pub fn counts(&self) -> impl Iterator<Item = u64> {
        self.buckets.iter().chain([&self.above]).map(|bucket| bucket.load(Relaxed))
    }

    /// The sum, in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        Duration::from_nanos(self.nanos.load(Relaxed)).as_secs_f64()
    }
}

/// Packets by type.
#[derive(Debug, Default)]
pub struct PacketCounts([AtomicU64; Packet::TYPES.len()]);

impl PacketCounts {
    pub(crate) fn packet(&self, packet: &Packet) {
        self.0[packet.type_index()].fetch_add(1, Relaxed);
    }

    pub(crate) fn data(&self) {
        self.0[Packet::DATA].fetch_add(1, Relaxed);
    }

    /// Counts by the name of a type.
    pub(crate) fn named(&self, name: &str) {
        count(&Packet::TYPES, &self.0, name);
    }

    /// Each type with its count.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Packet::TYPES.into_iter().zip(self.0.iter().map(|count| count.load(Relaxed)))
    }
}

/// Counts one at the index of `name` among `names`.
pub(crate) fn count(names: &[&'static str], counters: &[AtomicU64], name: &str) {
    if let Some(counter) = names.iter().position(|known| *known == name).and_then(|at| counters.get(at)) {
        counter.fetch_add(1, Relaxed);
    }
}
