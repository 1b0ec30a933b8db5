//! What it costs to read a ClientHello, by the recorded hellos of the clients that matter.
//!
//! A good number: well below a microsecond for a hello in one record, whatever its size, because extensions
//! that do not matter are stepped over and nothing is copied. The gateway spends tens of microseconds on a
//! connection in the kernel, so this must not show. `cargo bench -p portico-wire`.

use std::fs;
use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use portico_wire::hello::{self, Progress};

fn recorded(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/hello").join(file);
    fs::read(path).expect("the corpus is committed")
}

fn one_call(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hello");
    for client in ["kubectl-version", "openssl-tls1.2", "chromium-headless", "rustls-fragmented"] {
        let bytes = recorded(&format!("{client}.bin"));
        group.bench_function(client, |bencher| {
            bencher.iter(|| hello::parse(black_box(&bytes)).complete().is_some())
        });
    }
    group.finish();
}

/// The worst a client can do: every byte in a record of its own, every byte in a read of its own.
fn byte_by_byte(criterion: &mut Criterion) {
    let bytes = recorded("chromium-headless.bin");
    let records: Vec<u8> = bytes[5..].iter().flat_map(|byte| [22, 3, 1, 0, 1, *byte]).collect();
    criterion.bench_function("hello/byte by byte in records of one byte", |bencher| {
        bencher.iter(|| {
            let mut progress = Progress::default();
            let answers =
                (1..=records.len()).map(|have| progress.parse(black_box(&records[..have])).needs_more());
            answers.filter(|waits| !waits).count()
        });
    });
}

criterion_group!(benches, one_call, byte_by_byte);
criterion_main!(benches);
