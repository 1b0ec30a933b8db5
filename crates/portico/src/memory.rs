//! What a gateway on a directory remembers from one run to the next: the NodePorts that nobody fixed.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use anyhow::Context;
use portico_expose::node_ports::NodePortBook;
use portico_source::state::StateFile;
use serde_json::Value;

/// The NodePorts of one directory of manifests.
#[derive(Debug)]
pub(crate) struct NodePortMemory {
    file: StateFile,
    /// Revision of the book that was stored last.
    stored: u64,
}

impl NodePortMemory {
    /// The memory of `directory`. Nothing is touched yet.
    pub(crate) fn of(directory: &Path) -> Self {
        Self { file: StateFile::new(directory, "node-ports.json"), stored: 0 }
    }

    /// What was remembered. A memory that is there and cannot be read is an error, and a new one no remedy: every NodePort
    /// would be drawn anew, and the addresses in every kubeconfig be wrong.
    pub(crate) fn load(&self) -> anyhow::Result<NodePortBook> {
        let Some(document) = self.file.load::<Value>()? else { return Ok(NodePortBook::default()) };
        NodePortBook::from_json(&document.to_string()).with_context(|| self.file.path().display().to_string())
    }

    /// Stores `book` if it changed. A directory that cannot be written to is said in the log, and is no reason to stop.
    pub(crate) fn store(&mut self, book: &NodePortBook) {
        if book.revision() == self.stored {
            return;
        }
        match self.write(book) {
            Ok(()) => self.stored = book.revision(),
            Err(error) => tracing::error!("{error:#}"),
        }
    }

    fn write(&self, book: &NodePortBook) -> anyhow::Result<()> {
        let document: Value = serde_json::from_str(&book.to_json()?)?;
        Ok(self.file.save(&document)?)
    }
}

/// A seed for the draw of NodePorts that differs from run to run: the standard library's hasher is seeded by the system.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().hash_one("NodePorts")
}
