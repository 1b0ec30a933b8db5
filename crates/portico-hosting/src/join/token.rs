//! Bootstrap tokens: what shows a machine to an API server before it has a certificate.
//!
//! Wire and names are those of Kubernetes (`bootstrap.kubernetes.io/token`). The API server knows the token
//! by the Secret. The controller manager removes the Secret when it has ended.

use std::fmt;
use std::str::FromStr;

use serde_json::{Value, json};

/// The group of machines with a token of Portico, beside `system:bootstrappers`, which all tokens give.
pub const GROUP: &str = "system:bootstrappers:portico";

const NAMESPACE: &str = "kube-system";
const ID: usize = 6;
const SECRET: usize = 16;
const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
/// The largest multiple of the alphabet's size in a byte: from here on, letters would not be equally likely.
const FAIR: u8 = 252;

/// A token, `id.secret`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    id: String,
    secret: String,
}

impl Token {
    /// The token that random bytes make; `None` if they were too few.
    pub fn from_random(bytes: impl IntoIterator<Item = u8>) -> Option<Self> {
        let fair = bytes.into_iter().filter(|&byte| byte < FAIR);
        let mut letters = fair.map(|byte| char::from(ALPHABET[usize::from(byte) % ALPHABET.len()]));
        let id: String = letters.by_ref().take(ID).collect();
        let secret: String = letters.take(SECRET).collect();
        (secret.len() == SECRET).then_some(Self { id, secret })
    }

    /// The whole of it, for the command line and the kubeconfig of a machine.
    pub fn reveal(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }

    /// The path of its Secret in the API.
    pub fn path(&self) -> String {
        format!("/api/v1/namespaces/{NAMESPACE}/secrets/{}", self.name())
    }

    /// The Secret by which the API server knows it until `expires` (RFC 3339).
    pub fn object(&self, expires: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "bootstrap.kubernetes.io/token",
            "metadata": {"name": self.name(), "namespace": NAMESPACE},
            "stringData": {
                "token-id": self.id,
                "token-secret": self.secret,
                "description": "made by portico join token",
                "expiration": expires,
                "usage-bootstrap-authentication": "true",
                "usage-bootstrap-signing": "true",
                "auth-extra-groups": GROUP,
            },
        })
    }

    fn name(&self) -> String {
        format!("bootstrap-token-{}", self.id)
    }
}

impl FromStr for Token {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part =
            |part: &str, length| part.len() == length && part.bytes().all(|byte| ALPHABET.contains(&byte));
        match text.split_once('.') {
            Some((id, secret)) if part(id, ID) && part(secret, SECRET) => {
                Ok(Self { id: id.to_owned(), secret: secret.to_owned() })
            }
            // The wrong text may be most of a token: it is not repeated.
            _ => Err("give a token as `portico join token` prints it: 6 letters or digits, a dot, 16 more"
                .to_owned()),
        }
    }
}

/// Without the secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Token").field(&self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_make_a_token_that_is_read_again() {
        let token = Token::from_random((0..=255).rev()).unwrap();
        // 255 to 252 are left out, 251 is the last letter's.
        assert_eq!(token.reveal(), "987654.3210zyxwvutsrqpo");
        assert_eq!(token.reveal().parse(), Ok(token));
        assert_eq!(Token::from_random([255; 64]), None);
        assert_eq!(Token::from_random([0; 21]), None);
    }

    #[test]
    fn a_secret_has_what_the_api_server_asks_for() {
        let token: Token = "abcdef.0123456789abcdef".parse().unwrap();
        let object = token.object("2026-01-01T00:00:00Z");
        assert_eq!(token.path(), "/api/v1/namespaces/kube-system/secrets/bootstrap-token-abcdef");
        assert_eq!(object["metadata"]["name"], "bootstrap-token-abcdef");
        assert_eq!(object["type"], "bootstrap.kubernetes.io/token");
        assert_eq!(object["stringData"]["auth-extra-groups"], GROUP);
        assert_eq!(object["stringData"]["expiration"], "2026-01-01T00:00:00Z");
    }

    #[test]
    fn what_is_no_token_is_refused_and_not_repeated() {
        for bad in
            ["", "abcdef", "abcdef.0123456789abcde", "abcde.0123456789abcdef", "ABCDEF.0123456789abcdef"]
        {
            let error = bad.parse::<Token>().unwrap_err();
            assert!(bad.is_empty() || !error.contains(bad), "{error}");
        }
        let token: Token = "abcdef.0123456789abcdef".parse().unwrap();
        assert!(!format!("{token:?}").contains("0123456789abcdef"));
    }
}
