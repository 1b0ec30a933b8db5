//! When to read a change: at once if it is complete, later if it is half written.
//!
//! A new cluster should be routable within 10 ms. So a file that was renamed into place, or closed after
//! writing, is read as soon as its burst pauses. A file that is being written is left alone until it is
//! closed. A name that vanished counts as deleted only after a while: editors delete and write again.
//!
//! Pure: the caller passes the time. Called by [`crate::directory`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::watch::FileEvent;

/// A pause of this length ends a burst. Programs that write many files leave some 0.1 ms between two.
const QUIET: Duration = Duration::from_millis(2);

/// A burst without a pause is cut here, so that a steady writer delays no other file.
const MAX_BURST: Duration = Duration::from_millis(50);

/// How long a name may be absent before it counts as deleted. Editors write the new file within a few
/// milliseconds, on a slow disk within some tens.
const GONE_GRACE: Duration = Duration::from_millis(100);

/// How long a file may be open for writing without a write. After that, its present content is read. Objects
/// that it lacks count as missing only once the file is closed.
const WRITING_GRACE: Duration = Duration::from_secs(1);

/// A file that is written without a pause is read this long after the first write.
const MAX_WRITING: Duration = Duration::from_secs(2);

/// A file that is open for writing counts as closed after so long without a write. Inotify may have lost the
/// event that says so.
const MAX_OPEN: Duration = Duration::from_secs(30);

/// What has changed and was not read yet.
#[derive(Debug, Default)]
pub(crate) struct Debounce {
    items: BTreeMap<PathBuf, Item>,
    /// Files that were read before they were closed, and when.
    open: BTreeMap<PathBuf, Instant>,
    everything: bool,
    /// Time of the first and the last event of a path that is ready.
    burst: Option<(Instant, Instant)>,
}

#[derive(Debug)]
struct Item {
    /// When the first event arrived.
    since: Instant,
    /// Not to be read before.
    ready: Instant,
    /// Whether the last event says that it is being written.
    unfinished: bool,
}

/// What is to be read now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    /// The whole directory.
    pub(crate) everything: bool,
    /// Files and folders; the file system says which.
    pub(crate) paths: Vec<DuePath>,
}

/// A file or folder to read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DuePath {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Whether it is a file that is being written: what it lacks may still come.
    pub(crate) unfinished: bool,
}

impl Debounce {
    /// Adds an event that arrived `now`.
    pub(crate) fn add(&mut self, event: FileEvent, now: Instant) {
        let unfinished = matches!(event, FileEvent::Writing(_));
        let (path, grace) = match event {
            FileEvent::Everything => {
                self.everything = true;
                self.extend_burst(now);
                return;
            }
            FileEvent::Written(path) | FileEvent::Folder(path) => (path, None),
            FileEvent::Writing(path) => (path, Some(WRITING_GRACE)),
            FileEvent::Gone(path) => (path, Some(GONE_GRACE)),
        };
        self.open.remove(&path);
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

    /// Whether `path` waits to be read.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        self.items.contains_key(path)
    }

    /// Whether `path` is still open for writing after it was read.
    pub(crate) fn is_open(&self, path: &Path, now: Instant) -> bool {
        self.open.get(path).is_some_and(|&read| now < read + MAX_OPEN)
    }

    /// When there is something to [`take`](Self::take); `None` if nothing waits.
    pub(crate) fn due_at(&self) -> Option<Instant> {
        let burst = self.burst.map(|(first, last)| (last + QUIET).min(first + MAX_BURST));
        let ready_in_burst = |ready: Instant| self.burst.is_some_and(|(_, last)| ready <= last);
        let later = self.items.values().map(|item| item.ready).filter(|&ready| !ready_in_burst(ready)).min();
        burst.into_iter().chain(later).min()
    }

