//! Objects from a directory of manifests, watched.
//!
//! A thread of its own reads, parses and compares, so that a burst of two thousand files costs the data plane nothing;
//! it says what changed in [`Step`]s over a short channel. The thread sleeps in poll(2) on inotify (`watch`), waits for
//! a burst to pause (`pending`), looks at what changed (`walk`), reads what is new, and lets
//! `catalogue` decide what follows.
//!
//! What is promised: a rename, a truncation with writes after it, a swapped link and a new folder with files in it each end in exactly
//! the objects the files hold then. What cannot be read never takes down what worked, and while the directory itself is missing, all of it
//! stays in force.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use portico_api::problem::Severity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use thiserror::Error;
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::catalogue::{Catalogue, Signature};
use crate::pending::Pending;
use crate::step::{Event, MAX_EVENTS_PER_STEP, ManifestProblem, Step};
use crate::walk::{is_manifest, signature, walk};
use crate::watch::Watcher;

/// Longest file that is read: room for ten thousand clusters with their Services and EndpointSlices, and an end to a log
/// that somebody called `.json`.
pub(crate) const MAX_FILE: u64 = 64 * 1024 * 1024;

/// Between two looks at everything, for what inotify does not tell. Costs some 2 µs a file.
const LOOK_AROUND: Duration = Duration::from_secs(30);

/// The same while inotify is known to be blind somewhere: too many folders, or no directory.
const LOOK_AROUND_BLIND: Duration = Duration::from_millis(500);

/// Steps on their way to the reader. One is being applied, one waits; more would only hold memory.
const STEPS_AHEAD: usize = 2;

/// Why a directory cannot be a source.
#[derive(Debug, Error)]
pub enum DirectoryError {
    /// It is not there, is no directory, or may not be read.
    #[error("cannot read the manifest directory {}: {source}", path.display())]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refuses an inotify instance, a pipe or a thread.
    #[error("cannot watch the manifest directory {}: {source}; the limit fs.inotify.max_user_instances may be used up", path.display())]
    Watch {
        /// The directory.
        path: PathBuf,
        /// What the system said.
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
    /// Begins to read and watch `directory`.
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
            pending: Pending::default(),
            stopped,
            catalogue: Catalogue::default(),
            trouble: BTreeMap::new(),
            trouble_changed: false,
            blind: false,
            outbox: Outbox {
                sender,
                events: Vec::new(),
                problems: Arc::default(),
                sent: false,
                closed: false,
            },
        };
        thread::Builder::new().name("manifests".into()).spawn(move || worker.run()).map_err(refused)?;
        Ok(Self { steps, _stop: stop })
    }

    /// The next step; the first complete one holds everything there is. Waits until something changes. Nothing is lost if the
    /// future is dropped.
    ///
    /// `None` means that the thread has ended, which only a defect can make it do; what was delivered stays valid.
    pub async fn next(&mut self) -> Option<Step> {
        self.steps.recv().await
    }
}

struct Worker {
    root: PathBuf,
    watcher: Watcher,
    pending: Pending,
    stopped: OwnedFd,
    catalogue: Catalogue,
    /// What is wrong with folders, by path.
    trouble: BTreeMap<PathBuf, ManifestProblem>,
    trouble_changed: bool,
    /// Whether inotify cannot see everything.
    blind: bool,
    outbox: Outbox,
}

/// Events on their way into steps.
struct Outbox {
    sender: mpsc::Sender<Step>,
    events: Vec<Event>,
    problems: Arc<[ManifestProblem]>,
    /// Whether a complete step was sent, so that the next one needs a reason.
    sent: bool,
    closed: bool,
}

impl Outbox {
    fn push(&mut self, event: Event) {
        self.events.push(event);
        if self.events.len() >= MAX_EVENTS_PER_STEP {
            self.send(false);
        }
    }

    fn send(&mut self, complete: bool) {
        let events = std::mem::take(&mut self.events);
        self.sent = complete;
        let step = Step { events, complete, problems: self.problems.clone() };
        self.closed |= self.sender.blocking_send(step).is_err();
    }
}

impl Worker {
    fn run(mut self) {
        self.look_at_everything();
        self.finish_step();
        let mut look_around = Instant::now() + self.look_around();
        while !self.outbox.closed {
            let wake = self.pending.due_at().map_or(look_around, |due| due.min(look_around));
            match self.wait(wake) {
                Ok(Woken::Stopped) => return,
                Ok(Woken::Events) => {
                    let (pending, now) = (&mut self.pending, Instant::now());
                    if let Err(error) = self.watcher.read(|change| pending.note(change, now)) {
                        warn!(%error, "cannot read from inotify; looking at all manifests now and then instead");
                        self.blind = true;
                    }
                }
                Ok(Woken::Time) => {}
                Err(error) => {
                    // Not waiting would turn this loop into a busy one.
                    warn!(%error, "cannot wait for changes of manifests");
                    thread::sleep(LOOK_AROUND_BLIND);
                }
            }
            let now = Instant::now();
            let around = now >= look_around;
            if !around && self.pending.due_at().is_none_or(|due| due > now) {
                continue;
            }
            let due = self.pending.take(now);
            if due.everything || around {
                self.look_at_everything();
            }
            for look in due.paths {
                self.look_at(&look.path, look.unfinished);
            }
            self.finish_step();
            // A steady stream of events must not put it off.
            let next = Instant::now() + self.look_around();
            look_around = if around { next } else { look_around.min(next) };
        }
    }

    fn look_around(&self) -> Duration {
        if self.blind { LOOK_AROUND_BLIND } else { LOOK_AROUND }
    }

    /// Waits for an event, the end, or the time `until`.
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

