//! The status of the controller, for metrics, health and `/status`.

use std::sync::{Arc, Mutex, PoisonError};

use portico_expose::front::Waiting;
use serde::Serialize;

/// The status of the controller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontStatus {
    /// Whether all Services are known. This is what ready means: a replica that waits to lead is ready too.
    pub complete: bool,
    /// Whether this replica is the leader, which writes.
    pub leader: bool,
    /// Whether the front Service exists.
    pub found: bool,
    /// Ports of the front Service, those of the gateway itself included.
    pub used: usize,
    /// Most ports that it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Ports that are not published, oldest first.
    pub waiting: Vec<Waiting>,
    /// Updates of the front Service since this process started.
    pub writes: u64,
    /// Updates that the API server refused, or did not answer in time.
    pub failed_writes: u64,
    /// Why the last update failed, until the next one succeeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The [`FrontStatus`] for other tasks.
#[derive(Debug, Clone, Default)]
pub struct StatusHandle(Arc<Mutex<FrontStatus>>);

impl StatusHandle {
    /// Returns the present status.
    pub fn get(&self) -> FrontStatus {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut FrontStatus)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
