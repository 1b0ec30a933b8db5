//! Authenticates agents by a token, which the API server reviews, or by the certificate that TLS has
//! verified. Then decides whether the agent may claim its identifiers (`claims`).
//!
//! Reviews under way and waiting are bounded, in all and for each address, and so is the time of each. Agents
//! that come back at once must not look like an attack to the API server. Agents with made-up tokens must not
//! hold memory here, and must not keep others from their review. A token that was accepted is not reviewed
//! again for [`TIME_TO_LIVE`]: an agent that looks for further servers comes back each second.

use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use moka::sync::Cache;
use portico_api::text::one_line;
use portico_kube::client::limited;
use portico_kube::error::describe;
use portico_net::permits::Permits;
use portico_net::slots::Source;
use portico_wire::konnectivity::{Code, Identifiers};
use thiserror::Error;
use tokio::time::timeout;

use super::claims::{Binding, forbidden};
use super::counters::{Counted, Counters};
use crate::lease::LONGEST_ANSWER;

/// Reviews at a time of agents that come by one address. It may be that of a gateway, with a whole site
/// behind it.
const MAX_REVIEWS_PER_ADDRESS: usize = 8;

/// Reviews at a time.
const MAX_REVIEWS: usize = 2 * MAX_REVIEWS_PER_ADDRESS;

/// Agents that wait for their review, with those whose review is under way, that come by one address. More
/// are refused at once: they come back by themselves.
const MAX_WAITING_PER_ADDRESS: usize = 256;

/// Agents of all addresses that wait for their review, with those whose review is under way.
const MAX_WAITING: usize = 2 * MAX_WAITING_PER_ADDRESS;

/// How long the API server may take for one review: half of what an agent waits for its answer.
const REVIEW: Duration = Duration::from_secs(5);

/// How long an accepted token needs no other review.
const TIME_TO_LIVE: Duration = Duration::from_secs(30);

/// Accepted tokens that are cached; beyond that, some are reviewed again earlier.
const MAX_CACHED: u64 = 4_096;

/// Most characters of what it says that an agent and the log are told.
const QUOTED: usize = 300;

/// The node of a token's pod as the API server reports it, since Kubernetes 1.30.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Why an agent is refused: for its log and ours.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Refusal {
    /// It has no name, or two.
    #[error("{0}")]
    Metadata(String),
    /// Its token is missing, or is not accepted.
    #[error("{0}")]
    Token(String),
    /// Nobody could say whether its token is good. It may be, the next time.
    #[error("{0}")]
    Review(String),
    /// The API server was asked, and has not said whether its token is good. It may be, the next time.
    #[error("the API server cannot review the token: no answer within {REVIEW:?}")]
    Unanswered,
    /// Its token was not reviewed, because too many others wait. It may be good, the next time.
    #[error(
        "as many agents as may wait for the review of their token already: {MAX_WAITING_PER_ADDRESS} of one \
         address, {MAX_WAITING} in all"
    )]
    Crowd,
    /// It claims what its identity is not bound to.
    #[error(
        "the agent may not claim {claimed}: --bind-identifiers of the server does not allow it to {}",
        known(identities)
    )]
    Identifiers {
        /// The first claim that is too much.
        claimed: String,
        /// The identities that it was authenticated as.
        identities: Vec<String>,
    },
    /// The server has as many agents as it may have.
    #[error("the server has {0} agents already, and --max-agents allows no more")]
    Full(usize),
}

impl Refusal {
    /// The label value for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Metadata(_) => "metadata",
            Self::Token(_) => "token",
            Self::Review(_) | Self::Unanswered | Self::Crowd => "review",
            Self::Identifiers { .. } => "identifiers",
            Self::Full(_) => "full",
        }
    }

    /// As upstream, whose agents take every code alike. Ours comes back soon if the API server is away, as it
    /// is until it has started.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Review(_) | Self::Unanswered | Self::Crowd => Code::UNAVAILABLE,
            Self::Full(_) => Code::RESOURCE_EXHAUSTED,
            _ => Code::UNKNOWN,
        }
    }
}

fn known(identities: &[String]) -> String {
    match identities {
        [] => "an agent without a certificate or token".to_owned(),
        identities => identities.join(", "),
    }
}

