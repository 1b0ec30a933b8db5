//! The observations of one controller about clusters that migrate, for the controller that decides on the
//! next step.
//!
//! The user cluster controller looks inside; the exposure controller records the state. Nothing here outlives
//! the process: what is not observed again is not known.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::Stream;
use portico_expose::migration::Facts;

use crate::follow::Changes;

/// What one look inside a cluster saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Look {
    /// What was found.
    pub(crate) facts: Facts,
    /// Where the second door was then: what was tried by it was tried there.
    pub(crate) second_url: Box<str>,
}

/// The last look at each cluster that migrates. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Observed {
    looks: Arc<Mutex<HashMap<String, Look>>>,
    changed: Changes<Option<String>>,
}

impl Observed {
    /// Nothing is known.
    pub(crate) fn new() -> Self {
        Self { looks: Arc::default(), changed: Changes::new() }
    }

    /// Replaces what is known of `cluster`, and tells of it if that is news.
    pub(crate) fn tell(&self, cluster: &str, look: Look) {
        let before = self.looks().insert(cluster.to_owned(), look.clone());
        if before.as_ref() != Some(&look) {
            self.changed.tell(Some(cluster.to_owned()));
        }
    }

    /// What is known of `cluster`.
    pub(crate) fn of(&self, cluster: &str) -> Option<Look> {
        self.looks().get(cluster).cloned()
    }

    /// Forgets the clusters that do not migrate.
    pub(crate) fn forget(&self, cluster: &str) {
        self.looks().remove(cluster);
    }

    /// Forgets the clusters that are gone.
    pub(crate) fn retain(&self, exists: impl Fn(&str) -> bool) {
        self.looks().retain(|cluster, _| exists(cluster));
    }

    /// The clusters of which something else is known than before; `None` stands for all of them.
    pub(crate) fn changes(&self) -> impl Stream<Item = Option<String>> + Send + use<> {
        self.changed.subscribe(None)
    }

    fn looks(&self) -> MutexGuard<'_, HashMap<String, Look>> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
