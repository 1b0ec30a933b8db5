//! Files that are replaced while an agent runs: certificate, key, CA and token.
//!
//! Tokens live an hour and certificates days, and an agent runs for months. The folders of the files are
//! watched (inotify(7)), so that an agent at rest need not wake up to look. A volume of Kubernetes is
//! replaced by a new link in its folder. A look is a few stat(2); a file is read only when it may have
//! changed. Certificate and key are replaced in two steps: a pair that does not fit is tried again with the
//! next look, and the old one stays in force.

use std::fs;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use portico_dial::{ClientTls, TokenFile};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::time::timeout;

use crate::sys::readable;

/// What identifies the content of a file without reading it. Behind the symbolic links of a projected volume
/// it is another file each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
    modified: (i64, i64),
}

/// Files that are used together.
#[derive(Debug)]
struct Watched {
    what: &'static str,
    paths: Vec<PathBuf>,
    stamps: Vec<Option<Stamp>>,
    problem: Option<String>,
}

impl Watched {
    fn new(what: &'static str, paths: Vec<PathBuf>) -> Self {
        let stamps = paths.iter().map(stamp).collect();
        Self { what, paths, stamps, problem: None }
    }

    /// Reads the files with `reload` if they may have changed. True if there is something new in them.
    fn look<E: std::fmt::Display>(&mut self, reload: impl FnOnce() -> Result<bool, E>) -> bool {
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
}

/// Watches the folders of these files.
fn watch<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> io::Result<OwnedFd> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    for path in paths {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        inotify::add_watch(&inotify, folder, CHANGES)?;
    }
    Ok(inotify)
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

/// How often to look where the folders cannot be watched, or a file cannot be used.
const SHORT_INTERVAL: Duration = Duration::from_secs(1);

/// How often to look otherwise: a file may be a link to another folder, and inotify is silent about network
/// file systems.
const LONG_INTERVAL: Duration = Duration::from_secs(60);

/// Events that change which file a name in a folder is, or what the file holds.
const CHANGES: WatchFlags = WatchFlags::ATTRIB
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

/// The files of an agent's identity.
#[derive(Debug)]
pub struct IdentityFiles {
    /// Readable when something changes in one of the folders. `None` where not all of them can be watched.
    changes: Option<OwnedFd>,
    tls: Option<(Arc<ClientTls>, Watched)>,
    token: Option<(Arc<TokenFile>, Watched)>,
}

/// What a look has found to be new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewed {
    /// Certificate, key or CA.
    pub certificate: bool,
    /// The token.
    pub token: bool,
}

impl IdentityFiles {
    /// Watches what was read from these files just now.
    pub fn new(
        tls: Option<(Arc<ClientTls>, Vec<PathBuf>)>,
        token: Option<(Arc<TokenFile>, PathBuf)>,
    ) -> Self {
        let tls_paths = tls.iter().flat_map(|(_, paths)| paths);
        let changes = watch(tls_paths.chain(token.iter().map(|(_, path)| path)));
        Self {
            changes: changes
                .inspect_err(|error| tracing::info!(%error, "looking at the identity's files every second"))
                .ok(),
            tls: tls.map(|(tls, paths)| (tls, Watched::new("client certificate", paths))),
            token: token.map(|(token, path)| (token, Watched::new("token", vec![path]))),
        }
    }

    /// Whether there is anything to look at.
    pub fn is_empty(&self) -> bool {
        self.tls.as_ref().is_none_or(|(_, watched)| watched.paths.is_empty()) && self.token.is_none()
    }

    /// Returns when it is time for a look.
    pub async fn due(&self) {
        let wait = if self.changes.is_none() || !self.problems().is_empty() {
            SHORT_INTERVAL
        } else {
            LONG_INTERVAL
        };
        // A time-out is as good a reason to look as a change.
        let _ = timeout(wait, self.changed()).await;
    }

    async fn changed(&self) {
        let changes = self.changes.as_ref().and_then(|changes| readable(changes.try_clone().ok()?).ok());
        let Some(changes) = changes else { return pending().await };
        let mut events = [0; 4096];
        // The events are not needed: the look finds what has changed. All are read, so that the next one
        // wakes us again.
        if let Ok(mut readable) = changes.readable().await {
            while rustix::io::read(&changes, &mut events).is_ok_and(|read| read > 0) {}
            readable.clear_ready();
        }
    }

    /// Looks at the files. Blocks for the time of reading small files, if they changed.
    pub fn look(&mut self) -> Renewed {
        Renewed {
            certificate: self.tls.as_mut().is_some_and(|(tls, watched)| watched.look(|| tls.reload())),
            token: self.token.as_mut().is_some_and(|(token, watched)| watched.look(|| token.reload())),
        }
    }

    /// Why what is in the files now is not in force. Empty if it is.
    pub fn problems(&self) -> Vec<String> {
        let tls = self.tls.as_ref().map(|(_, watched)| watched);
        let token = self.token.as_ref().map(|(_, watched)| watched);
        let watched = tls.into_iter().chain(token);
        watched
            .filter_map(|watched| Some(format!("{}: {}", watched.what, watched.problem.as_ref()?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> (tempfile::TempDir, PathBuf, IdentityFiles) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first").unwrap();
        let token = Arc::new(TokenFile::load(path.clone()).unwrap());
        let files = IdentityFiles::new(None, Some((token, path.clone())));
        (folder, path, files)
    }

    const NOTHING: Renewed = Renewed { certificate: false, token: false };

    #[tokio::test]
    async fn a_new_token_is_seen_once() {
        let (_folder, path, mut files) = files();
        assert_eq!(files.look(), NOTHING);
        fs::write(path, "second").unwrap();
        assert!(files.look().token);
        assert_eq!(files.look(), NOTHING);
    }

    #[tokio::test]
    async fn a_token_that_cannot_be_used_is_tried_again_and_reported_meanwhile() {
        let (_folder, path, mut files) = files();
        fs::write(&path, "").unwrap();
        assert_eq!(files.look(), NOTHING);
        assert_eq!(files.problems().len(), 1);
        fs::remove_file(&path).unwrap();
        assert_eq!(files.look(), NOTHING);
        fs::write(&path, "third").unwrap();
        assert!(files.look().token);
        assert!(files.problems().is_empty());
    }

    #[tokio::test]
    async fn a_volume_that_is_replaced_calls_for_a_look() {
        let folder = tempfile::tempdir().unwrap();
        let place = |version: &str| {
            fs::create_dir(folder.path().join(version)).unwrap();
            fs::write(folder.path().join(version).join("token"), version).unwrap();
            std::os::unix::fs::symlink(version, folder.path().join("..new")).unwrap();
            fs::rename(folder.path().join("..new"), folder.path().join("..data")).unwrap();
        };
        place("..1");
        let path = folder.path().join("token");
        std::os::unix::fs::symlink("..data/token", &path).unwrap();
        let token = Arc::new(TokenFile::load(path.clone()).unwrap());
        let mut files = IdentityFiles::new(None, Some((token, path)));
        place("..2");
        timeout(LONG_INTERVAL / 2, files.due()).await.expect("inotify reports it");
        assert!(files.look().token);
    }

    #[tokio::test]
    async fn a_file_put_in_the_place_of_another_is_seen() {
        let (folder, path, mut files) = files();
        let other = folder.path().join("other");
        fs::write(&other, "later").unwrap();
        fs::rename(other, path).unwrap();
        assert!(files.look().token);
    }
}
