//! The address of a gateway as an operator writes it: `[tls://|h2c://]HOST:PORT`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use portico_dial::{Target, TargetError};

/// Whether the tunnel is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Security {
    /// TLS: the gateway shows a certificate, and the client may.
    Tls,
    /// HTTP/2 with prior knowledge, for trusted networks and for gateways without TLS, such as KKP's Envoy.
    Plaintext,
}

/// A gateway, as given on a command line.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GatewayAddress {
    /// Whether to speak TLS.
    pub security: Security,
    /// Where it is.
    pub target: Target,
}

/// Why text is no [`GatewayAddress`].
#[derive(Debug, Error)]
pub enum GatewayAddressError {
    /// Another scheme than `tls` and `h2c`.
    #[error("{0}:// is no way to a gateway; write tls://HOST:PORT, h2c://HOST:PORT, or HOST:PORT for TLS")]
    Scheme(String),
    /// No host and port.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl FromStr for GatewayAddress {
    type Err = GatewayAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (security, target) = match text.split_once("://") {
            None | Some(("tls", _)) => (Security::Tls, text.trim_start_matches("tls://")),
            Some(("h2c", target)) => (Security::Plaintext, target),
            Some((scheme, _)) => return Err(GatewayAddressError::Scheme(scheme.to_owned())),
        };
        Ok(Self { security, target: target.parse()? })
    }
}

impl fmt::Display for GatewayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.security {
            Security::Tls => "tls",
            Security::Plaintext => "h2c",
        };
        write!(f, "{scheme}://{}", self.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_is_the_default() {
        for (text, shown) in [
            ("gateway.example.com:8088", "tls://gateway.example.com:8088"),
            ("tls://gateway.example.com:443", "tls://gateway.example.com:443"),
            ("h2c://10.0.0.1:8088", "h2c://10.0.0.1:8088"),
            ("tls://[2001:db8::1]:8088", "tls://[2001:db8::1]:8088"),
        ] {
            assert_eq!(text.parse::<GatewayAddress>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn an_error_says_how_to_write_a_gateway() {
        let error = "https://gateway:443".parse::<GatewayAddress>().unwrap_err().to_string();
        assert!(error.contains("tls://HOST:PORT"), "{error}");
        assert!("gateway".parse::<GatewayAddress>().is_err());
    }
}
