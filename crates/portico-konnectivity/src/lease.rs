//! A server's Lease (coordination.k8s.io/v1), and when it expires. Agents count those that have not, and
//! other servers remove those that have.

use k8s_openapi::api::coordination::v1::Lease as Known;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use k8s_openapi::{Metadata, NamespaceResourceScope, Resource};
use kube::core::TypeMeta;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The longest answer of the API server that is read, to a review, to a page of Leases or to one watch: what
/// it says may be in the hands of a cluster's users.
pub(crate) const LONGEST_ANSWER: usize = 1 << 20;

/// A Lease whose own times are texts. The API server takes dates that no `Timestamp` holds, as in the year
/// 9999. One of those must not make a list unreadable.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Lease {
    /// Not in a list.
    #[serde(flatten)]
    pub(crate) types: Option<TypeMeta>,
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) spec: LeaseSpec,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LeaseSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) holder_identity: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lease_duration_seconds: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) acquire_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) renew_time: Option<String>,
    /// What others wrote beside it.
    #[serde(flatten)]
    pub(crate) others: Map<String, Value>,
}

impl Resource for Lease {
    const API_VERSION: &'static str = Known::API_VERSION;
    const GROUP: &'static str = Known::GROUP;
    const KIND: &'static str = Known::KIND;
    const VERSION: &'static str = Known::VERSION;
    const URL_PATH_SEGMENT: &'static str = Known::URL_PATH_SEGMENT;
    type Scope = NamespaceResourceScope;
}

impl Metadata for Lease {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// `at` as the API server wants the times of a Lease: with microseconds.
pub(crate) fn micro_time(at: Timestamp) -> String {
    format!("{at:.6}")
}

/// When a Lease expires that is not renewed. `None`: it is not valid.
pub(crate) fn expires(lease: &Lease) -> Option<Timestamp> {
    let spec = &lease.spec;
    let since: Timestamp = spec.renew_time.as_ref().or(spec.acquire_time.as_ref())?.parse().ok()?;
    since.checked_add(SignedDuration::from_secs(i64::from(spec.lease_duration_seconds?))).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lease(spec: &Value) -> Lease {
        serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap()
    }

    #[test]
    fn a_lease_is_valid_from_its_last_renewal_for_its_duration() {
        let at = |second| Some(Timestamp::from_second(second).unwrap());
        let time = |second| json!(micro_time(Timestamp::from_second(second).unwrap()));
        let renewed = json!({"acquireTime": time(10), "renewTime": time(100), "leaseDurationSeconds": 30});
        assert_eq!(expires(&lease(&renewed)), at(130));
        let without = |field| {
            let mut spec = renewed.clone();
            spec[field].take();
            expires(&lease(&spec))
        };
        assert_eq!(without("renewTime"), at(40));
        assert_eq!(without("leaseDurationSeconds"), None);
        assert_eq!(expires(&Lease::default()), None);
    }

    #[test]
    fn a_lease_with_a_time_that_nobody_can_read_is_not_valid_and_can_be_renewed() {
        let spec = json!({"leaseDurationSeconds": 30, "renewTime": "9999-12-31T23:59:59.000000Z",
            "leaseTransitions": 7});
        let mut lease = lease(&spec);
        assert_eq!(expires(&lease), None);
        lease.spec.renew_time = Some(micro_time(Timestamp::from_second(1).unwrap()));
        let written = serde_json::to_value(&lease).unwrap();
        let renewed = json!({"leaseDurationSeconds": 30, "renewTime": "1970-01-01T00:00:01.000000Z",
            "leaseTransitions": 7});
        assert_eq!(written["spec"], renewed, "what others wrote beside it stays");
    }
}
