//! The access line: one for each connection, refused or ended, on standard output.
//!
//! Finished lines go through a bounded queue to a thread of their own: a terminal or log collector that
//! stalls costs lines, which are counted, but never a byte of a connection.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use serde::Serialize;

/// Lines that wait for the writer: a tenth of a second at 40,000 connections a second.
const QUEUE: usize = 4_096;

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
    queue: Option<SyncSender<String>>,
    dropped: AtomicU64,
}

impl AccessLog {
    /// Starts the writer, unless `format` is off.
    pub fn start(format: AccessFormat) -> io::Result<Self> {
        let queue = match format {
            AccessFormat::Off => None,
            AccessFormat::Text | AccessFormat::Json => {
                let (sender, receiver) = sync_channel(QUEUE);
                std::thread::Builder::new().name("access-log".into()).spawn(move || {
                    // A closed standard output ends the log, not the process.
                    if let Err(error) = write_lines(&receiver, io::stdout()) {
                        tracing::error!(
                            %error,
                            "standard output takes no more access lines; from now on they are dropped and \
                             counted"
                        );
                    }
                })?;
                Some(sender)
            }
        };
        Ok(Self { format, queue, dropped: AtomicU64::default() })
    }

    /// Lines lost because the reader of standard output was too slow.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Writes a line, made only if lines are written.
    pub fn write<L: Line>(&self, line: impl FnOnce() -> L) {
        let Some(queue) = &self.queue else { return };
        if queue.try_send(formatted(&line(), self.format)).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
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

/// Writes lines as they come, many at once when many wait. Ends with the queue, or when `output` fails.
fn write_lines(lines: &Receiver<String>, output: impl Write) -> io::Result<()> {
    let mut output = io::BufWriter::new(output);
    while let Ok(line) = lines.recv() {
        output.write_all(line.as_bytes())?;
        while let Ok(line) = lines.try_recv() {
            output.write_all(line.as_bytes())?;
        }
        output.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_output_ends_the_log() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (sender, lines) = sync_channel(1);
        sender.send("a line\n".to_owned()).unwrap();
        assert_eq!(write_lines(&lines, Closed).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
