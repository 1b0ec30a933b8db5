//! Which files and folders a manifest directory holds.
//!
//! Hidden names are ignored: `.git`, `.portico`, an editor's `.a.yaml.swp`. So are the `..2026_01_02` and
//! `..data` of a ConfigMap volume: its files are seen once, under the names that link to them.
//!
//! Symbolic links to files and to folders are followed. Every folder is entered once, by device and inode,
//! first under the name that is no link. So links that fork or lead back up end there. The target of a link
//! is taken as a whole or, beyond [`Limits`], not at all: it may be `/`. Of the manifest directory itself as
//! much is taken as they allow. Whatever is not read is reported.

use std::collections::{HashSet, VecDeque};
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::index::Signature;

/// Longest file that is read, in bytes. It has room for ten thousand clusters with their Services and
/// EndpointSlices, and it bounds a log file that is called `.json`.
pub(crate) const MAX_FILE: u64 = 64 * 1024 * 1024;

/// Most of anything in one tree: the manifest directory without its links, and what one link leads to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Nesting of folders.
    depth: usize,
    /// Names, manifests or not: each may cost a system call.
    names: usize,
    /// Folders: each costs a watch.
    folders: usize,
    /// Bytes of manifests.
    bytes: u64,
}

impl Limits {
    /// Ten thousand clusters in a file each are 60 MB.
    pub(crate) const USUAL: Self = Self { depth: 32, names: 100_000, folders: 10_000, bytes: 1 << 30 };

    fn exceeded(&self) -> io::Error {
        let Self { names, folders, bytes, .. } = *self;
        let mebibytes = bytes >> 20;
        io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("there are more than {names} names, {folders} folders or {mebibytes} MiB of it"),
        )
    }
}

/// What a walk found.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// Manifest files and their versions, in no order.
    pub(crate) files: Vec<(PathBuf, Signature)>,
    /// Folders, the first one included.
    pub(crate) folders: Vec<PathBuf>,
    /// Files and folders that could not be read, or must not.
    pub(crate) failed: Vec<(PathBuf, io::Error)>,
    /// Why the walk did not come to the end of its folder: there is more than is read.
    pub(crate) cut_short: Option<io::Error>,
    /// Links to folders that are read under another name.
    pub(crate) repeated: Vec<PathBuf>,
    /// Whether there are links to folders. Then the content of one folder may depend on another.
    pub(crate) links: bool,
}

/// Walks `folder`. Calls `enter` with every folder before it is listed, so that a watch set there misses
/// nothing.
pub(crate) fn walk(folder: &Path, limits: Limits, enter: &mut dyn FnMut(&Path)) -> Walk {
    let mut walker = Walker {
        limits,
        entered: HashSet::new(),
        order: Vec::new(),
        refused: HashSet::new(),
        links: VecDeque::new(),
        found: Walk::default(),
    };
    match fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => {
            let root = Folder { path: folder.to_owned(), identity: identity(&metadata), depth: 0 };
            // What was found of it stays: it may be in force.
            walker.found.cut_short = walker.tree(root, enter).err();
            while let Some(link) = walker.links.pop_front() {
                walker.follow(link, enter);
            }
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => walker.found.failed.push((folder.to_owned(), error)),
    }
    walker.found
}

/// Device and inode.
type Identity = (u64, u64);

struct Folder {
    path: PathBuf,
    identity: Identity,
    depth: usize,
}

/// What one tree has held so far.
#[derive(Default)]
struct Totals {
    names: usize,
    folders: usize,
    bytes: u64,
}

impl Totals {
    fn check(&self, limits: &Limits) -> io::Result<()> {
        let Limits { names, folders, bytes, .. } = *limits;
        if self.names <= names && self.folders <= folders && self.bytes <= bytes {
            return Ok(());
        }
        Err(limits.exceeded())
    }
}

struct Walker {
    limits: Limits,
    entered: HashSet<Identity>,
    /// The folders entered, in this order, so that a tree can be taken back.
    order: Vec<Identity>,
    /// Folders that a link leads to, and that are too much.
    refused: HashSet<Identity>,
    /// Links to folders that are still to be followed.
    links: VecDeque<Folder>,
    found: Walk,
}

