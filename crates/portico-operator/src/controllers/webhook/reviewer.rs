//! From the bytes of a question to those of an answer: what this replica's caches say, within a time limit.
//!
//! A change that cannot be judged is admitted, with a warning. The caches may not be filled yet, or the seed
//! may be so large that a review takes too long. A change that would be refused is judged again for a while,
//! because a cache is a little behind. A Cluster must not be refused for a Seed that the same `kubectl apply`
//! wrote just before.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use kube::runtime::reflector::Store;
use portico_api::annotations::ExposeKeys;
use portico_api::cluster::Cluster;
use portico_api::problem::Problem;
use portico_api::service::Service;
use portico_source::served::Served;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::info;

use super::message::{About, Malformed, answer, question};
use super::review::{ProposedChange, Verdict, World, review};
use crate::installation::Installation;
use crate::kkp::{Kkp, KkpWatch};
use crate::status::StatusHandle;

/// Pauses before a change is judged again that would be refused. Caches are some milliseconds behind; a
/// second on a seed that has much else to do.
const REVIEW_AGAIN_AFTER: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(300), Duration::from_millis(900)];

/// Time limit of an answer, within the three seconds that the API server waits.
const LIMIT: Duration = Duration::from_millis(2_200);

/// What this replica answers by.
pub(super) struct Reviewer {
    pub(super) installation: Installation,
    pub(super) clusters: Store<Served<Cluster>>,
    /// The Services that are exposed.
    pub(super) services: Store<Served<Service>>,
    /// The annotations that expose a Service.
    pub(super) expose: ExposeKeys,
    /// Whether the operator is configured with the Seed that the gateway belongs to.
    pub(super) seed_is_named: bool,
    pub(super) kkp: KkpWatch,
    pub(super) status: StatusHandle,
    /// One is parsed and judged at a time: a tree of JSON is many times its text.
    pub(super) turn: Arc<Semaphore>,
}

/// What becomes of a change.
enum Outcome {
    Judged(Verdict),
    Unreadable(String),
    /// Admitted, and why it was not judged.
    Unchecked(&'static str),
    /// Admitted: no rule is about it, or it is not for Portico to judge.
    Nothing,
}

impl Reviewer {
    /// The answer to the body of a request.
    pub(super) async fn answer(&self, body: Bytes) -> Result<String, Malformed> {
        let read = self.in_turn(move || question(&body)).await;
        let asked = match read {
            Some(asked) => asked.inspect_err(|_| self.count("other", "malformed"))?,
            None => return Ok(String::new()),
        };
        let kind = asked.kind.map_or("other", |kind| kind.name());
        let outcome = match asked.about {
            About::Nothing => Outcome::Nothing,
            About::Unreadable(_) if self.kkp.now() != Kkp::Absent => Outcome::Nothing,
            About::Unreadable(text) => Outcome::Unreadable(text),
            About::Change(change) => match timeout(LIMIT, self.judge(change.into())).await {
                Ok(outcome) => outcome,
                Err(_) => Outcome::Unchecked("a review did not end in time"),
            },
        };
        let (errors, warnings) = outcome.texts();
        let result = match (&outcome, errors.is_empty(), warnings.is_empty()) {
            (Outcome::Unchecked(_), ..) => "unchecked",
            (_, false, _) => "refused",
            (_, true, false) => "warned",
            (_, true, true) => "admitted",
        };
        self.count(kind, result);
        Ok(answer(&asked.uid, &errors, &warnings))
    }

    async fn judge(&self, change: Arc<ProposedChange>) -> Outcome {
        // Where KKP's controllers run, they decide.
        if self.kkp.now() != Kkp::Absent {
            return Outcome::Nothing;
        }
        if !self.is_known() {
            return Outcome::Unchecked("the operator has not read all objects yet");
        }
        let Some(mut verdict) = self.review(&change).await else { return Outcome::Nothing };
        for pause in REVIEW_AGAIN_AFTER {
            if verdict.errors.is_empty() {
                return Outcome::Judged(verdict);
            }
            sleep(pause).await;
            let Some(again) = self.review(&change).await else { return Outcome::Nothing };
            verdict = again;
        }
        if let Some(first) = verdict.errors.first() {
            info!(object = %change.after.reference(), reason = first.reason, "a change is refused");
        }
        Outcome::Judged(verdict)
    }

    async fn review(&self, change: &Arc<ProposedChange>) -> Option<Verdict> {
        let (world, change) = (self.world(), Arc::clone(change));
        let mut verdict = self.in_turn(move || review(&world, &change)).await?;
        // What its remedy asks for has been done.
        verdict.warnings.retain(|problem| !(self.seed_is_named && problem.reason == "several-seeds"));
        Some(verdict)
    }

    /// Works on a thread of its own, when it is its turn. `None` only where the process ends.
    async fn in_turn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let turn = Arc::clone(&self.turn).acquire_owned().await.ok()?;
        let work = spawn_blocking(move || {
            let done = work();
            drop(turn);
            done
        });
        work.await.ok()
    }

    /// Whether the caches are filled.
    fn is_known(&self) -> bool {
        let filled = [
            self.clusters.wait_until_ready().now_or_never().is_some(),
            self.services.wait_until_ready().now_or_never().is_some(),
        ];
        self.installation.seeds.is_known()
            && self.installation.configurations.is_known()
            && filled.into_iter().all(|filled| filled)
    }

    fn world(&self) -> World {
        World {
            seeds: self.installation.seeds.objects(),
            configurations: self.installation.configurations.objects(),
            clusters: self.clusters.state(),
            services: self.services.state(),
            expose: self.expose.clone(),
        }
    }

    /// Counts a question.
    pub(super) fn count(&self, kind: &'static str, result: &'static str) {
        self.status.webhook(|webhook| {
            *webhook.reviews.entry(kind).or_default().entry(result).or_default() += 1;
        });
    }
}

impl Outcome {
    /// Errors and warnings in words.
    fn texts(&self) -> (Vec<String>, Vec<String>) {
        let texts = |problems: &[Problem]| problems.iter().map(ToString::to_string).collect();
        match self {
            Self::Judged(verdict) => (texts(&verdict.errors), texts(&verdict.warnings)),
            Self::Unreadable(text) => (vec![text.clone()], Vec::new()),
            Self::Unchecked(why) => (
                Vec::new(),
                vec![format!("not checked against other objects: {why}; portico check does that")],
            ),
            Self::Nothing => (Vec::new(), Vec::new()),
        }
    }
}
