//! Progress of something long: one line a step, with the time since the first.

use std::fmt::Display;
use std::io::{Write, stderr};
use std::time::Instant;

/// One line of progress for the person at the terminal: starting Kubernetes takes a while.
pub fn say(line: impl Display) {
    // A terminal that was closed must not keep a lab from being taken down.
    let _ = writeln!(stderr(), "lab: {line}");
}

/// When it began.
pub struct Steps {
    start: Instant,
}

impl Steps {
    /// The first step begins now.
    #[allow(clippy::new_without_default, reason = "it reads the clock")]
    pub fn new() -> Steps {
        Steps { start: Instant::now() }
    }

    /// Says what comes next.
    pub fn begin(&self, step: impl Display) {
        say(format_args!("{:>4} s  {step}", self.start.elapsed().as_secs()));
    }
}
