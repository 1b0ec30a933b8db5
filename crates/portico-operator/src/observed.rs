//! What one controller observed of clusters that migrate, for the one that decides what comes next.
//!
//! The user cluster controller looks inside; the exposure controller records the state. Nothing here outlives
//! the process: what is not observed again is not known.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::Stream;
use portico_expose::migration::Facts;

use crate::follow::Changes;

/// The last look at each cluster that migrates. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Observed {
    facts: Arc<Mutex<HashMap<String, Facts>>>,
    changed: Changes<Option<String>>,
}

impl Observed {
    /// Nothing is known.
    pub(crate) fn new() -> Self {
        Self { facts: Arc::default(), changed: Changes::new() }
    }

    /// Replaces what is known of `cluster`, and tells of it if that is news.
    pub(crate) fn tell(&self, cluster: &str, facts: Facts) {
        let before = self.facts().insert(cluster.to_owned(), facts.clone());
        if before.as_ref() != Some(&facts) {
            self.changed.tell(Some(cluster.to_owned()));
        }
    }

    /// What is known of `cluster`.
    pub(crate) fn of(&self, cluster: &str) -> Option<Facts> {
        self.facts().get(cluster).cloned()
    }

    /// Forgets the clusters that do not migrate.
    pub(crate) fn forget(&self, cluster: &str) {
        self.facts().remove(cluster);
    }

    /// Forgets the clusters that are gone.
    pub(crate) fn retain(&self, exists: impl Fn(&str) -> bool) {
        self.facts().retain(|cluster, _| exists(cluster));
    }

    /// The clusters of which something else is known than before; `None` stands for all of them.
    pub(crate) fn changes(&self) -> impl Stream<Item = Option<String>> + Send + use<> {
        self.changed.heard(None)
    }

    fn facts(&self) -> MutexGuard<'_, HashMap<String, Facts>> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
