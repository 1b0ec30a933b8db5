//! Whether an agent may connect: by its token, which the API server reviews, or by the certificate that TLS
//! has verified already.
//!
//! Reviews under way are bounded, and so is the time of each. A token that was accepted is not reviewed again
//! for [`HOLDS`]: an agent that looks for further servers comes back each second.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;

use super::agents::only;

/// Reviews at a time: agents that come back at once must not look like an attack to the API server.
const MAX_REVIEWS: usize = 8;

/// How long an accepted token needs no other review.
const HOLDS: Duration = Duration::from_secs(30);

/// Accepted tokens that are remembered; beyond that, the oldest are reviewed again.
const MAX_REMEMBERED: usize = 4_096;

/// How agents authenticate beside TLS.
#[derive(Debug)]
pub struct Authentication(Option<Reviews>);

/// Whose tokens are accepted.
#[derive(Debug, Clone)]
pub struct Expected {
    /// Namespace of the service account.
    pub namespace: String,
    /// The service account.
    pub service_account: String,
    /// What the token is for.
    pub audience: String,
}

struct Reviews {
    api: Api<TokenReview>,
    expected: Expected,
    permits: Semaphore,
    seed: RandomState,
    /// Hashes of tokens that were accepted, and when.
    accepted: Mutex<Vec<(u64, Instant)>>,
}

impl std::fmt::Debug for Reviews {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reviews").field("expected", &self.expected).finish_non_exhaustive()
    }
}

impl Authentication {
    /// TLS is all.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// By a token of this service account.
    #[must_use]
    pub fn by_token(client: Client, expected: Expected) -> Self {
        Self(Some(Reviews {
            api: Api::all(client),
            expected,
            permits: Semaphore::new(MAX_REVIEWS),
            seed: RandomState::new(),
            accepted: Mutex::default(),
        }))
    }

    /// Says why an agent with this metadata is not accepted. The caller bounds the time.
    pub(crate) async fn check(&self, metadata: &HeaderMap) -> Result<(), String> {
        let Some(reviews) = &self.0 else { return Ok(()) };
        let header =
            only(metadata, AUTHORIZATION.as_str())?.ok_or("no authorization metadata in the request")?;
        let token = header.strip_prefix("Bearer ").ok_or("authorization is no Bearer token")?;
        reviews.check(token.trim()).await
    }
}

impl Reviews {
    async fn check(&self, token: &str) -> Result<(), String> {
        let hash = self.seed.hash_one(token);
        if self.holds(hash).await {
            return Ok(());
        }
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: Some(vec![self.expected.audience.clone()]),
            },
            ..TokenReview::default()
        };
        let reviewed = self.api.create(&PostParams::default(), &review).await;
        let reviewed =
            reviewed.map_err(|error| format!("the API server cannot review the token: {error}"))?;
        self.expected.judge(reviewed.status.unwrap_or_default())?;
        self.remember(hash).await;
        Ok(())
    }

    async fn holds(&self, hash: u64) -> bool {
        let mut accepted = self.accepted.lock().await;
        accepted.retain(|(_, since)| since.elapsed() < HOLDS);
        accepted.iter().any(|(known, _)| *known == hash)
    }

    async fn remember(&self, hash: u64) {
        let mut accepted = self.accepted.lock().await;
        if accepted.len() >= MAX_REMEMBERED {
            accepted.remove(0);
        }
        accepted.push((hash, Instant::now()));
    }
}

impl Expected {
    /// Says why a reviewed token is not accepted.
    fn judge(&self, status: TokenReviewStatus) -> Result<(), String> {
        if let Some(error) = status.error.filter(|error| !error.is_empty()) {
            return Err(format!("the API server does not accept the token: {error}"));
        }
        if status.authenticated != Some(true) {
            return Err("the API server does not accept the token".to_owned());
        }
        // An API server that does not know audiences answers with none.
        if !status.audiences.unwrap_or_default().contains(&self.audience) {
            return Err(format!("the token is not for the audience {}", self.audience));
        }
        let name = status.user.and_then(|user| user.username).unwrap_or_default();
        let expected = format!("system:serviceaccount:{}:{}", self.namespace, self.service_account);
        if name == expected { Ok(()) } else { Err(format!("the token is of {name}, not of {expected}")) }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::*;

    fn status(authenticated: bool, audience: &str, user: &str) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated: Some(authenticated),
            audiences: Some(vec![audience.to_owned()]),
            user: Some(UserInfo { username: Some(user.to_owned()), ..UserInfo::default() }),
            error: None,
        }
    }

    #[test]
    fn only_the_service_account_with_the_audience_is_accepted() {
        let expected = Expected {
            namespace: "kube-system".into(),
            service_account: "konnectivity-agent".into(),
            audience: "system:konnectivity-server".into(),
        };
        let (audience, name) =
            ("system:konnectivity-server", "system:serviceaccount:kube-system:konnectivity-agent");
        assert_eq!(expected.judge(status(true, audience, name)), Ok(()));
        for refused in [
            status(false, audience, name),
            status(true, "api", name),
            status(true, audience, "system:serviceaccount:kube-system:other"),
            status(true, audience, "system:serviceaccount:default:konnectivity-agent"),
            status(true, audience, &format!("{name}:x")),
            TokenReviewStatus { error: Some("expired".into()), ..status(true, audience, name) },
            TokenReviewStatus::default(),
        ] {
            assert!(expected.judge(refused.clone()).is_err(), "{refused:?}");
        }
    }
}
