//! Hellos made by hand. Recorded ones are in `tests/hello_corpus.rs`.

use super::*;

use proptest::collection::vec;
use proptest::prelude::*;

/// The fields of a hello made for a test, each as its raw bytes.
#[derive(Clone)]
struct Made {
    kind: u8,
    legacy_version: u16,
    session_id: Vec<u8>,
    cipher_suites: Vec<u8>,
    compression: Vec<u8>,
    extensions: Option<Vec<(u16, Vec<u8>)>>,
    after: Vec<u8>,
}

impl Made {
    fn with(extensions: Vec<(u16, Vec<u8>)>) -> Self {
        Self {
            kind: MESSAGE_CLIENT_HELLO,
            legacy_version: 0x0303,
            session_id: vec![7; 32],
            cipher_suites: vec![0x13, 1, 0x13, 2],
            compression: vec![0],
            extensions: Some(extensions),
            after: Vec::new(),
        }
    }

    fn named(name: &[u8]) -> Self {
        Self::with(vec![(EXTENSION_SERVER_NAME, names(&[(0, name)]))])
    }

    fn message(&self) -> Vec<u8> {
        let mut body = self.legacy_version.to_be_bytes().to_vec();
        body.extend_from_slice(&[9; 32]);
        body.extend(vec8(&self.session_id));
        body.extend(vec16(&self.cipher_suites));
        body.extend(vec8(&self.compression));
        if let Some(extensions) = &self.extensions {
            let list: Vec<u8> = extensions
                .iter()
                .flat_map(|(kind, data)| [kind.to_be_bytes().to_vec(), vec16(data)].concat())
                .collect();
            body.extend(vec16(&list));
        }
        body.extend_from_slice(&self.after);
        with_message_header(self.kind, &body)
    }

    fn record(&self) -> Vec<u8> {
        records(&self.message(), usize::MAX)
    }
}

fn vec8(bytes: &[u8]) -> Vec<u8> {
    [&[bytes.len() as u8], bytes].concat()
}

fn vec16(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes(), bytes].concat()
}

fn names(list: &[(u8, &[u8])]) -> Vec<u8> {
    vec16(&list.iter().flat_map(|(kind, name)| [vec![*kind], vec16(name)].concat()).collect::<Vec<_>>())
}

fn protocols(list: &[&[u8]]) -> Vec<u8> {
    vec16(&list.iter().flat_map(|name| vec8(name)).collect::<Vec<_>>())
}

fn with_message_header(kind: u8, body: &[u8]) -> Vec<u8> {
    let [_, len @ ..] = (body.len() as u32).to_be_bytes();
    [&[kind], &len[..], body].concat()
}

/// The message in records of up to `size` bytes.
fn records(message: &[u8], size: usize) -> Vec<u8> {
    let size = size.min(MAX_RECORD);
    message.chunks(size).flat_map(|chunk| [vec![22, 3, 1], vec16(chunk)].concat()).collect()
}

