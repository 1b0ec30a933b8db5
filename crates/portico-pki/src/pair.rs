//! A certificate with its private key, as Secrets hold them.

use std::fmt;

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256, RsaKeySize};

/// A certificate and its private key, both PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The private key: PKCS #8 if it was made here; PKCS #1 and SEC 1 can be read.
    pub key: String,
}

impl fmt::Debug for Pair {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The kind of a key that is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeyKind {
    /// ECDSA on P-256: made in microseconds, understood by everything that speaks TLS 1.2.
    #[default]
    EcdsaP256,
    /// RSA with 2,048 bits, as in KKP; for tools that know nothing else.
    Rsa2048,
}

impl KeyKind {
    pub(crate) fn generate(self) -> Result<KeyPair, rcgen::Error> {
        match self {
            Self::EcdsaP256 => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256),
            Self::Rsa2048 => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048),
        }
    }
}
