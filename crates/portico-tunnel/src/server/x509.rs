//! The content of certificates and revocation lists, as people read it.

use jiff::Timestamp;
use x509_parser::certificate::X509Certificate;
use x509_parser::time::ASN1Time;

/// Most characters shown of a name or a number that a certificate carries.
const SHOWN: usize = 120;

/// A time in seconds since 1970; one that no calendar has is the last.
pub(crate) fn at(seconds: u64) -> Timestamp {
    i64::try_from(seconds)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .unwrap_or(Timestamp::MAX)
}

/// The first and the last second of a certificate's validity, since 1970.
pub(crate) fn validity_of(certificate: &X509Certificate<'_>) -> (u64, u64) {
    let second = |time: ASN1Time| u64::try_from(time.timestamp()).unwrap_or_default();
    let validity = certificate.validity();
    (second(validity.not_before), second(validity.not_after))
}

/// Text of a certificate, which is untrusted input, made fit for a log line.
pub(crate) fn shown(text: &str) -> Box<str> {
    text.chars().flat_map(char::escape_debug).take(SHOWN).collect::<String>().into()
}
