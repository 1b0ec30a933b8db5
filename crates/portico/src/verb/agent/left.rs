//! `portico agent left`: whether anything on this machine still uses an address of its API server. The kernel
//! tells which connections there are, of every program that shares the machine's network.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use http::Uri;
use tokio::net::lookup_host;

use super::look::{self, Seen};
use super::reach::Server;
use crate::args::positive_duration;
use crate::outcome::Outcome;

/// Where the kernel lists connections: those of the network that a process is in.
const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];

/// The port of a URL without one.
const HTTPS: u16 = 443;

/// Most connections that are listed.
const NAMED: usize = 3;

/// `portico agent left`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// The address that should be in use no more
    #[arg(value_name = "URL")]
    url: Server,
    /// Go on, with this time between two looks, and print a line for each change
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    every: Option<Duration>,
}

/// Looks once, or again and again until it is told to stop.
pub(super) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    look::run(flags.every, async || Ok(vec![look(&flags.url.0).await?]))
}

async fn look(url: &str) -> anyhow::Result<Seen> {
    let targets = match targets(url).await {
        Ok(targets) => targets,
        Err(why) => return Ok(Seen { line: format!("{url}: unknown: {why:#}"), good: false }),
    };
    let mut found = BTreeSet::new();
    for table in TABLES {
        found.extend(connections(Path::new(table), &targets)?);
    }
    let Some((_, target)) = found.first() else {
        return Ok(Seen { line: format!("{url}: nothing here is connected to it"), good: true });
    };
    let ports: Vec<String> = found.iter().take(NAMED).map(|(local, _)| local.port().to_string()).collect();
    let more = found.len().saturating_sub(NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let line = format!(
        "{url}: connected to from here, by port {}{more}: `ss -tnp dst {target}` names the program. A \
         kubelet is moved by `portico join move`; Cilium has the address in k8sServiceHost",
        ports.join(", ")
    );
    Ok(Seen { line, good: false })
}

/// Where the URL leads.
async fn targets(url: &str) -> anyhow::Result<BTreeSet<SocketAddr>> {
    let uri: Uri = url.parse().context("it is no URL")?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let found = lookup_host((host, uri.port_u16().unwrap_or(HTTPS))).await;
    Ok(found.with_context(|| format!("{host} does not resolve"))?.collect())
}

/// The connections of a table that lead to one of `targets`, or are about to: by which address here, and to
/// which. There is no table of IPv6 where a kernel has none.
fn connections(
    table: &Path,
    targets: &BTreeSet<SocketAddr>,
) -> anyhow::Result<Vec<(SocketAddr, SocketAddr)>> {
    let cannot = || format!("cannot read the connections of this machine in {}", table.display());
    let file = match File::open(table) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(cannot),
    };
    let mut found = Vec::new();
    for line in file.lines() {
        let line = line.with_context(cannot)?;
        found.extend(connection(&line).filter(|(_, remote)| targets.contains(remote)));
    }
    Ok(found)
}

/// A line of a table: the local and the remote address of a connection that is established, or being made.
fn connection(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, remote, state) = (words.next()?, words.next()?, words.next()?);
    // `include/net/tcp_states.h`: ESTABLISHED and SYN_SENT.
    let in_use = matches!(state, "01" | "02");
    in_use.then_some(())?;
    Some((socket(local)?, socket(remote)?))
}

/// An address as the kernel prints it: words of 32 bits as this machine has them in memory.
fn socket(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let octets: [u8; 16] = words.concat().try_into().ok()?;
            Ipv6Addr::from(octets).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn a_connection_is_read_as_the_kernel_prints_it() {
        let rest =
            "00000000:00000000 02:00000A5C 00000000     0        0 4242 2 0000000000000000 20 4 30 10 -1";
        let read = |addresses: &str, state: &str| {
            let found = connection(&format!("   7: {addresses} {state} {rest}"));
            found.map(|(local, remote)| format!("{local} {remote}"))
        };
        let four = "0705A8C0:C350 097100CB:7A02";
        assert_eq!(read(four, "01").unwrap(), "192.168.5.7:50000 203.0.113.9:31234");
        assert_eq!(read(four, "02"), read(four, "01"), "one that is being made");
        for ended in ["06", "08", "0A", "", "1"] {
            assert_eq!(read(four, ended), None, "{ended}");
        }
        let six = "B80D0120000000000000000001000000:C350 0000000000000000FFFF0000097100CB:7A02";
        assert_eq!(read(six, "01").unwrap(), "[2001:db8::1]:50000 203.0.113.9:31234");
        for bad in
            ["", "  sl  local_address rem_address   st", "0: 1:2 3:4 01", "0: é0000000:1 0705A8C0:1 01"]
        {
            assert_eq!(connection(bad), None, "{bad}");
        }
    }
}
