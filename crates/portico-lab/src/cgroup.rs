//! Control groups: the processes of a lab, and room for a node's pods.
//!
//! Every process of a lab starts inside the lab's control group and its children, containers and their shims
//! included, cannot leave it. So teardown asks the kernel instead of a list of process ids. What is in the
//! group is the lab's, what is not is not touched, and nothing is missed because it detached itself.
//!
//! Version 1 (one directory per controller) and version 2 (one directory in all) are both served;
//! see `docs/lab.md` for which of them this was tried on.

use std::fs;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::wait;

const MOUNT: &str = "/sys/fs/cgroup";

/// How long processes may take to die after SIGKILL. Only one that hangs in the kernel needs more
/// than a moment; then a person has to look.
const DYING: Duration = Duration::from_secs(20);

/// A control group of the lab's own making, the same path under every controller.
#[derive(Debug, Clone)]
pub struct Cgroup {
    path: String,
}

/// A control group with a memory limit, for one process under test. Dropped, it kills what is in it, and
/// removes it.
#[derive(Debug)]
pub struct LimitedGroup(Cgroup);

impl LimitedGroup {
    /// Makes the group at `path`, with a limit in bytes, swap included.
    ///
    /// # Errors
    /// Fails without root.
    pub fn make(path: impl Into<String>, memory: u64) -> Result<Self> {
        let limited = Self(Cgroup::at(path));
        limited.0.make().context("a control group is made by root only")?;
        limited.0.limit_memory(memory)?;
        Ok(limited)
    }
}

impl Deref for LimitedGroup {
    type Target = Cgroup;

    fn deref(&self) -> &Cgroup {
        &self.0
    }
}

impl Drop for LimitedGroup {
    fn drop(&mut self) {
        // What stays behind is a folder of the kernel without a process.
        let _ = self.0.kill().and_then(|()| self.0.remove());
    }
}

impl Cgroup {
    /// The group at `path` (absolute, as the kubelet's `cgroupRoot` wants it), made or not yet.
    pub fn at(path: impl Into<String>) -> Cgroup {
        Cgroup { path: path.into() }
    }

    /// Makes the group under every controller of this machine.
    pub fn make(&self) -> Result<()> {
        for root in hierarchies()? {
            let mut dir = root.clone();
            for part in self.path.split('/').filter(|part| !part.is_empty()) {
                let parent = dir.clone();
                dir.push(part);
                match fs::create_dir(&dir) {
                    Ok(()) => inherit(&parent, &dir)?,
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    Err(error) => {
                        return Err(error).with_context(|| format!("making control group {}", dir.display()));
                    }
                }
            }
        }
        Ok(())
    }

    /// Bounds the memory of all processes in the group, swap included. To be called before the first joins.
    pub fn limit_memory(&self, bytes: u64) -> Result<()> {
        let dir = self.memory_dir();
        let write = |file: &str, value: u64| {
            let file = dir.join(file);
            fs::write(&file, value.to_string()).with_context(|| format!("writing {}", file.display()))
        };
        if is_version_2() {
            write("memory.max", bytes)?;
            // Absent on a kernel without accounting of swap.
            if dir.join("memory.swap.max").exists() { write("memory.swap.max", 0) } else { Ok(()) }
        } else {
            write("memory.limit_in_bytes", bytes)?;
            let both = dir.join("memory.memsw.limit_in_bytes").exists();
            if both { write("memory.memsw.limit_in_bytes", bytes) } else { Ok(()) }
        }
    }

    /// The most memory that its processes had at one time, what the kernel holds for them included. `None`
    /// on version 2 before Linux 5.19.
    pub fn peak_memory(&self) -> Option<u64> {
        let file = if is_version_2() { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.memory_dir().join(file)).ok()?.trim().parse().ok()
    }

