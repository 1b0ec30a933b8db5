//! What a proxy costs: CPU time and memory of all its processes, read from `/proc`.
//!
//! CPU comes from `task/*/schedstat` (nanoseconds on the core) and not from `stat`, whose ticks of 10 ms are
//! coarse beside a slice of one second. Work the kernel does in soft interrupts on the process's behalf
//! counts, as it runs in its context on loopback. Memory is PSS: a page shared by three processes counts a
//! third in each.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result, ensure};

/// The process `root` and all its descendants.
fn family(root: u32) -> Result<Vec<u32>> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").context("cannot list /proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process may end between the listing and this read; then it has no parent in the list.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        // "pid (name) state ppid": the name may hold blanks and brackets, so count from the last bracket.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut family = vec![root];
    let mut next = 0;
    while let Some(&pid) = family.get(next) {
        family.extend(children.remove(&pid).unwrap_or_default());
        next += 1;
    }
    Ok(family)
}

/// CPU nanoseconds used so far by `root` and its descendants.
pub(crate) fn cpu_nanoseconds(root: u32) -> Result<u64> {
    let mut total = 0;
    for pid in family(root)? {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).with_context(|| {
            format!("process {pid} is gone: the proxy ended or restarted a part of itself")
        })?;
        for task in tasks {
            // A thread may end meanwhile. Its time is lost, which only idle helper threads do in any of the
            // proxies.
            let Ok(line) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
            total += line.split(' ').next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    ensure!(
        total > 0,
        "process {root} shows no CPU time: does this kernel have schedstat (CONFIG_SCHED_INFO)?"
    );
    Ok(total)
}

/// Proportional set size in bytes of `root` and its descendants.
pub(crate) fn memory_bytes(root: u32) -> Result<u64> {
    let mut total = 0;
    for pid in family(root)? {
        let path = format!("/proc/{pid}/smaps_rollup");
        let rollup = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let kilobytes: u64 = rollup
            .lines()
            .find_map(|line| line.strip_prefix("Pss:")?.split_whitespace().next()?.parse().ok())
            .with_context(|| format!("{path} names no Pss"))?;
        total += kilobytes * 1024;
    }
    Ok(total)
}

/// The most memory that has been resident in one process since [`forget_peak`], in bytes (`VmHWM`).
pub(crate) fn peak(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(number(&status, "VmHWM:")? * 1024)
}

/// The peak begins anew with what is resident now (proc_pid_clear_refs(5)).
pub(crate) fn forget_peak(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/clear_refs");
    fs::write(&path, "5").with_context(|| format!("cannot write {path}"))
}

/// What the kernel says of one process, without its children.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resting {
    /// Resident set size in bytes, shared pages in full (`VmRSS`).
    pub(crate) resident: u64,
    /// Threads.
    pub(crate) threads: u64,
    /// How often its threads have come onto the core to do something.
    pub(crate) wake_ups: u64,
}

/// Reads `status` of the process, and of its threads for the wake-ups.
pub(crate) fn resting(pid: u32) -> Result<Resting> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let mut wake_ups = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("process {pid} is gone"))? {
        let path = task?.path().join("status");
        // Without a thread that has ended since it was listed.
        let Ok(status) = fs::read_to_string(&path) else { continue };
        // Voluntary: a thread that waits again. The others show contention for the core.
        wake_ups += number(&status, "voluntary_ctxt_switches:")?;
    }
    Ok(Resting {
        resident: number(&status, "VmRSS:")? * 1024,
        threads: number(&status, "Threads:")?,
        wake_ups,
    })
}

fn number(status: &str, name: &str) -> Result<u64> {
    let value = |line: &str| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok();
    status.lines().find_map(value).with_context(|| format!("the kernel names no {name}"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    /// A family of its own: children of this process belong to other tests, and may end at any time.
    #[test]
    fn a_process_and_its_child_have_used_cpu_and_memory() {
        let mut shell = Command::new("sh")
            .args(["-c", "cat; exit 0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut input, mut output) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        input.write_all(b"!").unwrap();
        output.read_exact(&mut [0]).unwrap();

        assert_eq!(family(shell.id()).unwrap().len(), 2, "the shell and cat, which has answered");
        assert!(cpu_nanoseconds(shell.id()).unwrap() > 0);
        assert!(memory_bytes(shell.id()).unwrap() > 100_000);
        drop(input);
        shell.wait().unwrap();
    }

    #[test]
    fn this_process_has_threads_and_is_resident() {
        let me = resting(std::process::id()).unwrap();
        assert!(me.threads > 0 && me.resident > 100_000);
    }
}
