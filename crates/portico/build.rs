//! Puts the commit into `portico --version`, and has the program's relocations packed. A source archive
//! without git still builds: `PORTICO_COMMIT` can say what git cannot, and without either the version stands
//! alone.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=PORTICO_COMMIT");
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let commit = std::env::var("PORTICO_COMMIT").ok().filter(|text| !text.is_empty()).or_else(describe);
    let version = commit.map_or(version.clone(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=PORTICO_VERSION={version}");
    pack_relocations();
}

/// A megabyte of relocations, read at every start and counted as memory, fits into 30 KB (DT_RELR).
/// Understood by glibc since 2.36, and by the linkers of this architecture since then.
fn pack_relocations() {
    let is = |key: &str, value: &str| std::env::var(key).is_ok_and(|found| found == value);
    if is("CARGO_CFG_TARGET_ARCH", "x86_64") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// What git calls the commit that is checked out.
fn describe() -> Option<String> {
    // The reflog changes with every commit and checkout; HEAD alone would not change with a commit. A path
    // that does not exist would make cargo run this script every time.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|path| Path::new(path).exists())
    {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["describe", "--always", "--tags", "--abbrev=10"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
