//! What is wrong with the objects that decide exposure, each with object, field, value and remedy.
//!
//! An object can be wrong in three degrees. *Refused*: using it would expose something as nobody meant; the version before
//! stays in force. *Void in part*: an error, but the rest of the object is used. *Warning*: it works, probably not as meant.

mod cluster;
mod configuration;
mod seed;

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
                let message = format!("{:?} is no network in CIDR notation: {}", bad.value, bad.why);
                self.refuse("not-a-network", field, message, remedy);
            }
        }
    }
}
