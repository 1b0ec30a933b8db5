//! Cores and limits of the machine the bench runs on: pinning, and how many descriptors there are.

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The proxies share this core, one after the other.
pub(crate) const PROXY_CORE: usize = 0;
/// Load, backend and the bench itself run here.
pub(crate) const LOAD_CORE: usize = 1;
/// 2,000 idle connections cost the bench 4,000 descriptors (client and backend side); the rest is room.
const DESCRIPTORS: u64 = 10_000;

/// Moves the calling thread, and what it spawns from now on, to one core.
pub(crate) fn pin_to(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| {
        format!("cannot pin to core {core}: the bench needs cores {PROXY_CORE} and {LOAD_CORE}")
    })
}

/// Runs `spawn` on the proxies' core, so that the process it starts inherits the place, and comes back.
pub(crate) fn on_proxy_core<T>(spawn: impl FnOnce() -> Result<T>) -> Result<T> {
    let home = sched_getaffinity(None).context("cannot read this thread's cores")?;
    pin_to(PROXY_CORE)?;
    let outcome = spawn();
    sched_setaffinity(None, &home).context("cannot return to the load's core")?;
    outcome
}

/// Raises the soft limit of open files as far as allowed; proxies inherit it.
pub(crate) fn raise_descriptor_limit() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|maximum| maximum < DESCRIPTORS) {
        bail!(
            "the hard limit of open files is {:?}, the bench needs {DESCRIPTORS}: raise `ulimit -Hn`",
            limit.maximum
        );
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
        .context("cannot raise the limit of open files")
}
