//! Whatever a peer of Konnectivity sends: no panic, no message over its limit, a packet that is read is what
//! is written again, and identifiers and texts get an answer.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use portico_wire::Parse;
use portico_wire::konnectivity::frame::{PREFIX, prefix};
use portico_wire::konnectivity::{Code, Identifiers, Packet, address, status};

/// Small, so that the limit is met.
const MAX_MESSAGE: usize = 16 * 1024;

fuzz_target!(|bytes: &[u8]| {
    stream(Bytes::copy_from_slice(bytes));
    if let Ok(text) = std::str::from_utf8(bytes) {
        assert!(text.contains(address::host(text)));
        if let Ok(identifiers) = Identifiers::parse(text) {
            assert!(identifiers.networks().count() <= identifiers.cidr.len());
        }
        let encoded = status::encode_message(text);
        assert_eq!(status::decode_message(encoded.as_bytes()), text);
    }
    let _ = (status::decode_message(bytes), Code::parse(bytes));
});

/// Reads `bytes` as a stream reads them: message for message, until one is not right or not all there.
fn stream(mut bytes: Bytes) {
    while let Parse::Complete(frame) = prefix(&bytes, MAX_MESSAGE) {
        assert!(frame.message <= MAX_MESSAGE);
        if bytes.len() < frame.len() {
            return;
        }
        let message = bytes.split_to(frame.len()).slice(PREFIX..);
        let Ok(packet) = Packet::decode(&message) else { return };
        if packet != Packet::Unknown {
            let again = packet.encoded();
            assert_eq!(Packet::decode(&again.slice(PREFIX..)).ok(), Some(packet));
        }
    }
}
