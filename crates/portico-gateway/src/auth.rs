//! Authenticates tunnel clients: which cluster a certificate or a token opens, and whether it still does.
//!
//! [`Identities::authenticate`] looks at the certificate of the connection, which `portico-tunnel` has
//! verified. Then it looks at the token: in the static file ([`tokens`]), or by a [`review`] of the cluster's
//! API server. Accepted evidence becomes a [`credential`] that the streams of a connection hold. When a
//! certificate, a file or an API server revokes it, [`supervise`] has those streams cut.
//!
//! Clients without TLS are not asked: `--tunnel-plaintext` says so.

mod changes;
mod credential;
mod hash;
mod review;
mod supervise;
#[cfg(test)]
mod tests;
mod token_review;
mod tokens;
mod verdict;

use std::borrow::Cow;
use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use portico_api::names::Tenant;
use portico_net::slots::{Slot, Slots, Source};
use portico_tunnel::{Request, Tls, Token};

pub use review::{REVIEW_BUCKETS, ReviewTotals};
pub use tokens::{StaticTokens, TokensError};

pub(crate) use credential::{Credential, Credentials};
pub(crate) use hash::{Hash, hash};
pub(crate) use review::TokenReviewer;
pub(crate) use token_review::{Answer, review};

use crate::config::Config;
use crate::line_limit::TenantLines;
use crate::outcome::Refusal;
use changes::{Affected, Changes};
use credential::{Evidence, Registry};
use review::Reviews;
use verdict::Verdict;

/// Longest token taken: what most HTTP servers take for a whole header, and more than any service account's.
const MAX_TOKEN: usize = 8 * 1024;

/// How tokens of tunnel clients are verified.
#[derive(Debug, Clone, Default)]
pub struct TokenSettings {
    /// The static file.
    pub file: Option<Arc<StaticTokens>>,
    /// TokenReview by the cluster's own API server: how often tokens in use are reviewed again. `None` is
    /// off.
    pub review: Option<Duration>,
}

/// How a client authenticated, or tried to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By nothing at all.
    None,
    /// By a client certificate.
    Certificate,
    /// By a token of the static file.
    StaticToken,
    /// By a token that the API server of the cluster reviews.
    TokenReview,
}

impl Method {
    /// Each of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Certificate, Self::StaticToken, Self::TokenReview];

    /// The label value for metrics. Stable.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Certificate => "certificate",
            Self::StaticToken => "static_token",
            Self::TokenReview => "token_review",
        }
    }
}

/// The outcomes of authentication: the label values for metrics, in the order counted.
pub const OUTCOMES: [&str; 4] = ["accepted", "unauthenticated", "other_cluster", "unavailable"];

/// Authenticates the clients of one gateway.
#[derive(Debug)]
pub struct Identities {
    tls: Option<Arc<Tls>>,
    tokens: Option<Arc<StaticTokens>>,
    reviews: Option<Arc<Reviews>>,
    registry: Arc<Registry>,
    unauthenticated: Arc<Slots>,
    changes: Arc<Changes>,
    outcomes: [[AtomicU64; OUTCOMES.len()]; Method::ALL.len()],
    log: TenantLines,
}

/// Why a request is not served. It has the truth, for metrics and our log, and the part that this client may
/// know.
#[derive(Debug)]
pub(crate) struct Denied {
    /// The truth.
    pub(crate) refusal: Refusal,
    /// What the client sees: its status is that of the response.
    pub(crate) shown: Refusal,
    /// The sentence in the response.
    pub(crate) reason: Cow<'static, str>,
    /// The rest of the truth, for the log; empty where there is none.
    pub(crate) detail: String,
}

impl Denied {
    /// With nothing to hide.
    pub(crate) fn new(refusal: Refusal, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { refusal, shown: refusal, reason: reason.into(), detail: String::new() }
    }
}

impl From<Refusal> for Denied {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal, refusal.message())
    }
}

/// What a request asks for.
pub(crate) struct Wanted<'a> {
    /// The cluster behind the authority; `None` if nothing is exposed under it.
    pub(crate) cluster: Option<&'a Tenant>,
    /// Whether the allow list of the cluster admits the client.
    pub(crate) client_admitted: bool,
    /// Finds the API server that reviews tokens for the authority; `None` if no CA of it is known.
    pub(crate) reviewer: &'a (dyn Fn() -> Option<Arc<dyn TokenReviewer>> + Sync),
}

