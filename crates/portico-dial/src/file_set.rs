//! Credential files that are replaced while a process runs: certificate, key, CA, token.
//!
//! [`FolderWatch`] says when to look. A [`FileSet`] looks, and reads the files again only if they may have
//! changed. Files that belong together are replaced one after the other. A file that cannot be used now is
//! tried again with the next look. The content read before stays in force.

use std::fmt::Display;
use std::fs;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

/// Between two looks where folders cannot be watched, or what was found cannot be used.
const SOON: Duration = Duration::from_secs(1);

/// Between two looks otherwise. inotify(7) does not report a change by another machine on a network file
/// system, nor a change further along a chain of links.
const SOMETIMES: Duration = Duration::from_secs(60);

/// From a change to the look. Files that belong together are written one after the other. A busy folder costs
/// two looks a second at most.
const BURST: Duration = Duration::from_millis(500);

/// What changes the file behind a name in a folder, the folder behind its own name, or the content of a file.
const CHANGES: WatchFlags = WatchFlags::ATTRIB
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::MOVE_SELF);

/// Files that are read together.
#[derive(Debug)]
pub struct FileSet {
    what: &'static str,
    paths: Vec<PathBuf>,
    stamps: Vec<Option<Stamp>>,
    problem: Option<String>,
}

/// Identifies the content of a file without reading it. Behind the symbolic links of a projected volume there
/// is a new file each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
    modified: (i64, i64),
}

impl FileSet {
    /// `what` names the files in logs. The first look reads them: they may have changed since they were
    /// loaded.
    #[must_use]
    pub fn new(what: &'static str, paths: Vec<PathBuf>) -> Self {
        Self { what, paths, stamps: Vec::new(), problem: None }
    }

    /// Calls `reload` if the files may have changed, or could not be used before. Returns true if it says
    /// that there is new content in force. Blocks for the time of a few stat(2) and of `reload`.
    pub fn reload_if_changed<E: Display>(&mut self, reload: impl FnOnce() -> Result<bool, E>) -> bool {
        let stamps: Vec<_> = self.paths.iter().map(stamp).collect();
        if stamps == self.stamps && self.problem.is_none() {
            return false;
        }
        self.stamps = stamps;
        let what = self.what;
        match reload() {
            Ok(changed) => {
                if self.problem.take().is_some() && !changed {
                    tracing::info!(what, "readable again, and as before");
                }
                if changed {
                    tracing::info!(what, "replaced; the new one is in force");
                }
                changed
            }
            Err(error) => {
                let problem = error.to_string();
                if self.problem.as_ref() != Some(&problem) {
                    tracing::warn!(what, error = %problem, "cannot be used; the old one stays in force");
                    self.problem = Some(problem);
                }
                false
            }
        }
    }

    /// Returns the paths.
    #[must_use]
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns why the content of the files is not in force, with their name in front.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        Some(format!("{}: {}", self.what, self.problem.as_ref()?))
    }
}

fn stamp(path: &PathBuf) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
    })
}

/// Watches files and their folders, so that a resting process need not wake up to look.
#[derive(Debug)]
pub struct FolderWatch {
    files: Vec<PathBuf>,
    /// Readable when something changes. `None` if the system has no instance to give.
    inotify: Option<OwnedFd>,
}

impl FolderWatch {
    /// Watches these files.
    pub fn new(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        let watch = Self { files: files.into_iter().map(Into::into).collect(), inotify: inotify.ok() };
        if let Err(error) = watch.watch() {
            tracing::info!(%error, "files cannot be watched; looking at them every second until they can be");
        }
        watch
    }

    /// Returns when it is time to look at the files. `retry`: what was found by the last look cannot be used.
    pub async fn due(&self, retry: bool) {
        let wait = if self.watch().is_err() || retry { SOON } else { SOMETIMES };
        // It is time either way.
        let _ = timeout(wait, self.changed()).await;
        // Names may lead to other folders and files by now. Changes there are missed unless these are watched
        // before the look.
        let _ = self.watch();
    }

    /// Watches folders for files that are replaced, and the files themselves. A change of a file that is
    /// mounted by itself does not show in its folder. Watching the same ones again changes nothing.
    fn watch(&self) -> io::Result<()> {
        let inotify = self.inotify.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        for file in &self.files {
            let folder = file.parent().filter(|folder| *folder != Path::new(""));
            inotify::add_watch(inotify, folder.unwrap_or(Path::new(".")), CHANGES)?;
            inotify::add_watch(inotify, file, CHANGES)?;
        }
        Ok(())
    }

    async fn changed(&self) {
        let inotify = self.inotify.as_ref().and_then(|inotify| registered(inotify).ok());
        let Some(inotify) = inotify else { return pending().await };
        // What it says does not matter: a look finds out. All of it is read, so that it is readable again
        // after the next change.
        if let Ok(mut readable) = inotify.readable().await {
            sleep(BURST).await;
            let mut events = [0; 4096];
            while rustix::io::read(&inotify, &mut events).is_ok_and(|read| read > 0) {}
            readable.clear_ready();
        }
    }
}

