//! That a process has ended, as an error: no wait for it makes sense any more.

use std::fmt;
use std::process::ExitStatus;

/// A process that should be running has ended: waiting for what it was to do is pointless.
#[derive(Debug)]
pub struct Ended {
    pub(crate) process: String,
    pub(crate) status: ExitStatus,
    pub(crate) last_lines: String,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ended ({}); its log ends with:\n{}", self.process, self.status, self.last_lines)
    }
}

impl std::error::Error for Ended {}
