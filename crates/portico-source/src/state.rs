//! The state that must outlive a restart beside a directory of manifests: one small JSON file in
//! `DIR/.portico/`.
//!
//! Written to a temporary file, flushed, then renamed over the old one: a power cut leaves the old state or
//! the new one. A directory that cannot be written to is an error for the caller to report, and no reason to
//! stop.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Portico's own folder in the manifest directory. Hidden, so that the source does not read it as manifests.
pub const STATE_FOLDER: &str = ".portico";

/// Why a state was not read or written.
#[derive(Debug, Error)]
pub enum StateError {
    /// The file exists and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file exists and is not what was written.
    #[error("{} is damaged: {source}; restore it, or delete it to begin anew", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        source: serde_json::Error,
    },
    /// The directory is read-only, or full.
    #[error(
        "cannot write {}: {source}; what it should hold is forgotten at the next restart",
        path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

/// A file that holds state.
#[derive(Debug, Clone)]
pub struct StateFile {
    path: PathBuf,
}

impl StateFile {
    /// The state called `name` in `folder`. No file is touched yet.
    pub fn new(folder: &Path, name: &str) -> Self {
        Self { path: folder.join(name) }
    }

    /// Creates the folder of the state if it does not exist.
    pub fn make_folder(folder: &Path) -> io::Result<()> {
        match fs::create_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns what was saved last; `None` if nothing was.
    pub fn load<T: DeserializeOwned>(&self) -> Result<Option<T>, StateError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StateError::Read { path: self.path.clone(), source }),
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|source| StateError::Damaged { path: self.path.clone(), source })
    }

    /// Replaces what was saved. Once this returns, a restart finds the new state.
    pub fn save<T: Serialize>(&self, state: &T) -> Result<(), StateError> {
        self.write(state).map_err(|source| StateError::Write { path: self.path.clone(), source })
    }

    fn write<T: Serialize>(&self, state: &T) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        Self::make_folder(folder)?;
        let mut bytes = serde_json::to_vec_pretty(state)?;
        bytes.push(b'\n');
        // The process number keeps two processes from writing the same temporary file.
        let temporary = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let written = File::create(&temporary)
            .and_then(|mut file| {
                file.write_all(&bytes)?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&temporary, &self.path))
            // Without this the rename itself may be lost.
            .and_then(|()| File::open(folder)?.sync_all());
        if written.is_err() {
            // Fails if nothing was created, and then nothing is to be removed.
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    type Ports = BTreeMap<String, u16>;

    #[test]
    fn what_was_saved_last_is_found_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let file = StateFile::new(directory.path(), "node-ports.json");
        assert_eq!(file.load::<Ports>().unwrap(), None);
        file.save(&Ports::from([("a".into(), 30_000)])).unwrap();
        let ports = Ports::from([("a".into(), 30_000), ("b".into(), 30_001)]);
        file.save(&ports).unwrap();
        let again = StateFile::new(directory.path(), "node-ports.json");
        assert_eq!(again.load::<Ports>().unwrap(), Some(ports));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_file_is_an_error_and_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let file = StateFile::new(directory.path(), "node-ports.json");
        file.save(&Ports::new()).unwrap();
        fs::write(file.path(), "{\"a\": 3").unwrap();
        assert!(matches!(file.load::<Ports>(), Err(StateError::Damaged { .. })));
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "{\"a\": 3");
    }

    #[test]
    fn where_nothing_can_be_written_saving_fails_and_says_so() {
        let directory = tempfile::tempdir().unwrap();
        // A file in place of the folder stops root too, which a read-only folder does not.
        let folder = directory.path().join("state");
        fs::write(&folder, "").unwrap();
        let error = StateFile::new(&folder, "a.json").save(&Ports::new()).unwrap_err();
        assert!(error.to_string().contains("forgotten"), "{error}");
    }
}
