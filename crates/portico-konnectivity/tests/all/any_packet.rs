//! Packets that need not make sense, for peers that send anything in any order.

use std::future::Future;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use bytes::Bytes;
use portico_lab::long_form;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Steps of a sequence.
const MOST_STEPS: usize = 40;

/// Numbers are few, so that they meet.
fn number() -> impl Strategy<Value = i64> {
    prop_oneof![8 => 0..5_i64, 1 => Just(-1), 1 => Just(i64::MAX)]
}

/// Any packet of those that have a meaning. Those that ask for a connection ask for one of `addresses`.
pub(crate) fn packet(addresses: &'static [&'static str]) -> impl Strategy<Value = Packet> {
    let connection = || number().prop_map(ConnectId);
    let dial = || number().prop_map(DialId);
    prop_oneof![
        (0..addresses.len(), dial()).prop_map(|(index, dial)| Packet::DialRequest {
            protocol: "tcp".to_owned(),
            address: addresses[index].to_owned(),
            dial
        }),
        (dial(), proptest::result::maybe_ok(connection(), "[a-z]{1,20}"))
            .prop_map(|(dial, result)| Packet::DialResponse { dial, result }),
        connection().prop_map(Packet::CloseRequest),
        (connection(), "[a-z]{0,20}")
            .prop_map(|(connection, error)| Packet::CloseResponse { connection, error }),
        (connection(), 0..5_000_usize)
            .prop_map(|(connection, len)| Packet::Data { connection, payload: vec![b'x'; len].into() }),
        dial().prop_map(Packet::CloseDial),
        Just(Packet::Drain),
    ]
}

/// Bytes that need be no message, with and without the prefix of one.
pub(crate) fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let any = || prop::collection::vec(any::<u8>(), 1..50);
    let prefixed = any().prop_map(|bytes| [&[0, 0, 0, 0, bytes.len() as u8][..], &bytes].concat());
    prop_oneof![any(), prefixed]
}

/// Bytes of a connection that the checks after a sequence send.
pub(crate) const CHECK: Bytes = Bytes::from_static(b"still here");

/// Runs `sequence` on many lists of `step`s, each on a runtime of its own. Fails if it panics, on any task.
/// Call it in a process without other tests.
pub(crate) fn run_any<S: Clone + std::fmt::Debug, F: Future<Output = ()>>(
    step: impl Strategy<Value = S>,
    sequence: impl Fn(Vec<S>) -> F,
) {
    static HAS_PANICKED: AtomicBool = AtomicBool::new(false);
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        HAS_PANICKED.store(true, SeqCst);
        print(panic);
    }));
    let cases = long_form(60, 2_000);
    let config = Config { cases, max_shrink_iters: 200, failure_persistence: None, ..Config::default() };
    let ran = TestRunner::new(config).run(&prop::collection::vec(step, 1..MOST_STEPS), |steps| {
        HAS_PANICKED.store(false, SeqCst);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(sequence(steps));
        prop_assert!(!HAS_PANICKED.load(SeqCst), "a task has panicked");
        Ok(())
    });
    ran.unwrap();
}
