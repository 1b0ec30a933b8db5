use bytes::BufMut;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// The header block of a request of kube-apiserver: the authority is a path.
const BLOCK: &[u8] =
    b"\x83\x86\x45\x8f\x63\x5d\x87\xf3\xeb\x71\x6c\xee\x62\x15\x8d\x76\x1f\xcf\xaf\x41\x04%2Fa\x5f\x01x";

/// [`BLOCK`] with an authority that h2 accepts.
const REWRITTEN: &[u8] =
    b"\x83\x86\x45\x8f\x63\x5d\x87\xf3\xeb\x71\x6c\xee\x62\x15\x8d\x76\x1f\xcf\xaf\x41\x01s\x5f\x01x";

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.put_uint(payload.len() as u64, 3);
    bytes.put_slice(&[kind, flags]);
    bytes.put_u32(1);
    bytes.put_slice(payload);
    bytes
}

/// The bytes that a reader gets of `parts`, one read after the other, and the most that was kept for it
/// meanwhile.
fn read<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> (Vec<u8>, usize) {
    let (mut rewriter, mut out, mut most) = (Rewriter::default(), Vec::new(), 0);
    for part in parts {
        let passing = rewriter.push(part);
        out.extend_from_slice(&part[..passing]);
        most = most.max(rewriter.held.len() + rewriter.ready.len());
        out.append(&mut rewriter.ready().split().to_vec());
    }
    rewriter.end();
    out.extend_from_slice(rewriter.ready());
    (out, most)
}

#[test]
fn an_authority_is_replaced_and_all_else_passes() {
    let preface = [b'p'; PREFACE].to_vec();
    let sent = |block: &[u8]| {
        let ping = frame(6, 0, b"pingping");
        [&preface[..], &ping, &frame(kind::HEADERS, END_HEADERS, block), &ping, b"cut"].concat()
    };
    assert_eq!(read([&sent(BLOCK)[..]]).0, sent(REWRITTEN));
}

#[test]
fn a_block_without_end_is_bounded_and_passes() {
    let mut sent = vec![b'p'; PREFACE];
    sent.extend(frame(kind::HEADERS, 0, &[0; 1000]));
    (0..1000).for_each(|_| sent.extend(frame(kind::CONTINUATION, 0, &[0; 1000])));
    let (out, most) = read(sent.chunks(4096));
    assert!(out == sent, "nothing is lost");
    assert!(most <= MAX_BLOCK + 2 * 4096, "{most}");
}

/// Whatever the bytes are, only replaced ones are lost, and nothing panics.
#[test]
fn damaged_blocks_pass() {
    for at in 0..BLOCK.len() {
        for byte in [0, 1, 0x0f, 0x1f, 0x3f, 0x40, 0x41, 0x7f, 0x80, 0xff] {
            let mut damaged = BLOCK.to_vec();
            damaged[at] = byte;
            assert!(replaced(&damaged).len() <= damaged.len());
        }
        assert!(replaced(&BLOCK[..at]).len() <= at);
    }
    assert!(replaced(&[0x41; 1000]).len() <= 1000);
    assert_eq!(replaced(&[0x41]).len(), 1);
    assert_eq!(&replaced(&[0x41, 0])[..], [0x41, 0], "an empty authority stays");
    assert_eq!(&replaced(&[0x41, 0xff, 0xff, 0xff, 0xff, 0x7f])[..], [0x41, 0xff, 0xff, 0xff, 0xff, 0x7f]);
}

/// Frames of the kinds that matter, with flags and payloads as they come.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![Just(kind::HEADERS), Just(kind::CONTINUATION), 0_u8..12];
    let payload = prop_oneof![Just(BLOCK.to_vec()), vec(any::<u8>(), 0..40)];
    let frames = vec((kind, any::<u8>(), payload), 0..8);
    frames.prop_map(|frames| {
        let frames = frames.iter().flat_map(|(kind, flags, payload)| frame(*kind, *flags, payload));
        [b'p'; PREFACE].into_iter().chain(frames).collect()
    })
}

proptest! {
    #[test]
    fn a_reader_gets_the_same_however_the_bytes_come(sent in frames(), size in 1_usize..64) {
        prop_assert_eq!(read(sent.chunks(size)).0, read([&sent[..]]).0);
    }
}
