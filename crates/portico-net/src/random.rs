//! A random number, for waits that must not be the same everywhere.

use std::hash::{BuildHasher, RandomState};

/// Returns a number between 0 and 1. The standard library's hasher is seeded by the system, so nodes differ.
#[must_use]
pub fn random() -> f64 {
    let bits = RandomState::new().hash_one("portico");
    #[allow(clippy::cast_precision_loss, reason = "53 of 64 bits are random enough")]
    let fraction = (bits >> 11) as f64 / (1_u64 << 53) as f64;
    fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ_and_lie_between_0_and_1() {
        assert_ne!(random().to_bits(), random().to_bits());
        assert!((0..100).all(|_| (0.0..1.0).contains(&random())));
    }
}
