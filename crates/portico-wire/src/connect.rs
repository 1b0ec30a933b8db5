//! The first bytes on the tunnel port: TLS, HTTP/2 or HTTP/1.1, and the head of an HTTP/1.1 CONNECT request.
//!
//! For the gateway's tunnel listener. One port serves all three, and [`sniff`] tells them apart. [`parse`]
//! reads the head of an HTTP/1.1 request (RFC 9112; CONNECT in RFC 9110 section 9.3.6). HTTP/2 is read by
//! `portico-tunnel`.
//!
//! `httparse` reads the lines. It is forgiving, and a forgiving reader in front of a tunnel makes two
//! requests of one. So these are refused here: line ends without CR, empty lines before the request, headers
//! that announce a body, and headers that decide about access sent twice.

use httparse::{EMPTY_HEADER, Header, Request, Status};

use crate::{Malformed, Parse};

/// Most bytes of a request head that are read: 16 KiB. The one large header is a bearer token. The largest in
/// use (group memberships in OpenID Connect) stay below 8 KiB, where most HTTP servers stop.
pub const MAX_HEAD: usize = 16 * 1024;

/// Most headers in a request head. CONNECT clients send two to six; 64 leaves room for any chain of proxies
/// and bounds the work for each read.
pub const MAX_HEADERS: usize = 64;

/// The first bytes of every HTTP/2 connection with prior knowledge (RFC 9113, section 3.4).
pub const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The content type of the TLS record that carries a ClientHello.
const TLS_HANDSHAKE: u8 = 22;

/// What a client on the tunnel port speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A TLS handshake begins. Only the first byte was looked at; the TLS library judges the rest.
    Tls,
    /// The whole HTTP/2 connection preface is here.
    Http2Preface,
    /// Neither of the above, and the first byte may begin an HTTP/1.1 method.
    Http1,
}

/// Tells the protocols apart. Needs one byte for TLS and HTTP/1.1, and 24 only while they spell the HTTP/2
/// preface.
pub fn sniff(bytes: &[u8]) -> Parse<Protocol> {
    match bytes.first() {
        None => Parse::NeedMore,
        Some(&TLS_HANDSHAKE) => Parse::Complete(Protocol::Tls),
        Some(_) if bytes.starts_with(HTTP2_PREFACE) => Parse::Complete(Protocol::Http2Preface),
        Some(_) if HTTP2_PREFACE.starts_with(bytes) => Parse::NeedMore,
        Some(&first) if is_method_byte(first) => Parse::Complete(Protocol::Http1),
        Some(_) => Parse::Malformed(Malformed::because("the first bytes are neither TLS nor HTTP")),
    }
}

/// May this byte begin a method? Methods are tokens (RFC 9110, section 5.6.2), and all that exist begin with
/// a letter.
fn is_method_byte(byte: u8) -> bool {
    byte.is_ascii_alphabetic()
}

/// An HTTP/1.1 request head, as far as a tunnel needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head<'a> {
    /// The method, as sent. Only `CONNECT` opens a tunnel; methods are case-sensitive.
    pub method: &'a str,
    /// The request target as sent: `HOST:PORT` for CONNECT, not checked further.
    pub target: &'a str,
    /// The minor version of HTTP/1.
    pub minor_version: u8,
    /// The value of `Host`. Routing goes by the target; this is for the access line.
    pub host: Option<&'a str>,
    /// The value of `Authorization`.
    pub authorization: Option<&'a str>,
    /// The value of `Proxy-Authorization`.
    pub proxy_authorization: Option<&'a str>,
    /// Bytes of the head with the empty line. What follows is already data for the upstream.
    pub len: usize,
}

impl Head<'_> {
    /// Does the request ask for a tunnel?
    pub fn is_connect(&self) -> bool {
        self.method == "CONNECT"
    }
}

/// Reads the request head at the start of `bytes`, which are all bytes received so far.
pub fn parse(bytes: &[u8]) -> Parse<Head<'_>> {
    match read(bytes) {
        Ok(Some(head)) => Parse::Complete(head),
        Ok(None) => Parse::NeedMore,
        Err(malformed) => Parse::Malformed(malformed),
    }
}

fn read(bytes: &[u8]) -> Result<Option<Head<'_>>, Malformed> {
    let within_cap = &bytes[..bytes.len().min(MAX_HEAD)];
    if within_cap.first().is_some_and(|first| !is_method_byte(*first)) {
        return Err(Malformed::because("the request does not begin with a method"));
    }
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut request = Request::new(&mut headers);
    match request.parse(within_cap) {
        Ok(Status::Complete(len)) => {
            check_line_ends(&within_cap[..len])?;
            read_head(&request, len).map(Some)
        }
        Ok(Status::Partial) if bytes.len() >= MAX_HEAD => {
            Err(Malformed::because("the request head is longer than 16 KiB"))
        }
        Ok(Status::Partial) => check_line_ends(within_cap).map(|()| None),
        Err(error) => Err(Malformed::because(explain(error))),
    }
}

/// Lines end in CRLF and nothing else. `httparse` also takes a bare LF, which some readers take for content.
fn check_line_ends(head: &[u8]) -> Result<(), Malformed> {
    let mut before = 0;
    for &byte in head {
        if (byte == b'\n') != (before == b'\r') {
            return Err(Malformed::because("a line of the request head does not end in CRLF"));
        }
        before = byte;
    }
    Ok(())
}

/// Picks the headers that matter out of a whole head.
fn read_head<'a>(request: &Request<'_, 'a>, len: usize) -> Result<Head<'a>, Malformed> {
    const UNREAD: Malformed = Malformed::because("the request line is not whole");
    let mut head = Head {
        method: request.method.ok_or(UNREAD)?,
        target: request.path.ok_or(UNREAD)?,
        minor_version: request.version.ok_or(UNREAD)?,
        host: None,
        authorization: None,
        proxy_authorization: None,
        len,
    };
    for header in request.headers.iter() {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        if is("host") {
            only_once(&mut head.host, header)?;
        } else if is("authorization") {
            only_once(&mut head.authorization, header)?;
        } else if is("proxy-authorization") {
            only_once(&mut head.proxy_authorization, header)?;
        } else if head.is_connect() && announces_body(header) {
            return Err(Malformed::because("a CONNECT request announces a body"));
        }
    }
    Ok(head)
}

/// Takes a value that must not come twice: two readers could believe different ones.
fn only_once<'a>(slot: &mut Option<&'a str>, header: &Header<'a>) -> Result<(), Malformed> {
    let value = std::str::from_utf8(header.value)
        .map_err(|_| Malformed::because("the value of a request header is not text"))?;
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(Malformed::because("a header that must be unique comes twice")),
    }
}

/// Bytes after a CONNECT head belong to the tunnel. A client that counts them as a body means something else.
fn announces_body(header: &Header<'_>) -> bool {
    header.name.eq_ignore_ascii_case("transfer-encoding")
        || (header.name.eq_ignore_ascii_case("content-length") && header.value != b"0")
}

fn explain(error: httparse::Error) -> &'static str {
    match error {
        httparse::Error::HeaderName => "the request has a header name with forbidden characters",
        httparse::Error::HeaderValue => "the request has a header value with forbidden characters",
        httparse::Error::NewLine => "a line of the request head does not end in CRLF",
        httparse::Error::Token => "the request line has forbidden characters",
        httparse::Error::TooManyHeaders => "the request has more than 64 headers",
        httparse::Error::Version => "the request is neither HTTP/1.0 nor HTTP/1.1",
        httparse::Error::Status => "the request looks like a response",
    }
}

#[cfg(test)]
mod tests;
