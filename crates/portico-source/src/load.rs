//! A directory of manifests read once, with the location of every object and field: for `portico check` and
//! `portico routes`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use portico_api::meta::ObjectRef;

use crate::directory::{DirectoryError, cut_short, read_text, repeated, unreadable};
use crate::index::duplicate;
use crate::manifest;
use crate::object::Object;
use crate::problems::summarised;
use crate::step::ManifestProblem;
use crate::walk::{Limits, walk};
use portico_yaml::Node;

/// Everything that a directory holds.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The objects, by file in path order, then as written.
    pub objects: Vec<Object>,
    /// What could not be read, in path order.
    pub problems: Vec<ManifestProblem>,
    /// How many manifest files there are, readable or not.
    pub files: usize,
    locations: BTreeMap<ObjectRef, InFile>,
}

#[derive(Debug)]
struct InFile {
    file: Arc<Path>,
    node: Node,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file as a path that can be opened from the current directory.
    pub file: Arc<Path>,
    /// The line, counted from 1.
    pub line: u32,
}

impl Loaded {
    /// Returns the location of the field at `path` (`spec.ports[0].nodePort`) of `object`. For a field that
    /// is not written down, this is the nearest field around it; for an empty path, the first line of the
    /// object. `None` if the object is not from this directory.
    pub fn line_of(&self, object: &ObjectRef, path: &str) -> Option<Location> {
        let found = self.locations.get(object)?;
        Some(Location { file: found.file.clone(), line: found.node.line_of(path) })
    }
}

/// Reads all manifests in `directory` by the rules of [`crate::directory`]. Blocks.
pub fn read_directory(directory: &Path) -> Result<Loaded, DirectoryError> {
    std::fs::read_dir(directory)
        .map_err(|source| DirectoryError::Unreadable { path: directory.to_owned(), source })?;
    let mut found = walk(directory, Limits::USUAL, &mut |_| {});
    found.files.sort_by(|a, b| a.0.cmp(&b.0));
    let mut loaded = Loaded::default();
    loaded.problems.extend(found.failed.iter().map(|(path, error)| unreadable(path, error)));
    loaded.problems.extend(found.cut_short.iter().map(|error| cut_short(directory, error)));
    loaded.problems.extend(found.repeated.iter().map(|path| repeated(path)));
    loaded.files = found.files.len();
    for (path, _) in &found.files {
        let file: Arc<Path> = path.as_path().into();
        match read_text(path) {
            Ok(text) => loaded.add(&file, &text),
            Err(error) => loaded.problems.push(unreadable(path, &error)),
        }
    }
    loaded.problems = summarised(loaded.problems);
    Ok(loaded)
}

/// Reads one text as the manifest file `file`, without touching any file.
pub fn read_text_as(file: &Path, text: &str) -> Loaded {
    let mut loaded = Loaded::default();
    loaded.add(&file.into(), text);
    loaded
}

impl Loaded {
    fn add(&mut self, file: &Arc<Path>, text: &str) {
        let mut repeated = Vec::new();
        let reading = manifest::read(file, text, |found| {
            let object = found.object.reference();
            if let Some(first) = self.locations.get(&object) {
                repeated.push(duplicate(file, found.node.line, object, &first.file, first.node.line));
                return;
            }
            self.locations.insert(object, InFile { file: file.clone(), node: found.node.clone() });
            self.objects.push(found.object);
        });
        self.problems.extend(reading.problems);
        self.problems.append(&mut repeated);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn objects_fields_and_problems_have_their_lines() {
        let folder = tempfile::tempdir().unwrap();
        let service = "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  annotations:\n    x.y/z: q\n";
        fs::write(folder.path().join("a.yaml"), format!("# first\n---\n{service}")).unwrap();
        fs::write(folder.path().join("b.yaml"), format!("{service}---\nkind: [\n")).unwrap();
        let loaded = read_directory(folder.path()).unwrap();
        assert_eq!(loaded.objects.len(), 1);
        let location = loaded.line_of(&loaded.objects[0].reference(), "metadata.annotations.x.y/z").unwrap();
        assert_eq!((location.file.file_name().unwrap().to_str().unwrap(), location.line), ("a.yaml", 8));
        let reasons: Vec<_> = loaded.problems.iter().map(|problem| (problem.line, problem.reason)).collect();
        assert_eq!(reasons[0], (1, "duplicate"));
        assert_eq!(reasons[1].1, "syntax");
    }

    #[test]
    fn a_missing_directory_is_an_error() {
        assert!(read_directory(Path::new("/nonexistent/manifests")).is_err());
    }
}
