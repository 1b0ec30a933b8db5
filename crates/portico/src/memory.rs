//! What a gateway on a directory remembers from one run to the next, in `DIR/.portico/remembered.json`.
//!
//! One gateway writes it, the one that holds the lock beside it. A second one on the same directory would draw other
//! NodePorts for the same clusters; it is told so, and writes nothing until the first one is gone.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use portico_expose::persisted::PersistedState;
use portico_expose::planner::Planner;
use portico_source::state::{STATE_FOLDER, StateFile};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;

/// The memory of one directory of manifests.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    folder: PathBuf,
    file: StateFile,
    /// Held while this process may write.
    lock: Option<File>,
    /// Revision of what was stored last.
    stored: u64,
    /// Whether the last attempt failed, so that it is said once.
    failing: bool,
}

impl MemoryFile {
    /// The memory in `state_folder`, or, where none is named, in the directory of manifests. Nothing is touched yet.
    pub(crate) fn of(manifests: &Path, state_folder: Option<&Path>) -> Self {
        let folder = state_folder.map_or_else(|| manifests.join(STATE_FOLDER), Path::to_owned);
        let file = StateFile::new(&folder, "remembered.json");
        Self { folder, file, lock: None, stored: 0, failing: false }
    }

    /// What was remembered. A memory that is there and cannot be read is an error, and a new one no remedy: every NodePort
    /// would be drawn anew, and the addresses in every kubeconfig be wrong.
    pub(crate) fn load(&self) -> anyhow::Result<PersistedState> {
        let Some(document) = self.file.load::<Value>()? else { return Ok(PersistedState::default()) };
        PersistedState::from_json(&document.to_string())
            .with_context(|| self.file.path().display().to_string())
    }

    /// Stores what `planner` remembers, if it changed. A folder that cannot be written to is said in the log, and is no reason
    /// to stop.
    pub(crate) fn store(&mut self, planner: &Planner) {
        if planner.revision() == self.stored {
            return;
        }
        match self.write(planner) {
            Ok(()) => {
                self.stored = planner.revision();
                self.failing = false;
            }
            Err(error) if self.failing => tracing::debug!("{error:#}"),
            Err(error) => {
                self.failing = true;
                tracing::error!("{error:#}");
            }
        }
    }

    /// Whether something is still to be stored.
    pub(crate) fn owes(&self) -> bool {
        self.failing
    }

    fn write(&mut self, planner: &Planner) -> anyhow::Result<()> {
        if self.lock.is_none() {
            self.lock = Some(self.lock()?);
        }
        let document: Value = serde_json::from_str(&planner.persisted().to_json()?)?;
        Ok(self.file.save(&document)?)
    }

    fn lock(&self) -> anyhow::Result<File> {
        let path = self.folder.join("lock");
        let cannot = || {
            format!(
                "cannot write to {}, so NodePorts drawn now may differ after a restart; make it writable, or name another \
                 folder with --state-dir",
                self.folder.display()
            )
        };
        StateFile::make_folder(&self.folder).with_context(cannot)?;
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&path).with_context(cannot)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => bail!(
                "another gateway holds {}: both draw NodePorts, and only its are remembered; stop it, or start this one \
                 with --take-over or a --state-dir of its own",
                path.display()
            ),
            Err(error) => Err(io::Error::from(error)).with_context(cannot),
        }
    }
}

/// A seed for the draw of NodePorts that differs from run to run: the standard library's hasher is seeded by the system.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().hash_one("NodePorts")
}

#[cfg(test)]
mod tests {
    use portico_expose::planner::{Mode, Settings};

    use super::*;

    fn planner() -> Planner {
        let settings = Settings::new(Mode::Plan);
        let memory = r#"{"format": 1, "nodePorts": {}, "strategies": {"gone": "NodePort"}}"#;
        let mut planner = Planner::new(settings, PersistedState::from_json(memory).unwrap(), 1);
        planner.initial_sync_complete(true);
        planner
    }

    #[test]
    fn of_two_gateways_on_a_directory_one_writes_until_it_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let mut first = MemoryFile::of(directory.path(), None);
        let mut second = MemoryFile::of(directory.path(), None);
        first.store(&planner());
        assert!(!first.owes() && first.file.path().exists());
        second.store(&planner());
        assert!(second.owes());
        drop(first);
        second.store(&planner());
        assert!(!second.owes());
    }

    #[test]
    fn another_folder_may_hold_what_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("elsewhere");
        let mut memory = MemoryFile::of(directory.path(), Some(&state));
        memory.store(&planner());
        assert!(state.join("remembered.json").exists());
        assert!(!directory.path().join(STATE_FOLDER).exists());
    }
}
