//! The cryptography of TLS, as client and as server.

use std::sync::Arc;

use rustls::CipherSuite;
use rustls::crypto::{CryptoProvider, aws_lc_rs, ring};

/// Most encrypted bytes that TLS holds for a socket that takes no more: a large frame of HTTP/2 with the
/// batch before it. They count among the bytes that a connection holds for its peer.
pub const TLS_BUFFER: usize = 144 * 1024;

/// Returns the provider for clients and servers: handshakes by aws-lc, records by ring.
///
/// aws-lc has the key exchange that quantum computers do not break. ring's AES-GCM is twice as fast on
/// processors with VAES and without AVX-512: aws-lc has no code of its own for them. With AVX-512 aws-lc's is
/// faster. It costs 700 KB of code, too much for an agent.
///
/// It prefers AES-128-GCM in TLS 1.3, as Go and BoringSSL do: the library's own order begins with AES-256,
/// which has four rounds more. A peer with another preference still gets every suite.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    let mut cipher_suites = ring::DEFAULT_CIPHER_SUITES.to_vec();
    cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(CryptoProvider { cipher_suites, ..aws_lc_rs::default_provider() })
}

/// Makes [`provider`] the one of this process. Code that is not ours and asks for none, such as kube's
/// client, takes it; with two libraries there it panics otherwise. Does nothing if there is one already.
pub fn install_provider() {
    if CryptoProvider::get_default().is_none() {
        // An error says that there is one since.
        let _ = CryptoProvider::install_default(CryptoProvider::clone(&provider()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aes_128_comes_first_and_no_suite_is_lost() {
        let (own, library) = (provider(), aws_lc_rs::default_provider());
        let names: Vec<CipherSuite> = own.cipher_suites.iter().map(|suite| suite.suite()).collect();
        assert_eq!(names[0], CipherSuite::TLS13_AES_128_GCM_SHA256);
        assert!(library.cipher_suites.iter().all(|suite| names.contains(&suite.suite())));
    }
}