    /// Compares the whole directory with what is known. Reads only what changed.
    fn look_at_everything(&mut self) {
        self.blind = false;
        let root = self.root.clone();
        if let Err(error) = std::fs::read_dir(&root) {
            self.blind = true;
            self.watcher.retain(&root, |_| false);
            self.report(&root, missing_directory(&root, &error));
            return;
        }
        self.look_at_folder(&root);
    }

    /// Looks at one file or folder that may have changed.
    fn look_at(&mut self, path: &Path, unfinished: bool) {
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => self.look_at_folder(path),
            Ok(metadata) if metadata.is_file() && path.file_name().is_some_and(is_manifest) => {
                self.read(&path.into(), signature(&metadata), unfinished);
            }
            Ok(_) => self.gone(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.gone(path),
            Err(error) => self.report(path, unreadable(path, &error)),
        }
    }

    /// Compares one folder, and all below it, with what is known.
    fn look_at_folder(&mut self, folder: &Path) {
        let mut refused = None;
        let watcher = &mut self.watcher;
        let found = walk(folder, &mut |folder| {
            if let Err(error) = watcher.add(folder) {
                refused = Some((folder.to_owned(), error));
            }
        });
        self.clear_trouble(folder);
        if let Some((folder, error)) = refused {
            self.blind = true;
            self.report(&folder, unwatched(&folder, error));
        }
        for (path, error) in &found.failed {
            self.report(path, unreadable(path, error));
        }
        let folders: HashSet<&Path> = found.folders.iter().map(PathBuf::as_path).collect();
        self.watcher.retain(folder, |path| folders.contains(path));
        let present: HashSet<&Path> = found.files.iter().map(|(path, _)| path.as_path()).collect();
        let hidden_by_failure = |path: &Path| found.failed.iter().any(|(failed, _)| path.starts_with(failed));
        // What is being written or has just vanished is looked at in its own time.
        let pending = &self.pending;
        let gone: Vec<Arc<Path>> = self
            .catalogue
            .files_below(folder)
            .filter(|path| !present.contains(&***path) && !hidden_by_failure(path) && !pending.contains(path))
            .cloned()
            .collect();
        // Consumed, so that what is remembered of a file takes the place of the path that was found.
        for (path, signature) in found.files {
            if !self.catalogue.is_current(&path, signature) && !self.pending.contains(&path) {
                self.read(&path.into(), signature, false);
            }
        }
        for path in gone {
            self.catalogue.remove(&path);
        }
    }

    /// A file or folder is no more, unless it is the manifest directory itself that is missing.
    fn gone(&mut self, path: &Path) {
        if !self.root.is_dir() {
            return self.look_at_everything();
        }
        let gone: Vec<Arc<Path>> = self.catalogue.files_below(path).cloned().collect();
        for path in gone {
            self.catalogue.remove(&path);
        }
        self.watcher.retain(path, |_| false);
        self.clear_trouble(path);
    }

    fn read(&mut self, path: &Arc<Path>, signature: Signature, unfinished: bool) {
        match read_text(path) {
            Ok(text) => {
                let outbox = &mut self.outbox;
                let emit = &mut |event| outbox.push(event);
                self.catalogue.update(path, signature, &text, unfinished, emit);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.gone(path),
            Err(error) => self.catalogue.fail(path, signature, unreadable(path, &error)),
        }
    }

    /// Settles what is gone and says that the burst is over, if it changed anything.
    fn finish_step(&mut self) {
        let outbox = &mut self.outbox;
        let heirs = self.catalogue.settle(&mut |event| outbox.push(event));
        for heir in &heirs {
            self.look_at(heir, false);
        }
        if !heirs.is_empty() {
            // Reading an heir again may show that it has changed as well; what follows from that comes with the next event.
            let outbox = &mut self.outbox;
            self.catalogue.settle(&mut |event| outbox.push(event));
        }
        let changed = self.catalogue.problems_changed() | std::mem::take(&mut self.trouble_changed);
        if changed {
            self.publish_problems();
        }
        if changed || !self.outbox.events.is_empty() || !self.outbox.sent {
            self.outbox.send(true);
        }
    }

    fn publish_problems(&mut self) {
        let mut problems = self.catalogue.problems();
        problems.extend(self.trouble.values().cloned());
        problems.sort();
        for problem in &problems {
            if !self.outbox.problems.contains(problem) {
                warn!(reason = problem.reason, "{problem}");
            }
        }
        if problems.is_empty() && !self.outbox.problems.is_empty() {
            info!(directory = %self.root.display(), "all manifests can be read again");
        }
        self.outbox.problems = problems.into();
    }

    fn report(&mut self, path: &Path, problem: ManifestProblem) {
        self.trouble_changed |= self.trouble.get(path) != Some(&problem);
        self.trouble.insert(path.to_owned(), problem);
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

/// The text of a file, if it is text and not too long.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
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

/// A file or folder that is there and cannot be read.
pub(crate) fn unreadable(path: &Path, error: &io::Error) -> ManifestProblem {
    let remedy = "what was read of it before stays in force";
    trouble(path, "unreadable", format!("cannot be read: {error}"), remedy)
}

fn missing_directory(path: &Path, error: &io::Error) -> ManifestProblem {
    let remedy = "everything stays in force as it was last read; bring the directory back";
    trouble(path, "missing-directory", format!("the manifest directory cannot be read: {error}"), remedy)
}

fn unwatched(path: &Path, error: Errno) -> ManifestProblem {
    let message = format!("cannot be watched: {error}");
    let remedy = "changes are noticed with up to half a second of delay; raise fs.inotify.max_user_watches";
    ManifestProblem { severity: Severity::Warning, ..trouble(path, "unwatched", message, remedy) }
}
