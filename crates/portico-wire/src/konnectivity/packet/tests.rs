use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::Parse;
use crate::konnectivity::frame::{MAX_MESSAGE, prefix};

fn decode(message: &[u8]) -> Packet {
    Packet::decode(&Bytes::copy_from_slice(message)).unwrap()
}

/// The message that `packet` is encoded as, without its prefix.
fn message_of(packet: &Packet) -> Bytes {
    let mut framed = packet.encoded();
    let Parse::Complete(frame) = prefix(&framed, MAX_MESSAGE + 64) else { panic!("no prefix") };
    assert_eq!(frame.len(), framed.len(), "the prefix tells the length");
    framed.split_off(PREFIX)
}

/// Bytes as Go's library writes them.
#[test]
fn packets_are_the_bytes_that_upstream_sends() {
    let cases: [(Packet, &[u8]); 8] = [
        (
            Packet::DialRequest { protocol: "tcp".into(), address: "a:80".into(), dial: DialId(5) },
            b"\x12\x0d\x0a\x03tcp\x12\x04a:80\x18\x05",
        ),
        (
            Packet::DialResponse { dial: DialId(5), result: Ok(ConnectId(300)) },
            b"\x08\x01\x1a\x05\x10\xac\x02\x18\x05",
        ),
        (
            Packet::DialResponse { dial: DialId(-1), result: Err("no".into()) },
            b"\x08\x01\x1a\x0f\x0a\x02no\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        ),
        (Packet::CloseRequest(ConnectId(1)), b"\x08\x02\x2a\x02\x08\x01"),
        (
            Packet::CloseResponse { connection: ConnectId(1), error: "x".into() },
            b"\x08\x03\x32\x05\x0a\x01x\x10\x01",
        ),
        (
            Packet::Data { connection: ConnectId(2), payload: Bytes::from_static(b"hi") },
            b"\x08\x04\x22\x06\x08\x02\x1a\x02hi",
        ),
        (Packet::CloseDial(DialId(7)), b"\x08\x05\x3a\x02\x08\x07"),
        (Packet::Drain, b"\x08\x06\x42\x00"),
    ];
    for (packet, bytes) in cases {
        assert_eq!(message_of(&packet), bytes, "{packet:?}");
        assert_eq!(decode(bytes), packet);
    }
}

#[test]
fn the_empty_message_is_no_dial() {
    assert_eq!(decode(b""), Packet::Unknown);
    assert_eq!(decode(b"\x08\x00"), Packet::Unknown);
    assert_eq!(decode(b"\x08\x04"), Packet::Unknown, "DATA without a payload");
}

#[test]
fn a_type_that_disagrees_with_its_payload_is_ignored() {
    assert_eq!(decode(b"\x08\x02\x22\x06\x08\x02\x1a\x02hi"), Packet::Unknown);
    assert_eq!(decode(b"\x22\x06\x08\x02\x1a\x02hi"), Packet::Unknown, "a DIAL_REQ with DATA");
}

#[test]
fn what_a_later_version_adds_is_ignored() {
    assert_eq!(decode(b"\x08\x07\x4a\x00"), Packet::Unknown);
    assert_eq!(decode(b"\x08\xff\xff\xff\xff\x0f\x42\x00"), Packet::Unknown);
    // Fields of every type behind those that are known.
    assert_eq!(
        decode(b"\x08\x02\x2a\x12\x08\x01\x78\x05\x7d1234\x7912345678\xa2\x06\x00\x5a\x00"),
        Packet::CloseRequest(ConnectId(1))
    );
}

#[test]
fn a_message_that_is_not_protobuf_is_malformed() {
    for (bytes, reason) in [
        (&b"\x08"[..], "a packet ends within a number"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "a number in a packet is longer than 64 bits"),
        (b"\x22\x05ab", "a packet ends within a field"),
        (b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\x7fab", "a packet ends within a field"),
        (b"\x02\x00", "a field of a packet has a number that does not exist"),
        (b"\x23", "a field of a packet has a type that does not exist"),
        (b"\x0a\x01\x00", "a field of a packet has another type than the protocol says"),
        (b"\x12\x03\x0a\x01\xff", "a text in a packet is not UTF-8"),
    ] {
        let malformed = Packet::decode(&Bytes::copy_from_slice(bytes)).unwrap_err();
        assert_eq!(malformed.reason(), reason, "{}", bytes.escape_ascii());
    }
}

#[test]
fn the_payload_of_data_is_not_copied() {
    let message = message_of(&Packet::Data { connection: ConnectId(9), payload: vec![7; 5000].into() });
    let Packet::Data { payload, .. } = Packet::decode(&message).unwrap() else { panic!("no DATA") };
    assert!(message.as_ptr_range().contains(&payload.as_ptr()));
}

fn packets() -> impl Strategy<Value = Packet> {
    let id = prop_oneof![any::<i64>(), 0..300_i64];
    prop_oneof![
        (".{0,40}", ".{0,40}", id.clone()).prop_map(|(protocol, address, dial)| Packet::DialRequest {
            protocol,
            address,
            dial: DialId(dial)
        }),
        (id.clone(), prop_oneof![id.clone().prop_map(|id| Ok(ConnectId(id))), ".{1,80}".prop_map(Err)])
            .prop_map(|(dial, result)| Packet::DialResponse { dial: DialId(dial), result }),
        id.clone().prop_map(|id| Packet::CloseRequest(ConnectId(id))),
        (id.clone(), ".{0,40}")
            .prop_map(|(id, error)| Packet::CloseResponse { connection: ConnectId(id), error }),
        (id.clone(), vec(any::<u8>(), 0..20_000))
            .prop_map(|(id, bytes)| Packet::Data { connection: ConnectId(id), payload: bytes.into() }),
        id.prop_map(|id| Packet::CloseDial(DialId(id))),
        Just(Packet::Drain),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_what_is_read(packet in packets()) {
        prop_assert_eq!(Packet::decode(&message_of(&packet)).unwrap(), packet);
    }

    #[test]
    fn any_bytes_get_an_answer(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(packet) = Packet::decode(&bytes.into())
            && packet != Packet::Unknown
        {
            prop_assert_eq!(Packet::decode(&message_of(&packet)).unwrap(), packet);
        }
    }

    #[test]
    fn a_damaged_packet_never_panics(
        packet in packets(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut message = message_of(&packet).to_vec();
        let at = at.index(message.len());
        message[at] = byte;
        let _ = Packet::decode(&message.into());
    }
}

#[test]
fn a_packet_counts_with_its_texts_and_its_data() {
    let alone = size_of::<Packet>();
    let dial = Packet::DialRequest { protocol: "tcp".into(), address: "a".repeat(300), dial: DialId(1) };
    assert_eq!(dial.memory(), alone + 303);
    let refusal = Packet::DialResponse { dial: DialId(1), result: Err("x".repeat(100)) };
    assert_eq!(refusal.memory(), alone + 100);
    let closed = Packet::CloseResponse { connection: ConnectId(1), error: "y".repeat(50) };
    assert_eq!(closed.memory(), alone + 50);
    assert_eq!(Packet::CloseDial(DialId(1)).memory(), alone);
}
