//! Objects from a directory of manifests, watched.
//!
//! A thread of its own reads, parses and compares, so that a burst of two thousand files costs the data plane
//! nothing. It sends what changed in [`Step`]s over a short channel. The thread sleeps in poll(2) on inotify
//! (`watch`) and waits for a burst to pause (`debounce`). It finds the files (`walk`), reads the changed
//! ones, and lets `index` compute the changes.
//!
//! These changes each end in exactly the objects that the files hold then: a rename, a truncation followed by
//! writes, a swapped link, a new folder with files. A file that cannot be read takes down no object that
//! worked. All objects stay in force while the directory itself is missing, or is found without any manifest.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use portico_api::change::Change;
use portico_api::problem::Severity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use thiserror::Error;
use tokio::sync::mpsc;
use tracing::warn;

use crate::debounce::Debounce;
use crate::index::{ManifestIndex, Signature};
use crate::object::Object;
use crate::problem_log::ProblemLog;
use crate::problems::{log_new, summarised};
use crate::step::{MAX_CHANGES_PER_STEP, ManifestProblem, Step};
use crate::walk::{Limits, MAX_FILE, is_dangling, is_manifest, leads_nowhere, no_file, signature, walk};
use crate::watch::Watcher;

/// Pause between two rescans, for what inotify does not tell. A rescan costs some 2 µs a file.
const RESCAN: Duration = Duration::from_secs(30);

/// Pause between two rescans while inotify is known to be blind somewhere: too many folders, or no directory.
const RESCAN_BLIND: Duration = Duration::from_millis(500);

/// Length of the queue of steps. One is applied, one waits; more would only hold memory.
const STEPS_AHEAD: usize = 2;

/// Why a directory cannot be a source.
#[derive(Debug, Error)]
pub enum DirectoryError {
    /// It does not exist, is no directory, or may not be read.
    #[error("cannot read the manifest directory {}: {source}", path.display())]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refuses an inotify instance, a pipe or a thread.
    #[error(
        "cannot watch the manifest directory {}: {source}; the limit fs.inotify.max_user_instances may \
         be used up",
        path.display()
    )]
    Watch {
        /// The directory.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

/// A watched directory of manifests.
#[derive(Debug)]
pub struct DirectorySource {
    steps: mpsc::Receiver<Step>,
    /// The thread ends when this closes.
    _stop: OwnedFd,
}

impl DirectorySource {
    /// Starts to read and watch `directory`.
    pub fn open(directory: &Path) -> Result<Self, DirectoryError> {
        let path = || directory.to_owned();
        std::fs::read_dir(directory).map_err(|source| DirectoryError::Unreadable { path: path(), source })?;
        let refused = |source: io::Error| DirectoryError::Watch { path: path(), source };
        let watcher = Watcher::new(directory).map_err(|error| refused(error.into()))?;
        let (stopped, stop) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| refused(error.into()))?;
        let (sender, steps) = mpsc::channel(STEPS_AHEAD);
        let worker = Worker {
            root: directory.to_owned(),
            watcher,
            debounce: Debounce::default(),
            stopped,
            index: ManifestIndex::default(),
            trouble: BTreeMap::new(),
            trouble_changed: false,
            blind: false,
            links: false,
            problem_log: ProblemLog::default(),
            outbox: Outbox {
                sender,
                changes: Vec::new(),
                problems: Arc::default(),
                sent: false,
                closed: false,
            },
        };
        thread::Builder::new().name("manifests".into()).spawn(move || worker.run()).map_err(refused)?;
        Ok(Self { steps, _stop: stop })
    }

    /// Returns the next step; waits for it. The first complete one ends the initial sync. Cancel-safe.
    ///
    /// `None` means that the thread has ended, which only a defect can cause. The objects delivered before
    /// stay valid.
    pub async fn next(&mut self) -> Option<Step> {
        self.steps.recv().await
    }
}

struct Worker {
    root: PathBuf,
    watcher: Watcher,
    debounce: Debounce,
    stopped: OwnedFd,
    index: ManifestIndex,
    /// What is wrong with folders, by path.
    trouble: BTreeMap<PathBuf, ManifestProblem>,
    trouble_changed: bool,
    /// Whether inotify cannot see everything.
    blind: bool,
    /// Whether there are links to folders, so that a folder cannot be compared by itself.
    links: bool,
    problem_log: ProblemLog,
    outbox: Outbox,
}

