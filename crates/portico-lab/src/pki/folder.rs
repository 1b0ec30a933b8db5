//! An authority and its files, in a folder that ends with the test.

#![allow(clippy::unwrap_used, reason = "a test that cannot write its files ends there")]

use std::fs;
use std::path::{Path, PathBuf};

use rustls::ClientConfig;
use tempfile::TempDir;

use super::{Authority, Certificate, Identity};

/// The authority of a test, named `test CA`, and a temporary folder: `ca.crt`, whatever the test issues as
/// `NAME.crt` with `NAME.key`, and files of other kinds beside.
///
/// # Panics
///
/// Every method panics where it fails, with the reason: it is for tests.
pub struct Pki {
    authority: Authority,
    folder: TempDir,
}

impl Pki {
    /// A new authority with a key of its own, and its `ca.crt`.
    #[allow(clippy::new_without_default, reason = "a new key each time is no default")]
    pub fn new() -> Self {
        let authority = Authority::new("test CA").unwrap();
        let pki = Self { authority, folder: tempfile::tempdir().unwrap() };
        pki.write("ca.crt", &pki.authority.cert());
        pki
    }

    /// The authority, for what is not to be in a file.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Issues a certificate into `NAME.crt` and `NAME.key`. Its serial number is `name` in ASCII, by which
    /// [`Pki::revoke`] knows it, unless it says otherwise.
    pub fn issue(&self, name: &str, certificate: Certificate) -> Identity {
        let serial = |params: &mut rcgen::CertificateParams| {
            params.serial_number.get_or_insert_with(|| name.as_bytes().to_vec().into());
        };
        let identity = self.authority.issue(certificate.with(serial)).unwrap();
        identity.write(self.folder(), name).unwrap();
        identity
    }

    /// What [`Pki::issue`] has written, or what stands in its files now.
    pub fn identity(&self, name: &str) -> Identity {
        Identity { cert: self.read(&format!("{name}.crt")), key: self.read(&format!("{name}.key")) }
    }

    /// Writes to `crl.pem` that the certificates of these names are revoked, and no other.
    pub fn revoke(&self, names: &[&str]) {
        let serials: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
        self.write("crl.pem", &self.authority.revocations(&serials).unwrap());
    }

    /// TLS of a client that trusts this authority, with the certificate of this name.
    pub fn client_config(&self, name: Option<&str>, alpn: &[&[u8]]) -> ClientConfig {
        let identity = name.map(|name| self.identity(name));
        self.authority.client_config(identity.as_ref(), alpn).unwrap()
    }

    /// Where the files are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where the file of this name is, or would be.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Like [`Self::file`], as text for a command line.
    pub fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }

    /// The content of a file.
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap()
    }

    /// Writes a file. Returns where it is.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let file = self.file(name);
        fs::write(&file, content).unwrap();
        file
    }
}