/// How agents authenticate beside TLS, and what their identities are bound to.
#[derive(Debug)]
pub struct Authentication {
    reviews: Option<Arc<Reviews>>,
    bindings: Vec<Binding>,
}

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
    /// For those that wait, with those that are under way.
    waiting: Permits<Source>,
    /// For those under way.
    under_way: Permits<Source>,
    /// The identities of tokens that were accepted, by the SHA-256 of each.
    accepted: Cache<[u8; 32], Arc<[String]>>,
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
        Self { reviews: None, bindings: Vec::new() }
    }

    /// By a token of this service account.
    #[must_use]
    pub fn by_token(client: Client, expected: Expected) -> Self {
        let reviews = Reviews {
            api: Api::all(limited(client, LONGEST_ANSWER)),
            expected,
            waiting: Permits::new(MAX_WAITING, MAX_WAITING_PER_ADDRESS),
            under_way: Permits::new(MAX_REVIEWS, MAX_REVIEWS_PER_ADDRESS),
            accepted: Cache::builder().max_capacity(MAX_CACHED).time_to_live(TIME_TO_LIVE).build(),
        };
        Self { reviews: Some(Arc::new(reviews)), bindings: Vec::new() }
    }

    /// With identifiers bound to identities. Without bindings, any agent may claim any.
    #[must_use]
    pub fn bound(self, bindings: Vec<Binding>) -> Self {
        Self { bindings, ..self }
    }

    /// Says why an agent with this metadata, and a certificate of these names, may not connect, or not claim
    /// what it claims. The caller bounds the time. `reviewed` is told of each review whether the API server
    /// has answered it in its time; not of one that failed at once.
    pub(crate) async fn check(
        &self,
        source: Source,
        metadata: &HeaderMap,
        mut identities: Vec<String>,
        claimed: &Identifiers,
        counters: &Counters,
        reviewed: impl FnOnce(bool) + Send + 'static,
    ) -> Result<(), Refusal> {
        if let Some(reviews) = &self.reviews {
            let header = only(metadata, AUTHORIZATION.as_str())?;
            let missing = || Refusal::Token("no authorization metadata in the request".to_owned());
            let token = header.ok_or_else(missing)?.strip_prefix("Bearer ");
            let token = token.ok_or_else(|| Refusal::Token("authorization is no Bearer token".to_owned()))?;
            identities.extend(reviews.check(source, token.trim(), counters, reviewed).await?.iter().cloned());
        }
        match forbidden(&self.bindings, &identities, claimed) {
            None => Ok(()),
            Some(claimed) => Err(Refusal::Identifiers { claimed, identities }),
        }
    }
}

impl Reviews {
    /// Whose token it is. A review goes on when nobody waits for it any more: the API server is at it.
    async fn check(
        self: &Arc<Self>,
        source: Source,
        token: &str,
        counters: &Counters,
        reviewed: impl FnOnce(bool) + Send + 'static,
    ) -> Result<Arc<[String]>, Refusal> {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
        if let Some(identities) = self.accepted.get(&hash) {
            return Ok(identities);
        }
        let slot = self.waiting.try_acquire(&source).ok_or(Refusal::Crowd)?;
        let _waiting = Counted::new(&counters.reviews_waiting);
        let permit = self.under_way.acquire(&source).await;
        let (reviews, token) = (Arc::clone(self), token.to_owned());
        let review = tokio::spawn(async move {
            let answer = reviews.review(&token).await;
            match &answer {
                Ok(_) => reviewed(true),
                Err(Refusal::Unanswered) => reviewed(false),
                Err(_) => {}
            }
            let status = answer?;
            let identities: Arc<[String]> = reviews.expected.judge(status).map_err(Refusal::Token)?.into();
            reviews.accepted.insert(hash, Arc::clone(&identities));
            drop((slot, permit));
            Ok(identities)
        });
        review.await.unwrap_or_else(|error| Err(Refusal::Review(error.to_string())))
    }

