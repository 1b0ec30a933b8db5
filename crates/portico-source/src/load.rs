//! A directory of manifests read once, with the place of every object and field: for `portico check` and `portico routes`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use portico_api::meta::ObjectRef;

use crate::catalogue::duplicate;
use crate::directory::{DirectoryError, read_text, unreadable};
use crate::manifest;
use crate::object::Object;
use crate::step::ManifestProblem;
use crate::walk::walk;
use crate::yaml::Node;

/// Everything a directory holds.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The objects, by file in path order, then as written.
    pub objects: Vec<Object>,
    /// What could not be read, in path order.
    pub problems: Vec<ManifestProblem>,
    /// How many manifest files there are, readable or not.
    pub files: usize,
    places: BTreeMap<ObjectRef, Place>,
}

#[derive(Debug)]
struct Place {
    file: Arc<Path>,
    node: Node,
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file as a path that can be opened from the current directory.
    pub file: Arc<Path>,
    /// The line, counted from 1.
    pub line: u32,
}

impl Loaded {
    /// Where the field at `path` (`spec.ports[0].nodePort`) of `object` stands; for a field that is not written down,
    /// where the nearest field around it stands; for an empty path, where the object begins. `None` if the object is not from here.
    pub fn line_of(&self, object: &ObjectRef, path: &str) -> Option<Location> {
        let place = self.places.get(object)?;
        Some(Location { file: place.file.clone(), line: place.node.line_of(path) })
    }
}

/// Reads all manifests in `directory`, by the same rules as [`crate::directory`]. Blocks.
pub fn read_directory(directory: &Path) -> Result<Loaded, DirectoryError> {
    std::fs::read_dir(directory)
        .map_err(|source| DirectoryError::Unreadable { path: directory.to_owned(), source })?;
    let mut found = walk(directory, &mut |_| {});
    found.files.sort_by(|a, b| a.0.cmp(&b.0));
    let mut loaded = Loaded::default();
    loaded.problems.extend(found.failed.iter().map(|(path, error)| unreadable(path, error)));
    loaded.files = found.files.len();
    for (path, _) in &found.files {
        let file: Arc<Path> = path.as_path().into();
        match read_text(path) {
            Ok(text) => loaded.take(&file, &text),
            Err(error) => loaded.problems.push(unreadable(path, &error)),
        }
    }
    loaded.problems.sort();
    Ok(loaded)
}

/// Reads one text as the manifest file `file`, without touching any file.
pub fn read_text_as(file: &Path, text: &str) -> Loaded {
    let mut loaded = Loaded::default();
    loaded.take(&file.into(), text);
    loaded
}

impl Loaded {
    fn take(&mut self, file: &Arc<Path>, text: &str) {
        let mut repeated = Vec::new();
        let reading = manifest::read(file, text, |found| {
            let object = found.object.reference();
            if let Some(first) = self.places.get(&object) {
                repeated.push(duplicate(file, found.node.line, object, &first.file, first.node.line));
                return;
            }
            self.places.insert(object, Place { file: file.clone(), node: found.node.clone() });
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
    fn objects_fields_and_problems_have_their_places() {
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
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(read_directory(Path::new("/nonexistent/manifests")).is_err());
    }
}
