//! The conditions of a status, by the Kubernetes API conventions ("Typical status properties").
//!
//! Pure. A condition is written only when it changes, so that an object at rest causes no write.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// What a condition says now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed<'a> {
    /// The condition, in CamelCase: `Ready`.
    pub kind: &'a str,
    /// Whether it holds; `None` if that is not known.
    pub holds: Option<bool>,
    /// One word for programs, in CamelCase: `ListenerLimitReached`.
    pub reason: &'a str,
    /// A sentence for people.
    pub message: String,
    /// `metadata.generation` of the object that was observed, if it has one.
    pub generation: Option<i64>,
}

/// Sets one condition and returns whether that changed anything. Other conditions stay as they are.
///
/// `lastTransitionTime` moves to `now` only when the status itself changes.
pub fn set(conditions: &mut Vec<Condition>, observed: Observed<'_>, now: Timestamp) -> bool {
    let status = match observed.holds {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let mut condition = Condition {
        type_: observed.kind.to_owned(),
        status: status.to_owned(),
        reason: observed.reason.to_owned(),
        message: observed.message,
        observed_generation: observed.generation,
        last_transition_time: Time(now),
    };
    match conditions.iter_mut().find(|old| old.type_ == condition.type_) {
        Some(old) => {
            if old.status == condition.status {
                condition.last_transition_time = old.last_transition_time.clone();
            }
            let changed = *old != condition;
            *old = condition;
            changed
        }
        None => {
            conditions.push(condition);
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn observed(holds: bool, reason: &str, generation: i64) -> Observed<'_> {
        let message = "because".into();
        Observed { kind: "Ready", holds: Some(holds), reason, message, generation: Some(generation) }
    }

    #[test]
    fn a_condition_that_says_the_same_is_no_change() {
        let mut conditions = Vec::new();
        assert!(set(&mut conditions, observed(true, "Up", 1), at(1)));
        assert!(!set(&mut conditions, observed(true, "Up", 1), at(2)));
        assert_eq!(conditions[0].last_transition_time, Time(at(1)));
    }

    #[test]
    fn the_transition_time_moves_with_the_status_and_with_nothing_else() {
        let mut conditions = Vec::new();
        set(&mut conditions, observed(true, "Up", 1), at(1));
        assert!(set(&mut conditions, observed(true, "StillUp", 2), at(2)));
        assert_eq!(conditions[0].last_transition_time, Time(at(1)));
        assert_eq!(conditions[0].observed_generation, Some(2));
        assert!(set(&mut conditions, observed(false, "Down", 2), at(3)));
        assert_eq!(conditions[0].last_transition_time, Time(at(3)));
        let unknown = Observed { holds: None, ..observed(false, "Away", 2) };
        assert!(set(&mut conditions, unknown, at(4)));
        assert_eq!(conditions[0].status, "Unknown");
    }

    #[test]
    fn conditions_of_others_stay_in_their_place() {
        let mut conditions = Vec::new();
        let other = Observed { kind: "Other", ..observed(true, "Mine", 1) };
        set(&mut conditions, other, at(1));
        set(&mut conditions, observed(true, "Up", 1), at(2));
        set(&mut conditions, observed(false, "Down", 1), at(3));
        let kinds: Vec<_> = conditions.iter().map(|condition| condition.type_.as_str()).collect();
        assert_eq!(kinds, ["Other", "Ready"]);
        assert_eq!(conditions[0].last_transition_time, Time(at(1)));
    }
}
