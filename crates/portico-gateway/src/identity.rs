//! Who a tunnel client is: which cluster its certificate or its token speaks for, and whether that still holds.
//!
//! In the order of a request: [`Identities::authenticate`] looks at the certificate of the connection (judged in `portico-tunnel`), then at
//! the token, by the static file ([`tokens`]) or by the API server of the cluster asked for ([`review`], which makes each
//! [`exchange`]). What was accepted becomes a [`proof`], one for each connection and cluster, on which streams rest. When
//! something was revoked, [`watch`] looks at every proof again and cuts the streams of those that do not stand any more.
//!
//! Plain-text clients are asked for nothing: who serves them has said so (`--tunnel-plaintext`).

mod complaints;
mod exchange;
mod places;
mod proof;
mod review;
mod reviewed;
mod tokens;
mod unproven;
mod watch;

use std::borrow::Cow;
use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use portico_api::names::Authority;
use portico_tunnel::{Presented, Request, Tls, Token};
use tokio::sync::Notify;

pub use review::{REVIEW_BUCKETS, ReviewTotals};
pub use tokens::{StaticTokens, TokensError};

pub(crate) use complaints::Complaints;
pub(crate) use places::ClusterPlaces;
pub(crate) use proof::{Held, Proof};
pub(crate) use unproven::{Eviction, Place};
pub(crate) use watch::watch;

use crate::config::Config;
use crate::outcome::Refusal;
use crate::shared::Shared;
use crate::upstream::Upstream;
use proof::{Basis, Registry};
use review::Reviews;
use reviewed::{Reviewer, Verdict};
use unproven::Unproven;

/// SHA-256 of a secret: what is kept and compared in its place. Nobody can steer it, so comparing it tells nothing about a secret.
pub(crate) type Hash = [u8; 32];

/// Longest token taken: what most HTTP servers take for a whole header, and more than any service account's.
const LONGEST_TOKEN: usize = 8 * 1024;

/// Tokens of tunnel clients, and who says what they are worth.
#[derive(Debug, Clone, Default)]
pub struct TokenSettings {
    /// The static file.
    pub file: Option<Arc<StaticTokens>>,
    /// TokenReview by the cluster's own API server: how often tokens in use are reviewed again. `None` is off.
    pub review: Option<Duration>,
}

/// How clients proved, or tried to prove, who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By nothing at all.
    None,
    /// By a client certificate.
    Certificate,
    /// By a token of the static file.
    StaticToken,
    /// By a token that the API server of the cluster was asked about.
    TokenReview,
}

impl Method {
    /// Each of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Certificate, Self::StaticToken, Self::TokenReview];

    /// The word for metrics. Stable.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Certificate => "certificate",
            Self::StaticToken => "static_token",
            Self::TokenReview => "token_review",
        }
    }
}

/// What came of it: the words for metrics, in the order counted.
pub const OUTCOMES: [&str; 4] = ["accepted", "unauthenticated", "other_cluster", "unavailable"];

/// Everything that is known of identities.
#[derive(Debug)]
pub struct Identities {
    tls: Option<Arc<Tls>>,
    tokens: Option<Arc<StaticTokens>>,
    reviews: Option<Reviews>,
    registry: Arc<Registry>,
    unproven: Arc<Unproven>,
    /// Grows before each look at every proof: what was verified before it has to be verified again.
    generation: AtomicU64,
    changed: Notify,
    outcomes: [[AtomicU64; OUTCOMES.len()]; Method::ALL.len()],
    complaints: Complaints,
}

/// Why a request is not served: the truth, for metrics and our log, and what this client may know of it.
#[derive(Debug)]
pub(crate) struct Denied {
    /// What it is.
    pub(crate) refusal: Refusal,
    /// What the client sees: its status is the answer's.
    pub(crate) shown: Refusal,
    /// What the client is told.
    pub(crate) reason: Cow<'static, str>,
    /// What only the log is told; empty where that is all.
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

/// What a request asks for, as far as identities are concerned.
pub(crate) struct Wanted<'a> {
    pub(crate) upstream: Option<&'a Arc<Upstream>>,
    pub(crate) authority: Option<&'a str>,
    pub(crate) client: IpAddr,
}

/// What a look at the credentials found before anything was accepted.
#[derive(Default)]
struct Findings {
    /// An identity was proven, of another cluster.
    another: bool,
    /// Why nothing was proven.
    why: String,
    /// Why a reviewed token proved nothing: not for the client, who has not proven that it may know.
    detail: String,
    /// What that is, if it is not that the token is not valid.
    refusal: Option<Refusal>,
}

