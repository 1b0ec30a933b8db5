//! The proxy that the environment names, and the targets that are reached without it.
//!
//! The proxy is the first of curl's variables for `https://` that is not empty: a tunnel is always asked for
//! by CONNECT. Exceptions are in `NO_PROXY`, and count for a proxy that was configured, too. Their rules are
//! those of [`Matcher`], which follows curl. A name covers itself and the names below it. IP addresses and
//! networks cover targets that are given as an address. Entries have no ports. Unlike curl, it takes
//! `0.0.0.0/0` for every IPv4 address and `*` for every target even if other entries stand beside it.
//!
//! A proxy that the environment names leads nowhere on this machine, as with programs in Go: `localhost` and
//! loopback addresses are reached without it. A URL that was configured is used as it is, without these
//! exceptions.

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;

use crate::proxy::Proxy;
use crate::setting::{self, ProxyError};
use crate::target::Target;

const PROXY: [&str; 4] = ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];

const NO_PROXY: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// Returns the proxy, if one is named.
///
/// [`Matcher::from_env`] is not used for it. It ignores a URL that it cannot use, so that connections go
/// round the proxy. Here that is an error.
pub(crate) fn proxy(environment: &impl Fn(&str) -> Option<String>) -> Result<Option<Proxy>, ProxyError> {
    first(environment, &PROXY).map(|(name, url)| setting::parse(name, &url)).transpose()
}

/// Which targets are reached without the proxy.
#[derive(Debug)]
pub(crate) struct Exceptions(Matcher);

/// This machine.
const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.0/8", "::1"];

impl Exceptions {
    /// Reads `NO_PROXY`.
    pub(crate) fn of(environment: &impl Fn(&str) -> Option<String>) -> Self {
        Self::new(&no_proxy(environment), &[])
    }

    /// Like [`Self::of`], with this machine as one more exception.
    pub(crate) fn with_loopback(environment: &impl Fn(&str) -> Option<String>) -> Self {
        Self::new(&no_proxy(environment), &LOOPBACK)
    }

    fn new(list: &str, more: &[&str]) -> Self {
        // The matcher separates entries by commas, takes final dots literally, and `*` for names only.
        let entries = list.split([',', ' ', '\t']).map(|entry| entry.trim_end_matches('.'));
        let mut entries: Vec<&str> = entries.chain(more.iter().copied()).collect();
        if entries.contains(&"*") {
            entries.extend(["0.0.0.0/0", "::/0"]);
        }
        // It wants to know a proxy. Ours has been parsed already.
        Self(Matcher::builder().all("http://proxy").no(entries.join(",")).build())
    }

    /// Whether the target is reached without the proxy.
    pub(crate) fn contains(&self, target: &Target) -> bool {
        let host = target.host.trim_end_matches('.').into();
        let authority = Target { host, port: target.port }.to_string();
        let uri = Uri::builder().scheme("https").authority(authority).path_and_query("/").build();
        uri.is_ok_and(|uri| self.0.intercept(&uri).is_none())
    }
}

fn no_proxy(environment: &impl Fn(&str) -> Option<String>) -> String {
    first(environment, &NO_PROXY).map(|(_, list)| list).unwrap_or_default()
}

fn first(
    environment: &impl Fn(&str) -> Option<String>,
    names: &[&'static str],
) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| {
        environment(name).filter(|value| !value.trim().is_empty()).map(|value| (*name, value))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use tokio::net::TcpListener;
    use tokio::process::Command;

    use super::*;

    fn chosen(variables: &[(&str, &str)]) -> Option<String> {
        let environment = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        proxy(&environment).unwrap().map(|proxy| proxy.to_string())
    }

    #[test]
    fn lower_case_goes_first_then_the_scheme_then_all() {
        let mut variables = vec![
            ("https_proxy", "http://one:1"),
            ("HTTPS_PROXY", "http://two:2"),
            ("all_proxy", "http://three:3"),
            ("ALL_PROXY", "http://four:4"),
        ];
        for expected in ["http://one:1", "http://two:2", "http://three:3", "http://four:4"] {
            assert_eq!(chosen(&variables).as_deref(), Some(expected));
            // An empty one does not count.
            variables[0].1 = "";
            assert_ne!(chosen(&variables).as_deref(), Some(expected));
            variables.remove(0);
        }
        assert_eq!(chosen(&variables), None);
    }

    #[test]
    fn the_variable_for_plain_http_does_not_count() {
        assert_eq!(chosen(&[("http_proxy", "http://one:1"), ("HTTP_PROXY", "http://two:2")]), None);
    }

    #[test]
    fn a_variable_that_is_no_url_is_named() {
        let error =
            proxy(&|name: &str| (name == "ALL_PROXY").then(|| "socks5://x:1".to_owned())).unwrap_err();
        assert!(error.to_string().starts_with("ALL_PROXY \"socks5://x:1\": only http://"), "{error}");
    }

    /// A list, a host, and whether the host is on the list.
    const RULES: &[(&str, &str, bool)] = &[
        ("", "example.com", false),
        ("*", "example.com", true),
        ("*", "192.0.2.1", true),
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
        ("192.0.2.1/0", "192.0.2.1", true),
        ("192.0.2.0/33", "192.0.2.1", false),
        ("192.0.2.0/24", "example.com", false),
        ("2001:db8::1", "2001:db8::1", true),
        ("2001:DB8:0::1", "2001:db8::1", true),
        ("2001:db8::/32", "2001:db8:ffff::1", true),
        ("2001:db8::/32", "2001:db9::1", false),
        ("2001:db8::/32", "192.0.2.1", false),
    ];

    /// Where curl says no.
    const UNLIKE_CURL: &[(&str, &str, bool)] = &[
        ("*,example.org", "example.com", true),
        ("0.0.0.0/0", "192.0.2.1", true),
        ("192.0.2.1/0", "198.51.100.1", true),
    ];

    #[test]
    fn the_list_means_what_its_rules_say() {
        for (list, host, expected) in RULES.iter().chain(UNLIKE_CURL) {
            let target = Target { host: (*host).into(), port: 443 };
            assert_eq!(Exceptions::new(list, &[]).contains(&target), *expected, "{list:?} for {host}");
        }
    }

    /// Asks curl. It finds a proxy and a server, which both hang up. The test sees which of them it connects
    /// to.
    #[tokio::test]
    async fn curl_has_the_same_rules() {
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy_url = format!("http://{}", proxy.local_addr().unwrap());
        let server_port = server.local_addr().unwrap().port();
        // Not for IPv6: some versions (7.88) compare such addresses as text.
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
                status = curl.wait() => panic!("curl connected to neither for {list:?} and {host}: \
                    {status:?}"),
            };
            assert_eq!(direct, *expected, "curl, {list:?} for {host}");
            curl.wait().await.unwrap();
        }
    }
}
