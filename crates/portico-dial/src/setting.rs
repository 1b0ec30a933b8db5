//! The setting `--proxy URL|env|off`.
//!
//! A URL may hold user and password. [`Proxy`] prints without them, and errors repeat nothing before the `@`.
//! Where they would be seen, [`without_credentials`] takes them out.

use std::fmt;
use std::str::FromStr;

use percent_encoding::percent_decode_str;
use thiserror::Error;

use crate::client_tls::ClientTlsError;
use crate::credentials::CredentialsError;
use crate::proxy::{Proxy, UrlProblem};

/// The setting of the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProxySetting {
    /// No proxy, whatever the environment says.
    Off,
    /// The first of `https_proxy`, `HTTPS_PROXY`, `all_proxy`, `ALL_PROXY` that is not empty, as curl does,
    /// except for what `NO_PROXY` lists and for this machine.
    Env,
    /// This one, except for what `NO_PROXY` lists.
    Url(Proxy),
}

/// Why the proxy cannot be used as it is configured. Trying again does not help.
#[derive(Debug, Error)]
pub enum ProxyError {
    /// The text is no proxy's URL.
    #[error("{origin} {url:?}: {problem}; give http://[USER:PASSWORD@]HOST:PORT or https://...")]
    Url {
        /// Where it comes from: `proxy`, or the name of an environment variable.
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

/// Splits the URL of a proxy that holds user and password into a URL without them, and `USER:PASSWORD` as
/// [`crate::CREDENTIALS_VARIABLE`] has it. `None` if it holds none, or if they cannot be written so.
pub fn without_credentials(url: &str) -> Option<(String, String)> {
    let (before, host) = url.rsplit_once('@')?;
    let (scheme, pair) = before.split_once("://").unwrap_or(("http", before));
    let (user, password) = pair.split_once(':')?;
    let decode = |text| percent_decode_str(text).decode_utf8().ok();
    let (user, password) = (decode(user)?, decode(password)?);
    // A user name has no colon there (RFC 7617 section 2), and a variable no NUL.
    let fits = !user.contains([':', '\0']) && !password.contains('\0');
    fits.then(|| (format!("{scheme}://{host}"), format!("{user}:{password}")))
}

/// Parses the URL of a proxy. `origin` says where it comes from.
pub(crate) fn parse(origin: &'static str, url: &str) -> Result<Proxy, ProxyError> {
    Proxy::parse(url).map_err(|problem| ProxyError::Url { origin, url: redact(url), problem })
}

/// Returns the URL with nothing before the `@`.
fn redact(url: &str) -> String {
    let Some((before, host)) = url.rsplit_once('@') else { return url.to_owned() };
    match before.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://***@{host}"),
        None => format!("***@{host}"),
    }
}

// === Display, FromStr ===

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
            url => parse("proxy", url).map(Self::Url),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::Secret;
    use crate::target::TargetError;

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
    fn user_and_password_leave_a_url_as_they_are_meant() {
        for (url, without, pair) in [
            ("http://us%40er:pa%3Ass@wo%2Frd@proxy:3128", "http://proxy:3128", "us@er:pa:ss@wo/rd"),
            ("user:@proxy:3128", "http://proxy:3128", "user:"),
            ("https://a:b@[2001:db8::1]:443/", "https://[2001:db8::1]:443/", "a:b"),
        ] {
            let (found, secret) = without_credentials(url).unwrap();
            assert_eq!((&*found, &*secret), (without, pair));
            assert!(found.parse::<ProxySetting>().is_ok(), "{found}");
        }
        for url in
            ["http://proxy:3128", "http://user@proxy:1", "http://a%3Ab:c@p:1", "http://a:%FF@p:1", "env"]
        {
            assert_eq!(without_credentials(url), None, "{url}");
        }
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
