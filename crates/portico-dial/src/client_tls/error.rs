//! Why a TLS handshake failed. Messages say where to mend it: at the gateway, at the proxy, or here.

use std::fmt;
use std::io;

use portico_api::text::printable;
use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, UnixTime};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::time::ASN1Time;

use crate::socket::Route;

/// A handshake that failed.
#[derive(Debug)]
pub struct HandshakeError {
    /// The route to the server.
    pub route: Route,
    /// Whether the server had sent a certificate.
    pub answered: bool,
    /// The cause.
    pub problem: HandshakeProblem,
}

/// Why a handshake failed.
#[derive(Debug)]
pub enum HandshakeProblem {
    /// The configured server name is no name.
    ServerName {
        /// The text.
        name: Box<str>,
    },
    /// The certificate is not signed by a CA that we trust. Behind a proxy that nearly always means that it
    /// intercepts TLS.
    UnknownIssuer {
        /// Its issuer.
        issuer: Box<str>,
        /// Its subject.
        subject: Box<str>,
        /// The configured CA.
        trust: Box<str>,
    },
    /// The certificate is for other names.
    WrongName {
        /// The name that it should have.
        expected: Box<str>,
        /// The names that it has.
        names: Box<[Box<str>]>,
    },
    /// The certificate, or one that signed it, is no longer valid.
    Expired {
        /// When it expired.
        since: Box<str>,
        /// The subject.
        subject: Box<str>,
    },
    /// The certificate, or one that signed it, is not valid yet.
    NotYetValid {
        /// When it becomes valid.
        until: Box<str>,
        /// The subject.
        subject: Box<str>,
    },
    /// The certificate cannot be used for another reason.
    Certificate {
        /// The reason.
        source: rustls::Error,
        /// Its issuer.
        issuer: Box<str>,
        /// Its subject.
        subject: Box<str>,
    },
    /// The peer ended the handshake with an alert.
    Alert(rustls::Error),
    /// The peer does not speak TLS.
    NotTls {
        /// What may be wrong.
        hint: &'static str,
    },
    /// The handshake failed otherwise.
    Tls(rustls::Error),
    /// The connection was closed in the middle of the handshake.
    Closed,
    /// The connection broke.
    Io(io::Error),
}

/// Classifies an error of the handshake. `leaf` is the certificate that was not accepted, `trust` the
/// configured CA, `hint` what may be wrong with a server that does not speak TLS.
pub(super) fn problem(
    error: io::Error,
    leaf: Option<&CertificateDer<'_>>,
    trust: String,
    hint: &'static str,
) -> HandshakeProblem {
    let Some(reason) = error.get_ref().and_then(|source| source.downcast_ref::<rustls::Error>()) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof => HandshakeProblem::Closed,
            _ => HandshakeProblem::Io(error),
        };
    };
    match reason {
        rustls::Error::InvalidCertificate(fault) => certificate(reason, fault, leaf, trust),
        rustls::Error::AlertReceived(_) => HandshakeProblem::Alert(reason.clone()),
        rustls::Error::InvalidMessage(_) => HandshakeProblem::NotTls { hint },
        _ => HandshakeProblem::Tls(reason.clone()),
    }
}

fn certificate(
    reason: &rustls::Error,
    fault: &CertificateError,
    leaf: Option<&CertificateDer<'_>>,
    trust: String,
) -> HandshakeProblem {
    let parsed = leaf.and_then(|der| X509Certificate::from_der(der).ok());
    let name = |name: Option<String>| -> Box<str> {
        let name = name.filter(|name| !name.is_empty());
        name.map_or_else(|| "nobody in particular".into(), |name| printable(&name).into())
    };
    let issuer = name(parsed.as_ref().map(|(_, leaf)| leaf.issuer().to_string()));
    let subject = name(parsed.as_ref().map(|(_, leaf)| leaf.subject().to_string()));
    match fault {
        CertificateError::UnknownIssuer => {
            HandshakeProblem::UnknownIssuer { issuer, subject, trust: trust.into() }
        }
        CertificateError::NotValidForNameContext { expected, presented } => HandshakeProblem::WrongName {
            expected: expected.to_str().into(),
            names: presented.iter().map(|name| printable(plain(name)).into()).collect(),
        },
        CertificateError::ExpiredContext { not_after, .. } => {
            let own = parsed.is_some_and(|(_, leaf)| is(leaf.validity().not_after, *not_after));
            HandshakeProblem::Expired { since: date(*not_after), subject: whose(own, subject) }
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            let own = parsed.is_some_and(|(_, leaf)| is(leaf.validity().not_before, *not_before));
            HandshakeProblem::NotYetValid { until: date(*not_before), subject: whose(own, subject) }
        }
        _ => HandshakeProblem::Certificate { source: reason.clone(), issuer, subject },
    }
}

