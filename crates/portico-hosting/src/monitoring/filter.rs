//! The lines of an answer in Prometheus' text format that are passed on, line by line as they come.

use thiserror::Error;

use super::Source;
use super::kept::is_kept;

/// Longest line read. Labels of Kubernetes make a few hundred bytes.
const LONGEST_LINE: usize = 16 * 1_024;

/// Most bytes that are kept of one answer: twenty times what a cluster at rest has.
const MOST_KEPT: usize = 512 << 10;

/// Why an answer is not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TooLong {
    /// It is no text of Prometheus.
    #[error("a line of it is longer than {LONGEST_LINE} bytes")]
    Line,
    /// There are more series than anybody would want to keep.
    #[error("what is kept of it is more than {MOST_KEPT} bytes")]
    Kept,
}

/// Takes an answer in pieces, and keeps of it what is of use.
#[derive(Debug)]
pub struct Filter {
    source: Source,
    /// A line whose end has not come yet.
    begun: Vec<u8>,
    kept: String,
}

impl Filter {
    /// For an answer of `source`.
    pub const fn of(source: Source) -> Self {
        Self { source, begun: Vec::new(), kept: String::new() }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), TooLong> {
        let mut lines = piece.split_inclusive(|&byte| byte == b'\n');
        if !self.begun.is_empty()
            && let Some(rest) = lines.next()
        {
            self.begun.extend_from_slice(rest);
            if rest.last() == Some(&b'\n') {
                let line = std::mem::take(&mut self.begun);
                self.line(&line)?;
            } else if self.begun.len() > LONGEST_LINE {
                return Err(TooLong::Line);
            }
        }
        lines.try_for_each(|line| self.line(line))
    }

    /// What was kept. A last line without its end is none: the answer was cut.
    pub fn into_kept(self) -> String {
        self.kept
    }

    fn line(&mut self, line: &[u8]) -> Result<(), TooLong> {
        if line.len() > LONGEST_LINE {
            return Err(TooLong::Line);
        }
        if line.last() != Some(&b'\n') {
            self.begun.extend_from_slice(line);
            return Ok(());
        }
        if let Some(text) = std::str::from_utf8(line).ok().filter(|_| is_kept(self.source, line)) {
            if self.kept.len() + text.len() > MOST_KEPT {
                return Err(TooLong::Kept);
            }
            self.kept.push_str(text);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ANSWER: &str = "# HELP apiserver_request_total [STABLE] Requests.\n\
        # TYPE apiserver_request_total counter\n\
        apiserver_request_total{code=\"200\",verb=\"GET\"} 7\n\
        apiserver_request_total{code=\"503\",verb=\"GET\"} 1\n\
        # TYPE apiserver_response_sizes histogram\n\
        apiserver_response_sizes_bucket{le=\"1000\"} 3\n\
        process_open_fds 31\n\
        process_open_fds_of_somebody 1\n";

    fn kept(source: Source, pieces: &[&[u8]]) -> Result<String, TooLong> {
        let mut filter = Filter::of(source);
        pieces.iter().try_for_each(|piece| filter.push(piece))?;
        Ok(filter.into_kept())
    }

    #[test]
    fn of_an_api_server_failed_requests_are_kept_and_the_thousands_of_series_beside_them_are_not() {
        let expected = "# TYPE apiserver_request_total counter\n\
            apiserver_request_total{code=\"503\",verb=\"GET\"} 1\n\
            process_open_fds 31\n";
        assert_eq!(kept(Source::ApiServer, &[ANSWER.as_bytes()]).unwrap(), expected);
        assert_eq!(kept(Source::Etcd, &[ANSWER.as_bytes()]).unwrap(), "process_open_fds 31\n");
    }

    #[test]
    fn buckets_are_kept_with_their_sum_and_count() {
        let text = "etcd_disk_wal_fsync_duration_seconds_bucket{le=\"0.1\"} 1\n\
            etcd_disk_wal_fsync_duration_seconds_sum 1\n\
            etcd_disk_wal_fsync_duration_seconds_count 1\n";
        assert_eq!(kept(Source::Etcd, &[text.as_bytes()]).unwrap(), text);
    }

    #[test]
    fn a_line_without_end_and_an_answer_without_end_are_refused() {
        let long = [b'x'; LONGEST_LINE + 1];
        assert_eq!(kept(Source::Etcd, &[&long]), Err(TooLong::Line));
        let pieces = vec![&long[..1_000]; 20];
        assert_eq!(kept(Source::Etcd, &pieces), Err(TooLong::Line));
        let line = format!("process_open_fds{{a=\"{}\"}} 1\n", "x".repeat(10_000));
        assert_eq!(kept(Source::Etcd, &vec![line.as_bytes(); 300]), Err(TooLong::Kept));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_an_answer_is_cut(cuts in prop::collection::vec(0..ANSWER.len(), 0..9)) {
            let mut cuts = cuts;
            cuts.extend([0, ANSWER.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> =
                cuts.windows(2).map(|pair| &ANSWER.as_bytes()[pair[0]..pair[1]]).collect();
            let whole = kept(Source::ApiServer, &[ANSWER.as_bytes()]);
            prop_assert_eq!(kept(Source::ApiServer, &pieces), whole);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut filter = Filter::of(Source::ApiServer);
            prop_assert!(filter.push(&bytes).is_ok());
        }
    }
}
