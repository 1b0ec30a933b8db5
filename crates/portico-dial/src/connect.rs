//! CONNECT as a client (RFC 9110 section 9.3.6, RFC 9112): one request. After a 2xx the connection leads to
//! the target.
//!
//! The answer is untrusted input: its head is bounded, and nothing of it reaches a log without [`printable`].

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use portico_api::text::printable;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::credentials::{CredentialsSource, Secret};
use crate::error::{DialError, HeadLimit, Refused, Schemes, Sent};
use crate::proxy::Proxy;
use crate::socket::{Route, Socket, Transport};
use crate::target::Target;

/// The largest head of an answer, with the interim ones (1xx) before it. Those of proxies have some hundred
/// bytes, with cookies a few thousand.
const LARGEST_HEAD: usize = 16 * 1024;

/// The most header fields of an answer.
const MOST_FIELDS: usize = 64;

/// The most bytes that are read of the body of a refusal. The title of an HTML page is in its first kilobyte.
const LARGEST_BODY: usize = 4 * 1024;

/// How long the body of a refusal may take. It only adds to the status.
const BODY_TIME: Duration = Duration::from_secs(1);

/// The size of one read.
const STEP: usize = 1024;

/// A proxy's answer, read to the end of its head.
pub(crate) struct Answer {
    transport: Transport,
    head: Head,
    /// Bytes that came after the head.
    early: BytesMut,
    sent: Sent,
}

/// The parts of a head that matter.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    status: u16,
    reason: Box<str>,
    offered: Schemes,
    length: Option<usize>,
    html: bool,
    chunked: bool,
    /// The reason that squid gives in `x-squid-error`.
    code: Box<str>,
}

/// Sends the request and reads the head of the answer.
pub(crate) async fn ask(
    mut transport: Transport,
    target: &Target,
    credentials: Option<(Secret, CredentialsSource)>,
    proxy: &Arc<Proxy>,
) -> Result<Answer, DialError> {
    let gone = |source| DialError::ProxyGone { proxy: Arc::clone(proxy), target: target.clone(), source };
    let (secret, sent) = match credentials {
        None => (None, Sent::Nothing),
        Some((secret, source)) => (Some(secret), Sent::From(source)),
    };
    transport.write_all(request(target, secret.as_ref()).as_bytes()).await.map_err(gone)?;
    transport.flush().await.map_err(gone)?;
    let mut bytes = BytesMut::new();
    let mut interim = 0;
    let too_long = |limit| DialError::HeadTooLong { proxy: Arc::clone(proxy), target: target.clone(), limit };
    loop {
        match parse(&bytes) {
            Parsed::Complete(head, len) => {
                bytes.advance(len);
                // 1xx come before the answer (RFC 9110 section 15.2), which does not bound their number.
                if !(100..200).contains(&head.status) {
                    return Ok(Answer { transport, head, early: bytes, sent });
                }
                interim += len;
                if interim >= LARGEST_HEAD {
                    return Err(too_long(HeadLimit::Interim(LARGEST_HEAD)));
                }
                continue;
            }
            Parsed::NeedMore if bytes.len() >= LARGEST_HEAD => {
                return Err(too_long(HeadLimit::Bytes(LARGEST_HEAD)));
            }
            Parsed::NeedMore => {}
            Parsed::TooManyFields => return Err(too_long(HeadLimit::Fields(MOST_FIELDS))),
            Parsed::Malformed => return Err(not_http(proxy, &bytes)),
        }
        match read_more(&mut transport, &mut bytes, LARGEST_HEAD).await {
            Ok(0) if !bytes.is_empty() && !bytes.starts_with(b"HTTP/") => {
                return Err(not_http(proxy, &bytes));
            }
            Ok(0) => return Err(gone(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => {}
            Err(error) => return Err(gone(error)),
        }
    }
}

impl Answer {
    /// Returns the connection to the target, or why the proxy refused it. Reads a little of the body for
    /// that.
    pub(crate) async fn into_socket(mut self, route: Route, proxy: &Arc<Proxy>) -> Result<Socket, DialError> {
        let (proxy, target) = (Arc::clone(proxy), route.target().clone());
        match self.head.status {
            200..300 => Ok(Socket::new(route, self.early.freeze(), self.transport)),
            407 => {
                let (offered, sent) = (self.head.offered, self.sent);
                Err(DialError::AsksForCredentials { proxy, target, offered, sent })
            }
            500.. => Err(DialError::CannotReach { proxy, target, answer: self.refused().await }),
            _ => Err(DialError::Forbids { proxy, target, answer: self.refused().await }),
        }
    }

    async fn refused(&mut self) -> Refused {
        let wanted = self.head.length.unwrap_or(LARGEST_BODY).min(LARGEST_BODY);
        let read = async {
            while self.early.len() < wanted
                && matches!(read_more(&mut self.transport, &mut self.early, wanted).await, Ok(1..))
            {
            }
        };
        // What came until then will do.
        let _ = timeout(BODY_TIME, read).await;
        let body = String::from_utf8_lossy(&self.early);
        // A chunk begins with a line with its length.
        let body = if self.head.chunked { body.split_once('\n').map_or("", |(_, body)| body) } else { &body };
        let text = if self.head.html { title(body) } else { first_line(body) };
        let says = [&*self.head.code, text].into_iter().filter(|text| !text.is_empty());
        let says = printable(&says.collect::<Vec<_>>().join(": ")).into();
        Refused { status: self.head.status, reason: self.head.reason.clone(), says }
    }
}

fn request(target: &Target, credentials: Option<&Secret>) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let authorization =
        credentials.map(|secret| format!("Proxy-Authorization: {}\r\n", secret.expose())).unwrap_or_default();
    format!(
        "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: portico/{version}\r\n{authorization}\r\n"
    )
}

/// Reads once, until there are `most` bytes.
async fn read_more(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: &mut BytesMut,
    most: usize,
) -> io::Result<usize> {
    let room = STEP.min(most.saturating_sub(bytes.len()));
    bytes.reserve(room);
    stream.take(room as u64).read_buf(bytes).await
}

enum Parsed {
    /// A head, and its length.
    Complete(Head, usize),
    NeedMore,
    TooManyFields,
    Malformed,
}

fn parse(bytes: &[u8]) -> Parsed {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    let len = match response.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Parsed::NeedMore,
        Err(httparse::Error::TooManyHeaders) => return Parsed::TooManyFields,
        Err(_) => return Parsed::Malformed,
    };
    let values = |name: &'static str| {
        let named = response.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
        named.map(|field| String::from_utf8_lossy(field.value))
    };
    let offered = values("proxy-authenticate").flat_map(|value| schemes(&value)).collect();
    let value = |name| values(name).next().unwrap_or_default();
    let head = Head {
        status: response.code.unwrap_or_default(),
        reason: printable(response.reason.unwrap_or_default()).into(),
        offered: Schemes(offered),
        length: value("content-length").trim().parse().ok(),
        html: value("content-type").to_ascii_lowercase().starts_with("text/html"),
        chunked: value("transfer-encoding").to_ascii_lowercase().contains("chunked"),
        code: printable(&value("x-squid-error")).into(),
    };
    Parsed::Complete(head, len)
}

