use proptest::prelude::*;

use super::*;

#[test]
fn a_prefix_is_five_bytes() {
    let bytes = [0, 0, 1, 0, 2, 9, 9];
    for len in 0..PREFIX {
        assert!(prefix(&bytes[..len], MAX_MESSAGE).needs_more());
    }
    let frame = prefix(&bytes, MAX_MESSAGE).complete().unwrap();
    assert_eq!((frame.message, frame.len()), (65538, 65543));
}

#[test]
fn a_message_over_the_limit_is_refused_by_its_prefix() {
    assert!(prefix(&prefix_of(MAX_MESSAGE), MAX_MESSAGE).complete().is_some());
    assert!(matches!(prefix(&prefix_of(MAX_MESSAGE + 1), MAX_MESSAGE), Parse::Malformed(_)));
    assert!(matches!(prefix(&[0, 255, 255, 255, 255], MAX_MESSAGE), Parse::Malformed(_)));
}

#[test]
fn a_compressed_message_is_refused_by_its_first_byte() {
    assert!(matches!(prefix(&[1], MAX_MESSAGE), Parse::Malformed(_)));
    assert!(matches!(prefix(&[1, 0, 0, 0, 0], MAX_MESSAGE), Parse::Malformed(_)));
}

proptest! {
    #[test]
    fn a_prefix_that_is_written_is_read(message in 0..=MAX_MESSAGE) {
        prop_assert_eq!(prefix(&prefix_of(message), MAX_MESSAGE), Parse::Complete(Frame { message }));
    }
}