/// Returns `gateway.test` of webpki's `DnsName("gateway.test")`.
fn plain(name: &str) -> &str {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(name);
    inner.trim_matches('"')
}

fn is(time: ASN1Time, moment: UnixTime) -> bool {
    u64::try_from(time.timestamp()) == Ok(moment.as_secs())
}

/// Returns the subject whose time is meant: the verifier looks at the whole chain.
fn whose(own: bool, subject: Box<str>) -> Box<str> {
    if own { subject } else { format!("a signer of {subject}").into() }
}

fn date(moment: UnixTime) -> Box<str> {
    let seconds = moment.as_secs();
    let time = i64::try_from(seconds).ok().and_then(|seconds| ASN1Time::from_timestamp(seconds).ok());
    time.and_then(|time| time.to_rfc2822().ok())
        .map_or_else(|| format!("{seconds} s after 1970").into(), Into::into)
}

// === Display, Error ===

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { route, problem, .. } = self;
        let target = route.target();
        write!(f, "TLS to {route}: ")?;
        match (problem, route.proxy()) {
            (HandshakeProblem::UnknownIssuer { issuer, subject, trust }, None) => write!(
                f,
                "{trust} does not sign the certificate that came: its issuer is {issuer}, its subject \
                 {subject}; \
                 give the CA that issued it, if it is the right one"
            ),
            (HandshakeProblem::UnknownIssuer { issuer, subject, trust }, Some(proxy)) => write!(
                f,
                "proxy {proxy} seems to intercept TLS: the certificate that came was issued by {issuer} (its \
                 subject is {subject}), \
                 and {trust} does not sign it; have {target} exempted from interception there, for the \
                 tunnel's TLS \
                 must reach the gateway. Should that issuer be the gateway's own, give its CA"
            ),
            (problem, _) => problem.fmt(f),
        }
    }
}

impl fmt::Display for HandshakeProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ServerName { name } => write!(f, "{name:?} is neither a DNS name nor an IP address"),
            Self::UnknownIssuer { issuer, subject, trust } => {
                write!(f, "{trust} does not sign the certificate of {subject}, issued by {issuer}")
            }
            Self::WrongName { expected, names } if names.is_empty() => {
                write!(f, "the certificate is not for {expected}, and has no names at all (subjectAltName)")
            }
            Self::WrongName { expected, names } => {
                write!(f, "the certificate is not for {expected}, but for {}", names.join(", "))
            }
            Self::Expired { since, subject } => {
                write!(f, "the certificate of {subject} expired on {since}, by this machine's clock")
            }
            Self::NotYetValid { until, subject } => {
                write!(f, "the certificate of {subject} is not valid before {until}, by this machine's clock")
            }
            Self::Certificate { source, issuer, subject } => {
                write!(f, "the certificate of {subject}, issued by {issuer}, cannot be used: {source}")
            }
            Self::Alert(source) => write!(f, "the other side ended the handshake: {source}"),
            Self::NotTls { hint } => write!(f, "what answers does not speak TLS; {hint}"),
            Self::Tls(source) => source.fmt(f),
            Self::Closed => f.write_str("the connection was closed during the handshake"),
            Self::Io(source) => source.fmt(f),
        }
    }
}

impl std::error::Error for HandshakeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.problem {
            HandshakeProblem::Certificate { source, .. }
            | HandshakeProblem::Alert(source)
            | HandshakeProblem::Tls(source) => Some(source),
            HandshakeProblem::Io(source) => Some(source),
            _ => None,
        }
    }
}
