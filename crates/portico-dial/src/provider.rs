//! The cryptography of the tunnel, both ends, and of TLS to a corporate proxy.

use std::sync::Arc;

use rustls::CipherSuite;
use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// Most bytes that TLS holds, encrypted, for a socket that takes no more: a large frame of HTTP/2 with what
/// was batched before it. What a connection holds for its peer counts them.
pub const TLS_BUFFER: usize = 144 * 1024;

/// Returns the provider for clients and servers.
///
/// It prefers AES-128-GCM in TLS 1.3, as Go and BoringSSL do: the library's own order begins with AES-256,
/// which has four rounds more. A peer with another preference still gets every suite.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aes_128_comes_first_and_no_suite_is_lost() {
        let (own, library) = (provider(), aws_lc_rs::default_provider());
        assert_eq!(own.cipher_suites[0].suite(), CipherSuite::TLS13_AES_128_GCM_SHA256);
        assert!(library.cipher_suites.iter().all(|suite| own.cipher_suites.contains(suite)));
    }
}
