//! Which file holds which object: what changes when a file is read again, and who wins when two files hold the same one.
//!
//! Plain values, no files and no clock. Objects themselves are handed on and not kept: per object the catalogue remembers its name, its
//! line and a hash, so ten thousand clusters cost megabytes and not tens of them.
//!
//! The rules: an object goes when its file is deleted, or is read cleanly without it. An object in two files is taken from the
//! first in path order; when it leaves that file, the other takes over without the object ever being gone in between. To get
//! that right for a file that was renamed, a burst of changes first [reads](Catalogue::update) everything and only then
//! [settles](Catalogue::settle) what is gone.
//!
//! Called by [`crate::directory`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use portico_api::meta::ObjectRef;
use portico_api::problem::Severity;

use crate::manifest::{self, Missing};
use crate::step::{Event, ManifestProblem};

/// What tells a changed file from an unchanged one without reading it: device, inode, size and times, hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature(u64);

impl Signature {
    /// The signature of whatever identifies a version of a file.
    pub(crate) fn of(parts: impl Hash) -> Self {
        Self(hash(parts))
    }
}

/// All files and the objects they hold.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    files: BTreeMap<Arc<Path>, File>,
    /// The file each object is taken from.
    owners: HashMap<ObjectRef, Arc<Path>>,
    /// Files that hold an object which is taken from another. Nearly always empty.
    others: BTreeMap<ObjectRef, BTreeSet<Arc<Path>>>,
    /// Claims given up and not settled yet.
    released: Vec<(ObjectRef, Arc<Path>)>,
    /// Objects that changed owner and have not been handed on from the new one yet.
    inherited: HashSet<ObjectRef>,
    problems_changed: bool,
}

#[derive(Debug)]
struct File {
    signature: Signature,
    /// Hash of the text; `None` if the last attempt to read it failed or came too early.
    text: Option<u64>,
    claims: Box<[Claim]>,
    problems: Box<[ManifestProblem]>,
}

/// One object in one file.
#[derive(Debug)]
struct Claim {
    object: ObjectRef,
    hash: u64,
    line: u32,
}

impl Catalogue {
    /// Whether the file is known in exactly this version. One that could not be read, or was still being written, is not: the
    /// reason may be gone although the file is the same.
    pub(crate) fn is_current(&self, path: &Path, signature: Signature) -> bool {
        self.files.get(path).is_some_and(|file| file.signature == signature && file.text.is_some())
    }

    /// The known files in or below `folder`.
    pub(crate) fn files_below(&self, folder: &Path) -> impl Iterator<Item = &Arc<Path>> {
        self.files
            .range::<Path, _>((Bound::Included(folder), Bound::Unbounded))
            .map(|(path, _)| path)
            .take_while(move |path| path.starts_with(folder))
    }

    /// Takes in what the file says now. Hands on what is new or different; what is gone waits for [`Self::settle`]. From
    /// an unfinished text nothing is gone.
    pub(crate) fn update(
        &mut self,
        path: &Arc<Path>,
        signature: Signature,
        text: &str,
        unfinished: bool,
        emit: &mut dyn FnMut(Event),
    ) {
        let text_hash = hash(text);
        let old = match self.files.get_mut(path) {
            Some(file) => {
                file.signature = signature;
                let heir = !self.inherited.is_empty();
                if file.text == Some(text_hash) && !heir {
                    return;
                }
                std::mem::take(&mut file.claims)
            }
            None => Box::default(),
        };
        let mut before: HashMap<ObjectRef, (u64, u32)> =
            old.into_iter().map(|claim| (claim.object, (claim.hash, claim.line))).collect();
        let mut claims: Vec<Claim> = Vec::with_capacity(before.len().max(1));
        let mut lines: HashMap<ObjectRef, u32> = HashMap::new();
        let mut repeated = Vec::new();
        let mut reading = manifest::read(path, text, |found| {
            let mut object = found.object.reference();
            if let Some(&line) = lines.get(&object) {
                repeated.push(duplicate(path, found.node.line, object, path, line));
                return;
            }
            // Objects of one namespace usually stand together and can share its name.
            if let Some(last) = claims.last()
                && last.object.key.namespace == object.key.namespace
            {
                object.key.namespace = last.object.key.namespace.clone();
            }
            let known = before.remove(&object).map(|(hash, _)| hash);
            if self.claim(path, &object, known != Some(found.hash)) {
                emit(Event::Apply(found.object));
            }
            lines.insert(object.clone(), found.node.line);
            claims.push(Claim { object, hash: found.hash, line: found.node.line });
        });
        if unfinished {
            reading.missing = Missing::Any;
        }
        for (object, (hash, line)) in before {
            let stays = match &reading.missing {
                Missing::None => false,
                Missing::Some(objects) => objects.contains(&object),
                Missing::Any => true,
            };
            if stays {
                claims.push(Claim { object, hash, line });
            } else {
                self.released.push((object, path.clone()));
            }
        }
        if text.trim_ascii().is_empty() && !claims.is_empty() {
            reading.problems.push(still_empty(path));
        }
        reading.problems.append(&mut repeated);
        reading.problems.sort_by_key(|problem| problem.line);
        self.put(
            path,
            File {
                signature,
                text: (!unfinished).then_some(text_hash),
                claims: claims.into(),
                problems: reading.problems.into(),
            },
        );
    }

