//! Events of inotify(7) about a manifest directory, in the terms of the source.
//!
//! Folders are watched, not files: files come and go, and most editors replace them. The folder above the
//! manifest directory is watched too. Only there it shows that the directory itself was replaced, or is a
//! link that now leads elsewhere.
//!
//! Called by [`crate::directory`], which also compares everything now and then. inotify is silent about
//! network file systems, about targets of links that are elsewhere, and about folders beyond the limit of
//! watches.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use crate::walk::{is_hidden, is_manifest};

/// Room for some 200 events with names of usual length: a burst in few calls, without a large stack.
const BUFFER: usize = 8 * 1024;

/// Every event that changes the names in a folder or the content of its files.
const FOLDER: WatchFlags = WatchFlags::ATTRIB
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Only changes of names: the folder above may be `/tmp`, which is busy.
const ABOVE: WatchFlags = WatchFlags::CREATE.union(WatchFlags::MOVE).union(WatchFlags::ONLYDIR);

/// What happened to a file or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileEvent {
    /// The file is complete: closed after writing, renamed to this name, linked.
    Written(PathBuf),
    /// The file is being written, and will be closed.
    Writing(PathBuf),
    /// The file, or the folder, has lost its name.
    Gone(PathBuf),
    /// The folder appeared, or a link in it leads elsewhere now.
    Folder(PathBuf),
    /// Events were lost, or the manifest directory itself was replaced.
    Everything,
}

/// The watches of one manifest directory.
pub(crate) struct Watcher {
    inotify: OwnedFd,
    root: PathBuf,
    above: Option<i32>,
    /// All names of a watched folder: several names can lead to one folder, which has one watch.
    names: HashMap<i32, Vec<Arc<Path>>>,
    watches: BTreeMap<Arc<Path>, i32>,
}

impl Watcher {
    /// Watches only the folder above `root`.
    pub(crate) fn new(root: &Path) -> Result<Self, Errno> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // Relative paths of one component have an empty parent; `..` and `/` have no name to wait for.
        let above = root.parent().map(|above| if above == Path::new("") { Path::new(".") } else { above });
        let above = above.and_then(|above| inotify::add_watch(&inotify, above, ABOVE).ok());
        Ok(Self { inotify, root: root.to_owned(), above, names: HashMap::new(), watches: BTreeMap::new() })
    }

    /// The descriptor that becomes readable when there is something to [`read`](Self::read).
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Watches `folder`, or the folder that has taken its name. Costs one system call if nothing changed.
    pub(crate) fn add(&mut self, folder: &Path) -> Result<(), Errno> {
        let watch = inotify::add_watch(&self.inotify, folder, FOLDER)?;
        if self.watches.get(folder) == Some(&watch) {
            return Ok(());
        }
        self.forget(folder);
        let folder: Arc<Path> = folder.into();
        self.names.entry(watch).or_default().push(folder.clone());
        self.watches.insert(folder, watch);
        Ok(())
    }

    /// Stops watching the folders in and below `folder` for which `keep` says no.
    pub(crate) fn retain(&mut self, folder: &Path, keep: impl Fn(&Path) -> bool) {
        let below =
            self.watches.range::<Path, _>((Bound::Included(folder), Bound::Unbounded)).map(|(path, _)| path);
        let gone: Vec<Arc<Path>> =
            below.take_while(|path| path.starts_with(folder)).filter(|path| !keep(path)).cloned().collect();
        for folder in gone {
            self.forget(&folder);
        }
    }

    fn forget(&mut self, folder: &Path) {
        let Some(watch) = self.watches.remove(folder) else { return };
        let Some(names) = self.names.get_mut(&watch) else { return };
        names.retain(|name| **name != *folder);
        if names.is_empty() {
            self.names.remove(&watch);
            // Fails if the kernel has dropped the watch together with the folder.
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
    }

    /// Reads one buffer of events, because files that change faster than they can be read must not keep the
    /// caller here. Never waits.
    pub(crate) fn read(&mut self, mut sink: impl FnMut(FileEvent)) -> Result<(), Errno> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut read = false;
        while !(read && reader.is_buffer_empty()) {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            };
            read = true;
            let flags = event.events();
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                sink(FileEvent::Everything);
                continue;
            }
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            // No `continue`: through a link, the folder above may also be a folder inside.
            if Some(event.wd()) == self.above && name.is_some() && name == self.root.file_name() {
                sink(FileEvent::Everything);
            }
            if flags.contains(ReadFlags::IGNORED) {
                for name in self.names.remove(&event.wd()).unwrap_or_default() {
                    self.watches.remove(&name);
                }
                continue;
            }
            for folder in self.names.get(&event.wd()).into_iter().flatten() {
                if let Some(event) = file_event(folder, name, flags, &self.root) {
                    sink(event);
                }
            }
        }
        Ok(())
    }
}

/// What an inotify event in `folder` means.
fn file_event(folder: &Path, name: Option<&OsStr>, flags: ReadFlags, root: &Path) -> Option<FileEvent> {
    let appeared = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
    let gone = flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM);
    let Some(name) = name else {
        // About the folder itself. Below the root, the folder above has the same event with the name.
        let lost = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT;
        return (folder == root && flags.intersects(lost)).then_some(FileEvent::Everything);
    };
    if is_hidden(name) {
        // `..data` of a ConfigMap volume: the unchanged links in this folder lead to other files now.
        let volume = name.as_bytes().starts_with(b"..") && appeared;
        return volume.then(|| FileEvent::Folder(folder.to_owned()));
    }
    let path = folder.join(name);
    if flags.contains(ReadFlags::ISDIR) || !is_manifest(name) {
        // A link to a folder looks like any other file here, so the source must check it.
        return match (appeared, gone) {
            (true, _) => Some(FileEvent::Folder(path)),
            (_, true) => Some(FileEvent::Gone(path)),
            _ => None,
        };
    }
    if gone {
        return Some(FileEvent::Gone(path));
    }
    if flags.intersects(ReadFlags::MODIFY) {
        return Some(FileEvent::Writing(path));
    }
    if flags.contains(ReadFlags::CREATE) && is_being_written(&path) {
        return Some(FileEvent::Writing(path));
    }
    Some(FileEvent::Written(path))
}

/// Whether a file that was just created is still to be written. A link, symbolic or hard, is complete from
/// the start, and is never closed.
fn is_being_written(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.nlink() == 1)
}
