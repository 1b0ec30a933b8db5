//! How far a run is, on standard error: one line that moves at a terminal, else a line every tenth.

use std::io::{self, IsTerminal, Write};

use portico_preflight::runner::Outcome;

/// Counts checks as they end.
#[derive(Debug)]
pub(super) struct Progress {
    all: usize,
    done: usize,
    unanswered: usize,
    is_terminal: bool,
}

impl Progress {
    pub(super) fn new(all: usize) -> Self {
        Self { all, done: 0, unanswered: 0, is_terminal: io::stderr().is_terminal() }
    }

    pub(super) fn note(&mut self, outcome: &Outcome) {
        self.done += 1;
        let is_answer =
            matches!(outcome.seen.kind(), "answered" | "tls" | "resolved" | "path-mtu" | "not-tried");
        self.unanswered += usize::from(!is_answer);
        let tenth = self.all.div_ceil(10);
        if self.is_terminal || self.done == self.all || self.done.is_multiple_of(tenth) {
            self.write();
        }
    }

    fn write(&self) {
        let Self { all, done, unanswered, is_terminal } = self;
        let (start, end) = if *is_terminal { ("\r", "") } else { ("", "\n") };
        // Nothing depends on it.
        let _ = write!(
            io::stderr(),
            "{start}preflight: {done} of {all} checks, {unanswered} without an answer{end}"
        );
    }

    /// Leaves the line.
    pub(super) fn end(&self) {
        if self.is_terminal && self.all > 0 {
            let _ = writeln!(io::stderr());
        }
    }
}
