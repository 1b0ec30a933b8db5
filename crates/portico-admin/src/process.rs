//! The kernel's figures about this process: descriptors and memory, the two things a proxy runs out of.

use std::{fmt, fs};

use prometheus_client::registry::Unit;

use crate::exposition::Families;

/// Counted at the time of asking; a value the kernel did not give is left out.
#[derive(Debug, Default)]
pub struct Process {
    open_descriptors: Option<u64>,
    most_descriptors: Option<u64>,
    resident_bytes: Option<u64>,
}

impl Process {
    /// Asks the kernel.
    pub fn now() -> Self {
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

    /// As metrics.
    pub fn write(&self, out: &mut Families<'_>) -> fmt::Result {
        let values = [
            ("open_descriptors", "File descriptors in use.", None, self.open_descriptors),
            ("max_descriptors", "File descriptors this process may use.", None, self.most_descriptors),
            ("resident_memory", "Memory of this process.", Some(Unit::Bytes), self.resident_bytes),
        ];
        for (name, help, unit, value) in values {
            if let Some(value) = value {
                out.one_gauge(name, help, unit.as_ref(), value)?;
            }
        }
        Ok(())
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
