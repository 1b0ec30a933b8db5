//! Which file holds which object. Decides what changes when a file is read again, and which file wins an
//! object of two files.
//!
//! Pure: no files and no clock. Objects are handed on and not kept. Per object the index has its name, its
//! place and a hash. So ten thousand clusters cost megabytes and not tens of them. Names are shared with the
//! objects that are handed on.
//!
//! The rules: an object is deleted when its file is deleted, or is read without errors and lacks it. An
//! object in two files is taken from the first in path order. When it leaves that file, the other takes over,
//! and the object is not deleted in between. To get this right for a file that was renamed, a burst of
//! changes first [reads](ManifestIndex::update) everything and then [resolves](ManifestIndex::resolve) what
//! was released.
//!
//! Called by [`crate::directory`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use hashbrown::HashTable;
use portico_api::change::Change;
use portico_api::intern::Interner;
use portico_api::meta::ObjectRef;
use portico_api::problem::Severity;
use slab::Slab;

use crate::manifest::{self, Missing};
use crate::object::Object;
use crate::step::ManifestProblem;

/// A hash of device, inode, size and times of a file: tells whether it changed without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature(u64);

impl Signature {
    /// Hashes what identifies a version of a file.
    pub(crate) fn of(parts: impl Hash) -> Self {
        Self(hash(parts))
    }
}

/// All files and the objects they hold.
#[derive(Debug, Default)]
pub(crate) struct ManifestIndex {
    files: BTreeMap<Arc<Path>, File>,
    /// Every object of every file, and those released and not resolved yet.
    claims: Slab<Claim>,
    owners: Owners,
    /// Files that hold an object owned by another file, each with its claim. Nearly always empty.
    others: BTreeMap<ObjectRef, BTreeMap<Arc<Path>, ClaimId>>,
    /// Claims that were given up and are not resolved yet.
    released: Vec<ClaimId>,
    /// Objects that changed owner and have not been handed on from the new one yet.
    moved: HashSet<ObjectRef>,
    names: Interner,
    problems_changed: bool,
}

#[derive(Debug)]
struct File {
    signature: Signature,
    /// Hash of the text; `None` if the last attempt to read it failed or came too early.
    text: Option<u64>,
    claims: Box<[ClaimId]>,
    problems: Box<[ManifestProblem]>,
}

/// Index into [`ManifestIndex::claims`].
type ClaimId = u32;

/// One object in one file.
#[derive(Debug)]
struct Claim {
    object: ObjectRef,
    file: Arc<Path>,
    hash: u64,
    line: u32,
}

/// The claim that owns each object. A table of claims and not a map: the names are in the claims already, and
/// a map costs 300 bytes more for each cluster.
#[derive(Debug, Default)]
struct Owners {
    table: HashTable<ClaimId>,
    hasher: RandomState,
}

impl Owners {
    /// The claim that owns `object`.
    fn get(&self, claims: &Slab<Claim>, object: &ObjectRef) -> Option<ClaimId> {
        self.table.find(self.hasher.hash_one(object), |&id| claims[id as usize].object == *object).copied()
    }

    /// Makes `claim` the owner of its object.
    fn set(&mut self, claims: &Slab<Claim>, claim: ClaimId) {
        let hash = |id: ClaimId| self.hasher.hash_one(&claims[id as usize].object);
        let same = |&id: &ClaimId| claims[id as usize].object == claims[claim as usize].object;
        match self.table.find_mut(hash(claim), same) {
            Some(owner) => *owner = claim,
            None => {
                self.table.insert_unique(hash(claim), claim, |&id| hash(id));
            }
        }
    }

    /// Leaves the object of `claim` without an owner.
    fn remove(&mut self, claims: &Slab<Claim>, claim: ClaimId) {
        let hash = self.hasher.hash_one(&claims[claim as usize].object);
        if let Ok(entry) = self.table.find_entry(hash, |&id| id == claim) {
            entry.remove();
        }
    }
}

