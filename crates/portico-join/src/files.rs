//! The files of a machine that joins, and the record by which they are removed again.
//!
//! The record is written before the files: whatever ends the program, they are known. A file that was not
//! written by Portico is never replaced.

use std::fs::{self, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use jiff::Timestamp;
use portico_hosting::join::machine::{NewFile, Paths};
use portico_hosting::join::moving::Step;
use portico_hosting::join::trust::{CaHash, node_of};
use portico_pki::ends;
use serde::{Deserialize, Serialize};

/// Most bytes of a file that is read: a kubeconfig has some thousand.
const LONGEST: u64 = 1 << 20;

/// What was joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The URL of the API server.
    pub server: String,
    /// The hashes of its authorities that were pinned.
    pub authority: Vec<String>,
    /// The name of the node.
    pub node: String,
    /// What was written.
    pub files: Vec<PathBuf>,
    /// Whether systemd runs the kubelet.
    pub systemd: bool,
}

/// How the machine stands before.
#[derive(Debug, PartialEq, Eq)]
pub enum Before {
    /// It belongs to nobody, or was on its way into this cluster.
    Open {
        /// What was written then.
        ours: Vec<PathBuf>,
    },
    /// It is a node of this cluster.
    Joined(Record),
}

/// Reads the record, if there is one.
pub fn record(paths: &Paths) -> anyhow::Result<Option<Record>> {
    let path = paths.record();
    let Some(text) = read(&path)? else { return Ok(None) };
    let record = serde_json::from_str(&text);
    record.map(Some).with_context(|| format!("{} is not as `portico join` writes it", path.display()))
}

/// Whether the machine can join the cluster with these authorities.
pub fn before(paths: &Paths, pins: &[CaHash]) -> anyhow::Result<Before> {
    let has_kubeconfig = paths.kubeconfig().exists();
    match record(paths)? {
        None if has_kubeconfig => bail!(
            "{} exists and `portico join` did not make it: this machine belongs to a cluster already. To \
             leave that, run `kubeadm reset`, or undo what joined it",
            paths.kubeconfig().display()
        ),
        None => Ok(Before::Open { ours: Vec::new() }),
        Some(record) => {
            let same = pins.iter().any(|pin| record.authority.contains(&pin.to_string()));
            ensure!(
                same,
                "this machine is node {} of the cluster at {}: `portico join remove` takes it out there, and \
                 `kubectl delete node {}` removes its Node",
                record.node,
                record.server,
                record.node
            );
            // The kubelet writes the kubeconfig when it starts, before it has a certificate.
            let is_node = has_kubeconfig && has_certificate(paths, &record.node, Timestamp::now());
            Ok(if is_node { Before::Joined(record) } else { Before::Open { ours: record.files } })
        }
    }
}

/// Whether the kubelet has a certificate for this node that is still good.
pub(crate) fn has_certificate(paths: &Paths, node: &str, now: Timestamp) -> bool {
    let Ok(text) = fs::read_to_string(paths.certificate()) else { return false };
    node_of(&text).is_some_and(|name| name == node) && ends(&text).is_some_and(|end| end > now)
}

/// Writes the files, of which those of `ours` may be replaced.
pub fn write(paths: &Paths, mut record: Record, files: &[NewFile], ours: &[PathBuf]) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    for file in files {
        match read(&file.path)? {
            Some(content) if !ours.contains(&file.path) => ensure!(
                content == file.content,
                "{} exists, is another, and was not written by `portico join`: move it away",
                file.path.display()
            ),
            _ => missing.push(file),
        }
    }
    // What an earlier time wrote, and this one does not, is removed with the rest.
    record.files = ours.to_vec();
    let new = missing.iter().map(|file| &file.path).filter(|path| !ours.contains(path));
    record.files.extend(new.cloned());
    let content = format!("{}\n", serde_json::to_string_pretty(&record)?);
    put(&NewFile { path: paths.record(), content, mode: 0o600 })?;
    missing.into_iter().try_for_each(put)
}

/// Replaces a file at once, or not at all.
pub(crate) fn put(file: &NewFile) -> anyhow::Result<()> {
    put_as(file, None)
}

