use super::*;

use proptest::collection::vec;
use proptest::prelude::*;

/// A head as an agent sends it, with the first bytes for the upstream behind it.
const CONNECT: &[u8] = b"CONNECT apiserver-external.cluster-x.svc.cluster.local:443 HTTP/1.1\r\n\
    Host: apiserver-external.cluster-x.svc.cluster.local:443\r\n\
    user-agent: test\r\n\
    Proxy-Authorization: Bearer abc\r\n\r\n";

fn complete(bytes: &[u8]) -> Head<'_> {
    match parse(bytes) {
        Parse::Complete(head) => head,
        other => panic!("{other:?} for {}", bytes.escape_ascii()),
    }
}

#[track_caller]
fn refused(bytes: &[u8]) -> &'static str {
    match parse(bytes) {
        Parse::Malformed(malformed) => malformed.reason(),
        other => panic!("{other:?} for {}", bytes.escape_ascii()),
    }
}

#[test]
fn a_connect_request_gives_its_target_and_its_token() {
    let head = complete(CONNECT);
    assert!(head.is_connect());
    assert_eq!(head.target, "apiserver-external.cluster-x.svc.cluster.local:443");
    assert_eq!(head.host, Some("apiserver-external.cluster-x.svc.cluster.local:443"));
    assert_eq!(head.proxy_authorization, Some("Bearer abc"));
    assert_eq!(head.authorization, None);
    assert_eq!((head.minor_version, head.len), (1, CONNECT.len()));
}

#[test]
fn a_request_cut_anywhere_waits_for_the_rest() {
    for cut in 0..CONNECT.len() {
        assert!(parse(&CONNECT[..cut]).needs_more(), "cut at {cut}");
    }
}

#[test]
fn bytes_after_the_head_are_left_to_the_tunnel() {
    let with_data = [CONNECT, b"\x16\x03\x01\n\n"].concat();
    assert_eq!(parse(&with_data), parse(CONNECT));
}

#[test]
fn another_method_is_read_so_that_it_can_be_answered() {
    let head = complete(b"GET /version HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!((head.method, head.target, head.minor_version), ("GET", "/version", 0));
    assert!(!head.is_connect());
    assert!(!complete(b"connect a:1 HTTP/1.1\r\n\r\n").is_connect());
}

#[test]
fn what_another_reader_could_take_for_two_requests_is_refused() {
    for (request, why) in [
        (&b"CONNECT a:1 HTTP/1.1\nHost: a\r\n\r\n"[..], "a line of the request head does not end in CRLF"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\n\r\n", "a line of the request head does not end in CRLF"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\n", "a line of the request head does not end in CRLF"),
        (
            b"CONNECT a:1 HTTP/1.1\r\nHost: a\rb\r\n\r\n",
            "the request has a header value with forbidden characters",
        ),
        (
            b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
            "the request has a header name with forbidden characters",
        ),
        (
            b"CONNECT a:1 HTTP/1.1\r\nHost : a\r\n\r\n",
            "the request has a header name with forbidden characters",
        ),
        (
            b"CONNECT a:1 HTTP/1.1\r\nHost: a\0\r\n\r\n",
            "the request has a header value with forbidden characters",
        ),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", "a header that must be unique comes twice"),
        (
            b"CONNECT a:1 HTTP/1.1\r\nAuthorization: a\r\nauthorization: a\r\n\r\n",
            "a header that must be unique comes twice",
        ),
        (b"CONNECT a:1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "a CONNECT request announces a body"),
        (b"CONNECT a:1 HTTP/1.1\r\nContent-Length: 4\r\n\r\n", "a CONNECT request announces a body"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: \xff\r\n\r\n", "the value of a request header is not text"),
        (b"\r\nCONNECT a:1 HTTP/1.1\r\n\r\n", "the request does not begin with a method"),
        (b"CONNECT  a:1 HTTP/1.1\r\n\r\n", "the request line has forbidden characters"),
        (b"CONNECT a:1 HTTP/2.0\r\n\r\n", "the request is neither HTTP/1.0 nor HTTP/1.1"),
    ] {
        assert_eq!(refused(request), why, "for {}", request.escape_ascii());
    }
}

#[test]
fn a_line_without_carriage_return_is_refused_before_the_head_is_whole() {
    assert_eq!(refused(b"CONNECT a:1 HTTP/1.1\n"), "a line of the request head does not end in CRLF");
}

#[test]
fn a_head_that_never_ends_is_refused_at_the_cap() {
    let mut request = b"CONNECT a:1 HTTP/1.1\r\nX: ".to_vec();
    request.resize(MAX_HEAD - 1, b'x');
    assert!(parse(&request).needs_more());
    request.push(b'x');
    assert_eq!(refused(&request), "the request head is longer than 16 KiB");
    request.extend_from_slice(b"\r\n\r\n");
    assert_eq!(refused(&request), "the request head is longer than 16 KiB");
}

#[test]
fn too_many_headers_are_refused() {
    let request =
        |count: usize| [&b"CONNECT a:1 HTTP/1.1\r\n"[..], &b"X: y\r\n".repeat(count), &b"\r\n"[..]].concat();
    assert_eq!(complete(&request(MAX_HEADERS)).target, "a:1");
    assert_eq!(refused(&request(MAX_HEADERS + 1)), "the request has more than 64 headers");
}

#[test]
fn the_first_byte_tells_tls_and_http_1_apart() {
    assert_eq!(sniff(b"\x16"), Parse::Complete(Protocol::Tls));
    assert_eq!(sniff(b"C"), Parse::Complete(Protocol::Http1));
    assert_eq!(sniff(b"PO"), Parse::Complete(Protocol::Http1));
    assert_eq!(sniff(b"PRI * HTTP/1.1\r\n\r\n"), Parse::Complete(Protocol::Http1));
    for garbage in [&b"\0"[..], b"\x80\x2e\x01", b"\r\n", b" CONNECT", b"\x15\x03"] {
        assert!(matches!(sniff(garbage), Parse::Malformed(_)), "{}", garbage.escape_ascii());
    }
}

#[test]
fn the_http_2_preface_is_known_when_it_is_whole() {
    for cut in 0..HTTP2_PREFACE.len() {
        assert!(sniff(&HTTP2_PREFACE[..cut]).needs_more(), "cut at {cut}");
    }
    assert_eq!(sniff(HTTP2_PREFACE), Parse::Complete(Protocol::Http2Preface));
}

proptest! {
    #[test]
    fn more_bytes_never_change_an_answer(
        start in prop_oneof![Just(&b""[..]), Just(&b"CONNECT a:1 HTTP/1.1\r\n"[..]), Just(CONNECT)],
        bytes in vec(prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b':')], 0..200),
        more in vec(any::<u8>(), 0..40),
    ) {
        let bytes = [start, &bytes].concat();
        let longer = [&bytes[..], &more].concat();
        match parse(&bytes) {
            Parse::NeedMore => {}
            Parse::Complete(head) => {
                prop_assert!(head.len <= bytes.len());
                prop_assert_eq!(parse(&longer), Parse::Complete(head));
            }
            Parse::Malformed(_) => prop_assert!(matches!(parse(&longer), Parse::Malformed(_))),
        }
        if !sniff(&bytes).needs_more() {
            prop_assert_eq!(sniff(&bytes), sniff(&longer));
        }
    }
}
