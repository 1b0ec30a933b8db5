//! The memory of a gateway on a directory from one run to the next, in `DIR/.portico/remembered.json`.
//!
//! The gateway that holds the lock beside it writes it. A second one on the same directory would allocate
//! other NodePorts for the same clusters. It says so in the log, and writes nothing until the first one has
//! ended.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use portico_expose::persisted::{PersistedState, PersistedStateError};
use portico_expose::planner::Planner;
use portico_source::state::{STATE_FOLDER, StateError, StateFile};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;
use thiserror::Error;

/// Why the persisted state was not read or written.
#[derive(Debug, Error)]
pub enum PersistedFileError {
    /// The file exists and cannot be read. A new one is no remedy: every NodePort would be allocated anew,
    /// and the address in every kubeconfig would be wrong.
    #[error(transparent)]
    State(#[from] StateError),
    /// The file holds no such state.
    #[error("{}: {source}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: PersistedStateError,
    },
    /// The state cannot be encoded, which only a defect can cause.
    #[error("cannot encode what is to be remembered: {0}")]
    Encode(#[from] serde_json::Error),
    /// The folder cannot be written to.
    #[error(
        "cannot write to {}, so NodePorts drawn now may differ after a restart; make it writable, or name \
         another folder with --state-dir: {source}",
        folder.display()
    )]
    Unwritable {
        /// The folder of the state.
        folder: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Another gateway holds the lock.
    #[error(
        "another gateway holds {}: both draw NodePorts, and only its are remembered; stop it, or start this \
         one with --take-over or a --state-dir of its own",
        path.display()
    )]
    Locked {
        /// The lock.
        path: PathBuf,
    },
}

/// The persisted state of one directory of manifests.
#[derive(Debug)]
pub struct PersistedFile {
    folder: PathBuf,
    file: StateFile,
    /// Held while this process may write.
    lock: Option<File>,
    /// Revision of the planner that was stored last.
    stored: u64,
    /// Whether the last attempt failed, so that it is logged once.
    failing: bool,
}

impl PersistedFile {
    /// The state in `state_folder`, or else in the directory of manifests. No file is touched yet.
    pub fn new(manifests: &Path, state_folder: Option<&Path>) -> Self {
        let folder = state_folder.map_or_else(|| manifests.join(STATE_FOLDER), Path::to_owned);
        let file = StateFile::new(&folder, "remembered.json");
        Self { folder, file, lock: None, stored: 0, failing: false }
    }

    /// Returns what was remembered; the default if nothing was.
    pub fn load(&self) -> Result<PersistedState, PersistedFileError> {
        let Some(document) = self.file.load::<Value>()? else { return Ok(PersistedState::default()) };
        PersistedState::from_json(&document.to_string())
            .map_err(|source| PersistedFileError::Content { path: self.file.path().to_owned(), source })
    }

    /// Stores what `planner` remembers, if it changed. A failure is logged, and is no reason to stop.
    pub fn store(&mut self, planner: &Planner) {
        if planner.revision() == self.stored {
            return;
        }
        match self.write(planner) {
            Ok(()) => {
                self.stored = planner.revision();
                self.failing = false;
            }
            Err(error) if self.failing => tracing::debug!("{error}"),
            Err(error) => {
                self.failing = true;
                tracing::error!("{error}");
            }
        }
    }

    /// Whether the last attempt to store failed, so that it is to be tried again.
    pub fn is_failing(&self) -> bool {
        self.failing
    }

    fn write(&mut self, planner: &Planner) -> Result<(), PersistedFileError> {
        if self.lock.is_none() {
            self.lock = Some(self.lock()?);
        }
        let document: Value = serde_json::from_str(&planner.persisted().to_json()?)?;
        Ok(self.file.save(&document)?)
    }

    fn lock(&self) -> Result<File, PersistedFileError> {
        let path = self.folder.join("lock");
        let unwritable = |source| PersistedFileError::Unwritable { folder: self.folder.clone(), source };
        StateFile::make_folder(&self.folder).map_err(unwritable)?;
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(unwritable)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => Err(PersistedFileError::Locked { path }),
            Err(error) => Err(unwritable(error.into())),
        }
    }
}

/// A seed for the allocation of NodePorts that differs from run to run: the system seeds the standard
/// library's hasher.
pub fn random_seed() -> u64 {
    RandomState::new().hash_one("NodePorts")
}

#[cfg(test)]
mod tests {
    use portico_expose::planner::{Mode, Settings};

    use super::*;

    fn planner() -> Planner {
        let settings = Settings::new(Mode::Plan);
        let state = r#"{"format": 1, "nodePorts": {}, "strategies": {"gone": "NodePort"}}"#;
        let mut planner = Planner::new(settings, PersistedState::from_json(state).unwrap(), 1);
        planner.initial_sync_complete(true);
        planner
    }

    #[test]
    fn of_two_gateways_on_a_directory_one_writes_until_it_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let mut first = PersistedFile::new(directory.path(), None);
        let mut second = PersistedFile::new(directory.path(), None);
        first.store(&planner());
        assert!(!first.is_failing() && first.file.path().exists());
        second.store(&planner());
        assert!(second.is_failing());
        drop(first);
        second.store(&planner());
        assert!(!second.is_failing());
    }

    #[test]
    fn another_folder_may_hold_what_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("elsewhere");
        let mut file = PersistedFile::new(directory.path(), Some(&state));
        file.store(&planner());
        assert!(state.join("remembered.json").exists());
        assert!(!directory.path().join(STATE_FOLDER).exists());
    }
}
