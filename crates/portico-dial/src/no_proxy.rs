//! Who is not reached through the proxy: the list in `NO_PROXY`, by the rules of curl (lib/noproxy.c).
//!
//! A single `*` is everybody. Else entries, separated by commas or blanks: a name stands for itself and all names below it, with or without
//! a dot before it; letters may be of either case; a final dot on either side means nothing. If the target is an IP address, entries are
//! addresses or networks (`10.0.0.0/8`), and names do not count. Entries know no ports: one with a port matches nobody.

use std::net::IpAddr;

use ipnet::IpNet;

/// The list as it was written. It is read anew for each question, of which there are a few a minute at most.
#[derive(Debug, Clone)]
pub(crate) struct NoProxy(Box<str>);

impl NoProxy {
    pub(crate) fn new(list: &str) -> Self {
        Self(list.into())
    }

    /// Whether this host, a name or an IP address without brackets, is reached without the proxy.
    pub(crate) fn matches(&self, host: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use tokio::net::TcpListener;
    use tokio::process::Command;

    use super::*;

    /// A list, a host, and whether the host is on the list.
    const RULES: &[(&str, &str, bool)] = &[
        ("", "example.com", false),
        ("*", "example.com", true),
        ("*", "192.0.2.1", true),
        // Only by itself.
        ("*,example.org", "example.com", false),
        ("*.example.com", "www.example.com", false),
        ("example.com", "example.com", true),
        ("example.com", "www.example.com", true),
        ("example.com", "nonexample.com", false),
        ("example.com", "example.com.org", false),
        ("example.com", "com", false),
        ("www.example.com", "example.com", false),
        (".example.com", "example.com", true),
        (".example.com", "www.example.com", true),
        (".example.com", "nonexample.com", false),
        ("com", "example.com", true),
        ("EXAMPLE.com", "www.Example.COM", true),
        ("example.com.", "example.com", true),
        ("example.com", "example.com.", true),
        (".example.com.", "www.example.com.", true),
        ("localhost,example.com", "example.com", true),
        ("localhost, example.com", "example.com", true),
        ("localhost example.com", "example.com", true),
        (" ,,localhost,\texample.com,", "example.com", true),
        // Entries know no ports.
        ("example.com:80", "example.com", false),
        ("192.0.2.1:80", "192.0.2.1", false),
        ("192.0.2.1", "192.0.2.1", true),
        ("192.0.2.1", "192.0.2.10", false),
        ("2.1", "192.0.2.1", false),
        ("192.0.2.0/24", "192.0.2.200", true),
        ("192.0.2.77/24", "192.0.2.200", true),
        ("192.0.2.0/24", "192.0.3.1", false),
        ("192.0.2.1/32", "192.0.2.1", true),
        ("0.0.0.0/0", "192.0.2.1", false),
        ("192.0.2.1/0", "192.0.2.1", true),
        ("192.0.2.0/33", "192.0.2.1", false),
        ("192.0.2.0/24", "example.com", false),
        ("2001:db8::1", "2001:db8::1", true),
        ("2001:DB8:0::1", "2001:db8::1", true),
        ("2001:db8::/32", "2001:db8:ffff::1", true),
        ("2001:db8::/32", "2001:db9::1", false),
        ("2001:db8::/32", "192.0.2.1", false),
    ];

    #[test]
    fn the_list_means_what_its_rules_say() {
        for (list, host, expected) in RULES {
            assert_eq!(NoProxy::new(list).matches(host), *expected, "{list:?} for {host}");
        }
    }

    /// curl's own answer to each of them: it finds a proxy and a server, both of which hang up, and we see to whom it turns.
    #[tokio::test]
    async fn curl_has_the_same_rules() {
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy_url = format!("http://{}", proxy.local_addr().unwrap());
        let server_port = server.local_addr().unwrap().port();
        // Not of IPv6: some versions (7.88) compare such addresses as text, whereas the documentation promises networks.
        for (list, host, expected) in RULES.iter().filter(|(_, host, _)| !host.contains(':')) {
            let mut curl = Command::new("curl")
                .args(["--disable", "--silent", "--proxy", &proxy_url, "--noproxy", list])
                .args(["--connect-to", &format!("::127.0.0.1:{server_port}"), &format!("http://{host}/")])
                .env_clear()
                .stdout(Stdio::null())
                .kill_on_drop(true)
                .spawn()
                .expect("curl is not there; scripts/setup test installs it");
            let direct = tokio::select! {
                _ = server.accept() => true,
                _ = proxy.accept() => false,
                status = curl.wait() => panic!("curl turned to nobody for {list:?} and {host}: {status:?}"),
            };
            assert_eq!(direct, *expected, "curl, {list:?} for {host}");
            curl.wait().await.unwrap();
        }
    }
}
