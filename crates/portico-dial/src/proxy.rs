//! An HTTP proxy, and the URL that names it.

use std::fmt;

use percent_encoding::percent_decode_str;
use thiserror::Error;

use crate::credentials::Secret;
use crate::target::{Target, TargetError};

/// An HTTP proxy. Prints as its URL, without user and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proxy {
    tls: bool,
    address: Target,
    credentials: Option<Secret>,
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
    /// Parses a URL. Without a scheme it is `http://`, as for curl. The port is required: curl would take
    /// 1080, others 80.
    pub(crate) fn parse(url: &str) -> Result<Self, UrlProblem> {
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

    /// Returns its address.
    #[must_use]
    pub fn address(&self) -> &Target {
        &self.address
    }

    /// Whether it is an `https://` proxy.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Returns user and password of the URL.
    pub(crate) fn credentials(&self) -> Option<&Secret> {
        self.credentials.as_ref()
    }
}

// === Display ===

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.address)
    }
}
