//! The state of a source: its watches, and what keeps it from being complete.

use std::collections::BTreeMap;
use std::time::Duration;

use portico_api::meta::Kind;
use serde::Serialize;
use tokio::time::Instant;

use super::ClustersFrom;

/// If a watch fails with an error that it had before, the error is logged again only after this time.
const LOG_AGAIN: Duration = Duration::from_secs(600);

/// The state of all watches.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubernetesStatus {
    /// Whether everything has been listed once.
    pub complete: bool,
    /// Where it comes from what a cluster allows; [`ClustersFrom::Auto`] while that is not known.
    pub clusters_from: ClustersFrom,
    /// By kind. A kind that is not watched is not here.
    pub watches: BTreeMap<Kind, WatchStatus>,
    /// Why the last discovery failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discovery_error: Option<String>,
    /// The obstacle that keeps the Services of clusters, and the gateway with them, from being served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacks: Option<Lacking>,
}

/// The kind or the objects that are missing although there are Services of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lacking {
    /// There is not one ExposedCluster: nobody has written them yet.
    ExposedClusters,
    /// The API server serves no kind that tells what clusters allow.
    Kind,
}

impl Lacking {
    /// The missing part, and the remedy.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::ExposedClusters => {
                "there are Services in namespaces cluster-NAME, and no ExposedCluster: start portico front, \
                 which writes them; or, where there are no Clusters, start the gateway with \
                 --clusters-from services"
            }
            Self::Kind => {
                "there are Services in namespaces cluster-NAME, and the API server serves neither \
                 ExposedClusters nor Clusters: apply deploy/crds.yaml and start portico front; or, where \
                 there are no Clusters, start the gateway with --clusters-from services"
            }
        }
    }
}

/// The state of the watch of one kind.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchStatus {
    /// What it is doing.
    pub state: WatchState,
    /// The last error. Objects stay as they were last seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Errors so far.
    pub errors: u64,
    /// When the API server last sent anything, or when the watch was begun.
    #[serde(skip)]
    pub last_activity: Instant,
    #[serde(skip)]
    logged: Option<(String, Instant)>,
}

/// What the watch of a kind is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WatchState {
    /// The kind has not been listed yet.
    Listing,
    /// Listed, and watched.
    Watching,
    /// The last request failed, and another is tried. What was listed before stays.
    Failing,
}

impl WatchState {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Listing, Self::Watching, Self::Failing];

    /// The state in one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Listing => "listing",
            Self::Watching => "watching",
            Self::Failing => "failing",
        }
    }
}

impl WatchStatus {
    pub(super) fn new() -> Self {
        Self {
            state: WatchState::Listing,
            error: None,
            errors: 0,
            last_activity: Instant::now(),
            logged: None,
        }
    }

    /// Time since the API server last sent anything. Below 70 s while all is well.
    pub fn age(&self) -> Duration {
        self.last_activity.elapsed()
    }

    pub(super) fn alive(&mut self, listed: bool) {
        self.last_activity = Instant::now();
        self.error = None;
        self.state = if listed { WatchState::Watching } else { WatchState::Listing };
    }

    /// Returns true if the error is to be logged.
    pub(super) fn failed(&mut self, error: &str) -> bool {
        self.state = WatchState::Failing;
        self.error = Some(error.to_owned());
        self.errors += 1;
        let known = |(text, at): &(String, Instant)| text == error && at.elapsed() < LOG_AGAIN;
        let new = !self.logged.as_ref().is_some_and(known);
        if new {
            self.logged = Some((error.to_owned(), Instant::now()));
        }
        new
    }
}
