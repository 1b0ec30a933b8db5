//! The words of an agent about itself in `agentidentifiers`: a URL query, in which keys may repeat.
//!
//! ```text
//! ipv4=1.2.3.4&ipv4=5.6.7.8&ipv6=fd00::1&host=node-1&cidr=10.0.0.0/16&default-route=true
//! ```
//!
//! The strategies of the server route by them. Addresses stay the text they were sent as, because upstream
//! compares text. A network that is none is left out, because upstream ignores them all.

use ipnet::IpNet;

use super::status::escape;

/// Most pairs that are read. A node has a few addresses and names, a site some networks. A server reads them
/// before it has seen the agent's token, and holds them for as long as it has the agent.
pub const MAX: usize = 64;

/// Most bytes of all of them.
pub const MAX_BYTES: usize = 4 * 1024;

/// The identifiers of an agent, each in the order in which they were sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identifiers {
    /// Its IPv4 addresses.
    pub ipv4: Vec<String>,
    /// Its IPv6 addresses.
    pub ipv6: Vec<String>,
    /// Its host names.
    pub host: Vec<String>,
    /// Networks that it reaches.
    pub cidr: Vec<String>,
    /// Whether it takes dials for which no other agent is named.
    pub default_route: bool,
    /// Keys that are none of these: an agent refuses them, a server ignores them.
    pub unknown: Vec<String>,
}

/// Why a text is no list of identifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentifiersError {
    /// Pairs are separated by `&` only.
    #[error("invalid semicolon separator in query")]
    Semicolon,
    /// More than anybody needs.
    #[error("more than {MAX} identifiers, or than {MAX_BYTES} bytes of them")]
    TooMany,
    /// A `%` is not followed by two hexadecimal digits.
    #[error("invalid URL escape")]
    Escape,
    /// A value is not UTF-8.
    #[error("an identifier is not text")]
    NotText,
}

impl Identifiers {
    /// Reads `query`. The empty text has no identifiers.
    pub fn parse(query: &str) -> Result<Self, IdentifiersError> {
        if query.len() > MAX_BYTES {
            return Err(IdentifiersError::TooMany);
        }
        let mut identifiers = Self::default();
        let mut default_route = None;
        for (index, pair) in query.split('&').filter(|pair| !pair.is_empty()).enumerate() {
            if index >= MAX {
                return Err(IdentifiersError::TooMany);
            }
            if pair.contains(';') {
                return Err(IdentifiersError::Semicolon);
            }
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (key, value) = (unescaped(key)?, unescaped(value)?);
            match key.as_str() {
                "ipv4" => identifiers.ipv4.push(value),
                "ipv6" => identifiers.ipv6.push(value),
                "host" => identifiers.host.push(value),
                "cidr" => identifiers.cidr.push(value),
                // Upstream knows the key and does nothing with it.
                "uid" => {}
                "default-route" => _ = default_route.get_or_insert(is_true(&value)),
                _ => identifiers.unknown.push(key),
            }
        }
        identifiers.default_route = default_route.unwrap_or(false);
        Ok(identifiers)
    }

    /// The addresses and names that a dialled host is compared with.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        [&self.ipv4, &self.ipv6, &self.host].into_iter().flatten().map(String::as_str)
    }

    /// The networks that are networks, with their host bits cleared.
    pub fn networks(&self) -> impl Iterator<Item = IpNet> {
        self.cidr.iter().filter_map(|text| text.parse::<IpNet>().ok()).map(|network| network.trunc())
    }
}

/// As Go's `strconv.ParseBool`. What it refuses counts as false.
fn is_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "true" | "True" | "TRUE")
}

/// As Go's `url.QueryUnescape`.
fn unescaped(text: &str) -> Result<String, IdentifiersError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        bytes.push(match first {
            b'+' => b' ',
            b'%' => {
                rest = behind.get(2..).ok_or(IdentifiersError::Escape)?;
                escape(behind).ok_or(IdentifiersError::Escape)?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).map_err(|_| IdentifiersError::NotText)
}

#[cfg(test)]
mod tests;
