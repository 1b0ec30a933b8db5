//! Buffers for first bytes, used again: one a connection is needed from its hello until its endpoint has it, a millisecond
//! later, and a hello with a post-quantum key share is of a size that the allocator of the C library is slow for.

use std::cell::RefCell;

/// Buffers a thread keeps: as many as connections are commonly under way at a time.
const KEPT: usize = 32;

/// Larger ones are not kept, so that a thread holds 128 KiB at the most. Hellos have 0.3 to 2 KiB.
const LARGEST: usize = 4 * 1024;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer.
pub(crate) fn take() -> Vec<u8> {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_default()
}

/// Keeps `buffer` for the next connection.
pub(crate) fn give_back(mut buffer: Vec<u8>) {
    let capacity = buffer.capacity();
    if capacity == 0 || capacity > LARGEST {
        return;
    }
    buffer.clear();
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < KEPT {
            spare.push(buffer);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_empty_unless_it_has_grown_large() {
        let mut buffer = take();
        buffer.extend_from_slice(&[1; 1024]);
        give_back(buffer);
        let again = take();
        assert!(again.is_empty() && again.capacity() >= 1024);
        give_back(vec![0; LARGEST + 1]);
        assert_eq!(take().capacity(), 0);
    }

    #[test]
    fn a_thread_keeps_a_bounded_number() {
        (0..2 * KEPT).for_each(|_| give_back(vec![0; 16]));
        assert_eq!((0..2 * KEPT).filter(|_| take().capacity() > 0).count(), KEPT);
    }
}
