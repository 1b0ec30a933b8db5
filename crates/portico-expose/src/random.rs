//! Random numbers without a clock or an operating system: the caller brings the seed.

/// A stream of numbers that follows from its seed alone (SplitMix64: one addition and three mixing steps a
/// number).
///
/// It spreads NodePorts over their range. Nothing depends on its being hard to guess.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The stream that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0. For the bounds in use here (at most 65,536) no
    /// number is likelier than another by more than one part in 2^47.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let scaled = (u128::from(mixed) * u128::from(bound)) >> 64;
        u32::try_from(scaled).unwrap_or(0)
    }
}