impl Findings {
    fn note(&mut self, why: impl std::fmt::Display) {
        let separator = if self.why.is_empty() { "" } else { "; " };
        // Writing to a String cannot fail.
        let _ = write!(self.why, "{separator}{why}");
    }

    /// The token proved nothing to an API server. Whether there is one, what it says, whether it can be asked and who may come from where:
    /// the client is told the same, or clusters could be found by guessing.
    fn hide(&mut self, why: impl Into<String>) {
        self.note(NOT_PROVEN);
        self.detail = why.into();
    }
}

/// What is said of a token that an API server did not accept before, whatever the matter is.
const NOT_PROVEN: &str = "the token proves nothing here; the log of the gateway says why";

impl Identities {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            tls: config.tunnel.tls.clone(),
            tokens: config.tokens.file.clone(),
            reviews: config.tokens.review.map(Reviews::new),
            registry: Arc::default(),
            unproven: Arc::new(Unproven::new(config.max_handshakes)),
            generation: AtomicU64::default(),
            changed: Notify::new(),
            outcomes: Default::default(),
            complaints: Complaints::default(),
        }
    }

    /// Whether clients under TLS must say who they are.
    pub fn asks(&self) -> bool {
        self.asks_for_certificate() || self.tokens.is_some() || self.reviews.is_some()
    }

    /// Something that identities rest on has changed: each one in use is looked at again, at once.
    pub fn changed(&self) {
        self.generation.fetch_add(1, SeqCst);
        self.changed.notify_one();
    }

    /// Authentications by [`Method::ALL`] and [`OUTCOMES`].
    pub fn outcomes(&self) -> [[u64; OUTCOMES.len()]; Method::ALL.len()] {
        std::array::from_fn(|method| {
            std::array::from_fn(|outcome| self.outcomes[method][outcome].load(Relaxed))
        })
    }

    /// What is counted of token reviews; `None` where there are none.
    pub fn reviews(&self) -> Option<ReviewTotals> {
        self.reviews.as_ref().map(Reviews::totals)
    }

    /// Connections that must still say who they are, and have not been able to.
    pub fn unproven(&self) -> usize {
        self.unproven.count()
    }

    /// What a connection under TLS that has shown this certificate, or none, needs until a token of it is accepted; `None` if nothing.
    pub(crate) fn enter(&self, certificate: Option<&Presented>) -> Option<(Place, Eviction)> {
        let is_proven = certificate.is_some_and(|certificate| certificate.identity().is_ok());
        (self.asks() && !is_proven).then(|| self.unproven.enter())
    }

    pub(crate) fn complaints(&self) -> &Complaints {
        &self.complaints
    }

    fn asks_for_certificate(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.asks_for_certificate())
    }

    /// Whether who asks may have what it asks for, and on what that rests. `None`: nobody asks for an identity.
    pub(crate) async fn authenticate(
        &self,
        shared: &Shared,
        held: &Held,
        request: &Request,
        wanted: &Wanted<'_>,
    ) -> Result<Option<Arc<Proof>>, Denied> {
        if !request.tls || !self.asks() {
            return Ok(None);
        }
        loop {
            let generation = self.generation.load(SeqCst);
            let mut findings = Findings::default();
            let (method, outcome) = match self.examine(shared, held, request, wanted, &mut findings).await {
                Ok((method, basis)) => (method, Ok(basis)),
                Err((method, denied)) => (method, Err(denied)),
            };
            let (Some(upstream), Ok(basis)) = (wanted.upstream, outcome.as_ref()) else {
                let denied = outcome.err().unwrap_or_else(|| Refusal::Unknown.into());
                self.count(method, &denied);
                return Err(denied);
            };
            let proof = held.rest_on(&self.registry, &upstream.cluster.name, basis);
            // Otherwise what it rests on may have changed between the look and the note of it, unseen by those who look at all notes.
            if self.generation.load(SeqCst) == generation {
                self.outcomes[method as usize][0].fetch_add(1, Relaxed);
                return Ok(Some(proof));
            }
        }
    }

    fn count(&self, method: Method, denied: &Denied) {
        let outcome = match (denied.refusal, denied.shown) {
            (Refusal::ReviewFailed, _) => 3,
            (_, Refusal::Unauthenticated) => 1,
            _ => 2,
        };
        self.outcomes[method as usize][outcome].fetch_add(1, Relaxed);
    }

    async fn examine(
        &self,
        shared: &Shared,
        held: &Held,
        request: &Request,
        wanted: &Wanted<'_>,
        findings: &mut Findings,
    ) -> Result<(Method, Basis), (Method, Denied)> {
        let cluster = wanted.upstream.map(|upstream| upstream.cluster.name.as_str());
        let mut method = Method::None;
        if let Some(certificate) = &request.certificate {
            method = Method::Certificate;
            match certificate.identity() {
                Ok(identity) if Some(identity.cluster()) == cluster => {
                    return Ok((method, Basis::Certificate(Arc::clone(certificate))));
                }
                Ok(_) => findings.another = true,
                Err(unproven) => findings.note(unproven),
            }
        }
        if let Some(token) =
            request.token.as_ref().filter(|_| self.tokens.is_some() || self.reviews.is_some())
        {
            method = if self.reviews.is_some() { Method::TokenReview } else { Method::StaticToken };
            match self.examine_token(shared, held, token, wanted, findings).await {
                Ok(None) => {}
                Ok(Some(accepted)) => return Ok(accepted),
                Err(denied) => return Err((method, denied)),
            }
        }
        let detail = std::mem::take(&mut findings.detail);
        if findings.another {
            // The same for another's cluster and for none at all, or clusters could be found by guessing; the access line tells them apart.
            let shown = Refusal::NotAuthorized;
            let refusal = if wanted.upstream.is_some() { shown } else { Refusal::Unknown };
            return Err((method, Denied { refusal, shown, reason: shown.message().into(), detail }));
        }
        if method == Method::None {
            findings.note(
                match (self.asks_for_certificate(), self.tokens.is_some() || self.reviews.is_some()) {
                    (true, true) => "neither a client certificate nor a bearer token was shown",
                    (true, false) => "no client certificate was shown",
                    _ => "no bearer token was shown",
                },
            );
        }
        let shown = Refusal::Unauthenticated;
        let refusal = findings.refusal.unwrap_or(shown);
        Err((method, Denied { refusal, shown, reason: std::mem::take(&mut findings.why).into(), detail }))
    }

    /// `None` if the token proves nothing for this cluster.
    async fn examine_token(
        &self,
        shared: &Shared,
        held: &Held,
        token: &Token,
        wanted: &Wanted<'_>,
        findings: &mut Findings,
    ) -> Result<Option<(Method, Basis)>, Denied> {
        if token.secret().len() > LONGEST_TOKEN {
            findings.note("the token is longer than 8 KiB");
            return Ok(None);
        }
        let hash = hash(&[token.secret()]);
        if let Some(owner) = self.tokens.as_ref().and_then(|tokens| tokens.owner(&hash)) {
            if wanted.upstream.is_some_and(|upstream| upstream.cluster.name == owner) {
                return Ok(Some((Method::StaticToken, Basis::Token(hash))));
            }
            findings.another = true;
            return Ok(None);
        }
        let Some(reviews) = &self.reviews else {
            findings.note("the token is not known to this gateway");
            return Ok(None);
        };
        let Some(upstream) = wanted.upstream else {
            findings.hide("nothing is exposed under this name");
            return Ok(None);
        };
        // Whoever may not connect at all must not cause work behind the gateway.
        if !upstream.backend().policy.allow.admits(wanted.client) {
            findings.refusal = Some(Refusal::NotAllowed);
            findings.hide(Refusal::NotAllowed.message());
            return Ok(None);
        }
        let Some(reviewer) = Reviewer::of(upstream, wanted.authority, &shared.live) else {
            findings.hide(
                "tokens of this cluster cannot be reviewed: its Cluster or its Service apiserver-external carries no \
                 annotation portico.k8c.io/api-server-ca",
            );
            return Ok(None);
        };
        let reviewed = reviews.entry(token.secret(), reviewer, shared.now());
        let (reviewed, verdict) = reviews.verdict(shared, reviewed, token.secret(), &held.newcomers).await;
        match verdict {
            Verdict::Yes => Ok(Some((Method::TokenReview, Basis::Reviewed(reviewed)))),
            Verdict::No(why) => {
                findings.hide(why);
                Ok(None)
            }
            // Who was accepted before knows that the cluster is there.
            Verdict::Unknown(why) if reviewed.accepted_token().is_some() => {
                Err(Denied::new(Refusal::ReviewFailed, String::from(why)))
            }
            Verdict::Unknown(why) => {
                findings.refusal = Some(Refusal::ReviewFailed);
                findings.hide(why);
                Ok(None)
            }
        }
    }
}

/// SHA-256 of `parts`, each closed by a byte that none of them contains.
fn hash(parts: &[&str]) -> Hash {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(part.as_bytes());
        context.update(&[0]);
    }
    let mut hash = Hash::default();
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

/// The authority by which the API server of the cluster in `namespace` is exposed.
fn api_server_of(namespace: &str) -> Option<Authority> {
    Authority::parse(&format!("{API_SERVER}.{namespace}.svc.cluster.local:443")).ok()
}

/// The Service of a user cluster's API server, in KKP and wherever Portico plans it.
const API_SERVER: &str = "apiserver-external";
