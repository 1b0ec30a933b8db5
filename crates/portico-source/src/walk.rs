//! Which files and folders a manifest directory holds.
//!
//! Hidden names are ignored: `.git`, `.portico`, an editor's `.a.yaml.swp`, and the `..2026_01_02` and
//! `..data` of a ConfigMap volume, whose files are seen once, under the names that link to them. Symbolic
//! links to files and to folders are followed, but never into a folder that contains them.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::index::Signature;

/// Deepest nesting of folders; more is a mistake, such as a link that leads out into the whole file system.
const MAX_DEPTH: usize = 32;

/// What a walk found.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// Manifest files and their versions, in no order.
    pub(crate) files: Vec<(PathBuf, Signature)>,
    /// Folders, the first one included.
    pub(crate) folders: Vec<PathBuf>,
    /// Files and folders that could not be read.
    pub(crate) failed: Vec<(PathBuf, io::Error)>,
}

/// Walks `folder`. Calls `enter` with every folder before it is listed, so that a watch set there misses
/// nothing.
pub(crate) fn walk(folder: &Path, enter: &mut dyn FnMut(&Path)) -> Walk {
    let mut found = Walk::default();
    match fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => {
            visit(folder, &metadata, &mut Vec::new(), enter, &mut found);
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => found.failed.push((folder.to_owned(), error)),
    }
    found
}

fn visit(
    folder: &Path,
    metadata: &Metadata,
    above: &mut Vec<(u64, u64)>,
    enter: &mut dyn FnMut(&Path),
    found: &mut Walk,
) {
    let identity = (metadata.dev(), metadata.ino());
    if above.len() >= MAX_DEPTH || above.contains(&identity) {
        return;
    }
    enter(folder);
    found.folders.push(folder.to_owned());
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return found.failed.push((folder.to_owned(), error)),
    };
    above.push(identity);
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                found.failed.push((folder.to_owned(), error));
                break;
            }
        };
        let name = entry.file_name();
        if is_hidden(&name) {
            continue;
        }
        let path = entry.path();
        // Avoids a stat(2) of every file that is no manifest.
        let may_be_folder = entry.file_type().is_ok_and(|kind| !kind.is_file());
        if !may_be_folder && !is_manifest(&name) {
            continue;
        }
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => visit(&path, &metadata, above, enter, found),
            Ok(metadata) if metadata.is_file() && is_manifest(&name) => {
                found.files.push((path, signature(&metadata)));
            }
            // A socket, a pipe, or something that is no manifest.
            Ok(_) => {}
            // Gone again, or a link that leads nowhere.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => found.failed.push((path, error)),
        }
    }
    above.pop();
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

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = walk(folder, &mut |_| {})
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