impl Walker {
    /// Walks the target of a link. If that is too much, nothing of it is found.
    fn follow(&mut self, link: Folder, enter: &mut dyn FnMut(&Path)) {
        if self.entered.contains(&link.identity) {
            return self.found.repeated.push(link.path);
        }
        if self.refused.contains(&link.identity) {
            return self.found.failed.push((link.path, too_much(&self.limits.exceeded())));
        }
        let (path, identity) = (link.path.clone(), link.identity);
        let found = &self.found;
        let (files, folders, failed) = (found.files.len(), found.folders.len(), found.failed.len());
        let (links, entered) = (self.links.len(), self.order.len());
        if let Err(error) = self.tree(link, enter) {
            self.found.files.truncate(files);
            self.found.folders.truncate(folders);
            self.found.failed.truncate(failed);
            self.found.failed.push((path, too_much(&error)));
            self.links.truncate(links);
            // Another link may lead to a part of it that is not too much.
            for identity in self.order.drain(entered..) {
                self.entered.remove(&identity);
            }
            self.refused.insert(identity);
        }
    }

    /// Walks a folder and all below it but links to folders, which are put aside.
    ///
    /// # Errors
    /// There is more of it than is read.
    fn tree(&mut self, root: Folder, enter: &mut dyn FnMut(&Path)) -> io::Result<()> {
        let mut seen = Totals::default();
        let mut ahead = VecDeque::from([root]);
        while let Some(folder) = ahead.pop_front() {
            if !self.entered.insert(folder.identity) {
                continue;
            }
            self.order.push(folder.identity);
            seen.folders += 1;
            seen.check(&self.limits)?;
            if folder.depth >= self.limits.depth {
                let error = too_much(&format_args!("it is {} folders deep", folder.depth));
                self.fail(folder, error);
                continue;
            }
            enter(&folder.path);
            self.found.folders.push(folder.path.clone());
            let entries = match fs::read_dir(&folder.path) {
                Ok(entries) => entries,
                Err(error) => {
                    self.fail(folder, error);
                    continue;
                }
            };
            for entry in entries {
                let entry = match entry {
                    Ok(entry) => entry,
                    Err(error) => {
                        self.found.failed.push((folder.path.clone(), error));
                        break;
                    }
                };
                seen.names += 1;
                seen.bytes += self.entry(&folder, &entry, &mut ahead);
                seen.check(&self.limits)?;
            }
        }
        Ok(())
    }

    /// Notes that nothing of a folder was read. A link to it is no repetition then, and what was read through
    /// that link before is not gone.
    fn fail(&mut self, folder: Folder, error: io::Error) {
        self.entered.remove(&folder.identity);
        self.found.failed.push((folder.path, error));
    }

    /// Looks at one name. Returns the bytes of a manifest.
    fn entry(&mut self, folder: &Folder, entry: &fs::DirEntry, ahead: &mut VecDeque<Folder>) -> u64 {
        let name = entry.file_name();
        let is_manifest = is_manifest(&name);
        let kind = entry.file_type();
        // Avoids a stat(2) of every file that is no manifest.
        if is_hidden(&name) || (!is_manifest && kind.as_ref().is_ok_and(fs::FileType::is_file)) {
            return 0;
        }
        let path = entry.path();
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => {
                let below = Folder { path, identity: identity(&metadata), depth: folder.depth + 1 };
                if kind.is_ok_and(|kind| kind.is_symlink()) {
                    self.found.links = true;
                    self.links.push_back(below);
                } else {
                    ahead.push_back(below);
                }
                0
            }
            Ok(metadata) if metadata.is_file() && is_manifest => {
                self.found.files.push((path, signature(&metadata)));
                // A longer one is reported when it is to be read.
                Some(metadata.size()).filter(|&size| size <= MAX_FILE).unwrap_or_default()
            }
            Ok(_) if is_manifest => {
                self.found.failed.push((path, no_file()));
                0
            }
            Ok(_) => 0,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Whatever its name: it may have led to a folder.
                if is_dangling(&path) {
                    self.found.failed.push((path, leads_nowhere()));
                }
                0
            }
            // A link to something else than a manifest is nobody's loss.
            Err(_) if !is_manifest && kind.is_ok_and(|kind| kind.is_symlink()) => 0,
            Err(error) => {
                self.found.failed.push((path, error));
                0
            }
        }
    }
}

fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

