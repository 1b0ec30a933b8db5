//! What a source says, whatever it reads from: objects that came, changed or went, in steps; and what it could not read.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use portico_api::meta::ObjectRef;
use portico_api::problem::Severity;
use serde::Serialize;

use crate::object::Object;

/// Most events in one [`Step`]. A longer burst arrives in several steps, so that ten thousand objects are never in memory
/// twice; only the last of them is complete. An object weighs a kilobyte or more until it is applied, and a few steps are always
/// on their way: what they take at the start, the process hardly ever gives back.
pub const MAX_EVENTS_PER_STEP: usize = 64;

/// One change to one object.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It is new, or changed: this is what it is now.
    Apply(Object),
    /// It is gone.
    Delete(ObjectRef),
}

/// Changes that belong together.
///
/// Apply every event; publish what follows from them only when the step is [`complete`](Self::complete).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// In the order in which they are to be applied. An object appears at most once in the steps up to a complete one,
    /// unless it changed again meanwhile.
    pub events: Vec<Event>,
    /// Whether this is the end of a burst, so that what has been delivered so far is a whole picture. No step is complete before
    /// the source has delivered everything there is: a first picture with holes would send clients away.
    pub complete: bool,
    /// Everything the source cannot read at present, not only what is new.
    pub problems: Arc<[ManifestProblem]>,
}

/// One thing that keeps a manifest, or an object of the Kubernetes API, from being read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ManifestProblem {
    /// The file as a path that can be opened from the current directory; none for an object from a Kubernetes API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<Arc<Path>>,
    /// The line in the file, counted from 1; 0 where no line is to blame.
    pub line: u32,
    /// How bad it is.
    pub severity: Severity,
    /// A stable word for metrics and tests, in kebab case: `syntax`, `unknown-kind`, `duplicate`.
    pub reason: &'static str,
    /// The object, where it could be made out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectRef>,
    /// What is wrong, with the value found.
    pub message: String,
    /// What happens meanwhile and what to do about it.
    pub remedy: String,
}

impl fmt::Display for ManifestProblem {
    /// `dir/a.yaml:12: Cluster a: what is wrong; what to do`, which editors can jump to.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}:", file.display())?;
            if self.line != 0 {
                write!(f, "{}:", self.line)?;
            }
            f.write_str(" ")?;
        }
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        f.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}