/// Changes on their way into steps.
struct Outbox {
    sender: mpsc::Sender<Step>,
    changes: Vec<Change<Object>>,
    problems: Arc<[ManifestProblem]>,
    /// Whether a complete step was sent, so that the next one needs a reason.
    sent: bool,
    closed: bool,
}

impl Outbox {
    fn push(&mut self, change: Change<Object>) {
        self.changes.push(change);
        if self.changes.len() >= MAX_CHANGES_PER_STEP {
            self.send(false);
        }
    }

    fn send(&mut self, complete: bool) {
        let changes = std::mem::take(&mut self.changes);
        self.sent = complete;
        let step = Step { changes, complete, problems: self.problems.clone(), ..Step::default() };
        self.closed |= self.sender.blocking_send(step).is_err();
    }
}

impl Worker {
    fn run(mut self) {
        self.rescan();
        self.finish_step();
        let mut rescan_at = Instant::now() + self.rescan_period();
        while !self.outbox.closed {
            let wake = self.debounce.due_at().map_or(rescan_at, |due| due.min(rescan_at));
            match self.wait(wake) {
                Ok(Woken::Stopped) => return,
                Ok(Woken::Events) => {
                    let (debounce, now) = (&mut self.debounce, Instant::now());
                    if let Err(error) = self.watcher.read(|event| debounce.add(event, now)) {
                        warn!(%error, "cannot read from inotify; comparing all manifests from time to time");
                        self.blind = true;
                    }
                }
                Ok(Woken::Time) => {}
                Err(error) => {
                    // Not waiting would turn this loop into a busy one.
                    warn!(%error, "cannot wait for changes of manifests");
                    thread::sleep(RESCAN_BLIND);
                }
            }
            let now = Instant::now();
            let rescan = now >= rescan_at;
            if !rescan && self.debounce.due_at().is_none_or(|due| due > now) {
                continue;
            }
            let due = self.debounce.take(now);
            if due.everything || rescan {
                self.rescan();
            }
            for path in due.paths {
                self.read_path(&path.path, path.unfinished);
            }
            self.finish_step();
            // A steady stream of events must not put it off.
            let next = Instant::now() + self.rescan_period();
            rescan_at = if rescan { next } else { rescan_at.min(next) };
        }
    }

    fn rescan_period(&self) -> Duration {
        if self.blind { RESCAN_BLIND } else { RESCAN }
    }

