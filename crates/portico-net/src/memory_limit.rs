//! The memory that this process has: the limit of its control group, version 1 or 2, and the machine's.
//!
//! A group may lie within others, and each of them may have a limit: the least counts. In a container the
//! group is often seen as the root of the file system, whatever `/proc/self/cgroup` calls it.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const MOUNT: &str = "/sys/fs/cgroup";

/// The limit of the control group of this process, in bytes. `None` if it has none, or nothing says so.
pub fn of_control_group() -> Option<u64> {
    of_group(&read(Path::new("/proc/self/cgroup")).unwrap_or_default(), read)
}

/// The memory of the machine, in bytes; `None` if nothing says so.
pub fn of_machine() -> Option<u64> {
    total(&read(Path::new("/proc/meminfo"))?)
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The least limit of the group that `/proc/self/cgroup` names, and of those around it. `None` if none has
/// one. Version 1 writes "no limit" as a number, which no machine has.
fn of_group(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    // A line is `NUMBER:CONTROLLERS:PATH`. Where both versions are mounted, one of them has the controller.
    let lines = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let (mount, file) = match controllers {
            "" => (MOUNT.into(), "memory.max"),
            named if named.split(',').any(|name| name == "memory") => {
                (format!("{MOUNT}/memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        Some((PathBuf::from(mount), path, file))
    });
    let limits = lines.flat_map(|(mount, path, file)| {
        let inner = mount.join(path.trim_start_matches('/'));
        let folders: Vec<PathBuf> =
            inner.ancestors().take_while(|folder| folder.starts_with(&mount)).map(Path::to_owned).collect();
        folders
            .into_iter()
            .filter_map(|folder| read(&folder.join(file))?.trim().parse().ok())
            .collect::<Vec<u64>>()
    });
    limits.min()
}

/// The memory of the machine, from `/proc/meminfo`.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let read = |path: &Path| {
            files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned())
        };
        of_group(groups, read)
    }

    #[test]
    fn the_least_limit_of_a_group_and_those_around_it_counts() {
        let files = [
            ("/sys/fs/cgroup/kubepods/pod1/memory.max", "268435456\n"),
            ("/sys/fs/cgroup/kubepods/pod1/app/memory.max", "max\n"),
            ("/sys/fs/cgroup/kubepods/memory.max", "8589934592\n"),
        ];
        assert_eq!(limit("0::/kubepods/pod1/app\n", &files), Some(256 << 20));
        assert_eq!(limit("0::/other\n", &files), None);
    }

    #[test]
    fn version_1_has_a_mount_of_its_own_for_memory() {
        let groups = "9:name=systemd:/\n4:cpu,memory:/docker/1\n1:cpu:/x\n0::/\n";
        let files = [
            ("/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "536870912\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(limit(groups, &files), Some(512 << 20));
    }

    #[test]
    fn in_a_container_the_group_is_the_root_of_the_mount() {
        let v1 = [("/sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n")];
        assert_eq!(limit("4:memory:/docker/1\n", &v1), Some(512 << 20));
        let v2 = [("/sys/fs/cgroup/memory.max", "1073741824")];
        assert_eq!(limit("0::/\n", &v2), Some(1 << 30));
        assert_eq!(limit("", &v2), None);
    }

    #[test]
    fn the_memory_of_the_machine_is_read() {
        assert_eq!(total("MemTotal:       24684836 kB\nMemFree: 1 kB\n"), Some(24_684_836 << 10));
        assert_eq!(total(""), None);
    }
}
