//! The bearer token of a client (RFC 6750), read from a file and read again when it changes: service account
//! tokens live an hour.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use crate::secret_file::{SecretFileError, read_secret};

/// The token that a file holds.
pub struct TokenFile {
    path: PathBuf,
    /// As a header value, so that it is not formatted for each request.
    current: Mutex<Arc<str>>,
}

/// Why a file holds no token. The one in force, if any, stays.
#[derive(Debug, Error)]
pub enum TokenFileError {
    /// It does not hold one line of text.
    #[error("token: {0}")]
    File(#[from] SecretFileError),
    /// The line is no token.
    #[error("token: {}: more than letters, digits and -._~+/=; it must hold one bearer token and nothing \
        else", path.display())]
    NoToken {
        /// The file.
        path: PathBuf,
    },
}

impl TokenFile {
    /// Reads the file.
    pub fn load(path: PathBuf) -> Result<Self, TokenFileError> {
        let current = Mutex::new(read(&path)?);
        Ok(Self { path, current })
    }

    /// Reads the file again. Returns true if it holds another token, which is then in force. On an error the
    /// old one stays. Blocks for the time of reading a small file.
    pub fn reload(&self) -> Result<bool, TokenFileError> {
        let token = read(&self.path)?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *current != token;
        *current = token;
        Ok(changed)
    }

    /// Returns the value of the `authorization` header: `Bearer TOKEN`.
    #[must_use]
    pub fn current(&self) -> Arc<str> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for TokenFile {
    /// Never prints the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenFile({})", self.path.display())
    }
}

fn read(path: &Path) -> Result<Arc<str>, TokenFileError> {
    let token = read_secret(path)?;
    // b64token of RFC 6750 section 2.1.
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    if !token.bytes().all(allowed) {
        return Err(TokenFileError::NoToken { path: path.to_owned() });
    }
    Ok(format!("Bearer {token}").into())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_new_token_is_in_force_after_reload() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "eyJhbGciOi.J9.x-_1\n").unwrap();
        let token = TokenFile::load(file.path().to_owned()).unwrap();
        assert_eq!(&*token.current(), "Bearer eyJhbGciOi.J9.x-_1");
        assert!(!token.reload().unwrap());
        fs::write(file.path(), "second").unwrap();
        assert!(token.reload().unwrap());
        assert_eq!(&*token.current(), "Bearer second");
    }

    #[test]
    fn a_file_without_a_token_leaves_the_old_one_in_force() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "first").unwrap();
        let token = TokenFile::load(file.path().to_owned()).unwrap();
        for content in ["", "two words", "two\nlines", "t\u{f6}ken"] {
            fs::write(file.path(), content).unwrap();
            let error = token.reload().unwrap_err();
            assert!(content.is_empty() || !error.to_string().contains(content), "{error}");
        }
        assert_eq!(&*token.current(), "Bearer first");
        assert!(!format!("{token:?}").contains("first"));
    }
}