    async fn review(&self, token: &str) -> Result<TokenReviewStatus, Refusal> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: Some(vec![self.expected.audience.clone()]),
            },
            ..TokenReview::default()
        };
        let params = PostParams::default();
        match timeout(REVIEW, self.api.create(&params, &review)).await {
            Ok(Ok(reviewed)) => Ok(reviewed.status.unwrap_or_default()),
            Ok(Err(error)) => {
                let error = one_line(&describe(&error), QUOTED);
                Err(Refusal::Review(format!("the API server cannot review the token: {error}")))
            }
            Err(_) => Err(Refusal::Unanswered),
        }
    }
}

impl Expected {
    /// Whose token it is, or why it is not accepted.
    fn judge(&self, status: TokenReviewStatus) -> Result<Vec<String>, String> {
        if let Some(error) = status.error.filter(|error| !error.is_empty()) {
            let error = one_line(&error, QUOTED);
            return Err(format!("the API server does not accept the token: {error}"));
        }
        if status.authenticated != Some(true) {
            return Err("the API server does not accept the token".to_owned());
        }
        // An API server that does not know audiences answers with none.
        if !status.audiences.unwrap_or_default().contains(&self.audience) {
            return Err(format!("the token is not for the audience {}", self.audience));
        }
        let UserInfo { username, extra, .. } = status.user.unwrap_or_default();
        let name = username.unwrap_or_default();
        let expected = format!("system:serviceaccount:{}:{}", self.namespace, self.service_account);
        if name != expected {
            let name = one_line(&name, QUOTED);
            return Err(format!("the token is of {name:?}, not of {expected}"));
        }
        let nodes = extra.unwrap_or_default().remove(NODE_NAME).unwrap_or_default();
        Ok(std::iter::once(name).chain(nodes.iter().map(|node| format!("node:{node}"))).collect())
    }
}

