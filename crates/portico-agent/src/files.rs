//! The files of an agent's identity, which are replaced while it runs: certificate, key, CA and token. Tokens
//! live an hour and certificates days; an agent runs for months.

use std::path::PathBuf;
use std::sync::Arc;

use portico_dial::{ClientTls, FileSet, FolderWatch, TokenFile};

/// The files of an agent's identity.
#[derive(Debug)]
pub struct IdentityFiles {
    folders: FolderWatch,
    tls: Option<(Arc<ClientTls>, FileSet)>,
    token: Option<(Arc<TokenFile>, FileSet)>,
}

/// What a look has found to be new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewed {
    /// Certificate, key or CA.
    pub certificate: bool,
    /// The token.
    pub token: bool,
}

impl IdentityFiles {
    /// Watches what was read from these files just now.
    pub fn new(
        tls: Option<(Arc<ClientTls>, Vec<PathBuf>)>,
        token: Option<(Arc<TokenFile>, PathBuf)>,
    ) -> Self {
        let tls = tls.map(|(tls, paths)| (tls, FileSet::new("certificate, key or CA", paths)));
        let token = token.map(|(token, path)| (token, FileSet::new("token", vec![path])));
        let tls_paths = tls.iter().flat_map(|(_, files)| files.paths());
        let folders = FolderWatch::new(tls_paths.chain(token.iter().flat_map(|(_, files)| files.paths())));
        Self { folders, tls, token }
    }

    /// Whether there is anything to look at.
    pub fn is_empty(&self) -> bool {
        self.tls.as_ref().is_none_or(|(_, files)| files.paths().is_empty()) && self.token.is_none()
    }

    /// Returns when it is time for a look.
    pub async fn due(&self) {
        self.folders.due(!self.problems().is_empty()).await;
    }

    /// Looks at the files. Blocks for the time of reading small files, if they changed.
    pub fn reload_if_changed(&mut self) -> Renewed {
        Renewed {
            certificate: self
                .tls
                .as_mut()
                .is_some_and(|(tls, files)| files.reload_if_changed(|| tls.reload())),
            token: self
                .token
                .as_mut()
                .is_some_and(|(token, files)| files.reload_if_changed(|| token.reload())),
        }
    }

    /// Returns why the content of files is not in force.
    pub fn problems(&self) -> Vec<String> {
        let tls = self.tls.as_ref().map(|(_, files)| files);
        let token = self.token.as_ref().map(|(_, files)| files);
        tls.into_iter().chain(token).filter_map(FileSet::problem).collect()
    }
}

#[cfg(test)]
mod tests {
    use portico_dial::ClientTlsFiles;
    use portico_lab::pki::Pki;

    use super::*;

    #[test]
    fn a_ca_without_a_certificate_is_not_called_one() {
        let pki = Pki::new();
        let ca = pki.file("ca.crt");
        let tls = ClientTls::load(ClientTlsFiles { ca: Some(ca.clone()), ..ClientTlsFiles::default() });
        let mut files = IdentityFiles::new(Some((Arc::new(tls.unwrap()), vec![ca])), None);
        pki.write("ca.crt", "none");
        files.reload_if_changed();
        let problems = files.problems();
        assert!(
            matches!(&problems[..], [one] if one.starts_with("certificate, key or CA: ")),
            "{problems:?}"
        );
    }
}
