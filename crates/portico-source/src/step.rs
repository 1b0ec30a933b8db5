//! The output of every source: changed objects in steps, and the problems of those that it could not read.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::meta::ObjectRef;
use portico_api::problem::Severity;
use portico_api::text::one_line;
use serde::Serialize;

use crate::object::Object;

/// Most changes in one [`Step`]. A longer burst is cut into several steps, of which only the last is
/// complete. So ten thousand objects are never in memory twice: an object takes a kilobyte or more until it
/// is applied. The allocator hardly ever returns the memory of queued steps.
pub const MAX_CHANGES_PER_STEP: usize = 64;

/// Most characters of a path that a message shows: Linux has no longer ones (PATH_MAX).
const LONGEST_PATH: usize = 4_096;

/// Changes that belong together.
///
/// Apply every change; publish what follows from them only when the step is [`complete`](Self::complete).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// The changes, in the order in which they are to be applied. An object appears at most once in the steps
    /// up to a complete one, unless it changed again meanwhile.
    pub changes: Vec<Change<Object>>,
    /// Whether a burst ends here, so that all objects delivered so far belong together. The first complete
    /// step ends the initial sync. No step is complete before the source has delivered every object: routes
    /// from half of them would refuse clients.
    pub complete: bool,
    /// Whether an object tells of each cluster what it allows: a Service in the namespace of a cluster
    /// without one admits nobody. Once true, it stays true.
    pub policies_required: bool,
    /// Everything that the source cannot read at present, old and new.
    pub problems: Arc<[ManifestProblem]>,
    /// ClusterIPs of all Services of a Kubernetes API: most of them are not among the objects.
    pub cluster_ips: Vec<Change<IpAddr>>,
}

/// A reason why a manifest, or an object of the Kubernetes API, cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ManifestProblem {
    /// The file, as a path from the current directory; `None` for an object of a Kubernetes API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<Arc<Path>>,
    /// The line in the file, counted from 1; 0 for the entire file.
    pub line: u32,
    /// How bad it is.
    pub severity: Severity,
    /// A stable word for metrics and tests, in kebab case: `syntax`, `unknown-kind`, `duplicate`.
    pub reason: &'static str,
    /// The object, if its name could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectRef>,
    /// What is wrong, with the value found.
    pub message: String,
    /// What happens meanwhile and what to do about it.
    pub remedy: String,
}

impl fmt::Display for ManifestProblem {
    /// `dir/a.yaml:12: Cluster a: what is wrong; what to do`: a format that editors can jump to.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            // The name of a file may hold anything but a slash and a NUL, line ends too.
            let name = one_line(&file.display().to_string(), LONGEST_PATH);
            write!(f, "{name}:")?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_stays_on_the_line_of_its_problem() {
        let problem = ManifestProblem {
            file: Some(Path::new("a\n\u{202e}b.yaml").into()),
            line: 3,
            severity: Severity::Error,
            reason: "syntax",
            object: None,
            message: "no".to_owned(),
            remedy: String::new(),
        };
        assert_eq!(problem.to_string(), "a  b.yaml:3: no");
    }
}
