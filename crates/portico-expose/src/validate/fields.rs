//! Checks of fields that several kinds have in common.

use std::net::IpAddr;

use portico_api::setting::Setting;
use portico_api::strategy::ExposeStrategy;

use crate::findings::Findings;

impl Findings {
    /// `spec.exposeStrategy`, on each of the three kinds that have it.
    pub(super) fn strategy(&mut self, setting: &Setting<ExposeStrategy>, or_leave_it: &str) {
        if let Some(bad) = setting.bad() {
            let message = format!("{:?} is no strategy: {}", bad.value, bad.why);
            let all = ExposeStrategy::one_of(ExposeStrategy::ALL);
            let remedy = format!("write {all}, {or_leave_it}");
            self.refuse("unknown-strategy", "spec.exposeStrategy", message, &remedy);
        }
    }

    /// A list of networks. A bad entry is refused, never skipped: a shorter allow list may admit every
    /// client.
    pub(super) fn networks<T>(&mut self, field: &str, networks: &[Setting<T>]) {
        for (index, network) in networks.iter().enumerate() {
            self.network(&format!("{field}[{index}]"), network);
        }
    }

    /// A network in CIDR notation.
    pub(super) fn network<T>(&mut self, field: &str, network: &Setting<T>) {
        let remedy = "write address and prefix length, as in 198.51.100.0/24 or 198.51.100.7/32";
        match network {
            Setting::Good(_) => {}
            Setting::Unset => self.refuse("not-a-network", field, "it is empty".into(), remedy),
            Setting::Bad(bad) => {
                let why = why_no_network(&bad.value).unwrap_or_else(|| bad.why.to_string());
                let message = format!("{:?} is no network in CIDR notation: {why}", bad.value);
                self.refuse("not-a-network", field, message, remedy);
            }
        }
    }
}

/// The part of `text` that is no part of a network; the parser's error does not name it.
fn why_no_network(text: &str) -> Option<String> {
    let (address, prefix) = text.split_once('/').map_or((text, None), |(a, prefix)| (a, Some(prefix)));
    let Ok(address) = address.parse::<IpAddr>() else {
        return Some(format!("{address:?} is no IP address"));
    };
    let longest = if address.is_ipv4() { 32 } else { 128 };
    match prefix {
        Some(prefix) if !prefix.parse::<u8>().is_ok_and(|length| length <= longest) => {
            Some(format!("{prefix:?} is no prefix length from 0 to {longest}"))
        }
        None => Some("it has no prefix length".to_owned()),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;

    #[test]
    fn the_part_that_is_wrong_with_a_network_is_named() {
        for (text, why) in [
            ("10.0.0.1", "it has no prefix length"),
            ("10.1.0.0/33", "\"33\" is no prefix length from 0 to 32"),
            ("2001:db8::/129", "\"129\" is no prefix length from 0 to 128"),
            ("10.0.0.0/", "\"\" is no prefix length from 0 to 32"),
            ("10.0.0/24", "\"10.0.0\" is no IP address"),
            ("here", "\"here\" is no IP address"),
        ] {
            assert!(text.parse::<IpNet>().is_err(), "{text}");
            assert_eq!(why_no_network(text).as_deref(), Some(why));
        }
    }
}
