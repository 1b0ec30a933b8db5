//! User and password for the proxy, sent as Basic authentication (RFC 7617): from a file, the proxy's URL or
//! the environment, in this order. Nothing here prints them.

use std::fmt;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use thiserror::Error;

use crate::secret_file::{SecretFileError, read_secret};

/// The environment variable with `USER:PASSWORD`.
pub const CREDENTIALS_VARIABLE: &str = "PORTICO_PROXY_AUTH";

/// The value of a `Proxy-Authorization` header.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(Box<str>);

impl Secret {
    pub(crate) fn new(user: &[u8], password: &[u8]) -> Self {
        let pair = STANDARD.encode([user, b":", password].concat());
        Self(format!("Basic {pair}").into())
    }

    /// Parses `user:password`. The first colon counts: user names have none (RFC 7617 section 2).
    fn of_pair(pair: &str) -> Option<Self> {
        let (user, password) = pair.split_once(':')?;
        Some(Self::new(user.as_bytes(), password.as_bytes()))
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Where user and password come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSource {
    /// A file, read at each attempt.
    File(PathBuf),
    /// The proxy's URL.
    Url,
    /// An environment variable, read at the start.
    Environment(&'static str),
}

/// Why there are no user and password to send.
#[derive(Debug, Error)]
pub enum CredentialsError {
    /// The file cannot be read.
    #[error("user and password for the proxy: {0}")]
    File(#[from] SecretFileError),
    /// There is no colon in it.
    #[error("{0}: no colon in it; give USER:PASSWORD")]
    NoPair(CredentialsSource),
}

/// User and password, or the file they are in.
#[derive(Debug)]
pub(crate) enum Credentials {
    /// Read at each attempt, so that it can be replaced.
    File(PathBuf),
    /// Read at the start.
    Fixed(Secret, CredentialsSource),
}

impl Credentials {
    /// Returns the most specific source. A file must be valid at the start; later it may be invalid for a
    /// while.
    pub(crate) fn choose(
        file: Option<PathBuf>,
        url: Option<&Secret>,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, CredentialsError> {
        if let Some(path) = file {
            let credentials = Self::File(path);
            credentials.header()?;
            return Ok(Some(credentials));
        }
        if let Some(secret) = url {
            return Ok(Some(Self::Fixed(secret.clone(), CredentialsSource::Url)));
        }
        let Some(pair) = environment(CREDENTIALS_VARIABLE).filter(|pair| !pair.is_empty()) else {
            return Ok(None);
        };
        let source = CredentialsSource::Environment(CREDENTIALS_VARIABLE);
        match Secret::of_pair(&pair) {
            None => Err(CredentialsError::NoPair(source)),
            Some(secret) => Ok(Some(Self::Fixed(secret, source))),
        }
    }

    /// Returns where they come from.
    pub(crate) fn source(&self) -> CredentialsSource {
        match self {
            Self::File(path) => CredentialsSource::File(path.clone()),
            Self::Fixed(_, source) => source.clone(),
        }
    }

    /// Returns what to send now. Reads the file, if they are in one.
    pub(crate) fn header(&self) -> Result<Secret, CredentialsError> {
        match self {
            Self::File(path) => {
                Secret::of_pair(&read_secret(path)?).ok_or_else(|| CredentialsError::NoPair(self.source()))
            }
            Self::Fixed(secret, _) => Ok(secret.clone()),
        }
    }
}

impl fmt::Display for CredentialsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Url => f.write_str("the proxy's URL"),
            Self::Environment(name) => write!(f, "environment variable {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::proxy::Proxy;

    fn chosen(
        file: Option<PathBuf>,
        url: &str,
        variable: &str,
    ) -> Result<Option<Credentials>, CredentialsError> {
        let environment = |name: &str| (name == CREDENTIALS_VARIABLE).then(|| variable.to_owned());
        Credentials::choose(file, Proxy::parse(url).unwrap().credentials(), &environment)
    }

    #[test]
    fn a_file_goes_before_the_url_and_the_url_before_the_environment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "file:one\n").unwrap();
        let path = Some(file.path().to_owned());
        for (file, url, variable, expected) in [
            (path, "http://url:two@proxy:1", "environment:three", Secret::new(b"file", b"one")),
            (None, "http://url:two@proxy:1", "environment:three", Secret::new(b"url", b"two")),
            (None, "http://proxy:1", "environment:th:ree", Secret::new(b"environment", b"th:ree")),
        ] {
            let credentials = chosen(file, url, variable).unwrap().unwrap();
            assert!(credentials.header().unwrap() == expected, "{}", credentials.source());
        }
        assert!(chosen(None, "http://proxy:1", "").unwrap().is_none());
    }

    #[test]
    fn a_file_is_read_at_each_attempt() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "user:old").unwrap();
        let credentials = chosen(Some(file.path().to_owned()), "http://proxy:1", "").unwrap().unwrap();
        fs::write(file.path(), "user:new").unwrap();
        assert_eq!(credentials.header().unwrap(), Secret::new(b"user", b"new"));
    }

    #[test]
    fn what_is_no_pair_is_not_repeated() {
        let error = chosen(None, "http://proxy:1", "secret").unwrap_err();
        assert_eq!(
            error.to_string(),
            "environment variable PORTICO_PROXY_AUTH: no colon in it; give USER:PASSWORD"
        );
        assert!(!format!("{error:?}").contains("secret"));
    }

    #[test]
    fn the_header_is_as_the_rfc_has_it() {
        // RFC 7617 section 2.
        let secret = Secret::of_pair("Aladdin:open sesame").unwrap();
        assert_eq!(secret.expose(), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(format!("{secret:?}"), "Secret");
    }
}