    /// Waits for an event, for the end, or until the time `until`.
    fn wait(&self, until: Instant) -> Result<Woken, Errno> {
        let timeout = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let inotify = self.watcher.as_fd();
        let mut fds =
            [PollFd::from_borrowed_fd(inotify, PollFlags::IN), PollFd::new(&self.stopped, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        Ok(if !fds[1].revents().is_empty() {
            Woken::Stopped
        } else if !fds[0].revents().is_empty() {
            Woken::Events
        } else {
            Woken::Time
        })
    }

    /// Compares the whole directory with the index. Reads only what changed.
    fn rescan(&mut self) {
        self.blind = false;
        let root = self.root.clone();
        if let Err(error) = std::fs::read_dir(&root) {
            self.blind = true;
            self.watcher.retain(&root, |_| false);
            self.report(&root, missing_directory(&root, &error));
            return;
        }
        self.read_folder(&root);
    }

    /// Reads a file or folder that may have changed.
    fn read_path(&mut self, path: &Path, unfinished: bool) {
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => self.read_folder(path),
            Ok(metadata) if path.file_name().is_some_and(is_manifest) => {
                if metadata.is_file() {
                    self.clear_trouble(path);
                    self.read(&path.into(), signature(&metadata), unfinished);
                } else {
                    self.report(path, unreadable(path, &no_file()));
                }
            }
            Ok(_) => self.gone(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.not_found(path),
            Err(error) => self.report(path, unreadable(path, &error)),
        }
    }

    /// A path leads to nothing: it is gone, or is behind a link whose target is away.
    fn not_found(&mut self, path: &Path) {
        let mut below_root = path.ancestors().take_while(|ancestor| *ancestor != self.root);
        match below_root.find(|ancestor| is_dangling(ancestor)) {
            Some(link) => self.report(link, unreadable(link, &leads_nowhere())),
            None => self.gone(path),
        }
    }

    /// Compares a folder, and all below it, with the index.
    fn read_folder(&mut self, folder: &Path) {
        if self.links && folder != self.root {
            return self.rescan();
        }
        let mut refused = None;
        let watcher = &mut self.watcher;
        let found = walk(folder, Limits::USUAL, &mut |folder| {
            if let Err(error) = watcher.add(folder) {
                refused = Some((folder.to_owned(), error));
            }
        });
        if found.links && !self.links && folder != self.root {
            // Which names count is known only from the whole.
            self.links = true;
            return self.rescan();
        }
        self.links = found.links;
        self.clear_trouble(folder);
        for path in &found.repeated {
            self.report(path, repeated(path));
        }
        if let Some((folder, error)) = refused {
            self.blind = true;
            self.report(&folder, unwatched(&folder, error));
        }
        for (path, error) in &found.failed {
            self.report(path, unreadable(path, error));
        }
        if let Some(error) = &found.cut_short {
            self.report(folder, cut_short(folder, error));
        }
        let folders: HashSet<&Path> = found.folders.iter().map(PathBuf::as_path).collect();
        self.watcher.retain(folder, |path| folders.contains(path));
        let present: HashSet<&Path> = found.files.iter().map(|(path, _)| path.as_path()).collect();
        let hidden_by_failure = |path: &Path| {
            found.cut_short.is_some() || found.failed.iter().any(|(failed, _)| path.starts_with(failed))
        };
        // A file that is being written, or has just vanished, is read when it is due.
        let debounce = &self.debounce;
        let gone: Vec<Arc<Path>> = self
            .index
            .files_below(folder)
            .filter(|path| {
                !present.contains(&***path) && !hidden_by_failure(path) && !debounce.contains(path)
            })
            .cloned()
            .collect();
        if folder == self.root && found.files.is_empty() && !gone.is_empty() {
            // What an unmounted volume leaves. Files that are removed one by one are seen one by one.
            self.blind = true;
            return self.report(folder, empty_directory(folder));
        }
        let now = Instant::now();
        // Consumed, so that each path is freed as soon as the index has its own.
        for (path, signature) in found.files {
            if !self.index.is_current(&path, signature) && !self.debounce.contains(&path) {
                let unfinished = self.debounce.is_open(&path, now);
                self.read(&path.into(), signature, unfinished);
            }
        }
        for path in gone {
            self.index.remove(&path);
        }
    }

    /// Removes a file or folder from the index, unless the manifest directory itself is missing.
    fn gone(&mut self, path: &Path) {
        if !self.root.is_dir() {
            return self.rescan();
        }
        let gone: Vec<Arc<Path>> = self.index.files_below(path).cloned().collect();
        for path in gone {
            self.index.remove(&path);
        }
        self.watcher.retain(path, |_| false);
        self.clear_trouble(path);
    }

    fn read(&mut self, path: &Arc<Path>, signature: Signature, unfinished: bool) {
        match read_text(path) {
            Ok(text) => {
                let outbox = &mut self.outbox;
                let emit = &mut |change| outbox.push(change);
                self.index.update(path, signature, &text, unfinished, emit);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.not_found(path),
            Err(error) => self.index.fail(path, signature, unreadable(path, &error)),
        }
    }

    /// Resolves what was released, and sends a complete step if the burst changed anything.
    fn finish_step(&mut self) {
        self.resolve();
        let changed = self.index.problems_changed() | std::mem::take(&mut self.trouble_changed);
        if changed {
            self.publish_problems();
        }
        if changed || !self.outbox.changes.is_empty() || !self.outbox.sent {
            self.outbox.send(true);
        }
    }

    /// Deletes what was released, or hands it on from the files that own it now.
    fn resolve(&mut self) {
        // Reading a new owner may show that it has changed as well, and so release more. Every round uses up
        // what was released before.
        loop {
            let outbox = &mut self.outbox;
            let new_owners = self.index.resolve(&mut |change| outbox.push(change));
            if new_owners.is_empty() {
                return;
            }
            for owner in &new_owners {
                // A file that is being written, or has just vanished, is read when it is due.
                if !self.debounce.contains(owner) {
                    self.read_path(owner, self.index.is_unfinished(owner));
                }
            }
        }
    }

    fn publish_problems(&mut self) {
        let mut problems = self.index.problems();
        problems.extend(self.trouble.values().cloned());
        let problems = summarised(problems);
        log_new(&self.problem_log, &self.outbox.problems, &problems);
        if problems.is_empty() && !self.outbox.problems.is_empty() {
            self.problem_log.write_end(&self.root);
        }
        self.outbox.problems = problems.into();
    }

    fn report(&mut self, path: &Path, problem: ManifestProblem) {
        self.trouble_changed |= self.trouble.get(path) != Some(&problem);
        self.trouble.insert(path.to_owned(), problem);
        self.index.set_unreadable(path);
    }

    fn clear_trouble(&mut self, folder: &Path) {
        let before = self.trouble.len();
        self.trouble.retain(|path, _| !path.starts_with(folder));
        self.trouble_changed |= self.trouble.len() != before;
    }
}

enum Woken {
    Events,
    Stopped,
    Time,
}

/// Reads a file that is UTF-8 and not too long.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    // A pipe without a writer must not keep the caller here.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(no_file());
    }
    let too_long = metadata.len() > MAX_FILE;
    if !too_long {
        file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    }
    if too_long || bytes.len() as u64 > MAX_FILE {
        let message = format!("it is longer than {} MiB; split it", MAX_FILE >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    String::from_utf8(bytes).map_err(|error| {
        let line =
            1 + error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|&&b| b == b'\n').count();
        io::Error::new(io::ErrorKind::InvalidData, format!("line {line} is not UTF-8"))
    })
}

fn trouble(path: &Path, reason: &'static str, message: String, remedy: &str) -> ManifestProblem {
    ManifestProblem {
        file: Some(path.into()),
        line: 0,
        severity: Severity::Error,
        reason,
        object: None,
        message,
        remedy: remedy.to_owned(),
    }
}

/// A file or folder that exists and cannot be read.
pub(crate) fn unreadable(path: &Path, error: &io::Error) -> ManifestProblem {
    let remedy = "what was read of it before stays in force";
    trouble(path, "unreadable", format!("cannot be read: {error}"), remedy)
}

/// A folder that holds more than is read.
pub(crate) fn cut_short(path: &Path, error: &io::Error) -> ManifestProblem {
    let remedy = "the rest is not read, and what was read of it before stays in force; name a smaller folder";
    trouble(path, "unreadable", format!("is not read to its end: {error}"), remedy)
}

/// A link to a folder that is read under another name.
pub(crate) fn repeated(path: &Path) -> ManifestProblem {
    let message = "this link leads to a folder that is read under another name".to_owned();
    let problem = trouble(path, "repeated-folder", message, "it is not followed; remove it");
    ManifestProblem { severity: Severity::Warning, ..problem }
}

fn missing_directory(path: &Path, error: &io::Error) -> ManifestProblem {
    let remedy = "everything stays in force as it was last read; bring the directory back";
    trouble(path, "missing-directory", format!("the manifest directory cannot be read: {error}"), remedy)
}

fn empty_directory(path: &Path) -> ManifestProblem {
    let message = "the manifest directory has no manifest any more, as if its volume were not mounted";
    let remedy = "everything stays in force as it was last read; bring the manifests back, or to withdraw \
                  them all, put a file there that holds none, such as an empty List";
    trouble(path, "empty-directory", message.to_owned(), remedy)
}

fn unwatched(path: &Path, error: Errno) -> ManifestProblem {
    let message = format!("cannot be watched: {error}");
    let remedy = "changes are noticed with up to half a second of delay; raise fs.inotify.max_user_watches";
    ManifestProblem { severity: Severity::Warning, ..trouble(path, "unwatched", message, remedy) }
}
