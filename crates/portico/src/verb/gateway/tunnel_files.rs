//! The files of the tunnel listener, read again while the gateway runs: certificate and key, client CA and
//! revocation lists, tokens.
//!
//! A file that became unreadable or wrong leaves the one before in force. That is logged once. For as long as
//! it lasts, it is on `/readyz?verbose` and in the metric `tunnel_files_failed`.

use std::convert::Infallible;
use std::fmt::Display;
use std::future::pending;

use aws_lc_rs::digest::{SHA256, digest};
use portico_dial::FolderWatch;
use portico_gateway::Gateway;
use portico_tunnel::RevocationList;

use super::status::Status;

/// What is read as one, and fails as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TunnelFile {
    /// `--tunnel-tls-cert` and `--tunnel-tls-key`.
    Certificate,
    /// `--tunnel-client-ca` and `--tunnel-client-crl`.
    ClientCa,
    /// `--tunnel-tokens`.
    Tokens,
}

impl TunnelFile {
    /// Each of them.
    pub(crate) const ALL: [Self; 3] = [Self::Certificate, Self::ClientCa, Self::Tokens];

    /// The word for metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Certificate => "certificate",
            Self::ClientCa => "client_ca",
            Self::Tokens => "tokens",
        }
    }
}

/// The revocation lists in force. Each comes with the start of the SHA-256 of its CA's public key, since CAs
/// may have one name. kubeadm hashes the same for `--discovery-token-ca-cert-hash`.
pub(crate) fn revocation_lists(gateway: &Gateway) -> Vec<(String, RevocationList)> {
    let tls = gateway.shared().config.tunnel.tls.as_ref();
    let lists = tls.map(|tls| tls.revocation_lists()).unwrap_or_default();
    let with_hash = lists.into_iter().map(|list| {
        let hash = digest(&SHA256, &list.public_key);
        (hash.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect(), list)
    });
    with_hash.collect()
}

/// Has what the files say in force within a second of a change.
pub(crate) async fn follow(gateway: &Gateway, status: &Status) -> Infallible {
    let config = &gateway.shared().config;
    let (tls, tokens) = (config.tunnel.tls.clone(), config.tokens.file.clone());
    if let Some(tokens) = tokens.as_ref().filter(|tokens| tokens.is_readable_by_all()) {
        tracing::warn!(
            file = %tokens.path().display(),
            "every user of this machine may read the tokens of the tunnel; forbid it (chmod o-r)"
        );
    }
    if tls.is_none() && tokens.is_none() {
        return pending().await;
    }
    let paths = tls.iter().flat_map(|tls| tls.paths()).chain(tokens.iter().map(|tokens| tokens.path()));
    let folders = FolderWatch::new(paths);
    // The first look is for what changed since the files were read, before they were watched.
    loop {
        let mut revoked = false;
        if let Some(tls) = &tls {
            note(status, TunnelFile::Certificate, tls.reload_certificate());
            revoked |= note(status, TunnelFile::ClientCa, tls.reload_trust());
        }
        if let Some(tokens) = &tokens {
            revoked |= note(status, TunnelFile::Tokens, tokens.reload());
        }
        if revoked {
            gateway.shared().identities.changed();
        }
        // After a change, look again soon: `reload_trust` reports a bad file only when nothing changed.
        let has_removed_all = tokens.as_ref().is_none_or(|tokens| tokens.has_removed_all());
        folders.due(revoked || !has_removed_all || !status.tunnel_files().is_empty()).await;
    }
}

/// Says what came of reading a file again; true if its new content is in force.
fn note(status: &Status, file: TunnelFile, outcome: Result<bool, impl Display>) -> bool {
    let word = file.as_str();
    let (changed, error) = match outcome {
        Ok(changed) => (changed, None),
        Err(error) => (false, Some(error.to_string())),
    };
    let before = status.set_tunnel_file(file, error.clone());
    match (error, before) {
        (None, _) if changed => {
            tracing::info!(file = word, "new content of a file of the tunnel listener in force")
        }
        (None, Some(_)) => tracing::info!(file = word, "a file of the tunnel listener is as it was again"),
        // Once, not every second; and the first time it may only be half written.
        (Some(error), before) if before.as_ref() != Some(&error) => tracing::warn!(
            file = word, %error,
            "cannot use a file of the tunnel listener as it is now; what was read before stays in force"
        ),
        _ => {}
    }
    changed
}
