//! Whatever a trusted hop sends in front of a connection: no panic, and no waiting past the cap. Bytes behind
//! the header change nothing, and what was read can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use portico_wire::Parse;
use portico_wire::proxy::{Header, MAX_V2, Sniff, Tlvs, encode_v2, parse, sniff};

fuzz_target!(|bytes: &[u8]| {
    let answer = parse(bytes);
    match answer {
        Parse::NeedMore => {
            assert!(bytes.len() < MAX_V2, "waits with a full buffer");
            assert_ne!(sniff(bytes), Sniff::Other);
        }
        Parse::Malformed(malformed) => assert!(!malformed.reason().is_empty()),
        Parse::Complete(header) => {
            assert_eq!(sniff(bytes), Sniff::Header);
            assert!(header.consumed() <= bytes.len().min(MAX_V2));
            assert_eq!(parse(&bytes[..header.consumed()]), answer, "what follows the header changed it");
            assert!(parse(&bytes[..header.consumed() - 1]).needs_more(), "whole before its last byte");
            if let Header::Proxied { source, destination, tlvs, .. } = header {
                // Longer ones are read but not written.
                let tlvs = Tlvs {
                    authority: tlvs.authority.filter(|authority| authority.len() <= 255),
                    alpn: tlvs.alpn.filter(|alpn| alpn.len() <= 255),
                    unique_id: tlvs.unique_id,
                };
                let written = encode_v2(source, destination, tlvs);
                let expected = Header::Proxied { source, destination, tlvs, len: written.len() };
                assert_eq!(parse(&written), Parse::Complete(expected));
            }
        }
    }
});
