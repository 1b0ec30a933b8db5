//! Values of flags in the forms that the upstream programs take, which are those of Go.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::args::{bytes, duration};

/// A switch in the forms of Go: `--flag`, `--flag=true`, `--flag=f`.
pub(super) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("give true or false".to_owned()),
    }
}

/// A duration in the forms of Go, in which zero needs no unit.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    if text == "0" { Ok(Duration::ZERO) } else { duration(text) }
}

/// Where to listen for `host`, which may be empty for all addresses.
pub(super) fn listen(host: &str, port: u16) -> Result<SocketAddr, String> {
    let ip = match host {
        // Both families, where the system has IPv6.
        "" if std::net::UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok() => Ipv6Addr::UNSPECIFIED.into(),
        "" => Ipv4Addr::UNSPECIFIED.into(),
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        host => host.parse::<IpAddr>().map_err(|_| format!("{host:?} is no IP address to listen on"))?,
    };
    Ok(SocketAddr::new(ip, port))
}

/// A file, or none where the text is empty: manifests pass such flags.
#[derive(Debug, Clone)]
pub(super) struct OptionalFile(pub(super) Option<PathBuf>);

impl FromStr for OptionalFile {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self((!text.is_empty()).then(|| text.into())))
    }
}

/// A size of one connection.
pub(super) fn buffer(text: &str) -> Result<usize, String> {
    const LEAST: usize = 64 << 10;
    bytes(text)
        .filter(|bytes| (LEAST..=1 << 30).contains(bytes))
        .ok_or_else(|| "give a size such as 1Mi, 64Ki to 1024Mi".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_has_the_forms_of_go() {
        assert_eq!(switch("T"), Ok(true));
        assert_eq!(switch("false"), Ok(false));
        assert!(switch("yes").is_err());
    }

    #[test]
    fn an_empty_host_is_every_address() {
        assert!(listen("", 8093).unwrap().ip().is_unspecified());
        assert_eq!(listen("127.0.0.1", 1).unwrap().to_string(), "127.0.0.1:1");
        assert_eq!(listen("::1", 1).unwrap().to_string(), "[::1]:1");
        assert!(listen("example.com", 1).is_err());
    }
}