#[track_caller]
fn complete(bytes: &[u8]) -> ClientHello<'_> {
    match parse(bytes) {
        Parse::Complete(hello) => hello,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused(bytes: &[u8]) -> &'static str {
    match parse(bytes) {
        Parse::Malformed(malformed) => malformed.reason(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_hello_gives_the_name_as_it_was_sent() {
    let bytes = Made::named(b"API.Example.com.").record();
    let hello = complete(&bytes);
    assert_eq!(hello.server_name, Some(Cow::Borrowed("API.Example.com.")));
    assert!(matches!(hello.server_name, Some(Cow::Borrowed(_))), "one record needs no copy");
    assert_eq!((hello.legacy_version, hello.record_version), (0x0303, 0x0301));
    assert_eq!(hello.len, bytes.len());
}

#[test]
fn a_hello_tells_what_else_it_offers() {
    let extensions = vec![
        (0x0a0a, vec![]), // GREASE
        (EXTENSION_ALPN, protocols(&[b"\x0a\x0a", b"h2", b"http/1.1"])),
        (EXTENSION_SUPPORTED_VERSIONS, vec8(&[0x1a, 0x1a, 3, 4, 3, 3])),
        (0xfe0d, vec![0; 200]), // Encrypted ClientHello
        (EXTENSION_SERVER_NAME, names(&[(0, b"outer.example.com")])),
        (51, vec![0; 1300]),
    ];
    let bytes = Made::with(extensions).record();
    let hello = complete(&bytes);
    assert_eq!(hello.server_name.as_deref(), Some("outer.example.com"));
    assert!(hello.supports_tls13);
    assert!(hello.alpn.iter().any(|name| name == b"h2"));
    assert_eq!(hello.alpn.iter().collect::<Vec<_>>(), [&b"\x0a\x0a"[..], b"h2", b"http/1.1"]);
}

#[test]
fn a_hello_without_a_name_or_without_extensions_is_whole() {
    assert_eq!(complete(&Made::with(vec![]).record()).server_name, None);
    let old = Made { extensions: None, legacy_version: 0x0301, ..Made::with(vec![]) };
    let bytes = old.record();
    let hello = complete(&bytes);
    assert_eq!(
        (hello.server_name, hello.alpn.iter().next().is_none(), hello.supports_tls13),
        (None, true, false)
    );
}

#[test]
fn names_of_unknown_types_are_stepped_over() {
    let both = names(&[(9, b"\0\xff"), (0, b"a.example")]);
    let bytes = Made::with(vec![(EXTENSION_SERVER_NAME, both)]).record();
    assert_eq!(complete(&bytes).server_name.as_deref(), Some("a.example"));
    let only_unknown = Made::with(vec![(EXTENSION_SERVER_NAME, names(&[(9, b"x")]))]).record();
    assert_eq!(complete(&only_unknown).server_name, None);
}

#[test]
fn a_hello_cut_anywhere_waits_for_the_rest() {
    let bytes = Made::named(b"a.example").record();
    for cut in 0..bytes.len() {
        assert!(parse(&bytes[..cut]).needs_more(), "cut at {cut}");
    }
}

#[test]
fn a_hello_may_be_spread_over_records_at_any_byte() {
    let message = Made::named(b"a.example").message();
    for size in 1..=message.len() {
        let bytes = records(&message, size);
        let hello = complete(&bytes);
        assert_eq!(
            (hello.server_name.as_deref(), hello.len),
            (Some("a.example"), bytes.len()),
            "size {size}"
        );
        assert!((0..bytes.len()).all(|cut| parse(&bytes[..cut]).needs_more()), "size {size}");
    }
}

#[test]
fn progress_kept_between_reads_gives_the_same_answer() {
    let bytes = records(&Made::named(b"a.example").message(), 3);
    let mut progress = Progress::default();
    for cut in 0..bytes.len() {
        assert!(progress.parse(&bytes[..cut]).needs_more(), "cut at {cut}");
    }
    assert_eq!(progress.parse(&bytes), parse(&bytes));
    assert_eq!(progress.parse(&bytes), parse(&bytes), "asking again changes nothing");
    assert_eq!(progress.parse(&[]), Parse::Malformed(SHRUNK));
}

#[test]
fn bytes_after_the_hello_are_early_data_and_change_nothing() {
    let bytes = Made::named(b"a.example").record();
    let longer = [&bytes[..], b"\x17\x03\x03\0\x01x"].concat();
    assert_eq!(parse(&longer), parse(&bytes));
}

#[test]
fn what_is_no_hello_is_refused_at_the_first_byte_that_shows_it() {
    for (bytes, why) in [
        (&b"G"[..], "the first bytes are not TLS"),
        (b"\x15", "the first bytes are not TLS"),
        (b"\x80", "this is no TLS record, or an SSL 2.0 hello, which nobody should send"),
        (b"\x16\x02", "the record has no known TLS version"),
        (b"\x16\x03\x01\0\0", "a handshake record is empty"),
        (b"\x16\x03\x01\x40\x01", "a record is longer than TLS allows"),
        (b"\x16\x03\x01\x01\0\x02", "the first handshake message is not a ClientHello"),
        (b"\x16\x03\x01\x01\0\x01\x01\0\0", "the ClientHello is longer than 16 KiB"),
        (b"\x16\x03\x01\0\x05\x01\0\0\0", "more bytes follow the ClientHello in its last record"),
        (b"\x16\x03\x01\0\x01\x01\x17", "a record of another type is inside the ClientHello"),
    ] {
        assert_eq!(refused(bytes), why, "for {}", bytes.escape_ascii());
        assert!(parse(&bytes[..bytes.len() - 1]).needs_more(), "before {}", bytes.escape_ascii());
    }
}

#[test]
fn a_length_that_points_past_the_message_is_refused_and_not_waited_for() {
    let message = Made::with(vec![
        (EXTENSION_SERVER_NAME, names(&[(0, b"a.example")])),
        (EXTENSION_ALPN, protocols(&[b"h2"])),
        (EXTENSION_SUPPORTED_VERSIONS, vec8(&[3, 4])),
    ])
    .message();
    // Whatever byte after the message header is damaged, a whole message is answered for good.
    for damaged in MESSAGE_HEADER..message.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut message = message.clone();
            message[damaged] ^= flip;
            assert!(!parse(&records(&message, usize::MAX)).needs_more(), "byte {damaged} ^ {flip:#x}");
        }
    }
    // And whatever the length of the body is cut to, with the header agreeing.
    for cut in 0..message.len() - MESSAGE_HEADER {
        let short = with_message_header(1, &message[MESSAGE_HEADER..MESSAGE_HEADER + cut]);
        match parse(&records(&short, usize::MAX)) {
            Parse::NeedMore => panic!("waits for a body cut at {cut}"),
            Parse::Complete(hello) => {
                assert_eq!(hello.server_name, None, "only without extensions, cut at {cut}")
            }
            Parse::Malformed(_) => {}
        }
    }
}

#[test]
fn a_message_that_breaks_its_grammar_is_refused() {
    let named = Made::named(b"a.example");
    let extension = |kind, data: Vec<u8>| Made::with(vec![(kind, data)]);
    let name_list = (EXTENSION_SERVER_NAME, names(&[(0, b"a.example")]));
    let wrong_name_list = "a length in the server_name extension is wrong";
    let wrong_alpn = "a length in the ALPN extension is wrong";
    let wrong_versions = "a length in the supported_versions extension is wrong";
    for (made, why) in [
        (Made { legacy_version: 0x0203, ..named.clone() }, "the ClientHello has no known TLS version"),
        (Made { session_id: vec![0; 33], ..named.clone() }, "the session id is longer than 32 bytes"),
        (
            Made { cipher_suites: vec![], ..named.clone() },
            "the list of cipher suites is empty or has half an entry",
        ),
        (
            Made { cipher_suites: vec![1; 3], ..named.clone() },
            "the list of cipher suites is empty or has half an entry",
        ),
        (Made { compression: vec![], ..named.clone() }, "the list of compression methods is empty"),
        (Made { after: vec![0], ..named.clone() }, "bytes follow the extensions of the ClientHello"),
        (Made { kind: 2, ..named }, "the first handshake message is not a ClientHello"),
        (Made::with(vec![name_list.clone(), name_list]), "an extension comes twice"),
        (
            extension(EXTENSION_SERVER_NAME, names(&[(0, b"a"), (0, b"b")])),
            "the client asks for two server names",
        ),
        (extension(EXTENSION_SERVER_NAME, vec![]), wrong_name_list),
        (extension(EXTENSION_SERVER_NAME, names(&[])), wrong_name_list),
        (extension(EXTENSION_SERVER_NAME, [names(&[(0, b"a")]), vec![0]].concat()), wrong_name_list),
        (extension(EXTENSION_ALPN, vec![]), wrong_alpn),
        (extension(EXTENSION_ALPN, protocols(&[])), wrong_alpn),
        (extension(EXTENSION_ALPN, vec16(&[2, b'h'])), wrong_alpn),
        (extension(EXTENSION_ALPN, protocols(&[b""])), "a protocol name in the ALPN extension is empty"),
        (extension(EXTENSION_SUPPORTED_VERSIONS, vec![]), wrong_versions),
        (extension(EXTENSION_SUPPORTED_VERSIONS, vec8(&[])), wrong_versions),
        (extension(EXTENSION_SUPPORTED_VERSIONS, vec8(&[3, 4, 3])), wrong_versions),
        (Made::named(b""), "the server name is empty"),
        (Made::named(&[b'a'; 256]), "the server name is longer than 255 bytes"),
    ] {
        assert_eq!(refused(&made.record()), why);
    }
}

#[test]
fn a_name_that_is_not_printable_ascii_is_refused() {
    for name in [&b"a\0.example"[..], b"a b", b"a\n", "b\u{fc}cher.example".as_bytes(), b"\x7f"] {
        let why = refused(&Made::named(name).record());
        assert_eq!(why, "the server name has bytes that are not printable ASCII", "{}", name.escape_ascii());
    }
}

#[test]
fn the_largest_hello_is_read_and_a_larger_one_refused_without_waiting() {
    let hello_of = |padding: usize| Made::with(vec![(21, vec![0; padding])]).message();
    let overhead = hello_of(0).len() + 5; // of the one record
    let largest = records(&hello_of(MAX_HELLO - overhead), MAX_RECORD);
    assert_eq!(largest.len(), MAX_HELLO);
    assert_eq!(complete(&largest).len, MAX_HELLO);
    assert!(parse(&largest[..MAX_HELLO - 1]).needs_more());

    let larger = records(&hello_of(MAX_HELLO - overhead + 1), MAX_RECORD);
    assert_eq!(refused(&larger), TOO_LONG.reason());
    assert_eq!(
        refused(&larger[..MAX_HELLO]),
        TOO_LONG.reason(),
        "at the latest when the caller's buffer is full"
    );
    let tiny_records = records(&hello_of(10_000), 1);
    assert_eq!(refused(&tiny_records[..MAX_HELLO]), TOO_LONG.reason());
}

/// Bytes that look like a hello for a while.
fn nearly_hello() -> impl Strategy<Value = Vec<u8>> {
    let garbage = vec(any::<u8>(), 0..80);
    let damaged = (1..600usize, any::<prop::sample::Index>(), any::<u8>()).prop_map(|(size, at, byte)| {
        let mut bytes = records(&Made::named(b"a.example.com").message(), size);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes
    });
    prop_oneof![garbage, damaged]
}

proptest! {
    #[test]
    fn more_bytes_never_change_an_answer(bytes in nearly_hello(), more in vec(any::<u8>(), 0..40)) {
        let longer = [&bytes[..], &more].concat();
        match parse(&bytes) {
            Parse::NeedMore => {}
            Parse::Complete(hello) => prop_assert_eq!(parse(&longer), Parse::Complete(hello)),
            Parse::Malformed(malformed) => prop_assert_eq!(parse(&longer), Parse::Malformed(malformed)),
        }
    }

    #[test]
    fn reads_of_any_size_give_one_answer(bytes in nearly_hello(), sizes in vec(1..50usize, 1..20)) {
        let mut progress = Progress::default();
        let mut have = 0;
        for size in sizes.iter().cycle() {
            have = (have + size).min(bytes.len());
            let answer = progress.parse(&bytes[..have]);
            prop_assert_eq!(&answer, &parse(&bytes[..have]));
            if have == bytes.len() || !answer.needs_more() {
                break;
            }
        }
    }
}
