//! The facts that a node may state of itself when it joins: name, labels, taints.
//!
//! The API server takes no others (`NodeRestriction`). A kubelet that asks for them ends at its start, where
//! nobody sees it. So they are refused here, with the remedy.

use std::fmt;
use std::str::FromStr;

use serde_json::{Value, json};

/// Below these, and in them, kubelets set labels themselves; others with `kubernetes.io` or `k8s.io` are an
/// administrator's.
const OWN_PREFIXES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];
/// Labels outside of these that kubelets may set.
const OWN_LABELS: [&str; 10] = [
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
/// The longest name, or value, of a label.
const LONGEST: usize = 63;
/// The longest name of an object, or prefix of a label.
const LONGEST_NAME: usize = 253;

/// The name of a node (RFC 1123), which becomes part of its certificate's subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeName(String);

/// A label, `key=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    key: String,
    value: String,
}

/// A taint, `key=value:Effect` or `key:Effect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    key: String,
    value: String,
    effect: String,
}

impl NodeName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_name(text) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!("{text:?} is no name of a node: lower-case letters, digits, - and . as in worker-1"))
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Label {
    /// Whether an object with these labels has it.
    pub fn is_among(&self, labels: &Value) -> bool {
        labels[&self.key] == self.value
    }
}

impl FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("give KEY=VALUE, such as disk=ssd")?;
        if !is_key(key) || !value.is_empty() && !is_word(value) {
            return Err(format!("{text:?} is no label: give KEY=VALUE, such as disk=ssd"));
        }
        let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
        let is_below = |prefix: &str, above: &str| {
            prefix.strip_suffix(above).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let reserved = ["kubernetes.io", "k8s.io"].iter().any(|above| is_below(prefix, above));
        if reserved && !OWN_LABELS.contains(&key) && !OWN_PREFIXES.iter().any(|own| is_below(prefix, own)) {
            return Err(format!(
                "no node may give itself the label {key}; an administrator may, once it has joined: \
                 kubectl label node NODE {text}"
            ));
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}

impl Taint {
    pub(super) fn object(&self) -> Value {
        json!({"key": self.key, "value": self.value, "effect": self.effect})
    }
}

impl FromStr for Taint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("give KEY=VALUE:EFFECT or KEY:EFFECT, where EFFECT is {}", EFFECTS.join(", "));
        let (taint, effect) = text.rsplit_once(':').ok_or_else(wrong)?;
        let (key, value) = taint.split_once('=').unwrap_or((taint, ""));
        if !is_key(key) || !value.is_empty() && !is_word(value) || !EFFECTS.contains(&effect) {
            return Err(wrong());
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned(), effect: effect.to_owned() })
    }
}

/// `name`, or `prefix/name`.
fn is_key(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    is_word(name) && prefix.is_none_or(is_name)
}

fn is_word(text: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    ends_well(text) && text.len() <= LONGEST && text.bytes().all(inside)
}

fn is_name(text: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let part = |part: &str| ends_well(part) && part.bytes().all(inside);
    text.len() <= LONGEST_NAME && text.split('.').all(part)
}

fn ends_well(text: &str) -> bool {
    let ends = [text.bytes().next(), text.bytes().last()];
    ends.iter().all(|byte| byte.is_some_and(|byte| byte.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nodes_are_names_of_objects() {
        for good in ["worker-1", "a", "1.example.com"] {
            assert!(good.parse::<NodeName>().is_ok(), "{good}");
        }
        for bad in ["", "Worker", "a/b", "..", "-a", "a..b", "a b", "ä", &"a".repeat(254)] {
            assert!(bad.parse::<NodeName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn labels_that_the_api_server_would_refuse_are_refused_with_who_may_set_them() {
        for good in ["disk=ssd", "example.com/disk=", "node.kubernetes.io/pool=a", "kubernetes.io/os=linux"] {
            assert_eq!(good.parse::<Label>().map(|label| label.to_string()).as_deref(), Ok(good));
        }
        for bad in
            ["disk", "=a", "a=b=c", "a=b,c=d", "a b=c", "Ex ample/a=b", &format!("a={}", "b".repeat(64))]
        {
            assert!(bad.parse::<Label>().is_err(), "{bad}");
        }
        for others in ["node-role.kubernetes.io/worker=", "kubernetes.io/a=b", "x.k8s.io/a=b"] {
            let error = others.parse::<Label>().unwrap_err();
            assert!(error.contains("kubectl label node"), "{error}");
        }
    }

    #[test]
    fn a_taint_has_one_of_three_effects() {
        let taint: Taint = "dedicated=gpu:NoSchedule".parse().unwrap();
        assert_eq!(taint.object(), json!({"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}));
        assert!("dedicated:NoExecute".parse::<Taint>().is_ok());
        for bad in ["", "a", "a:Never", ":NoSchedule", "a=b c:NoSchedule"] {
            assert!(bad.parse::<Taint>().is_err(), "{bad}");
        }
    }
}