    /// The file is there and cannot be read: what it held stays in force.
    pub(crate) fn fail(&mut self, path: &Arc<Path>, signature: Signature, problem: ManifestProblem) {
        let claims =
            self.files.get_mut(path).map(|file| std::mem::take(&mut file.claims)).unwrap_or_default();
        self.put(path, File { signature, text: None, claims, problems: Box::new([problem]) });
    }

    /// The file is gone. What it held waits for [`Self::settle`].
    pub(crate) fn remove(&mut self, path: &Path) {
        if let Some((path, file)) = self.files.remove_entry(path) {
            self.problems_changed |= !file.problems.is_empty();
            self.released.extend(file.claims.into_iter().map(|claim| (claim.object, path.clone())));
        }
    }

    /// Decides about everything given up since the last time: it is gone, or another file has it. Returns the files that
    /// inherited something and must be [read again](Self::update) to hand it on.
    pub(crate) fn settle(&mut self, emit: &mut dyn FnMut(Event)) -> BTreeSet<Arc<Path>> {
        let mut heirs = BTreeSet::new();
        for (object, path) in std::mem::take(&mut self.released) {
            let owns = self.owners.get(&object).is_some_and(|owner| *owner == path);
            let others = self.others.get_mut(&object);
            if !owns {
                if let Some(others) = others {
                    others.remove(&path);
                    self.problems_changed = true;
                    if others.is_empty() {
                        self.others.remove(&object);
                    }
                }
                continue;
            }
            let Some(heir) = others.and_then(BTreeSet::pop_first) else {
                self.owners.remove(&object);
                self.inherited.remove(&object);
                emit(Event::Delete(object));
                continue;
            };
            if self.others.get(&object).is_some_and(BTreeSet::is_empty) {
                self.others.remove(&object);
            }
            self.problems_changed = true;
            self.owners.insert(object.clone(), heir.clone());
            self.inherited.insert(object);
            heirs.insert(heir);
        }
        heirs
    }

    /// Whether [`Self::problems`] may say something else than the last time it was asked.
    pub(crate) fn problems_changed(&mut self) -> bool {
        std::mem::take(&mut self.problems_changed)
    }

    /// Everything wrong with all files, in path order.
    pub(crate) fn problems(&self) -> Vec<ManifestProblem> {
        let mut problems: Vec<_> =
            self.files.values().flat_map(|file| file.problems.iter().cloned()).collect();
        for (object, others) in &self.others {
            let Some(owner) = self.owners.get(object) else { continue };
            for path in others {
                problems.push(duplicate(
                    path,
                    self.line(path, object),
                    object.clone(),
                    owner,
                    self.line(owner, object),
                ));
            }
        }
        problems.sort();
        problems
    }

    /// Registers that `path` holds `object`. Answers whether to hand it on.
    fn claim(&mut self, path: &Arc<Path>, object: &ObjectRef, changed: bool) -> bool {
        match self.owners.get_mut(object) {
            None => {
                self.owners.insert(object.clone(), path.clone());
                true
            }
            Some(owner) if owner == path => {
                // Must run whether or not it changed: the flag is spent.
                let inherited = self.inherited.remove(object);
                changed || inherited
            }
            Some(owner) if *owner > *path => {
                let later = std::mem::replace(owner, path.clone());
                let others = self.others.entry(object.clone()).or_default();
                others.insert(later);
                others.remove(path);
                self.inherited.remove(object);
                self.problems_changed = true;
                true
            }
            Some(_) => {
                self.problems_changed |= self.others.entry(object.clone()).or_default().insert(path.clone());
                false
            }
        }
    }

    fn put(&mut self, path: &Arc<Path>, file: File) {
        let has_problems = !file.problems.is_empty();
        let old = self.files.insert(path.clone(), file);
        self.problems_changed |= has_problems || old.is_some_and(|old| !old.problems.is_empty());
    }

    fn line(&self, path: &Path, object: &ObjectRef) -> u32 {
        let claims = self.files.get(path).map(|file| &file.claims[..]).unwrap_or_default();
        claims.iter().find(|claim| claim.object == *object).map_or(0, |claim| claim.line)
    }
}

/// The object at `file` and `line` is not used, because it stands in `owner` too.
pub(crate) fn duplicate(
    file: &Arc<Path>,
    line: u32,
    object: ObjectRef,
    owner: &Path,
    owner_line: u32,
) -> ManifestProblem {
    ManifestProblem {
        file: Some(file.clone()),
        line,
        severity: Severity::Error,
        reason: "duplicate",
        object: Some(object),
        message: format!(
            "it stands in {}:{owner_line} too, and the first in path order counts",
            owner.display()
        ),
        remedy: "remove one of the two".to_owned(),
    }
}

fn still_empty(file: &Arc<Path>) -> ManifestProblem {
    ManifestProblem {
        file: Some(file.clone()),
        line: 0,
        severity: Severity::Warning,
        reason: "empty-file",
        object: None,
        message: "the file is empty, and what it held before stays in force".to_owned(),
        remedy: "delete the file if that is meant to go".to_owned(),
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
#[path = "catalogue/tests.rs"]
mod tests;