    /// A command that starts `program` inside the group: on version 1 under its memory limit and its
    /// accounting of processes.
    pub fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new("sh");
        let join = "echo $$ >\"$0\" && echo $$ >\"$1\" && shift && exec \"$@\"";
        command.args(["-c", join]).arg(self.procs()?).arg(self.memory_dir().join("cgroup.procs"));
        command.arg(program);
        Ok(command)
    }

    /// Its path below every controller, such as `/portico-lab-7/seed`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The group of this name inside this one.
    pub fn child(&self, name: &str) -> Cgroup {
        Cgroup { path: format!("{}/{name}", self.path) }
    }

    /// The file a process writes its id to in order to join.
    pub fn procs(&self) -> Result<PathBuf> {
        Ok(self.tracking_dir()?.join("cgroup.procs"))
    }

    /// Every process in this group and the groups below it.
    pub fn pids(&self) -> Result<Vec<i32>> {
        let mut pids = Vec::new();
        for dir in tree(&self.tracking_dir()?) {
            // A group may go away while we look: then it is empty.
            let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(procs.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
        Ok(pids)
    }

    /// The directories it has on this machine, one per controller. On machines with both versions runc makes
    /// groups of pods in the tree of version 2 as well.
    pub fn dirs(&self) -> Result<Vec<PathBuf>> {
        let both = [Path::new(MOUNT).join("unified")];
        let all =
            hierarchies()?.into_iter().chain(both).map(|root| root.join(self.path.trim_start_matches('/')));
        Ok(all.filter(|dir| dir.exists()).collect())
    }

    /// Kills everything in the group, and what it starts meanwhile, until the group is empty.
    pub fn kill(&self) -> Result<()> {
        wait::until(&format!("the processes of {} to die", self.path), DYING, || {
            let pids = self.pids()?;
            for pid in &pids {
                self.kill_member(*pid);
            }
            if pids.is_empty() { Ok(()) } else { bail!("still there: {pids:?}") }
        })
    }

    /// Removes the emptied group and those below it.
    pub fn remove(&self) -> Result<()> {
        for top in self.dirs()? {
            wait::until(&format!("{} to be removed", top.display()), DYING, || {
                for dir in tree(&top).into_iter().rev() {
                    match fs::remove_dir(&dir) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => {
                            return Err(error).with_context(|| format!("removing {}", dir.display()));
                        }
                        _ => {}
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Kills `pid` if it still is the process that was found in the group. The descriptor pins the process,
    /// so an id that was given to a stranger meanwhile is noticed.
    fn kill_member(&self, pid: i32) {
        let Some(pid) = Pid::from_raw(pid) else { return };
        let Ok(pinned) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero())).unwrap_or_default();
        let ours = groups.lines().any(|line| {
            line.splitn(3, ':').nth(2).is_some_and(|path| {
                path == self.path || path.strip_prefix(&self.path).is_some_and(|rest| rest.starts_with('/'))
            })
        });
        if ours {
            // Gone already is as good as killed.
            let _ = pidfd_send_signal(&pinned, Signal::KILL);
        }
    }

    fn memory_dir(&self) -> PathBuf {
        let root = if is_version_2() { PathBuf::from(MOUNT) } else { Path::new(MOUNT).join("memory") };
        root.join(self.path.trim_start_matches('/'))
    }

    fn tracking_dir(&self) -> Result<PathBuf> {
        let root = if is_version_2() { PathBuf::from(MOUNT) } else { Path::new(MOUNT).join("pids") };
        Ok(root.join(self.path.trim_start_matches('/')))
    }
}

fn is_version_2() -> bool {
    Path::new(MOUNT).join("cgroup.controllers").exists()
}

/// The roots under which a group has to be made: one on version 2, one per controller on version 1.
fn hierarchies() -> Result<Vec<PathBuf>> {
    if is_version_2() {
        return Ok(vec![PathBuf::from(MOUNT)]);
    }
    let mut roots = Vec::new();
    for entry in
        fs::read_dir(MOUNT).with_context(|| format!("reading {MOUNT}: are control groups mounted?"))?
    {
        // Some machines have `cpu` as a link to `cpu,cpuacct`: one group is enough.
        let path = entry?.path();
        let Ok(path) = path.canonicalize() else { continue };
        let usable = path.join("cgroup.procs").exists() && !path.ends_with("unified");
        if usable && !roots.contains(&path) {
            roots.push(path);
        }
    }
    ensure!(
        roots.iter().any(|root| root.ends_with("pids")),
        "no `pids` controller under {MOUNT}: mount the control groups of this machine (package \
         cgroupfs-mount)"
    );
    Ok(roots)
}

/// What a new group needs from its parent before a process can join it.
fn inherit(parent: &Path, dir: &Path) -> Result<()> {
    // Version 1: a cpuset without processors and memory nodes admits no process.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if !is_version_2() && dir.join(file).exists() {
            let value = fs::read_to_string(parent.join(file))?;
            fs::write(dir.join(file), value.trim()).with_context(|| format!("{}/{file}", dir.display()))?;
        }
    }
    // Version 2: controllers have to be passed down level by level, as far as the parent has them.
    if is_version_2() {
        let available = fs::read_to_string(parent.join("cgroup.controllers"))?;
        for controller in available.split_whitespace() {
            // Some cannot be passed on (a group with realtime processes, say): pods do without.
            let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
        }
    }
    Ok(())
}

/// `top` and every directory below it, parents first.
fn tree(top: &Path) -> Vec<PathBuf> {
    let mut found = vec![top.to_path_buf()];
    let mut next = 0;
    while let Some(dir) = found.get(next).cloned() {
        next += 1;
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        found.extend(entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
    }
    found
}
