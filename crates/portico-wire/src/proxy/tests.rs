use super::*;

use proptest::collection::vec;
use proptest::prelude::*;

fn proxied(source: &str, destination: &str, len: usize) -> Header<'static> {
    Header::Proxied {
        source: source.parse().expect("the test names an address"),
        destination: destination.parse().expect("the test names an address"),
        tlvs: Tlvs::default(),
        len,
    }
}

#[track_caller]
fn refused(bytes: &[u8]) -> &'static str {
    match parse(bytes) {
        Parse::Malformed(malformed) => malformed.reason(),
        other => panic!("{other:?} for {}", bytes.escape_ascii()),
    }
}

/// A version 2 header with the given command, family and payload.
fn v2(version_and_command: u8, family: u8, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u16).to_be_bytes();
    [SIGNATURE_V2, &[version_and_command, family][..], &len, payload].concat()
}

/// A whole version 2 header of a connection that speaks for itself, as of a health check.
const LOCAL_V2: [u8; 16] = *b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";

const TCP4_PAYLOAD: [u8; 12] = [192, 0, 2, 1, 198, 51, 100, 2, 0xc0, 0, 0x19, 0x2b];

#[test]
fn a_line_of_version_1_names_the_client() {
    let line = b"PROXY TCP4 192.0.2.1 198.51.100.2 49152 6443\r\n";
    assert_eq!(parse(line), Parse::Complete(proxied("192.0.2.1:49152", "198.51.100.2:6443", line.len())));
    let line = b"PROXY TCP6 2001:db8::1 2001:db8::2 0 65535\r\n";
    assert_eq!(parse(line), Parse::Complete(proxied("[2001:db8::1]:0", "[2001:db8::2]:65535", line.len())));
}

#[test]
fn the_longest_line_of_version_1_is_read() {
    let ip = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    let line = format!("PROXY TCP6 {ip} {ip} 65535 65535\r\n");
    assert_eq!(parse(line.as_bytes()).complete().map(|header| header.consumed()), Some(line.len()));
    let line = format!("PROXY UNKNOWN {ip} {ip} 65535 65535\r\n");
    assert_eq!(line.len(), MAX_V1);
    assert_eq!(parse(line.as_bytes()), Parse::Complete(Header::Local { len: MAX_V1 }));
    let longer = line.replace("\r\n", "1\r\n");
    assert_eq!(refused(longer.as_bytes()), "the PROXY line does not end in CRLF");
    assert_eq!(refused(&[&b"PROXY "[..], &[b'x'; 101]].concat()), "the PROXY line is longer than 107 bytes");
}

#[test]
fn connections_without_a_client_on_ip_speak_for_themselves() {
    assert_eq!(parse(b"PROXY UNKNOWN\r\n"), Parse::Complete(Header::Local { len: 15 }));
    assert_eq!(parse(&LOCAL_V2), Parse::Complete(Header::Local { len: 16 }));
    // LOCAL with addresses or an unheard-of family: the text says to discard them.
    assert_eq!(parse(&v2(0x20, 0x11, &TCP4_PAYLOAD)), Parse::Complete(Header::Local { len: 28 }));
    assert_eq!(parse(&v2(0x20, 0x77, &[])), Parse::Complete(Header::Local { len: 16 }));
    assert_eq!(parse(&v2(0x21, 0x00, &[1, 2, 3])), Parse::Complete(Header::Local { len: 19 }));
    assert_eq!(parse(&v2(0x21, 0x31, &[0; 216])), Parse::Complete(Header::Local { len: 232 }));
}

