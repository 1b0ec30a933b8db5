//! Many problems in few lines. A directory with thirty thousand foreign manifests must not fill the log, nor
//! a list that people read. The same holds for ten thousand objects with another schema.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use portico_api::problem::Severity;

use crate::problem_log::ProblemLog;
use crate::step::ManifestProblem;

/// Most warnings of a reason that are listed one by one.
const MOST_ALIKE: usize = 10;

/// Warnings of one reason with one remedy.
#[derive(Debug, Default)]
struct Alike {
    listed: usize,
    /// The files of those that are not listed.
    other_files: BTreeSet<Option<Arc<Path>>>,
}

/// Sorts `problems`. If many warnings are alike, the first ones stay, and one says how many files have more.
pub(crate) fn summarised(mut problems: Vec<ManifestProblem>) -> Vec<ManifestProblem> {
    problems.sort();
    let mut by_reason: BTreeMap<(&'static str, String), Alike> = BTreeMap::new();
    problems.retain(|problem| {
        if problem.severity == Severity::Error {
            return true;
        }
        let alike = by_reason.entry((problem.reason, problem.remedy.clone())).or_default();
        let is_listed = alike.listed < MOST_ALIKE;
        if is_listed {
            alike.listed += 1;
        } else {
            alike.other_files.insert(problem.file.clone());
        }
        is_listed
    });
    for ((reason, remedy), alike) in by_reason {
        let files = alike.other_files.len();
        if files > 0 {
            let files = if files == 1 { "one file".to_owned() } else { format!("{files} files") };
            let message = format!("there is more like the {MOST_ALIKE} warnings {reason}, in {files}");
            let severity = Severity::Warning;
            problems.push(ManifestProblem {
                file: None,
                line: 0,
                severity,
                reason,
                object: None,
                message,
                remedy,
            });
        }
    }
    problems.sort();
    problems
}

/// Writes those of `now` to the log that were not among `before`. Both are sorted.
pub(crate) fn log_new(log: &ProblemLog, before: &[ManifestProblem], now: &[ManifestProblem]) {
    let new = now.iter().filter(|problem| before.binary_search(problem).is_err());
    log.write(new.map(|problem| (problem.severity, problem.reason, problem)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(file: &str, line: u32, severity: Severity, remedy: &str) -> ManifestProblem {
        ManifestProblem {
            file: Some(Path::new(file).into()),
            line,
            severity,
            reason: "unknown-kind",
            object: None,
            message: "Deployment (apps/v1) is not a kind Portico reads".into(),
            remedy: remedy.into(),
        }
    }

    #[test]
    fn of_many_warnings_alike_ten_stay_and_one_says_how_many_files_have_more() {
        let mut all: Vec<_> = (0..20_000)
            .map(|n| problem(&format!("{n:05}.yaml"), 1, Severity::Warning, "it is skipped"))
            .collect();
        all.push(problem("00011.yaml", 7, Severity::Warning, "it is skipped"));
        all.push(problem("z.yaml", 1, Severity::Warning, "did you mean v1?"));
        all.extend((0..30).map(|line| problem("broken.yaml", line, Severity::Error, "correct it")));
        let shown = summarised(all);
        let of = |severity| shown.iter().filter(move |problem| problem.severity == severity);
        assert_eq!((of(Severity::Warning).count(), of(Severity::Error).count()), (12, 30));
        let summary = "there is more like the 10 warnings unknown-kind, in 19990 files; it is skipped";
        assert!(shown.iter().any(|problem| problem.to_string() == summary), "{shown:?}");
        assert!(shown.iter().any(|problem| problem.remedy == "did you mean v1?"), "what is rare is not lost");
        assert!(shown.is_sorted());
    }
}
