//! `portico demo --kubernetes`: becomes `portico-lab demo`, which starts real Kubernetes.
//!
//! The lab builds and runs the programs of others, for tests and contributors. It is a program of the
//! checkout and no part of what ships.

use std::env;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::outcome::Outcome;

/// Names the program, where it is neither beside this one nor on the PATH.
const VARIABLE: &str = "PORTICO_LAB";

/// Becomes the lab. Returns only if it cannot.
pub(super) fn become_lab(no_workers: bool) -> anyhow::Result<Outcome> {
    let lab = find()?;
    let mut command = Command::new(&lab);
    command.arg("demo").args(no_workers.then_some("--no-workers"));
    Err(command.exec()).with_context(|| format!("starting {}", lab.display()))
}

fn find() -> anyhow::Result<PathBuf> {
    if let Some(named) = env::var_os(VARIABLE) {
        let named = PathBuf::from(named);
        ensure!(named.is_file(), "{VARIABLE}: there is no file {}", named.display());
        return Ok(named);
    }
    let own = env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = own.into_iter().chain(env::split_paths(&path)).map(|folder| folder.join("portico-lab"));
    let Some(lab) = found.find(|path| path.is_file()) else {
        bail!(
            "--kubernetes takes the program portico-lab, which is neither beside this one nor on the PATH. \
             In a checkout of {} `scripts/demo --kubernetes` builds it, with all that it runs, and starts \
             this demo",
            env!("CARGO_PKG_REPOSITORY")
        )
    };
    Ok(lab)
}
