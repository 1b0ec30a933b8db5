//! AdmissionReview `v1`: what an API server asks, and the answer.

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_api::text::one_line;
use portico_kube::json::may_hold_more_than;
use portico_source::Object;
use portico_source::object::InvalidObject;
use portico_source::served::{Served, ServedKind};
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use super::review::{KINDS, ProposedChange};

/// The only version that is spoken, as `admissionReviewVersions` says.
const VERSION: &str = "admission.k8s.io/v1";

/// Most values of a question, which are 30 MB as a tree at worst. Both versions of a Seed with two thousand
/// datacenters, and what kubectl notes on each, are less.
const MOST_VALUES: usize = 100_000;

/// Most problems that are listed one by one. A Seed may make two thousand.
const MOST_LISTED: usize = 5;

/// Longest text of one problem. It may quote what the client wrote.
const LONGEST: usize = 1_000;

/// HTTP status of an object that is not valid, as a ValidatingAdmissionPolicy answers.
const INVALID: u16 = 422;

/// Why bytes are no question.
#[derive(Debug, Error)]
pub(super) enum Malformed {
    #[error("no AdmissionReview in JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{0:?} is not {VERSION}")]
    Version(String),
    #[error("it may hold more than {MOST_VALUES} values")]
    TooManyValues,
}

/// A question of an API server.
pub(super) struct Question {
    pub(super) uid: String,
    /// The kind of the object; `None` for one that no rule is about.
    pub(super) kind: Option<Kind>,
    pub(super) about: About,
}

/// What is asked.
pub(super) enum About {
    /// A change to be judged.
    Change(Box<ProposedChange>),
    /// An object that does not fit its kind, while the one before did; in words.
    Unreadable(String),
    /// Nothing that a rule is about: another kind, a deletion, a status, an object that was as unreadable
    /// before.
    Nothing,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    kind: KindOf,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    old_object: Value,
}

#[derive(Deserialize)]
struct KindOf {
    #[serde(default)]
    group: String,
    kind: String,
}

/// Reads the body of a request.
pub(super) fn question(body: &[u8]) -> Result<Question, Malformed> {
    if may_hold_more_than(body, MOST_VALUES) {
        return Err(Malformed::TooManyValues);
    }
    let Review { api_version, request } = serde_json::from_slice(body)?;
    if api_version != VERSION {
        return Err(Malformed::Version(one_line(&api_version, LONGEST)));
    }
    let Request { uid, kind, sub_resource, object, old_object } = request;
    let found = KINDS.into_iter().find(|known| known.name() == kind.kind && group_of(*known) == kind.group);
    let about = match found {
        Some(kind) if sub_resource.is_empty() && object.is_object() => about(kind, object, old_object),
        _ => About::Nothing,
    };
    Ok(Question { uid, kind: found, about })
}

fn about(kind: Kind, object: Value, old: Value) -> About {
    let is_new = !old.is_object();
    let before = if is_new { None } else { read(kind, old).ok() };
    match read(kind, object) {
        Ok(after) => About::Change(Box::new(ProposedChange { before, after })),
        Err((object, error)) if is_new || before.is_some() => {
            About::Unreadable(portico_source::invalid(object, &error).to_string())
        }
        Err(_) => About::Nothing,
    }
}

fn group_of(kind: Kind) -> &'static str {
    if kind == Kind::Service { Service::GROUP } else { Cluster::GROUP }
}

fn read(kind: Kind, value: Value) -> Result<Object, (ObjectRef, InvalidObject)> {
    match kind {
        Kind::Cluster => read_as::<Cluster>(value),
        Kind::Seed => read_as::<Seed>(value),
        Kind::KubermaticConfiguration => read_as::<KubermaticConfiguration>(value),
        _ => read_as::<Service>(value),
    }
}

fn read_as<K: ServedKind>(value: Value) -> Result<Object, (ObjectRef, InvalidObject)> {
    match serde_json::from_value::<Served<K>>(value) {
        Ok(Served { object: Ok(object), .. }) => Ok(object),
        Ok(Served { object: Err(error), reference, .. }) => Err((reference, error)),
        // A `Served` takes every value.
        Err(error) => {
            let reference = ObjectRef { kind: K::KIND, key: portico_api::meta::ObjectKey::new("", "") };
            Err((reference, InvalidObject { field: String::new(), message: error.to_string() }))
        }
    }
}

/// The answer: refused if there are `errors`, with `warnings` that kubectl prints.
pub(super) fn answer(uid: &str, errors: &[String], warnings: &[String]) -> String {
    let mut response = json!({"uid": uid, "allowed": errors.is_empty()});
    if !errors.is_empty() {
        let message = lines(errors).join("\n");
        response["status"] = json!({"code": INVALID, "reason": "Invalid", "message": message});
    }
    if !warnings.is_empty() {
        response["warnings"] = lines(warnings).into();
    }
    json!({"apiVersion": VERSION, "kind": "AdmissionReview", "response": response}).to_string()
}

