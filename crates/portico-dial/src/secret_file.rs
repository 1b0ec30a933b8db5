//! Small files with one secret: a bearer token, or user and password. Errors never hold their content.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The largest file that is read. Service account tokens have about 1 KiB; the fields of a request may have
/// 16 KiB.
const LARGEST: u64 = 8 * 1024;

/// Why a file holds no secret.
#[derive(Debug, Error)]
pub enum SecretFileError {
    /// It cannot be read.
    #[error("reading {}: {source}; give a file this process may read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It is larger than 8 KiB.
    #[error("{}: larger than {LARGEST} bytes; it must hold the secret and nothing else", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is empty, or has more than one line of printable characters.
    #[error("{}: not one line of text; it must hold the secret and nothing else", path.display())]
    NotALine {
        /// The file.
        path: PathBuf,
    },
}

/// Returns the one line of the file, trimmed.
pub(crate) fn read_secret(path: &Path) -> Result<String, SecretFileError> {
    let read = |source| SecretFileError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(read)?.take(LARGEST + 1).read_to_end(&mut bytes).map_err(read)?;
    if bytes.len() as u64 > LARGEST {
        return Err(SecretFileError::TooLarge { path: path.to_owned() });
    }
    let text = str::from_utf8(&bytes).unwrap_or_default().trim();
    if text.is_empty() || text.chars().any(char::is_control) {
        return Err(SecretFileError::NotALine { path: path.to_owned() });
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Result<String, SecretFileError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        read_secret(file.path())
    }

    #[test]
    fn one_line_comes_without_the_space_around_it() {
        assert_eq!(read(b"user:pass word\n").unwrap(), "user:pass word");
        assert_eq!(read(b"  token").unwrap(), "token");
    }

    #[test]
    fn nothing_else_is_a_secret() {
        for content in [&b""[..], b" \n", b"one\ntwo\n", b"bell\x07", b"\xff\xfe"] {
            assert!(matches!(read(content), Err(SecretFileError::NotALine { .. })), "{content:?}");
        }
        assert!(matches!(read(&[b'a'; 8193]), Err(SecretFileError::TooLarge { .. })));
        assert!(matches!(read_secret(Path::new("/nowhere")), Err(SecretFileError::Read { .. })));
    }
}