/// Registers a copy of the descriptor with the runtime that waits for it.
#[allow(unsafe_code, reason = "AsyncFd has no safe constructor")]
fn registered(inotify: &OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let inotify = inotify.try_clone()?;
    // SAFETY: an OwnedFd is open, and stays the same descriptor until it is dropped. It moves into the
    // AsyncFd, which lends it out by shared reference only.
    Ok(unsafe { AsyncFd::register_with_interest(inotify, Interest::READABLE) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenFile;

    struct Token {
        path: PathBuf,
        token: TokenFile,
        set: FileSet,
    }

    impl Token {
        fn new(path: PathBuf) -> Self {
            let token = TokenFile::load(path.clone()).unwrap();
            Self { set: FileSet::new("token", vec![path.clone()]), path, token }
        }

        fn look(&mut self) -> bool {
            self.set.reload_if_changed(|| self.token.reload())
        }
    }

    fn token() -> (tempfile::TempDir, Token) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first").unwrap();
        (folder, Token::new(path))
    }

    #[test]
    fn a_new_token_is_seen_once() {
        let (_folder, mut token) = token();
        assert!(!token.look());
        fs::write(&token.path, "second").unwrap();
        assert!(token.look());
        assert!(!token.look());
    }

    #[test]
    fn a_token_that_cannot_be_used_is_tried_again_and_reported_meanwhile() {
        let (_folder, mut token) = token();
        fs::write(&token.path, "").unwrap();
        assert!(!token.look());
        assert!(token.set.problem().unwrap().starts_with("token: "));
        fs::remove_file(&token.path).unwrap();
        assert!(!token.look());
        fs::write(&token.path, "third").unwrap();
        assert!(token.look());
        assert_eq!(token.set.problem(), None);
    }

    #[test]
    fn a_file_renamed_over_another_is_seen() {
        let (folder, mut token) = token();
        let other = folder.path().join("other");
        fs::write(&other, "later").unwrap();
        fs::rename(other, &token.path).unwrap();
        assert!(token.look());
    }

    #[tokio::test]
    async fn a_volume_that_is_replaced_calls_for_a_look() {
        let folder = tempfile::tempdir().unwrap();
        let mount = |version: &str| {
            fs::create_dir(folder.path().join(version)).unwrap();
            fs::write(folder.path().join(version).join("token"), version).unwrap();
            std::os::unix::fs::symlink(version, folder.path().join("..new")).unwrap();
            fs::rename(folder.path().join("..new"), folder.path().join("..data")).unwrap();
        };
        mount("..1");
        let path = folder.path().join("token");
        std::os::unix::fs::symlink("..data/token", &path).unwrap();
        let mut token = Token::new(path);
        let folders = FolderWatch::new(token.set.paths());
        mount("..2");
        timeout(SOMETIMES / 2, folders.due(false)).await.expect("inotify reports it");
        assert!(token.look());
    }

    #[tokio::test]
    async fn a_folder_that_is_replaced_is_watched_from_then_on() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("identity");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("token"), "first").unwrap();
        let mut token = Token::new(folder.join("token"));
        let folders = FolderWatch::new(token.set.paths());
        let due = || async {
            timeout(SOMETIMES / 2, folders.due(false)).await.expect("inotify reports it");
        };
        let replace = async {
            fs::rename(&folder, parent.path().join("old")).unwrap();
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("token"), "second").unwrap();
        };
        tokio::join!(biased; due(), replace);
        assert!(token.look());
        fs::write(folder.join("token"), "third").unwrap();
        due().await;
        assert!(token.look());
    }

    #[tokio::test]
    async fn a_file_that_is_written_by_another_name_calls_for_a_look() {
        let (folder, mut token) = token();
        let elsewhere = tempfile::tempdir().unwrap();
        let other = elsewhere.path().join("token");
        fs::remove_file(&token.path).unwrap();
        fs::write(&other, "later").unwrap();
        std::os::unix::fs::symlink(&other, folder.path().join("token")).unwrap();
        assert!(token.look());
        let folders = FolderWatch::new(token.set.paths());
        fs::write(&other, "latest").unwrap();
        timeout(SOMETIMES / 2, folders.due(false)).await.expect("inotify reports it");
        assert!(token.look());
    }

    #[tokio::test(start_paused = true)]
    async fn a_folder_that_cannot_be_watched_is_looked_at_every_second() {
        let folders = FolderWatch::new(&[PathBuf::from("/nowhere/token")]);
        timeout(SOON + Duration::from_millis(1), folders.due(false)).await.expect("it is time");
    }
}
