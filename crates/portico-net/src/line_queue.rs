//! Lines on their way to an output that may stall: a terminal, or the pipe of a log collector.
//!
//! They go through a bounded queue to a thread of their own. An output that stalls costs lines, which are
//! counted. It never costs the time of a thread that moves bytes.

use std::io::{self, ErrorKind, Write};
use std::mem::replace;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::line_limit::{LineLimit, Pace};

/// Lines that wait for the writer: a tenth of a second at 40,000 connections a second.
const QUEUE: usize = 4_096;

/// Bytes written at once, and a line.
const WRITE_AT_ONCE: usize = 64 << 10;

/// How long a process that ends waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Between two looks at whether the last lines are written, or whether a full output that does not block
/// takes more.
const POLL: Duration = Duration::from_millis(5);

/// The fate of lines.
#[derive(Debug, Default)]
struct Counts {
    dropped: AtomicU64,
    /// Queued, or on their way to the output.
    unwritten: AtomicU64,
}

/// What a writer has to tell.
#[derive(Debug)]
pub enum Trouble {
    /// The output cannot take lines now. They are dropped and counted, until it can.
    Fails(io::Error),
    /// It never will again. The writer has ended.
    Closed(io::Error),
    /// It takes lines, and so many were dropped since this was last said.
    Dropped(u64),
}

/// The queue before an output. Dropped, it ends the writer, once all lines are written.
#[derive(Debug)]
pub struct LineQueue {
    queue: SyncSender<Vec<u8>>,
    counts: Arc<Counts>,
}

impl LineQueue {
    /// Starts the writer, a thread of this `name`. It writes to `output`, which has no buffer of its own, and
    /// has `report` make trouble known.
    pub fn start(
        name: &str,
        output: impl Write + Send + 'static,
        report: impl Fn(Trouble) + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, lines) = sync_channel(QUEUE);
        let counts = Arc::<Counts>::default();
        let writer = Writer {
            output,
            report,
            counts: Arc::clone(&counts),
            is_failing: false,
            reported: 0,
            reports: LineLimit::default(),
            started: Instant::now(),
        };
        thread::Builder::new().name(name.to_owned()).spawn(move || writer.run(lines))?;
        Ok(Self { queue, counts })
    }

    /// Adds a line, with its line break; dropped if too many wait.
    pub fn push(&self, line: Vec<u8>) {
        self.counts.unwritten.fetch_add(1, Relaxed);
        if self.queue.try_send(line).is_err() {
            self.counts.unwritten.fetch_sub(1, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Lines lost because the output was too slow, or failed.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Relaxed)
    }

    /// Blocks until all lines are written, a second at most: the end of the process ends the writer too.
    pub fn flush(&self) {
        let begun = Instant::now();
        while self.counts.unwritten.load(Relaxed) > 0 && begun.elapsed() < LAST_LINES {
            thread::sleep(POLL);
        }
    }
}

struct Writer<W, R> {
    output: W,
    report: R,
    counts: Arc<Counts>,
    is_failing: bool,
    /// Dropped lines that were reported.
    reported: u64,
    /// An output that is a little too slow drops lines again and again.
    reports: LineLimit,
    started: Instant,
}