/// What was found out before anything was accepted.
#[derive(Default)]
struct Findings {
    /// A credential of another cluster was shown.
    other_cluster: bool,
    /// Why nothing was accepted.
    why: String,
    /// Why a reviewed token was not accepted: not for the client, which must not learn of clusters.
    detail: String,
    /// The truth, where it is not that the token is invalid.
    refusal: Option<Refusal>,
}

impl Findings {
    fn note(&mut self, why: impl std::fmt::Display) {
        let separator = if self.why.is_empty() { "" } else { "; " };
        // Writing to a String cannot fail.
        let _ = write!(self.why, "{separator}{why}");
    }

    /// Notes why no API server has accepted the token. The client gets one sentence for every cause: no
    /// cluster, no API server, refused, unreachable, not on the allow list. Different sentences would let it
    /// find clusters by guessing.
    fn hide(&mut self, why: impl Into<String>) {
        self.note(NOT_ACCEPTED);
        self.detail = why.into();
    }
}

/// The message to a client whose token no API server has accepted before, whatever the reason.
const NOT_ACCEPTED: &str = "the token proves nothing here; the log of the gateway says why";

impl Identities {
    pub(crate) fn new(config: &Config) -> Self {
        let changes = Arc::<Changes>::default();
        let reviews = |every| {
            Arc::new(Reviews::new(every, config.max_reviews, config.review_memory, Arc::clone(&changes)))
        };
        Self {
            tls: config.tunnel.tls.clone(),
            tokens: config.tokens.file.clone(),
            reviews: config.tokens.review.map(reviews),
            registry: Arc::default(),
            unauthenticated: Slots::new(
                config.max_unauthenticated,
                "tunnel connections that have shown no accepted identity",
            ),
            changes,
            outcomes: Default::default(),
            log: TenantLines::new(),
        }
    }

    /// Whether clients under TLS must authenticate.
    pub fn asks(&self) -> bool {
        self.asks_for_certificate() || self.takes_tokens()
    }

    /// Has credentials in use checked at once: a CA, a revocation list or the file of tokens has changed.
    pub fn changed(&self) {
        self.changes.announce(Affected::All);
    }

    /// Authentications by [`Method::ALL`] and [`OUTCOMES`].
    pub fn outcomes(&self) -> [[u64; OUTCOMES.len()]; Method::ALL.len()] {
        std::array::from_fn(|method| {
            std::array::from_fn(|outcome| self.outcomes[method][outcome].load(Relaxed))
        })
    }

    /// Counters of token reviews; `None` where there are none.
    pub fn reviews(&self) -> Option<ReviewTotals> {
        self.reviews.as_deref().map(Reviews::totals)
    }

    /// Connections that must authenticate, and have not.
    pub fn unauthenticated(&self) -> u32 {
        self.unauthenticated.count()
    }

    /// Takes the slot that a connection needs until it has authenticated.
    pub(crate) fn enter(&self, client: IpAddr) -> Slot {
        self.unauthenticated.enter(Some(Source::of(client)))
    }

    pub(crate) fn log(&self) -> &TenantLines {
        &self.log
    }