/// Returns the schemes of a `Proxy-Authenticate` field. A challenge is a scheme and its parameters; commas
/// separate both parameters and challenges.
fn schemes(value: &str) -> Vec<Box<str>> {
    let mut quoted = false;
    value
        .split(move |letter| {
            quoted ^= letter == '"';
            letter == ',' && !quoted
        })
        .filter_map(|part| part.split_whitespace().next())
        // `realm="..."` is a parameter.
        .filter(|word| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'))
        .map(Into::into)
        .collect()
}

/// Returns the title of an HTML page.
fn title(html: &str) -> &str {
    // It has the same length as the page, so offsets are the same.
    let lower = html.to_ascii_lowercase();
    let Some(start) = lower.find("<title>").map(|at| at + "<title>".len()) else { return "" };
    let end = lower[start..].find("</title>").map_or(html.len(), |len| start + len);
    html[start..end].trim()
}

fn first_line(text: &str) -> &str {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default()
}

fn not_http(proxy: &Arc<Proxy>, bytes: &[u8]) -> DialError {
    /// Enough to recognise a protocol by.
    const SAMPLE: usize = 40;
    let said = match bytes {
        // Handshake or alert, and TLS's major version (RFC 8446 section 5.1).
        [0x15 | 0x16, 3, ..] => "it speaks TLS".to_owned(),
        _ => format!("it says \"{}\"", bytes[..bytes.len().min(SAMPLE)].escape_ascii()),
    };
    DialError::NotHttp { proxy: Arc::clone(proxy), said }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Head {
        match parse(text.as_bytes()) {
            Parsed::Complete(head, len) => {
                assert_eq!(len, text.len());
                head
            }
            _ => panic!("{text:?} is a head"),
        }
    }

    #[test]
    fn the_request_names_the_target_and_brings_credentials_if_there_are_any() {
        let target = "[2001:db8::1]:443".parse().unwrap();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            request(&target, None),
            format!(
                "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\nUser-Agent: \
                 portico/{version}\r\n\r\n"
            )
        );
        let secret = Secret::new(b"user", b"password");
        assert!(
            request(&target, Some(&secret))
                .ends_with("\r\nProxy-Authorization: Basic dXNlcjpwYXNzd29yZA==\r\n\r\n")
        );
    }

    #[test]
    fn a_407_says_which_schemes_are_offered() {
        let text = "HTTP/1.1 407 Proxy Authentication Required\r\n\
                    Proxy-Authenticate: Negotiate\r\n\
                    proxy-authenticate: NTLM, Basic realm=\"a, b\", charset=\"UTF-8\"\r\n\r\n";
        assert_eq!(head(text).offered.to_string(), "Negotiate, NTLM, Basic");
        let silent = "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n";
        assert_eq!(head(silent).offered.to_string(), "no kind of them");
    }

    #[test]
    fn heads_of_old_and_terse_proxies_are_read() {
        assert_eq!(head("HTTP/1.0 200 Connection established\r\n\r\n").status, 200);
        assert_eq!(head("HTTP/1.1 200\r\n\r\n").status, 200);
        assert_eq!(head("HTTP/1.1 200 OK\nVia: 1.1 proxy\n\n").status, 200);
    }

    #[test]
    fn a_page_is_named_by_its_title_and_a_text_by_its_first_line() {
        let page = "<!DOCTYPE html>\n<html><head>\n<TITLE>ERROR: Not\u{130}allowed </TITLE></head>";
        assert_eq!(title(page), "ERROR: Not\u{130}allowed");
        assert_eq!(title("<p>hello"), "");
        assert_eq!(title("<title>cut"), "cut");
        assert_eq!(first_line("\r\n  blocked by policy 7\r\nmore"), "blocked by policy 7");
        assert_eq!(first_line(""), "");
    }
}
