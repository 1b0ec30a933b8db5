//! The access line: one for each connection, refused or ended, on standard output, by a [`LineQueue`].

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use serde::Serialize;

use crate::line_queue::{LineQueue, Trouble};

/// How access lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AccessFormat {
    /// No lines are written.
    #[default]
    Off,
    /// `key=value` pairs.
    Text,
    /// One JSON object a line.
    Json,
}

/// An access line. As JSON it has its fields.
pub trait Line: Serialize {
    /// As `key=value` pairs, without a line break. Text that peers choose must be quoted.
    fn to_text(&self) -> String;
}

/// Where access lines go.
#[derive(Debug)]
pub struct AccessLog {
    format: AccessFormat,
    queue: Option<LineQueue>,
}

impl AccessLog {
    /// Starts the writer, unless `format` is off.
    pub fn start(format: AccessFormat) -> io::Result<Self> {
        let queue = match format {
            AccessFormat::Off => None,
            AccessFormat::Text | AccessFormat::Json => {
                // Past the buffer that standard output has: a write that failed would stay in it.
                let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
                Some(LineQueue::start("access-log", output, report)?)
            }
        };
        Ok(Self { format, queue })
    }

    /// Lines lost because standard output was not read fast enough, or failed.
    pub fn dropped(&self) -> u64 {
        self.queue.as_ref().map_or(0, LineQueue::dropped)
    }

    /// Writes a line, made only if lines are written.
    pub fn write<L: Line>(&self, line: impl FnOnce() -> L) {
        if let Some(queue) = &self.queue {
            queue.push(formatted(&line(), self.format).into_bytes());
        }
    }

    /// Blocks until all lines are written, a second at most.
    pub fn flush(&self) {
        if let Some(queue) = &self.queue {
            queue.flush();
        }
    }
}

fn report(trouble: Trouble) {
    match trouble {
        Trouble::Fails(error) => {
            tracing::error!(%error, "cannot write access lines; they are dropped until it is possible again");
        }
        // A closed standard output ends the log, not the process.
        Trouble::Closed(error) => tracing::error!(
            %error,
            "standard output takes no more access lines; from now on they are dropped and counted"
        ),
        // The metric says so.
        Trouble::Dropped(_) => {}
    }
}

/// The line as it is written, with its line break.
pub fn formatted(line: &impl Line, format: AccessFormat) -> String {
    let mut text = match format {
        AccessFormat::Json => serde_json::to_string(line).unwrap_or_default(),
        AccessFormat::Off | AccessFormat::Text => line.to_text(),
    };
    text.push('\n');
    text
}

/// A duration as access lines have it.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
