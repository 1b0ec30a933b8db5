//! Names to addresses, with the time until they expire. They come from the `hosts` file, or from DNS with its
//! time to live, which `getaddrinfo` does not return.
//!
//! `/etc/hosts` and `/etc/resolv.conf` are read for each question, because another network or a VPN changes
//! them. There is no cache: callers ask again when they want a new answer.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Hosts, ResolverBuilder, TokioResolver};
use thiserror::Error;
use tokio::time::{Instant, timeout};

use crate::target::Target;

/// The shortest time to live. A zone with 0 is not asked for every attempt.
const SHORTEST: Duration = Duration::from_secs(5);

/// The longest time to live: a gateway that moves is found within five minutes.
const LONGEST: Duration = Duration::from_secs(300);

/// The time to live of entries in the `hosts` file, which is cheap to read.
const HOSTS: Duration = Duration::from_secs(30);

/// The time limit of a resolution.
const LIMIT: Duration = Duration::from_secs(5);

/// The most addresses of one answer, which may hold four thousand. No gateway has more, and each address that
/// does not answer costs time.
const MOST_ADDRESSES: usize = 64;

/// The time limit of one question to a name server. A second one fits within [`LIMIT`].
const QUESTION: Duration = Duration::from_secs(2);

/// The addresses of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The addresses, IPv4 and IPv6, in the order of the answer; the first 64 of more.
    pub addresses: Box<[SocketAddr]>,
    /// When they expire. `None`: never, because the target is an address.
    pub until: Option<Instant>,
}

/// Why a name has no address. A later question may be answered.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// There is no configuration, or no name server in it.
    #[error("resolving {name}: /etc/resolv.conf cannot be used: {source}")]
    Configuration {
        /// The name.
        name: Box<str>,
        /// The error.
        source: Box<NetError>,
    },
    /// DNS has no address, or no name server answers.
    #[error("resolving {name}: {}", said(source))]
    NoAddress {
        /// The name.
        name: Box<str>,
        /// The answer of the name servers.
        source: Box<NetError>,
    },
    /// No name server answered in time.
    #[error("resolving {name}: no answer within {} s; see whether the servers in /etc/resolv.conf \
        answer", LIMIT.as_secs())]
    TooSlow {
        /// The name.
        name: Box<str>,
    },
}

/// Returns the addresses of a target, from these name servers, or from those of the machine if there are
/// none.
pub(crate) async fn resolve(target: &Target, servers: &[SocketAddr]) -> Result<Resolved, ResolveError> {
    if let Some(address) = target.ip() {
        return Ok(Resolved::at(target.port, [address], None));
    }
    let name = Name::from_str_relaxed(&*target.host).map_err(|error| ResolveError::NoAddress {
        name: target.host.clone(),
        source: Box::new(error.into()),
    })?;
    let listed = listed(&name);
    if !listed.is_empty() {
        return Ok(Resolved::at(target.port, listed, Some(Instant::now() + HOSTS)));
    }
    let builder = match servers {
        [] => TokioResolver::builder_tokio(),
        _ => Ok(TokioResolver::builder_with_config(asking(servers), TokioRuntimeProvider::default())),
    };
    let resolver = builder.and_then(resolver).map_err(|source| ResolveError::Configuration {
        name: target.host.clone(),
        source: Box::new(source),
    })?;
    ask(&resolver, name, target).await
}

/// Words for a failed look-up that are the same each time. The library names the question, for IPv4 or for
/// IPv6. The slower of the two decides which error this is, so the question is left out.
fn said(source: &NetError) -> String {
    match source {
        NetError::Dns(DnsError::NoRecordsFound(none)) => {
            format!("DNS has no address of this name ({})", none.response_code)
        }
        other => other.to_string(),
    }
}

/// Asks DNS.
async fn ask(resolver: &TokioResolver, name: Name, target: &Target) -> Result<Resolved, ResolveError> {
    let found = timeout(LIMIT, resolver.lookup_ip(name))
        .await
        .map_err(|_| ResolveError::TooSlow { name: target.host.clone() })?
        .map_err(|source| ResolveError::NoAddress { name: target.host.clone(), source: Box::new(source) })?;
    let until = until(found.valid_until().into(), Instant::now());
    Ok(Resolved::at(target.port, found.iter(), Some(until)))
}

impl Resolved {
    fn at(port: u16, addresses: impl IntoIterator<Item = IpAddr>, until: Option<Instant>) -> Self {
        let addresses = addresses.into_iter().take(MOST_ADDRESSES);
        Self { addresses: addresses.map(|address| SocketAddr::new(address, port)).collect(), until }
    }
}

/// Returns the entries of the `hosts` file. One that cannot be read has none.
fn listed(name: &Name) -> Vec<IpAddr> {
    let hosts = Hosts::from_system().unwrap_or_default();
    [RecordType::A, RecordType::AAAA]
        .into_iter()
        .filter_map(|kind| hosts.lookup_static_host(&Query::query(name.clone(), kind)))
        .flat_map(|lookup| {
            lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect::<Vec<_>>()
        })
        .collect()
}

fn asking(servers: &[SocketAddr]) -> ResolverConfig {
    let servers = servers.iter().map(|server| {
        let mut config = NameServerConfig::udp_and_tcp(server.ip());
        config.connections.iter_mut().for_each(|connection| connection.port = server.port());
        config
    });
    ResolverConfig::from_parts(None, vec![], servers.collect())
}

fn resolver(mut builder: ResolverBuilder<TokioRuntimeProvider>) -> Result<TokioResolver, NetError> {
    let options = builder.options_mut();
    options.timeout = options.timeout.min(QUESTION);
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.use_hosts_file = ResolveHosts::Never;
    builder.build()
}

/// Returns when addresses expire, within the bounds.
fn until(expires: Instant, now: Instant) -> Instant {
    expires.clamp(now + SHORTEST, now + LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_holds_for_ever() {
        for text in ["192.0.2.1:443", "[2001:db8::1]:443"] {
            let resolved = resolve(&text.parse().unwrap(), &[]).await.unwrap();
            assert_eq!(*resolved.addresses, [text.parse().unwrap()]);
            assert_eq!(resolved.until, None);
        }
    }

    #[tokio::test]
    async fn an_entry_of_the_hosts_file_holds_half_a_minute() {
        let before = Instant::now();
        let resolved = resolve(&"localhost:8088".parse().unwrap(), &[]).await.unwrap();
        assert!(resolved.addresses.contains(&"127.0.0.1:8088".parse().unwrap()), "{resolved:?}");
        let until = resolved.until.unwrap();
        assert!((before + HOSTS..=Instant::now() + HOSTS).contains(&until), "{resolved:?}");
    }

    #[test]
    fn of_thousands_of_addresses_the_first_are_used() {
        let many = (0..4_000_u32).map(|number| IpAddr::from(number.to_be_bytes()));
        let resolved = Resolved::at(443, many, None);
        assert_eq!(resolved.addresses.len(), MOST_ADDRESSES);
        assert_eq!(resolved.addresses[0], "0.0.0.0:443".parse().unwrap());
    }

    #[test]
    fn a_time_to_live_is_kept_within_reason() {
        let now = Instant::now();
        for (ttl, expected) in [(0, 5), (5, 5), (60, 60), (300, 300), (86_400, 300)] {
            let expires = now + Duration::from_secs(ttl);
            assert_eq!(until(expires, now), now + Duration::from_secs(expected), "{ttl}");
        }
    }
}
