//! A bearer token as it comes in a request (RFC 6750). The gateway verifies it.

use std::fmt;
use std::sync::Arc;

/// A secret, which is printed nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<str>);

impl Token {
    /// The token of an `authorization` header; `None` if the header has another scheme. The scheme may have
    /// any case.
    #[must_use]
    pub fn from_header(value: &str) -> Option<Self> {
        let (scheme, token) = value.trim().split_once(' ')?;
        let token = token.trim_start();
        (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| Self(token.into()))
    }

    /// The token itself, to be verified.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_token_is_one() {
        let token = |header: &str| Token::from_header(header).map(|token| token.secret().to_owned());
        assert_eq!(token("Bearer abc").as_deref(), Some("abc"));
        assert_eq!(token(" bearer  abc ").as_deref(), Some("abc"));
        for other in ["", "Bearer", "Bearer ", "Basic abc", "abc", "Bearerabc"] {
            assert_eq!(token(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_token_is_never_printed() {
        assert_eq!(format!("{:?}", Token::from_header("Bearer abc")), "Some(Token)");
    }
}
