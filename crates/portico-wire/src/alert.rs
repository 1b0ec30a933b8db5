//! The TLS alert a client reads when it gets no route, so that `kubectl` says more than "connection reset".
//!
//! The alert is sent in the clear before any handshake took place (RFC 5246 and RFC 8446, section 6). It must
//! look right to every client from TLS 1.0 to 1.3, which care differently about the version in the record
//! header. Called by the gateway's SNI listener.

/// The alert that the client gets. The gateway uses no other descriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Description {
    /// The client's address is not on the allow list of the user cluster.
    AccessDenied = 49,
    /// The name is known, but no endpoint is ready, none could be connected, or a limit is reached.
    InternalError = 80,
    /// No user cluster has this name, or the client sent none (RFC 6066, section 3).
    UnrecognizedName = 112,
}

/// Content type `alert` of the record layer.
const CONTENT_TYPE_ALERT: u8 = 21;
/// Alert level `fatal`: the connection ends after it.
const LEVEL_FATAL: u8 = 2;

/// The record that ends a handshake which has not begun: seven bytes, to be sent before closing.
///
/// `legacy_version` is [`ClientHello::legacy_version`](crate::hello::ClientHello::legacy_version). The record
/// carries it, because a client pinned to one version up to TLS 1.2 drops records of another. It is bounded
/// to TLS 1.2, because TLS 1.3 freezes the field there. The version of the hello's own record would be wrong:
/// most clients put TLS 1.0 there whatever they speak.
pub fn fatal(description: Description, legacy_version: u16) -> [u8; 7] {
    const SSL_3_0: u16 = 0x0300;
    const TLS_1_2: u16 = 0x0303;
    let [major, minor] = legacy_version.clamp(SSL_3_0, TLS_1_2).to_be_bytes();
    [CONTENT_TYPE_ALERT, major, minor, 0, 2, LEVEL_FATAL, description as u8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_of_any_version_gets_an_alert_in_a_version_it_reads() {
        for (sent, expected) in [(0x0301, 1), (0x0302, 2), (0x0303, 3), (0x0304, 3), (0x7f1c, 3), (0x0002, 0)]
        {
            let record = fatal(Description::UnrecognizedName, sent);
            assert_eq!(record, [21, 3, expected, 0, 2, 2, 112], "hello of version {sent:#06x}");
        }
    }
}
