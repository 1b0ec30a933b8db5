//! Errors of a Kubernetes API in words.

use std::fmt;

use portico_api::text::one_line;

/// The status for a client whose credential is missing, expired or unknown (RFC 9110 section 15.5.2).
const UNAUTHORIZED: u16 = 401;

/// The status for a client that lacks a right (RFC 9110 section 15.5.4).
const FORBIDDEN: u16 = 403;

/// How the user of a service account begins; its namespace and its name follow.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Most characters of a text that is passed on.
const LONGEST: usize = 4_096;

/// Returns the error with its causes, which `kube` leaves out of its own messages.
///
/// If the API server itself returned a status, the text is that status, with what to do about it.
pub fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let said = causes.find_map(|cause| {
        let boxed = || cause.downcast_ref::<Box<kube::Error>>().map(|error| &**error);
        cause.downcast_ref().or_else(boxed)
    });
    if let Some(kube::Error::SerdeError(error)) = said {
        return no_api(&fit(&error.to_string()));
    }
    if let Some(kube::Error::Api(status)) = said {
        if status.code == 0 {
            return no_api("a failure without a code");
        }
        let answer = format!("the API server answered {}: {}", status.code, fit(&status.message));
        return match status.code {
            FORBIDDEN => format!("{answer}; {}", grant(&status.message)),
            UNAUTHORIZED => format!("{answer}; the token or certificate is not valid here, or has expired"),
            _ => answer,
        };
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    fit(&text)
}

/// The remedy for the right that `message` says is missing. Those of Portico's service accounts are in its
/// manifests. A person gets the one right, and not those of a service account.
fn grant(message: &str) -> String {
    match Missing::of(message) {
        Some(missing) if !is_of_portico(missing.user) => fit(&missing.to_string()),
        _ => "grant it, the rules are in deploy/".to_owned(),
    }
}

/// Whether a user is a service account that a manifest of Portico has.
fn is_of_portico(user: &str) -> bool {
    let account = user.strip_prefix(SERVICE_ACCOUNT).and_then(|account| account.split_once(':'));
    account.is_some_and(|(_, name)| name.starts_with("portico-") || name == "konnectivity-agent")
}

/// A right that somebody lacks, in the words of an API server.
struct Missing<'a> {
    user: &'a str,
    verb: &'a str,
    /// As a rule has it: with its subresource.
    resource: &'a str,
    group: &'a str,
    /// The namespace that it is missing in. `None` for all.
    namespace: Option<&'a str>,
}

impl<'a> Missing<'a> {
    /// Reads `User "U" cannot VERB resource "R" in API group "G" in the namespace "N"`. The last part is
    /// another for all namespaces.
    fn of(message: &'a str) -> Option<Self> {
        let (_, rest) = message.split_once("User \"")?;
        let (user, rest) = rest.split_once("\" cannot ")?;
        let (verb, rest) = rest.split_once(" resource \"")?;
        let (resource, rest) = rest.split_once("\" in API group \"")?;
        let (group, rest) = rest.split_once('"')?;
        let namespace = rest.strip_prefix(" in the namespace \"").and_then(|rest| rest.split_once('"'));
        Some(Self { user, verb, resource, group, namespace: namespace.map(|(name, _)| name) })
    }
}

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user, verb, resource, group, namespace } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "have an administrator grant {user:?} the verb {verb} on {resource}{dot}{group}")?;
        match namespace {
            Some(namespace) => write!(f, " in the namespace {namespace}, by a Role and a RoleBinding"),
            None => f.write_str(", by a ClusterRole and a ClusterRoleBinding"),
        }
    }
}

/// As one line. Kubernetes says last what is wrong with a long value, and a webhook may have several lines.
fn fit(text: &str) -> String {
    one_line(&text.trim().replace('\n', "; "), LONGEST)
}

/// What answered is something else, which shows by `why`.
#[must_use]
pub fn no_api(why: &str) -> String {
    format!(
        "what answered is no Kubernetes API ({why}); see whether the address is right, and what is on the way"
    )
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_refused_write_is_described_as_a_refused_read_is() {
        let status = json!({"status": "Failure", "code": 403, "reason": "Forbidden", "message": "no"});
        let refused = kube::Error::Api(serde_json::from_value(status).unwrap());
        let read = describe(&refused);
        assert_eq!(read, "the API server answered 403: no; grant it, the rules are in deploy/");
        let write = crate::apply::ApplyError { name: "a".to_owned(), source: Box::new(refused) };
        assert_eq!(write.to_string(), format!("cannot apply a: {read}"));
        assert_eq!(describe(&write), read, "and not as a debug dump of the status");
    }

    #[test]
    fn a_missing_right_is_described_in_the_words_of_the_api_server() {
        let described = |message: &str| {
            let status = json!({"status": "Failure", "code": 403, "reason": "Forbidden", "message": message});
            let status = serde_json::from_value(status).unwrap();
            describe(&watcher::Error::InitialListFailed(kube::Error::Api(status)))
        };
        let lacks = |user: &str, right: &str| format!("it is forbidden: User \"{user}\" cannot {right}");
        let all = "list resource \"clusters\" in API group \"kubermatic.k8c.io\" at the cluster scope";
        let own = lacks("system:serviceaccount:portico:portico-front", all);
        let said = format!("the API server answered 403: {own}; grant it, the rules are in deploy/");
        assert_eq!(described(&own), said);
        for (user, right, remedy) in [
            (
                "anna",
                all,
                "have an administrator grant \"anna\" the verb list on clusters.kubermatic.k8c.io, by a \
                 ClusterRole and a ClusterRoleBinding",
            ),
            (
                "system:serviceaccount:ci:runner",
                "get resource \"pods/proxy\" in API group \"\" in the namespace \"portico\"",
                "have an administrator grant \"system:serviceaccount:ci:runner\" the verb get on pods/proxy \
                 in the namespace portico, by a Role and a RoleBinding",
            ),
        ] {
            let message = lacks(user, right);
            assert_eq!(described(&message), format!("the API server answered 403: {message}; {remedy}"));
        }
    }
}
