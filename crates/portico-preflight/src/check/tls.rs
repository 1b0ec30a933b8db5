//! TLS to a server, through a corporate proxy if one leads there: chain, name, ALPN, and the server's clock.
//!
//! No trust is needed for it. The connection carries one request without credentials, for the `Date` header,
//! and only where HTTP/1.1 was agreed on.

use std::sync::Arc;

use jiff::fmt::rfc2822::DateTimeParser;
use portico_api::text::one_line;
use portico_dial::{
    AnyCertificate, ConnectAnyError, DialError, Dialer, RecordingVerifier, Socket, Target, provider,
    server_verifier,
};
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{Limits, millis, unix_millis};
use crate::observation::{Observation, TlsSession};

/// The largest head of an answer that is looked at for its date.
const LARGEST_HEAD: usize = 8 * 1024;

/// The most header fields of an answer.
const MOST_FIELDS: usize = 64;

/// The most names of a certificate that are reported.
const MOST_NAMES: usize = 10;

/// The longest name that is reported.
const LONGEST_NAME: usize = 200;

/// The certificates that are right.
#[derive(Debug, Clone)]
pub enum Trust {
    /// The certificates that lead to one of these roots.
    Roots(Arc<RootCertStore>),
    /// Every one: the CA is private, and nobody has named it.
    Any,
}

/// A server, and what it should present.
#[derive(Debug, Clone)]
pub struct Server {
    /// Where it is.
    pub target: Target,
    /// The name in the ClientHello and in the certificate.
    pub name: Box<str>,
    /// The authorities that may have issued the certificate.
    pub trust: Trust,
    /// What is offered by ALPN, most wanted first.
    pub alpn: Vec<Box<str>>,
}

/// The observation, and the clock on the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handshake {
    /// What was seen.
    pub seen: Observation,
    /// How far the server's clock is ahead of ours, to the second.
    pub ahead_millis: Option<i64>,
}

/// Connects and shakes hands.
pub async fn check(dialer: &Dialer, server: &Server, limits: Limits) -> Handshake {
    let only = |seen| Handshake { seen, ahead_millis: None };
    let proxy = dialer.via(&server.target).map(ToString::to_string);
    let socket = match dialer.connect_any(&server.target).await {
        Ok(socket) => socket,
        Err(error) => return only(not_connected(error, proxy)),
    };
    let shaking = shake_hands(socket, server, proxy.as_deref());
    let Ok((seen, stream)) = timeout(limits.answer, shaking).await else {
        return only(Observation::TimedOut { millis: millis(limits.answer) });
    };
    let ahead_millis = match stream {
        Some(stream) => timeout(limits.answer, ask_for_date(stream, &server.name)).await.ok().flatten(),
        None => None,
    };
    Handshake { seen, ahead_millis }
}

async fn shake_hands(
    socket: Socket,
    server: &Server,
    proxy: Option<&str>,
) -> (Observation, Option<TlsStream<Socket>>) {
    let no_tls = |why: String| (Observation::NoTls { why: why.into() }, None);
    let Ok(name) = ServerName::try_from(server.name.trim_end_matches('.').to_owned()) else {
        return no_tls(format!("{:?} is no server name", server.name));
    };
    let recorder = match recorder(&server.trust) {
        Ok(recorder) => Arc::new(recorder),
        Err(error) => return no_tls(error),
    };
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let mut config = match builder {
        Ok(builder) => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&recorder) as Arc<dyn ServerCertVerifier>)
            .with_no_client_auth(),
        Err(error) => return no_tls(error.to_string()),
    };
    config.alpn_protocols = server.alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let outcome = TlsConnector::from(Arc::new(config)).connect(name, socket).await;
    let mut session = Box::new(session(&recorder.take_presented()));
    session.proxy = proxy.map(Into::into);
    match outcome {
        Ok(stream) => {
            let connection = stream.get_ref().1;
            session.version =
                connection.protocol_version().map_or("", |version| version.as_str().unwrap_or("")).into();
            session.alpn = connection.alpn_protocol().map(|name| String::from_utf8_lossy(name).into());
            (Observation::Tls(session), Some(stream))
        }
        Err(error) => (refused(&error, session), None),
    }
}

/// What an error of the handshake means.
fn refused(error: &std::io::Error, session: Box<TlsSession>) -> Observation {
    let Some(reason) = error.get_ref().and_then(|source| source.downcast_ref::<rustls::Error>()) else {
        return match error.kind() {
            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => Observation::Reset,
            _ => Observation::NoTls { why: error.to_string().into() },
        };
    };
    match reason {
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => Observation::Intercepted { session },
        // An intercepting proxy without a CA of its own (CaUsedAsEndEntity) is known by its issuer.
        rustls::Error::InvalidCertificate(fault) => {
            Observation::WrongCertificate { why: fault.to_string().into(), session }
        }
        rustls::Error::InvalidMessage(_) => {
            Observation::NoTls { why: "what answers does not speak TLS".into() }
        }
        other => Observation::NoTls { why: other.to_string().into() },
    }
}