#[test]
fn a_line_that_is_not_exactly_right_is_refused() {
    for (line, why) in [
        (
            &b"PROXY TCP4 192.0.2.1 198.51.100.2 49152 06443\r\n"[..],
            "the PROXY line has a wrong address or port",
        ),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 49152 65536\r\n", "the PROXY line has a wrong address or port"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 +9152 6443\r\n", "the PROXY line has a wrong address or port"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 49152\r\n", "the PROXY line has a wrong address or port"),
        (b"PROXY TCP4  192.0.2.1 198.51.100.2 1 2\r\n", "the PROXY line has a wrong address or port"),
        (b"PROXY TCP4 2001:db8::1 198.51.100.2 1 2\r\n", "the PROXY line has a wrong address or port"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 1 2 \r\n", "the PROXY line has words after the ports"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 1 2\n", "the PROXY line does not end in CRLF"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 1 2\rx", "the PROXY line does not end in CRLF"),
        (b"PROXY UDP4 192.0.2.1 198.51.100.2 1 2\r\n", "the PROXY line has an unknown protocol"),
        (b"PROXY \xff\r\n", "the PROXY line is not text"),
        (b"proxy TCP4", "the connection does not begin with a PROXY header"),
    ] {
        assert_eq!(refused(line), why, "for {}", line.escape_ascii());
    }
}

#[test]
fn a_binary_header_that_is_not_exactly_right_is_refused() {
    let unknown_command = "the PROXY header has an unknown version or command";
    assert_eq!(refused(&v2(0x11, 0x11, &TCP4_PAYLOAD)), unknown_command);
    assert_eq!(refused(&v2(0x22, 0x11, &TCP4_PAYLOAD)), unknown_command);
    let no_stream = "the PROXY header is for something else than a stream";
    assert_eq!(refused(&v2(0x21, 0x12, &TCP4_PAYLOAD)), no_stream);
    assert_eq!(refused(&v2(0x21, 0x41, &TCP4_PAYLOAD)), no_stream);
    let short = "the PROXY header is too short for its addresses";
    assert_eq!(refused(&v2(0x21, 0x11, &TCP4_PAYLOAD[..11])), short);
    assert_eq!(refused(&v2(0x21, 0x21, &[0; 35])), short);
    let overrun = "a TLV points past the end of the PROXY header";
    for tlv in [&b"\x02"[..], b"\x02\0", b"\x02\0\x05abcd", b"\xee\xff\xff"] {
        assert_eq!(refused(&v2(0x21, 0x11, &[&TCP4_PAYLOAD, tlv].concat())), overrun);
    }
}

#[test]
fn a_binary_header_that_is_too_long_is_refused_at_its_length() {
    let fits = v2(0x21, 0x00, &[0; MAX_V2 - 16]);
    assert_eq!(parse(&fits), Parse::Complete(Header::Local { len: MAX_V2 }));
    let longer = v2(0x21, 0x00, &[0; MAX_V2 - 15]);
    assert!(parse(&longer[..15]).needs_more());
    assert_eq!(refused(&longer[..16]), "the PROXY header is longer than 4 KiB");
}

#[test]
fn tlvs_are_read_and_unknown_ones_skipped() {
    let tlvs = b"\x04\0\x03\0\0\0\x02\0\x07a.b.c.d\x20\0\x01x\x05\0\x02\x00\xff\x01\0\x02h2\x02\0\x01z";
    let header = v2(0x21, 0x11, &[&TCP4_PAYLOAD[..], tlvs].concat());
    let Parse::Complete(Header::Proxied { tlvs, .. }) = parse(&header) else { panic!("the header is right") };
    assert_eq!(tlvs.authority, Some("a.b.c.d"));
    assert_eq!(tlvs.unique_id, Some(&b"\x00\xff"[..]));
    assert_eq!(tlvs.alpn, Some(&b"h2"[..]));
}

#[test]
fn a_checksum_is_checked() {
    assert_eq!(crc32c(b"123456789".iter()), 0xe306_9283, "the check value every CRC-32C has");
    let mut header = v2(0x21, 0x11, &[&TCP4_PAYLOAD[..], b"\x03\0\x04\0\0\0\0\x02\0\x01a"].concat());
    let sum = crc32c(header.iter()).to_be_bytes();
    header[31..35].copy_from_slice(&sum);
    assert!(parse(&header).complete().is_some());
    header[16] ^= 1;
    assert_eq!(refused(&header), "the checksum of the PROXY header is wrong");
}

#[test]
fn a_header_cut_anywhere_waits_for_the_rest() {
    let v1 = b"PROXY TCP4 192.0.2.1 198.51.100.2 49152 6443\r\n".to_vec();
    let v2 = v2(0x21, 0x11, &[&TCP4_PAYLOAD[..], b"\x02\0\x01a"].concat());
    for header in [v1, v2, LOCAL_V2.to_vec()] {
        for cut in 0..header.len() {
            assert!(parse(&header[..cut]).needs_more(), "{} cut at {cut}", header.escape_ascii());
        }
    }
}

#[test]
fn a_listener_with_an_optional_header_tells_it_from_tls_and_http() {
    assert_eq!(sniff(b""), Sniff::NeedMore);
    assert_eq!(sniff(b"PRO"), Sniff::NeedMore);
    assert_eq!(sniff(b"PROXY "), Sniff::Header);
    assert_eq!(sniff(b"\r\n\r\n\0\r\nQUIT"), Sniff::NeedMore);
    assert_eq!(sniff(&LOCAL_V2), Sniff::Header);
    for other in [&b"\x16\x03\x01"[..], b"PRI * HTTP/2.0", b"\r\n\r\n\r\n", b"C"] {
        assert_eq!(sniff(other), Sniff::Other);
    }
}

#[test]
fn addresses_of_two_families_share_the_header_as_ipv6() {
    let (v4, v6) = (SocketAddr::from(([192, 0, 2, 1], 5)), "[2001:db8::2]:6".parse().expect("an address"));
    let header = encode_v2(v4, v6, Tlvs::default());
    assert_eq!(header[13], FAMILY_TCP6);
    assert_eq!(parse(&header), Parse::Complete(proxied("192.0.2.1:5", "[2001:db8::2]:6", 52)));
}

#[test]
fn ipv4_in_ipv6_clothes_is_written_and_read_as_ipv4() {
    let mapped = "[::ffff:192.0.2.1]:5".parse().expect("an address");
    let header = encode_v2(mapped, mapped, Tlvs::default());
    assert_eq!(header[13], FAMILY_TCP4);
    let line = b"PROXY TCP6 ::ffff:192.0.2.1 2001:db8::2 5 6\r\n";
    assert_eq!(parse(line), Parse::Complete(proxied("192.0.2.1:5", "[2001:db8::2]:6", line.len())));
}

#[test]
fn a_tlv_that_is_too_long_is_left_out() {
    let long = "x".repeat(256);
    let address = SocketAddr::from(([192, 0, 2, 1], 5));
    let tlvs = Tlvs { authority: Some(&long), unique_id: Some(&[0; 129]), alpn: Some(long.as_bytes()) };
    assert_eq!(encode_v2(address, address, tlvs), encode_v2(address, address, Tlvs::default()));
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip.to_canonical(), port))
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        source in any_address(),
        destination in any_address(),
        authority in proptest::option::of("[a-z0-9.:-]{0,255}"),
        unique_id in proptest::option::of(vec(any::<u8>(), 0..=128)),
        alpn in proptest::option::of(vec(any::<u8>(), 0..=255)),
        after in vec(any::<u8>(), 0..20),
    ) {
        let (authority, unique_id) = (authority.as_deref(), unique_id.as_deref());
        let tlvs = Tlvs { authority, unique_id, alpn: alpn.as_deref() };
        let header = encode_v2(source, destination, tlvs);
        let bytes = [&header[..], &after].concat();
        let expected = Header::Proxied { source, destination, tlvs, len: header.len() };
        prop_assert_eq!(parse(&bytes), Parse::Complete(expected));
    }

    #[test]
    fn more_bytes_never_change_an_answer(
        start in prop_oneof![
            Just(&b""[..]),
            Just(&b"PROXY "[..]),
            Just(&b"PROXY TCP4 1.2.3.4 "[..]),
            Just(&SIGNATURE_V2[..]),
            Just(&b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00"[..]),
        ],
        bytes in vec(prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b' ')], 0..120),
        more in vec(any::<u8>(), 0..40),
    ) {
        let bytes = [start, &bytes].concat();
        let longer = [&bytes[..], &more].concat();
        match parse(&bytes) {
            Parse::NeedMore => prop_assert!(bytes.len() < MAX_V2),
            Parse::Complete(header) => {
                prop_assert!(header.consumed() <= bytes.len());
                prop_assert_eq!(parse(&longer), Parse::Complete(header));
            }
            Parse::Malformed(malformed) => prop_assert_eq!(parse(&longer), Parse::Malformed(malformed)),
        }
    }
}