impl ManifestIndex {
    /// Whether the file is known in exactly this version. A file that could not be read, or was being
    /// written, is not. It may be readable now although its signature is the same.
    pub(crate) fn is_current(&self, path: &Path, signature: Signature) -> bool {
        self.files.get(path).is_some_and(|file| file.signature == signature && file.text.is_some())
    }

    /// Whether the file could not be read, or was being written, the last time. Objects that it lacks may
    /// still come.
    pub(crate) fn is_unfinished(&self, path: &Path) -> bool {
        self.files.get(path).is_some_and(|file| file.text.is_none())
    }

    /// The known files in or below `folder`.
    pub(crate) fn files_below(&self, folder: &Path) -> impl Iterator<Item = &Arc<Path>> {
        self.files
            .range::<Path, _>((Bound::Included(folder), Bound::Unbounded))
            .map(|(path, _)| path)
            .take_while(move |path| path.starts_with(folder))
    }

    /// Reads the present text of the file. Emits objects that are new or different. Objects that are gone are
    /// released and wait for [`Self::resolve`]. An unfinished text releases nothing.
    pub(crate) fn update(
        &mut self,
        path: &Arc<Path>,
        signature: Signature,
        text: &str,
        unfinished: bool,
        emit: &mut dyn FnMut(Change<Object>),
    ) {
        let text_hash = hash(text);
        let old = match self.files.get_mut(path) {
            Some(file) => {
                file.signature = signature;
                // A file that owns more objects than before must emit them although its text is the same.
                if file.text == Some(text_hash) && self.moved.is_empty() {
                    return;
                }
                std::mem::take(&mut file.claims)
            }
            None => Box::default(),
        };
        let mut before: HashMap<ObjectRef, ClaimId> =
            old.into_iter().map(|id| (self.claims[id as usize].object.clone(), id)).collect();
        let mut claims: Vec<ClaimId> = Vec::with_capacity(before.len().max(1));
        let mut lines: HashMap<ObjectRef, u32> = HashMap::new();
        let mut repeated = Vec::new();
        let mut reading = manifest::read(path, text, |mut found| {
            found.object.metadata_mut().share_names(&mut self.names);
            let (object, hash, line) = (found.object.reference(), found.hash, found.node.line);
            if let Some(&first) = lines.get(&object) {
                repeated.push(duplicate(path, line, object, path, first));
                return;
            }
            lines.insert(object.clone(), line);
            let known = before.remove(&object);
            let changed = known.is_none_or(|id| self.claims[id as usize].hash != hash);
            let claim = Claim { object, file: path.clone(), hash, line };
            let id = match known {
                Some(id) => {
                    self.claims[id as usize] = claim;
                    id
                }
                None => {
                    u32::try_from(self.claims.insert(claim)).expect("memory ends long before 2^32 objects")
                }
            };
            claims.push(id);
            if self.claim(id, changed) {
                emit(Change::Apply(found.object));
            }
        });
        if unfinished {
            reading.missing = Missing::Any;
        }
        for (object, id) in before {
            let stays = match &reading.missing {
                Missing::None => false,
                Missing::Some(objects) => objects.contains(&object),
                Missing::Any => true,
            };
            if stays {
                claims.push(id);
            } else {
                self.released.push(id);
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

    /// The file exists and cannot be read: what it held stays in force.
    pub(crate) fn fail(&mut self, path: &Arc<Path>, signature: Signature, problem: ManifestProblem) {
        let claims =
            self.files.get_mut(path).map(|file| std::mem::take(&mut file.claims)).unwrap_or_default();
        self.put(path, File { signature, text: None, claims, problems: Box::new([problem]) });
    }

    /// The same, where the problem is reported elsewhere, in place of those that the file had.
    pub(crate) fn set_unreadable(&mut self, path: &Path) {
        if let Some(file) = self.files.get_mut(path) {
            file.text = None;
            self.problems_changed |= !std::mem::take(&mut file.problems).is_empty();
        }
    }

    /// The file is gone. Its objects are released and wait for [`Self::resolve`].
    pub(crate) fn remove(&mut self, path: &Path) {
        if let Some(file) = self.files.remove(path) {
            self.problems_changed |= !file.problems.is_empty();
            self.released.extend(file.claims);
        }
    }

    /// Resolves everything released since the last call: the object is deleted, or another file holds it.
    /// Returns the files that own an object now and must be [read again](Self::update) to emit it, which may
    /// release more.
    pub(crate) fn resolve(&mut self, emit: &mut dyn FnMut(Change<Object>)) -> BTreeSet<Arc<Path>> {
        let mut new_owners = BTreeSet::new();
        for id in std::mem::take(&mut self.released) {
            let Claim { object, file, .. } = &self.claims[id as usize];
            let mut others = self.others.remove(object).unwrap_or_default();
            if self.owners.get(&self.claims, object) != Some(id) {
                // Unless the file holds the object again by now.
                if others.get(file) == Some(&id) {
                    others.remove(file);
                    self.problems_changed = true;
                }
            } else if let Some((new_owner, claim)) = others.pop_first() {
                self.owners.set(&self.claims, claim);
                self.moved.insert(object.clone());
                self.problems_changed = true;
                new_owners.insert(new_owner);
            } else {
                self.owners.remove(&self.claims, id);
                self.moved.remove(object);
                emit(Change::Delete(object.clone()));
            }
            let gone = self.claims.remove(id as usize);
            if !others.is_empty() {
                self.others.insert(gone.object, others);
            }
        }
        new_owners
    }

    /// Whether [`Self::problems`] may have changed since the last call.
    pub(crate) fn problems_changed(&mut self) -> bool {
        std::mem::take(&mut self.problems_changed)
    }

    /// Everything wrong with all files.
    pub(crate) fn problems(&self) -> Vec<ManifestProblem> {
        let mut problems: Vec<_> =
            self.files.values().flat_map(|file| file.problems.iter().cloned()).collect();
        for (object, others) in &self.others {
            let Some(owner) = self.owners.get(&self.claims, object) else { continue };
            let owner = &self.claims[owner as usize];
            problems.extend(others.iter().map(|(path, &id)| {
                duplicate(path, self.claims[id as usize].line, object.clone(), &owner.file, owner.line)
            }));
        }
        problems
    }

    /// Decides whether the claim `id`, new or known, owns its object. Returns whether to emit the object.
    fn claim(&mut self, id: ClaimId, changed: bool) -> bool {
        let Claim { object, file, .. } = &self.claims[id as usize];
        let Some(owner) = self.owners.get(&self.claims, object) else {
            self.owners.set(&self.claims, id);
            return true;
        };
        let owner_file = &self.claims[owner as usize].file;
        if owner_file == file {
            self.owners.set(&self.claims, id);
            // Not short-circuited: the flag must be cleared in any case.
            let moved = self.moved.remove(object);
            return changed || moved;
        }
        let others = self.others.entry(object.clone()).or_default();
        if owner_file < file {
            self.problems_changed |= others.insert(file.clone(), id).is_none();
            return false;
        }
        others.insert(owner_file.clone(), owner);
        others.remove(file);
        self.moved.remove(object);
        self.problems_changed = true;
        self.owners.set(&self.claims, id);
        true
    }

    fn put(&mut self, path: &Arc<Path>, file: File) {
        let has_problems = !file.problems.is_empty();
        let old = self.files.insert(path.clone(), file);
        self.problems_changed |= has_problems || old.is_some_and(|old| !old.problems.is_empty());
    }
}

/// The object at `file` and `line` is not used, because `owner` holds it too.
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
#[path = "index/tests.rs"]
mod tests;
