//! What is wrong with the objects that decide exposure, each with object, field, value and remedy.
//!
//! An object can be wrong in three degrees. *Refused*: using it would expose something as nobody meant; the version before
//! stays in force. *Void in part*: an error, but the rest of the object is used. *Warning*: it works, probably not as meant.

mod cluster;
mod configuration;
mod seed;

use std::net::IpAddr;

use ipnet::IpNet;
use portico_api::meta::{Kind, ObjectMeta, ObjectRef};
use portico_api::problem::{Problem, Severity};
use portico_api::setting::Setting;
use portico_api::strategy::ExposeStrategy;

pub(crate) use cluster::strategy_change;
pub use cluster::{Before, ClusterContext, cluster};
pub use configuration::configuration;
pub use seed::seed;

/// What validation found on one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Everything that is wrong, in the order of the fields.
    pub problems: Vec<Problem>,
    /// The object must not be used; the version before it stays.
    pub refused: bool,
}

/// Collects what is wrong with one object.
struct Findings {
    object: ObjectRef,
    verdict: Verdict,
}

impl Findings {
    fn of(kind: Kind, meta: &ObjectMeta) -> Self {
        let verdict = Verdict { problems: Vec::new(), refused: false };
        Self { object: ObjectRef::new(kind, meta), verdict }
    }

    /// The object must not be used.
    fn refuse(&mut self, reason: &'static str, field: &str, message: String, remedy: &str) {
        self.verdict.refused = true;
        self.void(reason, field, message, remedy);
    }

    /// This field does not count; the rest of the object does.
    fn void(&mut self, reason: &'static str, field: &str, message: String, remedy: &str) {
        self.push(Severity::Error, reason, field, message, remedy);
    }

    /// It works, probably not as meant.
    fn warn(&mut self, reason: &'static str, field: &str, message: String, remedy: &str) {
        self.push(Severity::Warning, reason, field, message, remedy);
    }

    fn push(&mut self, severity: Severity, reason: &'static str, field: &str, message: String, remedy: &str) {
        let (object, field, remedy) = (self.object.clone(), field.into(), remedy.into());
        self.verdict.problems.push(Problem { severity, reason, object, field, message, remedy });
    }

    /// `spec.exposeStrategy`, on each of the three kinds that have it.
    fn strategy(&mut self, setting: &Setting<ExposeStrategy>, or_leave_it: &str) {
        if let Some(bad) = setting.bad() {
            let message = format!("{:?} is no strategy: {}", bad.value, bad.why);
            let remedy = format!("write NodePort, LoadBalancer or Tunneling, {or_leave_it}");
            self.refuse("unknown-strategy", "spec.exposeStrategy", message, &remedy);
        }
    }

    /// A list of networks. An entry that is none is refused, never skipped: a shorter allow list may mean an open door.
    fn networks(&mut self, field: &str, networks: &[Setting<IpNet>]) {
        for (index, network) in networks.iter().enumerate() {
            self.network(&format!("{field}[{index}]"), network);
        }
    }

    /// A network in CIDR notation.
    fn network(&mut self, field: &str, network: &Setting<IpNet>) {
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

/// Which part of `text` keeps it from being a network; its parser does not tell.
fn why_no_network(text: &str) -> Option<String> {
    let (address, prefix) = text.split_once('/').map_or((text, None), |(a, prefix)| (a, Some(prefix)));
    let Ok(address) = address.parse::<IpAddr>() else {
        return Some(format!("{address:?} is no IP address"));
    };
    let longest = if address.is_ipv4() { 32 } else { 128 };
    match prefix {
        None => Some("it has no prefix length".to_owned()),
        Some(prefix) if !prefix.parse::<u8>().is_ok_and(|length| length <= longest) => {
            Some(format!("{prefix:?} is no prefix length from 0 to {longest}"))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
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