/// The first of `texts`, and how many there are more.
fn lines(texts: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = texts.iter().take(MOST_LISTED).map(|text| one_line(text, LONGEST)).collect();
    let more = texts.len() - lines.len();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(request: Value) -> Result<Question, Malformed> {
        question(
            json!({"apiVersion": VERSION, "kind": "AdmissionReview", "request": request})
                .to_string()
                .as_bytes(),
        )
    }

    fn cluster(spec: &Value) -> Value {
        json!({"metadata": {"name": "a"}, "spec": spec})
    }

    fn of_cluster(object: Value, old: Value) -> Question {
        let kind = json!({"group": "kubermatic.k8c.io", "version": "v1", "kind": "Cluster"});
        asked(json!({"uid": "7", "kind": kind, "object": object, "oldObject": old})).unwrap()
    }

    #[test]
    fn a_question_that_would_be_a_huge_tree_is_not_read() {
        let values = vec![r#"{"":0}"#; MOST_VALUES].join(",");
        let body = format!(
            r#"{{"apiVersion":"{VERSION}","request":{{"uid":"","kind":{{"kind":"x"}},"object":[{values}]}}}}"#
        );
        assert!(matches!(question(body.as_bytes()), Err(Malformed::TooManyValues)));
    }

    #[test]
    fn a_new_version_of_an_object_is_a_change() {
        let question = of_cluster(cluster(&json!({})), cluster(&json!({"pause": true})));
        let About::Change(change) = question.about else { panic!("no change") };
        assert_eq!((&*question.uid, question.kind), ("7", Some(Kind::Cluster)));
        assert!(change.before.is_some() && change.after.reference().to_string() == "Cluster a");
        let question = of_cluster(cluster(&json!({})), Value::Null);
        assert!(matches!(question.about, About::Change(change) if change.before.is_none()));
    }

    #[test]
    fn an_object_that_does_not_fit_is_reported_in_the_words_of_the_check_unless_it_never_did() {
        let bad = || cluster(&json!({"cloud": {"dc": 7}}));
        let About::Unreadable(text) = of_cluster(bad(), cluster(&json!({}))).about else {
            panic!("readable")
        };
        assert!(text.starts_with("Cluster a: spec.cloud.dc: "), "{text}");
        assert!(matches!(of_cluster(bad(), Value::Null).about, About::Unreadable(_)));
        assert!(matches!(of_cluster(bad(), bad()).about, About::Nothing));
    }

    #[test]
    fn other_kinds_deletions_and_subresources_are_no_matter_of_a_rule() {
        for request in [
            json!({"uid": "1", "kind": {"group": "", "kind": "Pod"}, "object": {}}),
            json!({"uid": "1", "kind": {"group": "apps", "kind": "Service"}, "object": {}}),
            json!({"uid": "1", "kind": {"group": "", "kind": "Service"}, "object": null, "oldObject": {}}),
            json!({"uid": "1", "kind": {"kind": "Service"}, "subResource": "status", "object": {}}),
        ] {
            assert!(matches!(asked(request).unwrap().about, About::Nothing));
        }
    }

    #[test]
    fn what_is_no_review_is_malformed() {
        let old = r#"{"apiVersion": "admission.k8s.io/v1beta1",
            "request": {"uid": "1", "kind": {"kind": "Service"}}}"#;
        let deep = "[".repeat(100_000);
        for body in ["", "{}", "null", r#"{"request": 7}"#, old, &deep] {
            assert!(question(body.as_bytes()).is_err(), "{body:.40}");
        }
    }

    #[test]
    fn a_refusal_has_the_first_problems_and_the_number_of_the_others() {
        let many: Vec<String> = (0..2_000).map(|number| format!("problem {number}\n")).collect();
        let answer: Value = serde_json::from_str(&answer("7", &many, &many[..1])).unwrap();
        let response = &answer["response"];
        assert_eq!((&response["uid"], &response["allowed"]), (&json!("7"), &json!(false)));
        let message = response["status"]["message"].as_str().unwrap();
        assert_eq!((message.lines().count(), message.lines().next_back()), (6, Some("and 1995 more")));
        assert_eq!(response["warnings"], json!(["problem 0 "]));
    }

    #[test]
    fn a_text_that_quotes_megabytes_is_cut() {
        let answer = answer("7", &["ä".repeat(1 << 20)], &[]);
        assert!(answer.len() < 4_096, "{}", answer.len());
    }
}
