//! The access line: one for each connection, refused or ended, on standard output.
//!
//! Finished lines go through a bounded queue to a thread of their own: a terminal or log collector that
//! stalls costs lines, which are counted, but never a byte of a connection.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

/// Lines that wait for the writer: a tenth of a second at 40,000 connections a second.
const QUEUE: usize = 4_096;

/// How long a process that ends waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Between two looks at whether they are.
const LAST_LINES_POLL: Duration = Duration::from_millis(5);

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
    /// Lines that are queued, or on their way to standard output.
    unwritten: Arc<AtomicU64>,
}

impl AccessLog {
    /// Starts the writer, unless `format` is off.
    pub fn start(format: AccessFormat) -> io::Result<Self> {
        Self::start_to(format, io::stdout())
    }

    fn start_to(format: AccessFormat, output: impl Write + Send + 'static) -> io::Result<Self> {
        let unwritten = Arc::new(AtomicU64::default());
        let queue = match format {
            AccessFormat::Off => None,
            AccessFormat::Text | AccessFormat::Json => {
                let (sender, receiver) = sync_channel(QUEUE);
                let unwritten = Arc::clone(&unwritten);
                std::thread::Builder::new().name("access-log".into()).spawn(move || {
                    // A closed standard output ends the log, not the process.
                    if let Err(error) = write_lines(&receiver, &unwritten, output) {
                        unwritten.store(0, Relaxed);
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
        Ok(Self { format, queue, dropped: AtomicU64::default(), unwritten })
    }

    /// Lines lost because the reader of standard output was too slow.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Writes a line, made only if lines are written.
    pub fn write<L: Line>(&self, line: impl FnOnce() -> L) {
        let Some(queue) = &self.queue else { return };
        self.unwritten.fetch_add(1, Relaxed);
        if queue.try_send(formatted(&line(), self.format)).is_err() {
            self.unwritten.fetch_sub(1, Relaxed);
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Waits until all lines are written, a second at most: the end of the process ends the writer too.
    pub async fn flush(&self) {
        let begun = Instant::now();
        while self.unwritten.load(Relaxed) > 0 && begun.elapsed() < LAST_LINES {
            sleep(LAST_LINES_POLL).await;
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
fn write_lines(lines: &Receiver<String>, unwritten: &AtomicU64, output: impl Write) -> io::Result<()> {
    let mut output = io::BufWriter::new(output);
    while let Ok(line) = lines.recv() {
        output.write_all(line.as_bytes())?;
        let mut count = 1;
        while let Ok(line) = lines.try_recv() {
            output.write_all(line.as_bytes())?;
            count += 1;
        }
        output.flush()?;
        unwritten.fetch_sub(count, Relaxed);
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
        assert_eq!(
            write_lines(&lines, &AtomicU64::new(1), Closed).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }

    #[tokio::test]
    async fn a_flush_ends_once_all_lines_are_written() {
        #[derive(Serialize)]
        struct Word(&'static str);
        impl super::Line for Word {
            fn to_text(&self) -> String {
                self.0.to_owned()
            }
        }
        /// Counts lines, and takes a moment for each write.
        struct Slow(Arc<AtomicU64>);
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                std::thread::sleep(Duration::from_millis(10));
                let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
                self.0.fetch_add(u64::try_from(lines).unwrap(), Relaxed);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let written = Arc::new(AtomicU64::default());
        let log = AccessLog::start_to(AccessFormat::Text, Slow(Arc::clone(&written))).unwrap();
        for _ in 0..1_000 {
            log.write(|| Word("line"));
        }
        log.flush().await;
        assert_eq!((written.load(Relaxed), log.dropped()), (1_000, 0));
    }
}
