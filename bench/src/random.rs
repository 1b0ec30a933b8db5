//! A small generator for orders and moments: each run takes the same ones, which is welcome.

/// xorshift64*.
pub(crate) struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// At least 0 and less than 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 32) as f64 / (u64::from(u32::MAX) + 1) as f64
    }

    /// Puts `order` into another one.
    pub(crate) fn shuffle(&mut self, order: &mut [usize]) {
        for last in (1..order.len()).rev() {
            let other = (self.next() >> 33) as usize % (last + 1);
            order.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_everyone_and_moves_someone() {
        let mut random = Random::default();
        let mut firsts = Vec::new();
        for _ in 0..40 {
            let mut order = [0, 1, 2, 3];
            random.shuffle(&mut order);
            firsts.push(order[0]);
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3]);
        }
        assert!((0..4).all(|number| firsts.contains(&number)));
    }

    #[test]
    fn fractions_fill_the_unit() {
        let mut random = Random::default();
        let fractions: Vec<_> = (0..1000).map(|_| random.fraction()).collect();
        assert!(fractions.iter().all(|fraction| (0.0..1.0).contains(fraction)));
        let mean = fractions.iter().sum::<f64>() / 1000.0;
        assert!((0.45..0.55).contains(&mean), "{mean}");
    }
}