/// Like [`put`], and gives the file to this user and group.
fn put_as(file: &NewFile, owner: Option<(u32, u32)>) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", file.path.display());
    let folder = file.path.parent().with_context(cannot)?;
    fs::create_dir_all(folder).with_context(cannot)?;
    let mut new = tempfile::NamedTempFile::new_in(folder).with_context(cannot)?;
    new.write_all(file.content.as_bytes()).with_context(cannot)?;
    if let Some((user, group)) = owner {
        fchown(new.as_file(), Some(user), Some(group)).with_context(cannot)?;
    }
    new.as_file().set_permissions(Permissions::from_mode(file.mode)).with_context(cannot)?;
    new.as_file().sync_all().with_context(cannot)?;
    new.persist(&file.path).with_context(cannot)?;
    Ok(())
}

/// Does what a move asks for.
pub(crate) fn take(steps: &[Step]) -> anyhow::Result<()> {
    for step in steps {
        match step {
            Step::Write(file) => rewrite(file)?,
            Step::Remove(path) => drop(removed(path)?),
        }
    }
    Ok(())
}

/// Writes a file that may be there. One that is keeps its mode and its owner, and a link stays one.
fn rewrite(file: &NewFile) -> anyhow::Result<()> {
    let path = fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone());
    let there = fs::metadata(&path).ok();
    let mode = there.as_ref().map_or(file.mode, |there| there.permissions().mode() & 0o7777);
    let owner = there.map(|there| (there.uid(), there.gid()));
    put_as(&NewFile { path, content: file.content.clone(), mode }, owner)
}

/// Removes what was written, and what the kubelet made of it; returns what was there. The record goes last.
pub fn remove(paths: &Paths, record: &Record) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = record.files.clone();
    files.extend([paths.kubeconfig(), paths.before_move(), paths.running()]);
    match fs::read_dir(paths.certificates()) {
        Ok(entries) => {
            for entry in entries {
                files.push(entry.with_context(|| cannot_remove(&paths.certificates()))?.path());
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| cannot_remove(&paths.certificates())),
    }
    files.push(paths.record());
    let mut gone = Vec::new();
    for path in files {
        if removed(&path)? {
            gone.push(path);
        }
    }
    Ok(gone)
}

/// Removes a file; whether it was there.
fn removed(path: &Path) -> anyhow::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| cannot_remove(path)),
    }
}

fn cannot_remove(path: &Path) -> String {
    format!("cannot remove {}", path.display())
}

