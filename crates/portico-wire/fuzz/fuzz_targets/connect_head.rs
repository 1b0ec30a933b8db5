//! Whatever a client sends to the tunnel port: no panic, and no waiting past the cap. A head that is taken
//! has one end that every reader of HTTP agrees on.
#![no_main]

use libfuzzer_sys::fuzz_target;
use portico_wire::Parse;
use portico_wire::connect::{HTTP2_PREFACE, MAX_HEAD, parse, sniff};

fuzz_target!(|bytes: &[u8]| {
    if sniff(bytes).needs_more() {
        assert!(HTTP2_PREFACE.starts_with(bytes));
    }
    let answer = parse(bytes);
    match &answer {
        Parse::NeedMore => assert!(bytes.len() < MAX_HEAD, "waits with a full buffer"),
        Parse::Malformed(malformed) => assert!(!malformed.reason().is_empty()),
        Parse::Complete(head) => {
            assert!(head.len <= bytes.len().min(MAX_HEAD));
            assert!(!head.method.is_empty() && !head.target.is_empty() && head.minor_version <= 1);
            assert_eq!(parse(&bytes[..head.len]), answer, "what follows the head changed it");
            assert!(parse(&bytes[..head.len - 1]).needs_more(), "whole before its last byte");
            let text = &bytes[..head.len];
            let end = text.windows(4).position(|window| window == b"\r\n\r\n");
            assert_eq!(end, Some(head.len - 4), "an empty line inside the head");
            assert!(!text.contains(&0));
            assert!(text.split(|byte| *byte == b'\n').rev().skip(1).all(|line| line.ends_with(b"\r")));
        }
    }
});
