//! The bounds of a gateway, divided out of two numbers: the memory and the descriptors that it has.
//!
//! The parts add up to less than the whole, so that no part can take what another was promised. The rest of
//! the memory, two sixteenths, is for routes, counters and the program. The rest of the descriptors, two
//! sixteenths, is for listeners, files, the admin listener and pipes.
//!
//! | | of the memory | each | of the descriptors |
//! |---|---|---|---|
//! | connections that have not said where to go | 1/8 | 32 KiB | 1/8 |
//! | tunnel connections without an identity | 1/16 | 64 KiB | 1/16 |
//! | bytes that tunnel streams hold | 1/4 | | |
//! | connections of clusters | 3/8 | as they cost | 5/8 |
//! | requests that wait for a token review | 1/32 | 3 KiB and the token | |
//! | token reviews under way | 1/32 | 64 KiB | 1/16 |

/// A socket, its task, TLS, and a handshake of 20 KiB.
const HANDSHAKE: usize = 32 << 10;

/// A socket, TLS, HTTP/2 and the few requests that may wait.
const UNAUTHENTICATED: usize = 64 << 10;

/// A socket, TLS, the token three times over and what the API server answers.
const REVIEW: usize = 64 << 10;

/// 32 clusters whose API servers hang fill it.
const MOST_REVIEWS: usize = 256;

/// More would only be slower: what a gateway of any size begins with at a time.
const MOST_SLOTS: usize = 8_192;

/// A gateway that is very small must begin with some.
const LEAST_SLOTS: usize = 16;

/// The parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Connections that have not yet said where they want to go.
    pub(crate) handshakes: u32,
    /// Tunnel connections that have shown no accepted identity.
    pub(crate) unauthenticated: u32,
    /// Bytes that tunnel streams hold for receivers that do not take them.
    pub(crate) tunnel_held: usize,
    /// Bytes that the connections of all clusters may take.
    pub(crate) connection_memory: usize,
    /// Descriptors that they may take.
    pub(crate) connection_descriptors: u32,
    /// Token reviews under way at a time.
    pub(crate) reviews: u32,
    /// Bytes that requests may take that wait for one.
    pub(crate) review_memory: usize,
}

impl Capacity {
    /// Divides `memory`, in bytes, and `descriptors`.
    pub(crate) fn of(memory: usize, descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        let slots = |by_memory: usize, most: usize| {
            u32::try_from(by_memory.min(most).max(LEAST_SLOTS)).unwrap_or(u32::MAX)
        };
        Self {
            handshakes: slots(memory / 8 / HANDSHAKE, MOST_SLOTS.min(descriptors / 8)),
            unauthenticated: slots(memory / 16 / UNAUTHENTICATED, MOST_SLOTS.min(descriptors / 16)),
            tunnel_held: memory / 4,
            connection_memory: memory / 8 * 3,
            connection_descriptors: u32::try_from(descriptors / 8 * 5).unwrap_or(u32::MAX),
            reviews: slots(memory / 32 / REVIEW, MOST_REVIEWS.min(descriptors / 16)),
            review_memory: memory / 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_pod_is_divided_by_its_memory() {
        let capacity = Capacity::of(256 << 20, 1 << 20);
        let expected = Capacity {
            handshakes: 1_024,
            unauthenticated: 256,
            tunnel_held: 64 << 20,
            connection_memory: 96 << 20,
            connection_descriptors: 655_360,
            reviews: 128,
            review_memory: 8 << 20,
        };
        assert_eq!(capacity, expected);
    }

    #[test]
    fn a_process_with_few_descriptors_is_divided_by_those() {
        let capacity = Capacity::of(8 << 30, 1_024);
        assert_eq!((capacity.handshakes, capacity.unauthenticated), (128, 64));
        assert_eq!((capacity.connection_descriptors, capacity.reviews), (640, 64));
    }

    #[test]
    fn all_parts_together_are_less_than_the_whole() {
        for (memory, descriptors) in [(32 << 20, 1_000), (256 << 20, 20_000), (64 << 30, 1 << 20)] {
            let capacity = Capacity::of(memory, descriptors);
            let used = capacity.handshakes as usize * HANDSHAKE
                + capacity.unauthenticated as usize * UNAUTHENTICATED
                + capacity.reviews as usize * REVIEW
                + capacity.review_memory
                + capacity.tunnel_held
                + capacity.connection_memory;
            assert!(used <= memory / 16 * 14, "{capacity:?}");
            let used = u64::from(capacity.handshakes)
                + u64::from(capacity.unauthenticated)
                + u64::from(capacity.reviews)
                + u64::from(capacity.connection_descriptors);
            assert!(used <= descriptors / 16 * 14 + 16, "{capacity:?}");
        }
    }
}
