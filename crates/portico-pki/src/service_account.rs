//! The keys of a cluster's service accounts: one signs tokens, that one and perhaps others verify them.

use std::fmt;

use portico_api::text::pem_problem;
use rcgen::{KeyPair, PublicKeyData};
use rustls_pki_types::SubjectPublicKeyInfoDer;
use rustls_pki_types::pem::{self, PemObject};
use thiserror::Error;

use crate::authority::{IssueError, signing};
use crate::certificate;
use crate::inventory::SERVICE_ACCOUNT_KEYS;
use crate::pair::KeyKind;

/// As Secret `service-account-key` holds them.
#[derive(Clone, PartialEq, Eq)]
pub struct ServiceAccountKeys {
    /// The private key that signs, PEM.
    pub signing: String,
    /// The public keys that verify, PEM, one after the other.
    pub verifying: String,
}

/// Why keys cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadKeys {
    /// One of them cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// No token that is signed from now on would be accepted.
    #[error("none of the public keys in sa.pub belongs to the private key in sa.key")]
    Mismatch,
}

impl ServiceAccountKeys {
    /// Makes a key, which signs and verifies.
    pub fn create(kind: KeyKind) -> Result<Self, IssueError> {
        let key = kind.generate().map_err(|error| signing(SERVICE_ACCOUNT_KEYS, &error))?;
        Ok(Self { signing: key.serialize_pem(), verifying: key.public_key_pem() })
    }

    /// Checks what a Secret holds, Portico's or another. Public keys beside that of the private key are those
    /// of earlier or later ones.
    pub fn read(signing: &str, verifying: &str) -> Result<Self, BadKeys> {
        let private = certificate::key(signing).map_err(BadKeys::Unreadable)?;
        if !public_keys(verifying)?.contains(&private.subject_public_key_info()) {
            return Err(BadKeys::Mismatch);
        }
        Ok(Self { signing: signing.to_owned(), verifying: verifying.to_owned() })
    }

    /// These keys, and the public key of `other`, whose tokens are accepted from then on.
    ///
    /// # Errors
    /// `other` has no private key that can be read.
    #[must_use = "the keys are returned"]
    pub fn accepting(mut self, other: &Self) -> Result<Self, BadKeys> {
        let key: KeyPair = certificate::key(&other.signing).map_err(BadKeys::Unreadable)?;
        if !public_keys(&self.verifying)?.contains(&key.subject_public_key_info()) {
            self.verifying = self.verifying.trim_end().to_owned() + "\n" + &key.public_key_pem();
        }
        Ok(self)
    }
}

impl fmt::Debug for ServiceAccountKeys {
    /// Without the private key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceAccountKeys").field("verifying", &self.verifying).finish_non_exhaustive()
    }
}

fn public_keys(text: &str) -> Result<Vec<Vec<u8>>, BadKeys> {
    let keys = SubjectPublicKeyInfoDer::pem_slice_iter(text.as_bytes());
    let keys = keys.map(|key| key.map(|key| key.to_vec()));
    let keys: Result<Vec<_>, pem::Error> = keys.collect();
    let unreadable = |error| format!("its public keys cannot be read: {}", pem_problem(&error));
    keys.map_err(|error| BadKeys::Unreadable(unreadable(error)))
}
