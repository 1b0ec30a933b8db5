//! Problems in the log. A Service that is changed two hundred times a second, with new problems each time,
//! must not fill a disk: lines are bounded in time, and the rest is counted.

use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use portico_api::problem::Severity;
use portico_net::line_limit::{LineLimit, Pace};
use tokio::time::Instant;
use tracing::{error, info, warn};

/// Writes new problems to the log.
#[derive(Debug)]
pub struct ProblemLog {
    started: Instant,
    /// Errors and warnings apart: a flood of warnings hides no error.
    errors: LineLimit,
    warnings: LineLimit,
    /// Problems that were neither written nor counted in a line.
    left_out: AtomicU64,
    /// Lines that count those left out.
    counts: LineLimit,
    /// Lines that say that all is well again.
    endings: LineLimit,
}

impl Default for ProblemLog {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            errors: LineLimit::default(),
            warnings: LineLimit::default(),
            left_out: AtomicU64::new(0),
            counts: LineLimit::default(),
            endings: LineLimit::default(),
        }
    }
}

impl ProblemLog {
    /// Writes the `new` problems of one change, each with its severity and reason, as far as there may be
    /// lines.
    pub fn write<P: Display>(&self, new: impl IntoIterator<Item = (Severity, &'static str, P)>) {
        // Of one change no more than at once, however long it takes to write them.
        let now = self.started.elapsed();
        for (severity, reason, problem) in new {
            let lines = match severity {
                Severity::Error => &self.errors,
                Severity::Warning => &self.warnings,
            };
            if lines.admit(Pace::PROBLEMS, now).is_none() {
                self.left_out.fetch_add(1, Relaxed);
                continue;
            }
            match severity {
                Severity::Error => error!(reason, "{problem}"),
                Severity::Warning => warn!(reason, "{problem}"),
            }
        }
        if self.left_out.load(Relaxed) > 0 && self.counts.admit(Pace::SAME_KIND, now).is_some() {
            let more = self.left_out.swap(0, Relaxed);
            warn!(more, "more problems than are written here; /readyz?verbose lists them");
        }
    }

    /// Writes that the manifests of `directory` can be read again. What follows from them may still be wrong:
    /// two Services that want one name.
    pub(crate) fn write_end(&self, directory: &Path) {
        if self.endings.admit(Pace::PROBLEMS, self.started.elapsed()).is_some() {
            info!(directory = %directory.display(), "every manifest can be read again");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use portico_lab::log_lines::LogLines;
    use tokio::time::advance;
    use tracing::Level;

    use super::*;

    /// How many problems there are in the log, and how many lines count others.
    fn counted(lines: &LogLines) -> (usize, usize) {
        let counts = |message: &&String| message.starts_with("more problems");
        let messages = lines.messages();
        let others = messages.iter().filter(counts).count();
        (messages.len() - others, others)
    }

    fn warnings(from: u32, to: u32) -> impl Iterator<Item = (Severity, &'static str, u32)> {
        (from..to).map(|number| (Severity::Warning, "void-annotation", number))
    }

    #[tokio::test(start_paused = true)]
    async fn of_one_change_twenty_problems_are_written_and_the_others_counted() {
        let (lines, _collecting) = LogLines::collect(|line| *line.level() == Level::WARN);
        let log = ProblemLog::default();
        log.write(warnings(0, 20));
        assert_eq!(counted(&lines), (20, 0));
        advance(Duration::from_secs(20)).await;
        log.write(warnings(20, 60));
        assert_eq!(counted(&lines), (40, 1));
        assert_eq!(log.left_out.load(Relaxed), 0, "a line has counted them");
    }

    #[tokio::test(start_paused = true)]
    async fn changes_in_a_flood_are_a_line_a_second_and_a_count_each_ten() {
        let (lines, _collecting) = LogLines::collect(|line| *line.level() == Level::WARN);
        let log = ProblemLog::default();
        for change in 0..12_000 {
            log.write(warnings(25 * change, 25 * (change + 1)));
            advance(Duration::from_millis(5)).await;
        }
        assert_eq!(counted(&lines), (20 + 59, 6));
        let since_the_last_count = log.left_out.load(Relaxed);
        assert!((40_000..50_000).contains(&since_the_last_count), "{since_the_last_count}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_warnings_hides_no_error() {
        let (errors, _collecting) = LogLines::collect(|line| *line.level() == Level::ERROR);
        let log = ProblemLog::default();
        log.write(warnings(0, 1_000));
        log.write([(Severity::Error, "syntax", "broken")]);
        assert_eq!(errors.messages(), ["broken"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_has_the_severity_of_its_problem() {
        let (errors, _collecting) = LogLines::collect(|line| *line.level() == Level::ERROR);
        let log = ProblemLog::default();
        log.write([(Severity::Warning, "void-annotation", "a"), (Severity::Error, "syntax", "b")]);
        assert_eq!(errors.messages(), ["b"]);
    }

    #[test]
    fn of_manifests_without_a_problem_no_more_is_said_than_that_they_can_be_read() {
        let (lines, _collecting) = LogLines::collect(|line| *line.level() == Level::INFO);
        ProblemLog::default().write_end(Path::new("manifests"));
        assert_eq!(lines.messages(), ["every manifest can be read again"]);
    }

    #[tokio::test(start_paused = true)]
    async fn problems_that_come_and_go_in_a_flood_end_once_a_second_in_the_log() {
        let (lines, _collecting) = LogLines::collect(|line| *line.level() == Level::INFO);
        let log = ProblemLog::default();
        for _ in 0..1_000 {
            log.write_end(Path::new("manifests"));
            advance(Duration::from_millis(5)).await;
        }
        assert_eq!(lines.messages().len(), 20 + 4);
    }
}