/// The one value of a header, if there is one.
pub(crate) fn only<'a>(metadata: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Refusal> {
    let mut values = metadata.get_all(name).iter();
    let value = values.next();
    if values.next().is_some() {
        return Err(Refusal::Metadata(format!("multiple values for {name} in the context")));
    }
    let not_text = |_| Refusal::Metadata(format!("{name} is not text"));
    value.map(|value| value.to_str().map_err(not_text)).transpose()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;
    use portico_lab::faulty_api::nowhere;

    use super::*;

    fn status(authenticated: bool, audience: &str, user: &str) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated: Some(authenticated),
            audiences: Some(vec![audience.to_owned()]),
            user: Some(UserInfo { username: Some(user.to_owned()), ..UserInfo::default() }),
            error: None,
        }
    }

    fn expected() -> Expected {
        Expected {
            namespace: "kube-system".into(),
            service_account: "konnectivity-agent".into(),
            audience: AUDIENCE.into(),
        }
    }

    const AUDIENCE: &str = "system:konnectivity-server";
    const NAME: &str = "system:serviceaccount:kube-system:konnectivity-agent";

    #[test]
    fn only_the_service_account_with_the_audience_is_accepted() {
        assert_eq!(expected().judge(status(true, AUDIENCE, NAME)), Ok(vec![NAME.to_owned()]));
        for refused in [
            status(false, AUDIENCE, NAME),
            status(true, "api", NAME),
            status(true, AUDIENCE, "system:serviceaccount:kube-system:other"),
            status(true, AUDIENCE, "system:serviceaccount:default:konnectivity-agent"),
            status(true, AUDIENCE, &format!("{NAME}:x")),
            TokenReviewStatus { error: Some("expired".into()), ..status(true, AUDIENCE, NAME) },
            TokenReviewStatus::default(),
        ] {
            assert!(expected().judge(refused.clone()).is_err(), "{refused:?}");
        }
    }

    #[tokio::test]
    async fn a_token_that_is_missing_of_another_kind_or_there_twice_is_refused_unreviewed() {
        // A review would fail as such.
        let authentication = Authentication::by_token(nowhere(), expected());
        let (claimed, counters) = (Identifiers::default(), Counters::default());
        let source = Source::V4(0);
        let cases: [(&[&'static str], _); 4] = [
            (&[], "token"),
            (&["Basic dTpw"], "token"),
            (&["bearer lower"], "token"),
            (&["Bearer one", "Bearer two"], "metadata"),
        ];
        for (values, reason) in cases {
            let mut metadata = HeaderMap::new();
            for value in values {
                metadata.append(AUTHORIZATION, http::HeaderValue::from_static(value));
            }
            let refused = authentication.check(source, &metadata, Vec::new(), &claimed, &counters, |_| ());
            let refused = refused.await.unwrap_err();
            assert_eq!(refused.reason(), reason, "{values:?}: {refused}");
        }
    }

    /// What becomes of an agent whose token the API server would have to review.
    async fn reviewed_by(client: Client) -> Refusal {
        let authentication = Authentication::by_token(client, expected());
        let mut metadata = HeaderMap::new();
        metadata.insert(AUTHORIZATION, http::HeaderValue::from_static("Bearer token"));
        let (claimed, counters) = (Identifiers::default(), Counters::default());
        let checked = authentication.check(Source::V4(0), &metadata, Vec::new(), &claimed, &counters, |_| ());
        checked.await.unwrap_err()
    }

    #[tokio::test(start_paused = true)]
    async fn no_answer_is_another_refusal_than_an_api_server_that_is_away() {
        let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, std::io::Error>>()
        });
        assert_eq!(reviewed_by(Client::new(silent, "default")).await, Refusal::Unanswered);
        let away = tower::service_fn(async |_: http::Request<kube::client::Body>| {
            Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("refused"))
        });
        let refused = reviewed_by(Client::new(away, "default")).await;
        assert!(matches!(refused, Refusal::Review(_)), "{refused}");
    }

    /// An API server that answers each request so.
    fn answering(status: u16, body: String) -> Client {
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let body = kube::client::Body::from(body.clone().into_bytes());
            let response = http::Response::builder().status(status).body(body).unwrap();
            std::future::ready(Ok::<_, std::io::Error>(response))
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_not_read_to_its_end() {
        let review = serde_json::to_string(&TokenReview::default()).unwrap();
        for status in [200, 500] {
            let refused = reviewed_by(answering(status, review.clone() + &" ".repeat(LONGEST_ANSWER))).await;
            assert!(refused.to_string().contains("is longer than 1048576 bytes"), "{refused}");
        }
        let refused = reviewed_by(answering(200, review + &" ".repeat(LONGEST_ANSWER / 2))).await;
        assert!(matches!(refused, Refusal::Token(_)), "{refused}");
    }

    #[tokio::test]
    async fn a_long_text_of_the_api_server_is_cut_in_what_an_agent_is_told() {
        let text = "x".repeat(60_000);
        let refused = reviewed_by(answering(502, text.clone())).await;
        assert!(refused.to_string().len() < 1_000 && refused.reason() == "review", "{refused}");
        let status = TokenReviewStatus { error: Some(text), ..status(true, AUDIENCE, NAME) };
        let review = TokenReview { status: Some(status), ..TokenReview::default() };
        let refused = reviewed_by(answering(201, serde_json::to_string(&review).unwrap())).await;
        assert!(refused.to_string().len() < 1_000 && matches!(refused, Refusal::Token(_)), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_review_counts_for_its_time_also_if_its_agent_has_left() {
        let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, std::io::Error>>()
        });
        let authentication = Authentication::by_token(Client::new(silent, "default"), expected());
        let reviews = authentication.reviews.unwrap();
        let counters = Counters::default();
        let (sender, mut answered) = tokio::sync::oneshot::channel();
        let reviewed = |answered| sender.send(answered).unwrap();
        let mut check = Box::pin(reviews.check(Source::V4(0), "token", &counters, reviewed));
        assert!(futures_util::poll!(&mut check).is_pending());
        drop(check);
        assert_eq!((reviews.under_way.in_use(), reviews.waiting.in_use()), (1, 1));
        tokio::time::sleep(REVIEW + Duration::from_millis(1)).await;
        assert_eq!((reviews.under_way.in_use(), reviews.waiting.in_use()), (0, 0));
        assert_eq!(answered.try_recv(), Ok(false));
    }

    #[test]
    fn the_node_of_a_tokens_pod_is_an_identity() {
        let mut reviewed = status(true, AUDIENCE, NAME);
        let extra = [(NODE_NAME.to_owned(), vec!["node-1".to_owned()])];
        reviewed.user.as_mut().unwrap().extra = Some(extra.into());
        assert_eq!(expected().judge(reviewed), Ok(vec![NAME.to_owned(), "node:node-1".to_owned()]));
    }
}