impl<W: Write, R: Fn(Trouble)> Writer<W, R> {
    /// Writes lines as they come, many at once when many wait. Ends with the queue, or when the output is
    /// closed. The queue ends before the report does, so that no line is taken after that.
    fn run(mut self, lines: Receiver<Vec<u8>>) {
        while let Ok(mut bytes) = lines.recv() {
            let mut count = 1;
            while bytes.len() < WRITE_AT_ONCE
                && let Ok(line) = lines.try_recv()
            {
                bytes.extend_from_slice(&line);
                count += 1;
            }
            let written = self.write(&bytes);
            if written.is_err() {
                self.counts.dropped.fetch_add(count, Relaxed);
            }
            self.counts.unwritten.fetch_sub(count, Relaxed);
            match written {
                Ok(()) => {
                    self.is_failing = false;
                    self.report_dropped();
                }
                Err(error) if is_closed(&error) => {
                    // Lines that are in the queue now are lost with it.
                    self.counts.unwritten.store(0, Relaxed);
                    return (self.report)(Trouble::Closed(error));
                }
                Err(error) if !self.is_failing => {
                    self.is_failing = true;
                    (self.report)(Trouble::Fails(error));
                }
                Err(_) => {}
            }
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.output.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process that shares the terminal may have asked for that.
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(POLL),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn report_dropped(&mut self) {
        let dropped = self.counts.dropped.load(Relaxed);
        if dropped > self.reported && self.reports.admit(Pace::SAME_KIND, self.started.elapsed()).is_some() {
            let lines = dropped - replace(&mut self.reported, dropped);
            (self.report)(Trouble::Dropped(lines));
        }
    }
}

/// Whether nothing will ever be written there again.
fn is_closed(error: &io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe || Errno::from_io_error(error) == Some(Errno::BADF)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Fails with the queued errors first, then holds what was written.
    #[derive(Default, Clone)]
    struct Output(Arc<Mutex<(VecDeque<ErrorKind>, Vec<u8>)>>);

    impl Output {
        fn failing(kinds: impl Into<VecDeque<ErrorKind>>) -> Self {
            Self(Arc::new(Mutex::new((kinds.into(), Vec::new()))))
        }

        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().1.clone()).unwrap()
        }
    }

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (failures, written) = &mut *self.0.lock().unwrap();
            if let Some(kind) = failures.pop_front() {
                return Err(kind.into());
            }
            // Never all at once.
            let some = bytes.len().div_ceil(2);
            written.extend_from_slice(&bytes[..some]);
            Ok(some)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn start(output: impl Write + Send + 'static) -> (LineQueue, std::sync::mpsc::Receiver<Trouble>) {
        let (report, troubles): (Sender<Trouble>, _) = channel();
        let report = move |trouble| report.send(trouble).unwrap_or_default();
        (LineQueue::start("lines", output, report).unwrap(), troubles)
    }

    #[test]
    fn a_flush_ends_once_all_lines_are_written() {
        let output = Output::default();
        let (queue, _troubles) = start(output.clone());
        for _ in 0..1_000 {
            queue.push(b"line\n".to_vec());
        }
        queue.flush();
        assert_eq!((output.text(), queue.dropped()), ("line\n".repeat(1_000), 0));
    }

    #[test]
    fn an_output_that_is_full_for_now_loses_nothing() {
        let output = Output::failing([ErrorKind::WouldBlock, ErrorKind::Interrupted]);
        let (queue, _troubles) = start(output.clone());
        queue.push(b"line\n".to_vec());
        queue.flush();
        assert_eq!((output.text().as_str(), queue.dropped()), ("line\n", 0));
    }

    #[test]
    fn an_output_that_fails_loses_those_lines_and_takes_the_next() {
        let output = Output::failing([ErrorKind::StorageFull]);
        let (queue, troubles) = start(output.clone());
        queue.push(b"lost\n".to_vec());
        assert!(matches!(troubles.recv(), Ok(Trouble::Fails(_))));
        queue.push(b"line\n".to_vec());
        assert!(matches!(troubles.recv(), Ok(Trouble::Dropped(1))));
        queue.flush();
        assert_eq!((output.text().as_str(), queue.dropped()), ("line\n", 1));
    }

    #[test]
    fn a_closed_output_ends_the_writer_and_lines_are_dropped() {
        let (queue, troubles) = start(Output::failing([ErrorKind::BrokenPipe]));
        queue.push(b"lost\n".to_vec());
        assert!(matches!(troubles.recv(), Ok(Trouble::Closed(_))));
        // The writer has ended when its report has.
        assert!(troubles.recv().is_err());
        queue.push(b"lost\n".to_vec());
        queue.flush();
        assert_eq!(queue.dropped(), 2);
    }

    #[test]
    fn an_output_that_stalls_costs_lines_and_no_time() {
        /// Says that it was asked to write, and takes nothing until it is told to.
        struct Stalled(Sender<()>, Receiver<()>);
        impl Write for Stalled {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                // Errors say that nothing is held up any more.
                self.0.send(()).unwrap_or_default();
                self.1.recv().unwrap_or_default();
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let ((stalls, stalled), (go_on, told)) = (channel(), channel());
        let (queue, troubles) = start(Stalled(stalls, told));
        queue.push(b"line\n".to_vec());
        stalled.recv().unwrap();
        for _ in 0..3 * QUEUE {
            queue.push(b"line\n".to_vec());
        }
        let dropped = queue.dropped();
        assert_eq!(dropped, 2 * u64::try_from(QUEUE).unwrap());
        drop(go_on);
        assert!(matches!(troubles.recv(), Ok(Trouble::Dropped(count)) if count == dropped));
    }
}