/// The text of a file, if there is one.
pub(crate) fn read(path: &Path) -> anyhow::Result<Option<String>> {
    let there = match fs::metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    ensure!(
        there.is_file() && there.len() <= LONGEST,
        "{} is no file of at most {LONGEST} bytes: put back what was there",
        path.display()
    );
    Ok(Some(fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use portico_lab::pki::Certificate;

    use super::*;

    const PIN: &str = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    const OTHER: &str = "sha256:ff112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn record_of(pin: &str) -> Record {
        let (server, node) = ("https://a.example.com:6443".to_owned(), "worker-1".to_owned());
        Record { server, authority: vec![pin.to_owned()], node, files: Vec::new(), systemd: false }
    }

    fn new_file(paths: &Paths, content: &str) -> NewFile {
        NewFile { path: paths.bootstrap(), content: content.to_owned(), mode: 0o600 }
    }

    #[test]
    fn what_was_written_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::below(dir.path());
        let file = new_file(&paths, "token");
        write(&paths, record_of(PIN), std::slice::from_ref(&file), &[]).unwrap();
        assert_eq!(fs::metadata(&file.path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::create_dir_all(paths.certificates()).unwrap();
        fs::write(paths.certificate(), "of the kubelet").unwrap();
        fs::write(paths.kubeconfig(), "of the kubelet").unwrap();
        let others = dir.path().join("etc/kubernetes/manifests.yaml");
        fs::write(&others, "somebody's").unwrap();
        let record = record(&paths).unwrap().unwrap();
        assert_eq!(remove(&paths, &record).unwrap().len(), 4);
        assert!(others.exists() && !paths.kubeconfig().exists() && !paths.certificate().exists());
        assert_eq!(before(&paths, &[]).unwrap(), Before::Open { ours: Vec::new() });
        assert_eq!(remove(&paths, &record).unwrap(), Vec::<PathBuf>::new(), "a second time is harmless");
    }

    #[test]
    fn a_file_that_is_changed_keeps_its_mode_and_the_link_to_it_and_a_new_one_is_secret() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::below(dir.path());
        let file = new_file(&paths, "new");
        let mode = || fs::metadata(&file.path).unwrap().permissions().mode() & 0o777;
        take(&[Step::Write(file.clone())]).unwrap();
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&file.path, Permissions::from_mode(0o640)).unwrap();
        take(&[Step::Write(NewFile { content: "newer".to_owned(), ..file.clone() })]).unwrap();
        assert_eq!((mode(), &*fs::read_to_string(&file.path).unwrap()), (0o640, "newer"));
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(&file.path, &elsewhere).unwrap();
        symlink(&elsewhere, &file.path).unwrap();
        take(&[Step::Write(NewFile { content: "newest".to_owned(), ..file.clone() })]).unwrap();
        assert!(file.path.is_symlink() && mode() == 0o640);
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "newest");
        let remove = Step::Remove(file.path.clone());
        take(&[remove.clone(), remove]).unwrap();
        assert!(!file.path.exists());
    }

    #[test]
    fn what_is_no_file_or_has_no_end_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("long");
        assert_eq!(read(&path).unwrap(), None);
        fs::File::create(&path).unwrap().set_len(LONGEST + 1).unwrap();
        for wrong in [&path, dir.path()] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("is no file of at most"), "{error}");
        }
    }

    #[test]
    fn a_machine_of_another_cluster_is_refused_with_how_it_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let (paths, pins) = (Paths::below(dir.path()), [PIN.parse().unwrap()]);
        write(&paths, record_of(OTHER), &[], &[]).unwrap();
        let error = before(&paths, &pins).unwrap_err().to_string();
        assert!(error.contains("portico join remove") && error.contains("worker-1"), "{error}");
        fs::remove_file(paths.record()).unwrap();
        fs::create_dir_all(paths.kubeconfig().parent().unwrap()).unwrap();
        fs::write(paths.kubeconfig(), "kubeadm's").unwrap();
        let error = before(&paths, &pins).unwrap_err().to_string();
        assert!(error.contains("kubeadm reset"), "{error}");
    }

    #[test]
    fn a_second_time_replaces_only_what_the_first_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let (paths, pins) = (Paths::below(dir.path()), [PIN.parse().unwrap()]);
        write(&paths, record_of(PIN), &[new_file(&paths, "old")], &[]).unwrap();
        let Before::Open { ours } = before(&paths, &pins).unwrap() else { panic!("it is not a node yet") };
        write(&paths, record_of(PIN), &[new_file(&paths, "new")], &ours).unwrap();
        assert_eq!(fs::read_to_string(paths.bootstrap()).unwrap(), "new");
        let error = write(&paths, record_of(PIN), &[new_file(&paths, "newer")], &[]).unwrap_err();
        assert!(error.to_string().contains("move it away"), "{error}");
        assert_eq!(fs::read_to_string(paths.bootstrap()).unwrap(), "new");
        // The kubelet has started, and waits for its certificate: another token may be what it needs.
        fs::write(paths.kubeconfig(), "the kubelet's").unwrap();
        let Before::Open { ours } = before(&paths, &pins).unwrap() else { panic!("it is not a node yet") };
        assert_eq!(ours, [paths.bootstrap()]);
        write(&paths, record_of(PIN), &[], &ours).unwrap();
        assert_eq!(record(&paths).unwrap().unwrap().files, ours, "what was written once is not forgotten");
    }

    #[test]
    fn a_machine_is_a_node_with_a_certificate_of_that_name_that_has_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (paths, pins) = (Paths::below(dir.path()), [PIN.parse().unwrap()]);
        write(&paths, record_of(PIN), &[], &[]).unwrap();
        fs::create_dir_all(paths.certificates()).unwrap();
        fs::create_dir_all(paths.kubeconfig().parent().unwrap()).unwrap();
        fs::write(paths.kubeconfig(), "the kubelet's").unwrap();
        let issue = |name: &str, year: i32| {
            let node = Certificate::client(&format!("system:node:{name}")).not_after(year, 1, 1);
            fs::write(paths.certificate(), node.self_signed().unwrap().cert).unwrap();
            matches!(before(&paths, &pins).unwrap(), Before::Joined(_))
        };
        assert!(issue("worker-1", 2_999));
        assert!(!issue("worker-1", 2_001) && !issue("worker-2", 2_999));
    }

    #[test]
    fn a_record_that_cannot_be_read_stops_everything() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::below(dir.path());
        fs::create_dir_all(paths.record().parent().unwrap()).unwrap();
        fs::write(paths.record(), "{").unwrap();
        assert!(before(&paths, &[]).unwrap_err().to_string().contains("join.json"));
    }
}