    fn asks_for_certificate(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.asks_for_certificate())
    }

    fn takes_tokens(&self) -> bool {
        self.tokens.is_some() || self.reviews.is_some()
    }

    /// Returns the credential that gives the client the target it asks for. `None` where clients are not
    /// asked for one. `held` are those of its connection.
    pub(crate) async fn authenticate(
        &self,
        held: &Credentials,
        request: &Request,
        wanted: &Wanted<'_>,
    ) -> Result<Option<Arc<Credential>>, Denied> {
        if !request.tls || !self.asks() {
            return Ok(None);
        }
        loop {
            let generation = self.changes.generation();
            let (method, outcome) = match self.examine(request, wanted).await {
                Ok((method, evidence)) => (method, Ok(evidence)),
                Err((method, denied)) => (method, Err(denied)),
            };
            let (Some(cluster), Ok(evidence)) = (wanted.cluster, outcome.as_ref()) else {
                let denied = outcome.err().unwrap_or_else(|| Refusal::Unknown.into());
                self.count(method, &denied);
                return Err(denied);
            };
            let credential = held.accept(&self.registry, cluster, evidence);
            // `supervise` may have run before this credential was registered. If anything was announced
            // meanwhile, it is verified again here. Otherwise not: verifying a certificate costs 0.1 ms.
            if self.changes.generation() == generation
                || (!credential.is_revoked() && credential.why_invalid(self.tokens.as_deref()).is_none())
            {
                self.outcomes[method as usize][0].fetch_add(1, Relaxed);
                return Ok(Some(credential));
            }
        }
    }

    fn count(&self, method: Method, denied: &Denied) {
        let outcome = match (denied.refusal, denied.shown) {
            (Refusal::ReviewFailed | Refusal::MaxReviewsWaiting, _) => 3,
            (_, Refusal::Unauthenticated) => 1,
            _ => 2,
        };
        self.outcomes[method as usize][outcome].fetch_add(1, Relaxed);
    }

    async fn examine(
        &self,
        request: &Request,
        wanted: &Wanted<'_>,
    ) -> Result<(Method, Evidence), (Method, Denied)> {
        let mut findings = Findings::default();
        let mut method = Method::None;
        if let Some(certificate) = &request.certificate {
            method = Method::Certificate;
            match certificate.identity() {
                Ok(tenant) if wanted.cluster == Some(&tenant) => {
                    return Ok((method, Evidence::Certificate(Arc::clone(certificate))));
                }
                Ok(_) => findings.other_cluster = true,
                Err(invalid) => findings.note(invalid),
            }
        }
        if let Some(token) = request.token.as_ref().filter(|_| self.takes_tokens()) {
            method = if self.reviews.is_some() { Method::TokenReview } else { Method::StaticToken };
            match self.examine_token(token, wanted, &mut findings).await {
                Ok(None) => {}
                Ok(Some(accepted)) => return Ok(accepted),
                Err(denied) => return Err((method, denied)),
            }
        }
        if method == Method::None {
            findings.note(match (self.asks_for_certificate(), self.takes_tokens()) {
                (true, true) => "neither a client certificate nor a bearer token was shown",
                (true, false) => "no client certificate was shown",
                _ => "no bearer token was shown",
            });
        }
        let Findings { other_cluster, why, detail, refusal } = findings;
        if other_cluster {
            // The answer is the same whether the cluster belongs to another tenant or does not exist, or
            // clusters could be found by guessing. The access line tells them apart.
            let shown = Refusal::NotAuthorized;
            let refusal = if wanted.cluster.is_some() { shown } else { Refusal::Unknown };
            return Err((method, Denied { refusal, shown, reason: shown.message().into(), detail }));
        }
        let shown = Refusal::Unauthenticated;
        Err((method, Denied { refusal: refusal.unwrap_or(shown), shown, reason: why.into(), detail }))
    }

    /// Returns `None` if the token does not open the cluster.
    async fn examine_token(
        &self,
        token: &Token,
        wanted: &Wanted<'_>,
        findings: &mut Findings,
    ) -> Result<Option<(Method, Evidence)>, Denied> {
        if token.secret().len() > MAX_TOKEN {
            findings.note("the token is longer than 8 KiB");
            return Ok(None);
        }
        let hash = hash(&[token.secret().as_bytes()]);
        if let Some(owner) = self.tokens.as_ref().and_then(|tokens| tokens.owner(&hash)) {
            if wanted.cluster == Some(&owner) {
                return Ok(Some((Method::StaticToken, Evidence::StaticToken(hash))));
            }
            findings.other_cluster = true;
            return Ok(None);
        }
        let Some(reviews) = &self.reviews else {
            findings.note("the token is not known to this gateway");
            return Ok(None);
        };
        if wanted.cluster.is_none() {
            findings.hide("nothing is exposed under this name");
            return Ok(None);
        }
        // A client that may not connect at all must not cause work behind the gateway.
        if !wanted.client_admitted {
            findings.refusal = Some(Refusal::NotAllowed);
            findings.hide(Refusal::NotAllowed.message());
            return Ok(None);
        }
        let Some(reviewer) = (wanted.reviewer)() else {
            findings.hide(
                "tokens of this cluster cannot be reviewed: neither its Cluster nor its Service \
                 apiserver-external carries an annotation portico.k8c.io/api-server-ca that can be read",
            );
            return Ok(None);
        };
        let reviewed = reviews.token(token, reviewer);
        let verdict = reviews.verdict(&reviewed).await.ok_or(Refusal::MaxReviewsWaiting)?;
        match verdict {
            Verdict::Accepted => Ok(Some((Method::TokenReview, Evidence::ReviewedToken(reviewed)))),
            Verdict::Refused(why) => {
                findings.hide(why);
                Ok(None)
            }
            // A client that was accepted before knows that the cluster is there.
            Verdict::Unavailable(why) if reviewed.state.was_accepted() => {
                Err(Denied::new(Refusal::ReviewFailed, String::from(why)))
            }
            Verdict::Unavailable(why) => {
                findings.refusal = Some(Refusal::ReviewFailed);
                findings.hide(why);
                Ok(None)
            }
        }
    }
}
