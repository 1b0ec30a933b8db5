//! What a gateway may hold, divided out of two numbers: the memory and the descriptors that it has.
//!
//! The parts add up to less than the whole, so that no part can take what another was promised. What is left
//! of the memory, three sixteenths, are routes, counters, reviews of tokens and the program; what is left of
//! the descriptors, three sixteenths, are listeners, files, the admin listener, reviews and pipes.
//!
//! | | of the memory | each | of the descriptors |
//! |---|---|---|---|
//! | connections that have not said where to go | 1/8 | 24 KiB | 1/8 |
//! | tunnel connections without an identity | 1/16 | 64 KiB | 1/16 |
//! | bytes that tunnel streams hold | 1/4 | | |
//! | connections of clusters | 3/8 | as they cost | 5/8 |

/// A socket, its task, and a hello of 16 KiB.
const HANDSHAKE: usize = 24 << 10;

/// A socket, TLS, HTTP/2 and the few requests that may wait.
const UNAUTHENTICATED: usize = 64 << 10;

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
}

impl Capacity {
    /// Divides `memory`, in bytes, and `descriptors`.
    pub(crate) fn of(memory: usize, descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        let slots = |by_memory: usize, by_descriptors: usize| {
            let slots = by_memory.min(by_descriptors).clamp(LEAST_SLOTS, MOST_SLOTS);
            u32::try_from(slots).unwrap_or(u32::MAX)
        };
        Self {
            handshakes: slots(memory / 8 / HANDSHAKE, descriptors / 8),
            unauthenticated: slots(memory / 16 / UNAUTHENTICATED, descriptors / 16),
            tunnel_held: memory / 4,
            connection_memory: memory / 8 * 3,
            connection_descriptors: u32::try_from(descriptors / 8 * 5).unwrap_or(u32::MAX),
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
            handshakes: 1_365,
            unauthenticated: 256,
            tunnel_held: 64 << 20,
            connection_memory: 96 << 20,
            connection_descriptors: 655_360,
        };
        assert_eq!(capacity, expected);
    }

    #[test]
    fn a_process_with_few_descriptors_is_divided_by_those() {
        let capacity = Capacity::of(8 << 30, 1_024);
        assert_eq!((capacity.handshakes, capacity.unauthenticated), (128, 64));
        assert_eq!(capacity.connection_descriptors, 640);
    }

    #[test]
    fn all_parts_together_are_less_than_the_whole() {
        for (memory, descriptors) in [(32 << 20, 1_000), (256 << 20, 20_000), (64 << 30, 1 << 20)] {
            let capacity = Capacity::of(memory, descriptors);
            let slots = (capacity.handshakes as usize, capacity.unauthenticated as usize);
            let used = slots.0 * HANDSHAKE
                + slots.1 * UNAUTHENTICATED
                + capacity.tunnel_held
                + capacity.connection_memory;
            assert!(used <= memory / 16 * 13, "{capacity:?}");
            let used = u64::from(capacity.handshakes)
                + u64::from(capacity.unauthenticated)
                + u64::from(capacity.connection_descriptors);
            assert!(used <= descriptors / 16 * 13 + 16, "{capacity:?}");
        }
    }
}
