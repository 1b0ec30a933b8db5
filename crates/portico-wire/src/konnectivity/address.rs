//! The host in the address of a DIAL_REQ, which the strategy `destHost` compares with agents' identifiers.

/// Longest address that is dialled. It is a DNS name, or an IPv6 address with a zone, and a port.
pub const MAX: usize = 512;

/// The host in `address`, byte for byte as upstream's server cuts it: `HOST:PORT`, `HOST`, `[IPV6]:PORT`,
/// `[IPV6]`, `IPV6`. Nothing is normalised, because identifiers are not either.
pub fn host(address: &str) -> &str {
    if address.bytes().filter(|byte| *byte == b':').count() <= 1 {
        return address.split(':').next().unwrap_or(address);
    }
    match address.strip_prefix('[') {
        // Upstream cuts at the last colon even in `[IPV6]`, where that is no port.
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_what_upstream_compares() {
        for (address, expected) in [
            ("localhost:8080", "localhost"),
            ("localhost", "localhost"),
            ("192.168.0.1:8080", "192.168.0.1"),
            ("::", "::"),
            ("9878::7562", "9878::7562"),
            ("[fd00::1]:8080", "fd00::1"),
            ("[fd00::1]", "fd00::1"),
            ("Node-1.example.com:10250", "Node-1.example.com"),
            ("", ""),
            (":80", ""),
        ] {
            assert_eq!(host(address), expected, "{address}");
        }
    }
}
