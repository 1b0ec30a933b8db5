//! What a test that looks for leaks counts, and how it is left alone with its process.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Descriptors that this process has open.
pub fn descriptors() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd").context("cannot count descriptors")?.count())
}

/// Tasks that are alive in this runtime.
pub fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Runs an ignored test of this program in a process of its own: it would count descriptors of others.
pub fn run_alone(test: &str) -> Result<()> {
    let program = std::env::current_exe().context("cannot find this test program")?;
    let output =
        Command::new(program).args(["--ignored", "--exact", test]).output().context("cannot run it")?;
    let told = String::from_utf8_lossy(&output.stdout);
    // A name that no test has passes, too.
    ensure!(output.status.success() && told.contains("1 passed"), "{told}");
    Ok(())
}
