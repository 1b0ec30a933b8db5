//! Whether this machine can have the demo. If not: what is missing, and the one thing to do about it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::programs;

const GIB: u64 = 1 << 30;

/// Measured: 1.5 GiB at most, the page cache of its programs included. The rest is for what users do.
const MEMORY: u64 = 5 * GIB / 2;
const MEMORY_WITHOUT_WORKERS: u64 = 2 * GIB;

/// Images, packed and unpacked, and what etcd writes: 1 GiB at the start.
const DISK: u64 = 2 * GIB;

/// As far as the demo depends on it.
pub(super) struct Machine {
    is_root: bool,
    has_apt: bool,
    /// Packages, then what is built.
    missing: Vec<String>,
    memory: u64,
    disk: u64,
}

impl Machine {
    /// This one.
    pub(super) fn look() -> Result<Machine> {
        let mut missing: Vec<String> =
            programs::missing_packages().into_iter().map(|package| format!("package {package}")).collect();
        missing.extend(programs::missing_builds()?);
        let free = rustix::fs::statvfs("/var/lib").context("asking for the space below /var/lib")?;
        Ok(Machine {
            is_root: rustix::process::geteuid().is_root(),
            has_apt: programs::find("apt-get").is_ok(),
            missing,
            memory: available_memory()?,
            disk: free.f_bavail * free.f_frsize,
        })
    }

    /// Whether all programs are there and may do what they must.
    pub(super) fn can_run_programs(&self) -> Result<()> {
        let checkout = programs::checkout();
        let (here, missing) = (checkout.display(), self.missing.join(", "));
        ensure!(checkout.is_dir(), "{here}, from which this program was built, is gone; build it again");
        ensure!(
            self.missing.is_empty() || self.has_apt,
            "the demo is made of Debian's packages, and this machine has no apt-get: take one with Debian 12 \
             or later, a virtual machine for example"
        );
        ensure!(
            self.missing.is_empty(),
            "not there yet: {missing}. `scripts/setup lab` in {here} brings them: 10 to 20 minutes on two \
             cores, once"
        );
        ensure!(
            self.is_root,
            "the demo makes network namespaces, mounts and control groups, as root only: `scripts/demo \
             --kubernetes` in {here} asks sudo"
        );
        Ok(())
    }

    /// Whether it fits.
    pub(super) fn has_room(&self, with_workers: bool) -> Result<()> {
        let less = in_words(MEMORY_WITHOUT_WORKERS);
        let (needed, instead) = match with_workers {
            true => (MEMORY, format!(", or give --no-workers, for which {less} is enough")),
            false => (MEMORY_WITHOUT_WORKERS, String::new()),
        };
        ensure!(
            self.memory >= needed,
            "the demo needs {} of memory, and {} is available: end something{instead}",
            in_words(needed),
            in_words(self.memory)
        );
        ensure!(
            self.disk >= DISK,
            "the demo needs {} below /var/lib/portico-lab, and {} is free there: make room",
            in_words(DISK),
            in_words(self.disk)
        );
        Ok(())
    }
}

/// As people say it.
fn in_words(bytes: u64) -> String {
    format!("{}.{} GiB", bytes / GIB, bytes % GIB * 10 / GIB)
}

/// What programs can still get without swapping.
fn available_memory() -> Result<u64> {
    let path = Path::new("/proc/meminfo");
    let text = fs::read_to_string(path).context("reading /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).context("no MemAvailable there")?;
    Ok(kib.parse::<u64>().context("MemAvailable is no number")? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn able() -> Machine {
        Machine { is_root: true, has_apt: true, missing: Vec::new(), memory: 8 * GIB, disk: 9 * GIB }
    }

    fn refusal(machine: &Machine, with_workers: bool) -> String {
        let checked = machine.can_run_programs().and_then(|()| machine.has_room(with_workers));
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_machine_that_has_everything_is_taken() {
        assert_eq!(refusal(&able(), true), "");
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        let missing = || vec!["package runc".to_owned(), "Kubernetes".to_owned()];
        let cases = [
            (Machine { missing: missing(), ..able() }, "package runc, Kubernetes. `scripts/setup lab` in /"),
            (Machine { missing: missing(), has_apt: false, ..able() }, "take one with Debian 12"),
            (Machine { is_root: false, ..able() }, "`scripts/demo --kubernetes` in /"),
            (
                Machine { memory: 9 * GIB / 4, ..able() },
                "2.2 GiB is available: end something, or give --no-workers",
            ),
            (Machine { disk: GIB, ..able() }, "1.0 GiB is free there: make room"),
        ];
        for (machine, wanted) in cases {
            let said = refusal(&machine, true);
            assert!(said.contains(wanted), "{said}");
        }
    }

    #[test]
    fn without_workers_less_memory_is_enough() {
        let small = Machine { memory: 9 * GIB / 4, ..able() };
        assert_eq!(refusal(&small, false), "");
        let said = refusal(&Machine { memory: GIB, ..able() }, false);
        assert!(said.ends_with("end something"), "{said}");
    }
}
