//! When a server's Lease expires. Agents count those that have not, and other servers remove those that have.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// When a Lease expires that is not renewed. `None`: it is not valid.
pub(crate) fn expires(lease: &Lease) -> Option<Timestamp> {
    let spec = lease.spec.as_ref()?;
    let since = spec.renew_time.as_ref().or(spec.acquire_time.as_ref())?.0;
    let seconds = spec.lease_duration_seconds?;
    since.checked_add(SignedDuration::from_secs(i64::from(seconds))).ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    use super::*;

    #[test]
    fn a_lease_is_valid_from_its_last_renewal_for_its_duration() {
        let time = |second| Some(MicroTime(Timestamp::from_second(second).unwrap()));
        let lease = |spec| Lease { spec: Some(spec), ..Lease::default() };
        let renewed = LeaseSpec {
            acquire_time: time(10),
            renew_time: time(100),
            lease_duration_seconds: Some(30),
            ..LeaseSpec::default()
        };
        assert_eq!(expires(&lease(renewed.clone())), Some(Timestamp::from_second(130).unwrap()));
        let never_renewed = LeaseSpec { renew_time: None, ..renewed.clone() };
        assert_eq!(expires(&lease(never_renewed)), Some(Timestamp::from_second(40).unwrap()));
        assert_eq!(expires(&lease(LeaseSpec { lease_duration_seconds: None, ..renewed })), None);
        assert_eq!(expires(&Lease::default()), None);
    }
}
