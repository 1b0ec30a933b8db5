//! Whatever a client of a Unix socket sends: no panic, nothing is added, little is held, and the reader gets
//! the same however the bytes come.
#![no_main]

use libfuzzer_sys::fuzz_target;
use portico_wire::authority::{MAX_BLOCK, Rewriter};

fuzz_target!(|bytes: &[u8]| {
    let Some((&size, bytes)) = bytes.split_first() else { return };
    let size = usize::from(size) + 1;
    let whole = read([bytes]);
    assert!(whole.len() <= bytes.len());
    assert!(whole == read(bytes.chunks(size)));
});

fn read<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
    for part in parts {
        let passing = rewriter.push(part);
        out.extend_from_slice(&part[..passing]);
        assert!(rewriter.ready().len() <= MAX_BLOCK + part.len());
        out.extend_from_slice(&rewriter.ready().split());
    }
    rewriter.end();
    out.extend_from_slice(rewriter.ready());
    out
}