    /// Takes everything that may be read `now`.
    pub(crate) fn take(&mut self, now: Instant) -> Due {
        let paths: Vec<DuePath> = self
            .items
            .extract_if(.., |_, item| item.ready <= now)
            .map(|(path, item)| DuePath { path, unfinished: item.unfinished })
            .collect();
        self.open.retain(|_, read| now < *read + MAX_OPEN);
        self.open.extend(paths.iter().filter(|due| due.unfinished).map(|due| (due.path.clone(), now)));
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

    fn written(name: &str) -> FileEvent {
        FileEvent::Written(name.into())
    }

    fn taken(debounce: &mut Debounce, now: Instant) -> Vec<(String, bool)> {
        let paths = debounce.take(now).paths.into_iter();
        paths.map(|due| (due.path.to_str().unwrap().to_owned(), due.unfinished)).collect()
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_file_renamed_into_place_is_due_after_a_short_pause() {
        let (mut debounce, start) = (Debounce::default(), Instant::now());
        assert_eq!(debounce.due_at(), None);
        debounce.add(written("a"), start);
        assert_eq!(debounce.due_at(), Some(start + QUIET));
        assert_eq!(taken(&mut debounce, start + QUIET), [("a".to_owned(), false)]);
        assert_eq!(debounce.due_at(), None);
    }

    #[test]
    fn a_burst_is_one_step_but_not_for_ever() {
        let (mut debounce, start) = (Debounce::default(), Instant::now());
        for time in 0..1_000 {
            debounce.add(written(&time.to_string()), start + ms(time));
            assert!(debounce.due_at() <= Some(start + MAX_BURST));
        }
        assert_eq!(debounce.take(start + ms(1_000)).paths.len(), 1_000);
    }

    #[test]
    fn a_file_being_written_waits_until_it_is_closed_and_delays_no_other() {
        let (mut debounce, start) = (Debounce::default(), Instant::now());
        debounce.add(FileEvent::Writing("a".into()), start);
        debounce.add(written("b"), start + ms(1));
        let due = debounce.due_at().unwrap();
        assert_eq!(taken(&mut debounce, due), [("b".to_owned(), false)]);
        assert_eq!(debounce.due_at(), Some(start + WRITING_GRACE));
        debounce.add(written("a"), start + ms(20));
        assert_eq!(debounce.due_at(), Some(start + ms(20) + QUIET));
    }

    #[test]
    fn a_file_that_never_stops_being_written_is_read_in_the_end() {
        let (mut debounce, start) = (Debounce::default(), Instant::now());
        for time in 0..1_950 {
            debounce.add(FileEvent::Writing("a".into()), start + ms(time));
        }
        assert_eq!(debounce.due_at(), Some(start + MAX_WRITING));
        assert_eq!(taken(&mut debounce, start + MAX_WRITING), [("a".to_owned(), true)]);
    }

    #[test]
    fn a_file_that_was_read_before_it_was_closed_stays_open_until_then_and_not_for_ever() {
        let start = Instant::now();
        let read = start + WRITING_GRACE;
        let unclosed = || {
            let mut debounce = Debounce::default();
            debounce.add(FileEvent::Writing("a".into()), start);
            assert_eq!(taken(&mut debounce, read), [("a".to_owned(), true)]);
            debounce
        };
        let is_open = |debounce: &Debounce, now| debounce.is_open(Path::new("a"), now);
        let mut debounce = unclosed();
        assert!(is_open(&debounce, read + MAX_OPEN - ms(1)) && !is_open(&debounce, read + MAX_OPEN));
        debounce.take(read + MAX_OPEN);
        assert!(debounce.open.is_empty());
        for end in [written("a"), FileEvent::Gone("a".into())] {
            let mut debounce = unclosed();
            debounce.add(end, read);
            debounce.take(read + GONE_GRACE);
            assert!(!is_open(&debounce, read + GONE_GRACE));
        }
    }

    #[test]
    fn a_vanished_name_that_comes_back_is_a_file_written_anew() {
        let (mut debounce, start) = (Debounce::default(), Instant::now());
        debounce.add(FileEvent::Gone("a".into()), start);
        assert_eq!(debounce.due_at(), Some(start + GONE_GRACE));
        debounce.add(FileEvent::Writing("a".into()), start + ms(10));
        debounce.add(written("a"), start + ms(11));
        assert_eq!(debounce.due_at(), Some(start + ms(11) + QUIET));
    }
}
