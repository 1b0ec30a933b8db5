//! Whatever a stranger sends to the SNI listener: no panic, no waiting past the cap, and one answer however
//! the bytes arrive. And never a name that could upset a log or a table.
#![no_main]

use libfuzzer_sys::fuzz_target;
use portico_wire::Parse;
use portico_wire::hello::{MAX_HELLO, Progress, parse};

fuzz_target!(|bytes: &[u8]| {
    let answer = parse(bytes);
    match &answer {
        Parse::NeedMore => assert!(bytes.len() < MAX_HELLO, "waits with a full buffer"),
        Parse::Malformed(malformed) => assert!(!malformed.reason().is_empty()),
        Parse::Complete(hello) => {
            assert!(hello.len <= bytes.len().min(MAX_HELLO));
            assert_eq!(parse(&bytes[..hello.len]), answer, "what follows the hello changed it");
            assert!(parse(&bytes[..hello.len - 1]).needs_more(), "whole before its last byte");
            if let Some(name) = hello.server_name.as_deref() {
                assert!(!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic()));
            }
            assert!(hello.alpn.iter().all(|name| !name.is_empty()));
        }
    }

    // Parses the same bytes again, in reads of a size that depends on the input.
    let step = 1 + usize::from(bytes.last().copied().unwrap_or_default());
    let mut progress = Progress::default();
    let mut have = 0;
    let in_steps = loop {
        have = (have + step).min(bytes.len());
        let answer = progress.parse(&bytes[..have]);
        if have == bytes.len() || !answer.needs_more() {
            break answer;
        }
    };
    assert_eq!(in_steps, answer, "in steps of {step}");
});
