//! When to look at what changed: at once for what is complete, later for what is half done.
//!
//! A new cluster should be routable within 10 ms, so a file that was renamed into place or closed after writing is read as
//! soon as the burst it belongs to pauses. A file somebody is still writing is left alone until it is closed, and a name that vanished is
//! not believed at once: editors delete and write again.
//!
//! Pure: the caller brings the time. Called by [`crate::directory`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::watch::Change;

/// A pause this long ends a burst. Programs that write many files leave some 0.1 ms between two.
const QUIET: Duration = Duration::from_millis(2);

/// A burst without a pause is cut here, so that a steady writer delays nobody else.
const MAX_BURST: Duration = Duration::from_millis(50);

/// How long a vanished name may stay away before it counts as deleted. Editors write the new file within a few milliseconds, on a slow
/// disk some tens.
const GONE_GRACE: Duration = Duration::from_millis(100);

/// How long a file may be open for writing without being written to. What a writer
/// that stalls longer has written so far is read; what he has not written yet counts as missing only once he closes the file.
const WRITING_GRACE: Duration = Duration::from_secs(1);

/// A file that never stops being written is read this long after the first write all the same.
const MAX_WRITING: Duration = Duration::from_secs(2);

/// What has changed and was not looked at yet.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    items: BTreeMap<PathBuf, Item>,
    everything: bool,
    /// First and last change that is ready to be looked at.
    burst: Option<(Instant, Instant)>,
}

#[derive(Debug)]
struct Item {
    /// When it was first noticed.
    since: Instant,
    /// Not to be looked at before.
    ready: Instant,
    /// Whether somebody was writing it when last heard of.
    unfinished: bool,
}

/// What is to be looked at now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    /// The whole directory.
    pub(crate) everything: bool,
    /// Files or folders; which of the two, the file system says.
    pub(crate) paths: Vec<Look>,
}

/// A file or folder to look at.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Look {
    /// Where.
    pub(crate) path: PathBuf,
    /// Whether it is a file that is still being written, and what it lacks may still come.
    pub(crate) unfinished: bool,
}

impl Pending {
    /// Notes a change that happened `now`.
    pub(crate) fn note(&mut self, change: Change, now: Instant) {
        let unfinished = matches!(change, Change::Writing(_));
        let (path, grace) = match change {
            Change::Everything => {
                self.everything = true;
                self.extend_burst(now);
                return;
            }
            Change::Written(path) | Change::Folder(path) => (path, None),
            Change::Writing(path) => (path, Some(WRITING_GRACE)),
            Change::Gone(path) => (path, Some(GONE_GRACE)),
        };
        let item = self.items.entry(path).or_insert(Item { since: now, ready: now, unfinished });
        item.unfinished = unfinished;
        item.ready = match grace {
            None => now,
            Some(grace) => (now + grace).min(item.since + MAX_WRITING),
        };
        if grace.is_none() {
            self.extend_burst(now);
        }
    }

    /// Whether `path` waits to be looked at.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        self.items.contains_key(path)
    }

    /// When there is something to [`take`](Self::take); `None` if nothing is pending.
    pub(crate) fn due_at(&self) -> Option<Instant> {
        let burst = self.burst.map(|(first, last)| (last + QUIET).min(first + MAX_BURST));
        let ready_in_burst = |ready: Instant| self.burst.is_some_and(|(_, last)| ready <= last);
        let later = self.items.values().map(|item| item.ready).filter(|&ready| !ready_in_burst(ready)).min();
        burst.into_iter().chain(later).min()
    }

    /// Everything that may be looked at `now`.
    pub(crate) fn take(&mut self, now: Instant) -> Due {
        let paths = self
            .items
            .extract_if(.., |_, item| item.ready <= now)
            .map(|(path, item)| Look { path, unfinished: item.unfinished })
            .collect();
        self.burst = None;
        Due { everything: std::mem::take(&mut self.everything), paths }
    }

    fn extend_burst(&mut self, now: Instant) {
        let first = self.burst.map_or(now, |(first, _)| first);
        self.burst = Some((first, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(name: &str) -> Change {
        Change::Written(name.into())
    }

    fn taken(pending: &mut Pending, now: Instant) -> Vec<(String, bool)> {
        let paths = pending.take(now).paths.into_iter();
        paths.map(|look| (look.path.to_str().unwrap().to_owned(), look.unfinished)).collect()
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_file_renamed_into_place_is_due_after_a_short_pause() {
        let (mut pending, start) = (Pending::default(), Instant::now());
        assert_eq!(pending.due_at(), None);
        pending.note(written("a"), start);
        assert_eq!(pending.due_at(), Some(start + QUIET));
        assert_eq!(taken(&mut pending, start + QUIET), [("a".to_owned(), false)]);
        assert_eq!(pending.due_at(), None);
    }

    #[test]
    fn a_burst_is_one_step_but_not_for_ever() {
        let (mut pending, start) = (Pending::default(), Instant::now());
        for time in 0..1_000 {
            pending.note(written(&time.to_string()), start + ms(time));
            assert!(pending.due_at() <= Some(start + MAX_BURST));
        }
        assert_eq!(pending.take(start + ms(1_000)).paths.len(), 1_000);
    }

    #[test]
    fn a_file_being_written_waits_until_it_is_closed_and_holds_up_nobody() {
        let (mut pending, start) = (Pending::default(), Instant::now());
        pending.note(Change::Writing("a".into()), start);
        pending.note(written("b"), start + ms(1));
        let due = pending.due_at().unwrap();
        assert_eq!(taken(&mut pending, due), [("b".to_owned(), false)]);
        assert_eq!(pending.due_at(), Some(start + WRITING_GRACE));
        pending.note(written("a"), start + ms(20));
        assert_eq!(pending.due_at(), Some(start + ms(20) + QUIET));
    }

    #[test]
    fn a_file_that_never_stops_being_written_is_read_in_the_end() {
        let (mut pending, start) = (Pending::default(), Instant::now());
        for time in 0..1_950 {
            pending.note(Change::Writing("a".into()), start + ms(time));
        }
        assert_eq!(pending.due_at(), Some(start + MAX_WRITING));
        assert_eq!(taken(&mut pending, start + MAX_WRITING), [("a".to_owned(), true)]);
    }

    #[test]
    fn a_vanished_name_that_comes_back_is_a_file_written_anew() {
        let (mut pending, start) = (Pending::default(), Instant::now());
        pending.note(Change::Gone("a".into()), start);
        assert_eq!(pending.due_at(), Some(start + GONE_GRACE));
        pending.note(Change::Writing("a".into()), start + ms(10));
        pending.note(written("a"), start + ms(11));
        assert_eq!(pending.due_at(), Some(start + ms(11) + QUIET));
    }
}