fn not_connected(error: ConnectAnyError, proxy: Option<String>) -> Observation {
    let text: Box<str> = error.to_string().into();
    match (error, proxy) {
        (ConnectAnyError::Resolve(_) | ConnectAnyError::NoAddress(_), _) => {
            Observation::NotResolved { why: text }
        }
        (_, Some(proxy)) => Observation::Proxy { proxy: proxy.into(), why: text },
        (ConnectAnyError::Dial(DialError::Tcp { source, .. }), None) => match source.kind() {
            std::io::ErrorKind::TimedOut => {
                Observation::TimedOut { millis: millis(portico_dial::DialTimeouts::default().tcp) }
            }
            _ => Observation::of_error(&source, None),
        },
        (_, None) => Observation::Unreachable { by: None, why: text },
    }
}

/// Asks for the server's time. `None`: it does not say.
async fn ask_for_date(mut stream: TlsStream<Socket>, name: &str) -> Option<i64> {
    if stream.get_ref().1.alpn_protocol().is_some_and(|name| name != b"http/1.1") {
        return None;
    }
    let version = env!("CARGO_PKG_VERSION");
    let request = format!(
        "HEAD / HTTP/1.1\r\nHost: {name}\r\nUser-Agent: portico-preflight/{version}\r\nConnection: \
         close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.ok()?;
    stream.flush().await.ok()?;
    let mut bytes = Vec::new();
    while bytes.len() < LARGEST_HEAD {
        if let Some(date) = date(&bytes) {
            return Some(date - unix_millis());
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    None
}

/// Returns the time in the head of an HTTP answer (RFC 9110 section 6.6.1), once it is complete.
fn date(head: &[u8]) -> Option<i64> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    if !matches!(response.parse(head), Ok(httparse::Status::Complete(_))) {
        return None;
    }
    let value = response.headers.iter().find(|field| field.name.eq_ignore_ascii_case("date"))?.value;
    Some(DateTimeParser::new().parse_timestamp(value).ok()?.as_millisecond())
}

/// Records what is presented, good or bad.
fn recorder(trust: &Trust) -> Result<RecordingVerifier, String> {
    let verifier: Arc<dyn ServerCertVerifier> = match trust {
        Trust::Any => Arc::new(AnyCertificate::default()),
        Trust::Roots(roots) => {
            let verifier = server_verifier(Arc::clone(roots));
            verifier.map_err(|error| format!("no CA to verify with: {error}"))?
        }
    };
    Ok(RecordingVerifier::new(verifier))
}

/// What was presented, in words.
fn session(presented: &[CertificateDer<'_>]) -> TlsSession {
    let parsed: Vec<X509Certificate<'_>> = presented
        .iter()
        .filter_map(|der| X509Certificate::from_der(der).ok().map(|(_, certificate)| certificate))
        .collect();
    let issuer = parsed.last().map(|last| shown(&last.issuer().to_string())).unwrap_or_default();
    TlsSession {
        chain: parsed.iter().map(|certificate| shown(&certificate.subject().to_string())).collect(),
        issuer,
        names: parsed.first().map(names).unwrap_or_default(),
        ..TlsSession::default()
    }
}

fn names(leaf: &X509Certificate<'_>) -> Vec<Box<str>> {
    let Ok(Some(extension)) = leaf.subject_alternative_name() else { return Vec::new() };
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(shown(name)),
        GeneralName::IPAddress(bytes) => match *bytes {
            [a, b, c, d] => Some(std::net::Ipv4Addr::new(*a, *b, *c, *d).to_string().into()),
            _ => {
                let bytes: [u8; 16] = (*bytes).try_into().ok()?;
                Some(std::net::Ipv6Addr::from(bytes).to_string().into())
            }
        },
        _ => None,
    };
    extension.value.general_names.iter().filter_map(text).take(MOST_NAMES).collect()
}

/// Certificates hold what their issuer liked.
fn shown(name: &str) -> Box<str> {
    one_line(name, LONGEST_NAME).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_date_of_an_answer_is_read_once_its_head_is_complete() {
        let head = b"HTTP/1.1 403 Forbidden\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n";
        assert_eq!(date(head), Some(784_111_777_000));
        for length in 0..head.len() {
            assert_eq!(date(&head[..length]), None, "{length}");
        }
        assert_eq!(date(b"HTTP/1.1 200 OK\r\ndate: today\r\n\r\n"), None);
    }
}
