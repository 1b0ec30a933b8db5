//! Who is not reached through the proxy: the list in `NO_PROXY`, by the rules of curl (lib/noproxy.c).
//!
//! A single `*` is everybody. Else entries, separated by commas or blanks: a name stands for itself and all names below it, with or without
//! a dot before it; letters may be of either case; a final dot on either side means nothing. If the target is an IP address, entries are
//! addresses or networks (`10.0.0.0/8`), and names do not count. Entries know no ports: one with a port matches nobody.

use std::net::IpAddr;

use ipnet::IpNet;

/// The list as it was written. It is read anew for each question, of which there are a few a minute at most.
#[derive(Debug, Clone)]
pub(super) struct NoProxy(Box<str>);

impl NoProxy {
    pub(super) fn new(list: &str) -> Self {
        Self(list.into())
    }

    /// Whether this host, a name or an IP address without brackets, is reached without the proxy.
    pub(super) fn matches(&self, host: &str) -> bool {
        if &*self.0 == "*" {
            return true;
        }
        let mut entries = self.0.split([',', ' ', '\t']).filter(|entry| !entry.is_empty());
        match host.parse() {
            Ok(address) => entries.any(|entry| is_address(entry, address)),
            Err(_) => entries.any(|entry| is_name(entry, host)),
        }
    }
}

fn is_address(entry: &str, address: IpAddr) -> bool {
    match entry.split_once('/') {
        None => entry.parse() == Ok(address),
        // curl takes a prefix of no length for none.
        Some((single, "0")) => single.parse() == Ok(address),
        Some(_) => entry.parse::<IpNet>().is_ok_and(|network| network.contains(&address)),
    }
}

fn is_name(entry: &str, host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let entry = entry.strip_suffix('.').unwrap_or(entry);
    let entry = entry.strip_prefix('.').unwrap_or(entry);
    // Hosts are ASCII, entries need not be.
    let (Some(start), entry) = (host.len().checked_sub(entry.len()), entry.as_bytes()) else { return false };
    let (above, tail) = host.as_bytes().split_at(start);
    tail.eq_ignore_ascii_case(entry) && above.last().is_none_or(|last| *last == b'.')
}
