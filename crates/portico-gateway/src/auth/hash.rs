//! SHA-256 of secrets, kept and compared in their place: the time a comparison takes tells nothing about a secret.

use aws_lc_rs::digest::{Context, SHA256};

/// SHA-256.
pub(crate) type Hash = [u8; 32];

/// Hashes `parts`. Each is closed by a zero byte, which neither names nor tokens contain.
pub(crate) fn hash(parts: &[&[u8]]) -> Hash {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(part);
        context.update(&[0]);
    }
    let mut hash = Hash::default();
    hash.copy_from_slice(context.finish().as_ref());
    hash
}
