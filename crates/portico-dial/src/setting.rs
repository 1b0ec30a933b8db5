//! The setting `--proxy URL|env|off`, and the proxy a URL names.
//!
//! A URL may carry user and password. They are kept apart from the rest from the first moment: [`Proxy`]
//! prints without them, and no error repeats what stands before the `@`.

use std::fmt;
use std::str::FromStr;

use percent_encoding::percent_decode_str;
use thiserror::Error;

use crate::client_tls::ClientTlsError;
use crate::credentials::{CredentialsError, Secret};
use crate::target::{Target, TargetError};

/// What the operator says about proxies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProxySetting {
    /// None, whatever the environment says.
    Off,
    /// What the environment says, by curl's rules: `https_proxy`, `HTTPS_PROXY`, `all_proxy`, `ALL_PROXY`;
    /// the first that is not empty.
    Env,
    /// This one, except for what `NO_PROXY` lists.
    Url(Proxy),
}

/// An HTTP proxy. Prints as its URL, without user and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proxy {
    tls: bool,
    address: Target,
    credentials: Option<Secret>,
}

/// Why there is no way through the proxy as it is set. Wrong configuration: nothing changes by trying again.
#[derive(Debug, Error)]
pub enum ProxyError {
    /// The text is no proxy's URL.
    #[error("{origin} {url:?}: {problem}; give http://[USER:PASSWORD@]HOST:PORT or https://...")]
    Url {
        /// Where it stands: `proxy`, or an environment variable's name.
        origin: &'static str,
        /// The URL without what may be a password.
        url: String,
        /// What is wrong with it.
        problem: UrlProblem,
    },
    /// User and password cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The CA for an `https://` proxy cannot be used.
    #[error("TLS to the proxy: {0}")]
    Tls(#[from] ClientTlsError),
}

/// What is wrong with a proxy's URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum UrlProblem {
    /// `socks5://` and others.
    #[error("only http:// and https:// proxies can be used")]
    Scheme,
    /// Host or port.
    #[error(transparent)]
    Target(TargetError),
    /// A user without a password.
    #[error("there is a user and no password")]
    Credentials,
    /// Something follows the port.
    #[error("nothing may follow the port")]
    Path,
}

impl Proxy {
    /// Reads a URL. As curl has it, one without a scheme is `http://`. But there must be a port: curl would
    /// take 1080, others 80.
    pub(crate) fn parse(origin: &'static str, url: &str) -> Result<Self, ProxyError> {
        Self::read(url).map_err(|problem| ProxyError::Url { origin, url: redact(url), problem })
    }

    fn read(url: &str) -> Result<Self, UrlProblem> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
        let tls = if scheme.eq_ignore_ascii_case("https") {
            true
        } else if scheme.eq_ignore_ascii_case("http") {
            false
        } else {
            return Err(UrlProblem::Scheme);
        };
        let (credentials, rest) = match rest.rsplit_once('@') {
            None => (None, rest),
            Some((credentials, rest)) => {
                let (user, password) = credentials.split_once(':').ok_or(UrlProblem::Credentials)?;
                let decode = |text| percent_decode_str(text).collect::<Vec<u8>>();
                (Some(Secret::new(&decode(user), &decode(password))), rest)
            }
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#']) {
            return Err(UrlProblem::Path);
        }
        let address = rest.parse().map_err(UrlProblem::Target)?;
        Ok(Self { tls, address, credentials })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Target {
        &self.address
    }

    /// Whether it is spoken to under TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// User and password of the URL.
    pub(crate) fn credentials(&self) -> Option<&Secret> {
        self.credentials.as_ref()
    }
}

/// The URL with nothing before the `@`.
fn redact(url: &str) -> String {
    let Some((before, host)) = url.rsplit_once('@') else { return url.to_owned() };
    match before.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://***@{host}"),
        None => format!("***@{host}"),
    }
}

// === Display, FromStr ===

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.address)
    }
}

impl fmt::Display for ProxySetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Env => f.write_str("env"),
            Self::Url(proxy) => proxy.fmt(f),
        }
    }
}

impl FromStr for ProxySetting {
    type Err = ProxyError;

    fn from_str(text: &str) -> Result<Self, ProxyError> {
        match text {
            "off" => Ok(Self::Off),
            "env" => Ok(Self::Env),
            url => Proxy::parse("proxy", url).map(Self::Url),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_off_or_env_or_a_url() {
        for text in ["off", "env", "http://proxy.corp:3128", "https://[2001:db8::1]:443"] {
            assert_eq!(text.parse::<ProxySetting>().unwrap().to_string(), text);
        }
        for (text, printed) in
            [("proxy:3128", "http://proxy:3128"), ("HTTP://proxy:3128/", "http://proxy:3128")]
        {
            assert_eq!(text.parse::<ProxySetting>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn user_and_password_are_percent_decoded_and_never_printed() {
        let ProxySetting::Url(proxy) = "http://us%40er:pa%3Ass@wo%2Frd@proxy:3128".parse().unwrap() else {
            panic!("this is a URL");
        };
        assert_eq!(proxy.credentials(), Some(&Secret::new(b"us@er", b"pa:ss@wo/rd")));
        assert_eq!(proxy.to_string(), "http://proxy:3128");
        assert!(!format!("{proxy:?}").contains("pa"), "{proxy:?}");
    }

    #[test]
    fn a_url_that_cannot_be_used_says_why_without_its_password() {
        for (url, problem) in [
            ("socks5://user:secret@proxy:1080", UrlProblem::Scheme),
            ("http://user:secret@proxy", UrlProblem::Target(TargetError::NoPort)),
            ("http://secret@proxy:3128", UrlProblem::Credentials),
            ("http://user:secret@proxy:3128/path", UrlProblem::Path),
            ("user:secret@:3128", UrlProblem::Target(TargetError::Host)),
            ("", UrlProblem::Target(TargetError::NoPort)),
        ] {
            let error = url.parse::<ProxySetting>().unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
            assert!(matches!(error, ProxyError::Url { problem: found, .. } if found == problem), "{error}");
        }
    }
}
