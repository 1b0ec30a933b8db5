//! Errors of a Kubernetes API in words.

use portico_api::text::one_line;

/// The status for a client whose credential is missing, expired or unknown (RFC 9110 section 15.5.2).
const UNAUTHORIZED: u16 = 401;

/// The status for a client that lacks a right (RFC 9110 section 15.5.4).
const FORBIDDEN: u16 = 403;

/// Most characters of a text that is passed on.
const LONGEST: usize = 4_096;

/// Returns the error with its causes, which `kube` leaves out of its own messages.
///
/// If the API server itself returned a status, the text is that status, with what to do about it.
pub fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let said = causes.find_map(|cause| cause.downcast_ref());
    if let Some(kube::Error::SerdeError(error)) = said {
        return no_api(&fit(&error.to_string()));
    }
    if let Some(kube::Error::Api(status)) = said {
        if status.code == 0 {
            return no_api("a failure without a code");
        }
        let answer = format!("the API server answered {}: {}", status.code, fit(&status.message));
        return match status.code {
            FORBIDDEN => format!("{answer}; grant it, the rules are in deploy/"),
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

    use super::*;

    #[test]
    fn a_missing_right_is_described_in_the_words_of_the_api_server() {
        let status = serde_json::from_str(
            r#"{"status": "Failure", "code": 403, "reason": "Forbidden",
                "message": "services is forbidden: User \"portico\" cannot list resource \"services\""}"#,
        );
        let error = watcher::Error::InitialListFailed(kube::Error::Api(status.unwrap()));
        assert_eq!(
            describe(&error),
            "the API server answered 403: services is forbidden: User \"portico\" cannot list resource \
             \"services\"; grant it, the rules are in deploy/"
        );
    }
}
