//! Names for processes that were given none.

use std::hash::{BuildHasher, RandomState};

/// A random UUID (RFC 9562 section 5.4).
pub(super) fn uuid() -> String {
    // The standard library seeds each state anew by the system's random numbers.
    let random = || RandomState::new().hash_one("portico");
    let (high, low) = (random() & !0xf000 | 0x4000, random() & !(0b11 << 62) | (1 << 63));
    let text = format!("{high:016x}{low:016x}");
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_up_name_is_a_uuid_and_another_one_each_time() {
        let one = uuid();
        let lengths: Vec<usize> = one.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert!(one.as_bytes()[14] == b'4' && b"89ab".contains(&one.as_bytes()[19]), "{one}");
        assert_ne!(one, uuid());
    }
}
