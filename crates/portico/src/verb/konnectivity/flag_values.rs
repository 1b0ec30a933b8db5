//! Values of flags in the forms that the upstream programs take, which are those of Go.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio::net::lookup_host;

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

/// Where to listen for `host`: an address, a name, or empty for all addresses.
pub(super) async fn listen(host: &str, port: u16) -> Result<SocketAddr, String> {
    let ip = match host {
        // Both families, where the system has IPv6.
        "" if std::net::UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok() => Ipv6Addr::UNSPECIFIED.into(),
        "" => Ipv4Addr::UNSPECIFIED.into(),
        host => resolve(host).await?,
    };
    Ok(SocketAddr::new(ip, port))
}

/// The address that is meant by a name. Of several the first of IPv4, or else the first: as in Go.
async fn resolve(host: &str) -> Result<IpAddr, String> {
    let found = lookup_host((host, 0)).await.map_err(|why| format!("{host:?} does not resolve: {why}"))?;
    first(found.map(|at| at.ip())).ok_or_else(|| format!("{host:?} has no address to listen on"))
}

fn first(mut found: impl Iterator<Item = IpAddr>) -> Option<IpAddr> {
    let first = found.next()?;
    Some(if first.is_ipv4() { first } else { found.find(IpAddr::is_ipv4).unwrap_or(first) })
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

    #[tokio::test]
    async fn a_host_is_an_address_a_name_or_empty_for_every_address() {
        assert!(listen("", 8093).await.unwrap().ip().is_unspecified());
        for (host, address) in
            [("127.0.0.1", "127.0.0.1:1"), ("::1", "[::1]:1"), ("localhost", "127.0.0.1:1")]
        {
            assert_eq!(listen(host, 1).await.unwrap().to_string(), address);
        }
        // Too long for a label: no name server is asked.
        let nowhere = "n".repeat(64);
        let refusal = listen(&nowhere, 1).await.unwrap_err();
        assert!(refusal.contains(&nowhere), "{refusal}");
    }

    #[test]
    fn of_the_addresses_of_a_name_the_first_of_ipv4_counts() {
        let chosen = |found: &[&str]| first(found.iter().map(|ip| ip.parse().unwrap()));
        assert_eq!(chosen(&["::1", "192.0.2.1", "192.0.2.2"]), "192.0.2.1".parse().ok());
        assert_eq!(chosen(&["2001:db8::1", "::1"]), "2001:db8::1".parse().ok());
        assert_eq!(chosen(&[]), None);
    }
}
