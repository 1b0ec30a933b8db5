//! What the kernel says about this process: descriptors and memory, the two things a proxy runs out of.

use std::fs;

/// Counted at the time of asking; a value the kernel did not give is left out.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) open_descriptors: Option<u64>,
    pub(super) most_descriptors: Option<u64>,
    pub(super) resident_bytes: Option<u64>,
}

impl Process {
    pub(super) fn now() -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Self {
            // Less the one that reads the folder.
            open_descriptors: fs::read_dir("/proc/self/fd")
                .ok()
                .map(|fds| (fds.count() as u64).saturating_sub(1)),
            most_descriptors: limit.current,
            resident_bytes: fs::read_to_string("/proc/self/status").ok().as_deref().and_then(resident),
        }
    }
}

/// `VmRSS` of `/proc/PID/status`, which the kernel gives in kB of 1,024 bytes.
fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_descriptors_and_memory() {
        let process = Process::now();
        assert!(process.open_descriptors > Some(2) && process.open_descriptors < process.most_descriptors);
        assert!(process.resident_bytes > Some(100_000));
    }
}