fn too_much(what: &dyn fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("{what}; name a smaller folder, or remove the link"))
}

/// Why a pipe, a socket or a device is not read: that might never end.
pub(crate) fn no_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is a pipe, a socket or a device, and no regular file")
}

/// Why a link is not read whose target does not exist. That of an unmounted volume may come back.
pub(crate) fn leads_nowhere() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "it is a link that leads nowhere")
}

/// Whether a path that was not found is a link.
pub(crate) fn is_dangling(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink())
}

/// Identifies this version of a file.
pub(crate) fn signature(metadata: &Metadata) -> Signature {
    Signature::of((
        (metadata.dev(), metadata.ino(), metadata.size()),
        (metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()),
    ))
}

/// Whether the directory source ignores the name.
pub(crate) fn is_hidden(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b".")
}

/// Whether a file of this name is read. Backups (`a.yaml~`, `#a.yaml#`) are not.
pub(crate) fn is_manifest(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().unwrap_or_default();
    // `A.YAML` comes from systems that ignore case.
    ["yaml", "yml", "json"].iter().any(|known| extension.eq_ignore_ascii_case(known)) && !is_hidden(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::directory::cut_short;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = walk(folder, Limits::USUAL, &mut |_| {})
            .files
            .iter()
            .map(|(path, _)| path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn manifests_are_found_at_any_depth_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        fs::create_dir(folder.path().join(".git")).unwrap();
        for name in [
            "x.yaml",
            "a/y.yml",
            "a/b/z.json",
            "README.md",
            ".x.yaml.swp",
            "x.yaml~",
            ".git/c.yaml",
            ".d.yaml",
            "A.YAML",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(names(folder.path()), ["A.YAML", "a/b/z.json", "a/y.yml", "x.yaml"]);
    }

    #[test]
    fn a_link_back_up_is_not_followed_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("x.yaml"), "").unwrap();
        symlink(folder.path(), folder.path().join("self")).unwrap();
        symlink("nowhere.yaml", folder.path().join("dangling.yaml")).unwrap();
        assert_eq!(names(folder.path()), ["x.yaml"]);
        let found = walk(folder.path(), Limits::USUAL, &mut |_| {});
        assert_eq!(found.repeated, [folder.path().join("self")]);
        assert_eq!(found.failed[0].0, folder.path().join("dangling.yaml"));
    }

    #[test]
    fn links_that_fork_are_walked_once_each_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        // Two links in each of forty folders: 2^40 paths.
        for depth in 0..40 {
            let level = folder.path().join(format!("level-{depth}"));
            fs::create_dir(&level).unwrap();
            fs::write(level.join("x.yaml"), "").unwrap();
            for link in ["left", "right"] {
                symlink(format!("../level-{}", depth + 1), level.join(link)).unwrap();
            }
        }
        let mut entered = 0;
        let found = walk(folder.path(), Limits::USUAL, &mut |_| entered += 1);
        assert_eq!((found.files.len(), entered), (40, 41));
        assert_eq!(found.repeated.len(), 78);
        assert!(found.files.iter().all(|(path, _)| !path.to_str().unwrap().contains("left")));
    }

    #[test]
    fn a_link_to_too_much_is_left_out_as_a_whole_and_reported() {
        let (folder, large) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(folder.path().join("x.yaml"), "").unwrap();
        for number in 0..50 {
            fs::write(large.path().join(format!("{number}.yaml")), "abc").unwrap();
            fs::create_dir(large.path().join(format!("{number}"))).unwrap();
        }
        symlink(large.path(), folder.path().join("all")).unwrap();
        let usual = Limits::USUAL;
        for limits in
            [Limits { names: 30, ..usual }, Limits { folders: 20, ..usual }, Limits { bytes: 60, ..usual }]
        {
            let found = walk(folder.path(), limits, &mut |_| {});
            assert_eq!((found.files.len(), found.folders.len()), (1, 1), "{limits:?}");
            assert_eq!(found.failed[0].0, folder.path().join("all"));
        }
        assert_eq!(walk(folder.path(), usual, &mut |_| {}).files.len(), 51);
    }

    #[test]
    fn of_a_manifest_directory_with_too_much_the_first_part_is_taken_and_no_folder_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..50 {
            fs::create_dir(folder.path().join(format!("{number}"))).unwrap();
            fs::write(folder.path().join(format!("{number}/x.yaml")), "abc").unwrap();
        }
        let usual = Limits::USUAL;
        for (limits, files) in
            [(Limits { folders: 21, ..usual }, 20), (Limits { names: 69, ..usual }, 20), (usual, 50)]
        {
            let found = walk(folder.path(), limits, &mut |_| {});
            assert_eq!((found.files.len(), found.failed.len()), (files, 0), "{limits:?}");
            let said = found.cut_short.map(|error| cut_short(folder.path(), &error).message);
            assert_eq!(said.is_some(), files < 50, "{limits:?}");
            let names_the_limits =
                |said: String| said.starts_with("is not read to its end: there are more than");
            assert!(said.is_none_or(names_the_limits));
        }
    }

    #[test]
    fn a_link_to_too_much_takes_nothing_from_a_link_to_a_part_of_it() {
        let (folder, large) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // So deep that the part has been entered when the limit is reached.
        fs::create_dir_all(large.path().join("rest/deep")).unwrap();
        for number in 0..50 {
            fs::write(large.path().join(format!("rest/deep/{number}.yaml")), "").unwrap();
        }
        fs::create_dir(large.path().join("part")).unwrap();
        fs::write(large.path().join("part/x.yaml"), "").unwrap();
        // Links in a folder are followed after those above it.
        fs::create_dir(folder.path().join("later")).unwrap();
        for (all, part) in [("all", "later/part"), ("later/all", "part")] {
            let (all, part) = (folder.path().join(all), folder.path().join(part));
            symlink(large.path(), &all).unwrap();
            symlink(large.path().join("part"), &part).unwrap();
            let found = walk(folder.path(), Limits { names: 30, ..Limits::USUAL }, &mut |_| {});
            assert_eq!((found.files.len(), &found.files[0].0), (1, &part.join("x.yaml")));
            assert_eq!((found.failed.len(), &found.failed[0].0), (1, &all));
            assert!(found.repeated.is_empty());
            fs::remove_file(all).unwrap();
            fs::remove_file(part).unwrap();
        }
    }

    #[test]
    fn every_link_to_too_much_is_reported_and_only_one_is_tried() {
        let (folder, large) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for number in 0..50 {
            fs::write(large.path().join(format!("{number}.yaml")), "").unwrap();
        }
        for link in ["one", "two", "three"] {
            symlink(large.path(), folder.path().join(link)).unwrap();
        }
        let mut entered = 0;
        let found = walk(folder.path(), Limits { names: 30, ..Limits::USUAL }, &mut |_| entered += 1);
        assert_eq!((found.failed.len(), entered), (3, 2));
        assert!(found.files.is_empty() && found.repeated.is_empty());
    }

    #[test]
    fn a_folder_too_deep_below_one_link_is_read_through_another() {
        let (folder, deep) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(deep.path().join("one/two")).unwrap();
        fs::write(deep.path().join("one/two/x.yaml"), "").unwrap();
        fs::create_dir(folder.path().join("later")).unwrap();
        symlink(deep.path(), folder.path().join("deep")).unwrap();
        symlink(deep.path().join("one/two"), folder.path().join("later/two")).unwrap();
        let found = walk(folder.path(), Limits { depth: 3, ..Limits::USUAL }, &mut |_| {});
        assert_eq!(found.failed[0].0, folder.path().join("deep/one/two"));
        assert_eq!(found.files[0].0, folder.path().join("later/two/x.yaml"));
    }

    #[test]
    fn a_pipe_that_is_called_a_manifest_is_reported_and_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe.yaml");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        symlink("/dev/zero", folder.path().join("zero.json")).unwrap();
        let found = walk(folder.path(), Limits::USUAL, &mut |_| {});
        assert!(found.files.is_empty());
        assert_eq!(found.failed.len(), 2);
    }

    #[test]
    fn the_files_of_a_configmap_volume_are_seen_once() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("..2026_01_02")).unwrap();
        fs::write(folder.path().join("..2026_01_02/x.yaml"), "").unwrap();
        symlink("..2026_01_02", folder.path().join("..data")).unwrap();
        symlink("..data/x.yaml", folder.path().join("x.yaml")).unwrap();
        assert_eq!(names(folder.path()), ["x.yaml"]);
    }
}
