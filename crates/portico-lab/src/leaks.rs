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

/// Bytes of this process that are in memory and not in a file, in Linux' words its anonymous pages.
pub fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read what is resident")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).context("/proc/self/status has no RssAnon")
}

/// Runs an ignored test of this program in a process of its own: it would count descriptors of others.
pub fn run_alone(test: &str) -> Result<()> {
    let program = std::env::current_exe().context("cannot find this test program")?;
    let output =
        Command::new(program).args(["--ignored", "--exact", test]).output().context("cannot run it")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // A name that no test has passes, too.
    ensure!(output.status.success() && text.contains("1 passed"), "{text}");
    Ok(())
}
