//! What others may see of the controller: for metrics, health and logs.

use std::sync::{Arc, Mutex, PoisonError};

use portico_expose::front::Waiting;
use serde::Serialize;

/// How the controller is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontStatus {
    /// Whether all Services are known. Ready means this: a replica that waits to lead is ready too.
    pub complete: bool,
    /// Whether this replica is the one that writes.
    pub leader: bool,
    /// Whether the front Service exists.
    pub found: bool,
    /// Listeners in use, those of the gateway itself included.
    pub used: usize,
    /// Most listeners there may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Ports that are not published, oldest first.
    pub waiting: Vec<Waiting>,
    /// Updates of the front Service since this process started.
    pub writes: u64,
    /// Updates that the API server refused or did not answer.
    pub failed_writes: u64,
    /// Why the last update failed, until one succeeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A view of the [`FrontStatus`], for other tasks.
#[derive(Debug, Clone, Default)]
pub struct StatusHandle(Arc<Mutex<FrontStatus>>);

impl StatusHandle {
    /// The status now.
    pub fn get(&self) -> FrontStatus {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut FrontStatus)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
