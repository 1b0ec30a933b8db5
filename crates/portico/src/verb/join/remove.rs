//! `portico join remove`: undoes what joining wrote, by its record.

use std::path::PathBuf;

use clap::Args;
use portico_hosting::join::machine::Paths;
use portico_join::{files, kubelet};

use crate::outcome::{Outcome, print};

// `portico join remove`.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// Folder below which the files are, as when the machine joined
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Removes what was written.
pub(super) async fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let paths = Paths::below(&flags.root);
    let Some(record) = files::record(&paths)? else {
        print("`portico join` has written nothing here: nothing to remove\n")?;
        return Ok(Outcome::Done);
    };
    // Joining may have been ended before it wrote the unit, the last of its files.
    if record.systemd && paths.units().iter().any(|unit| unit.exists()) {
        kubelet::stop().await?;
    }
    let removed = files::remove(&paths, &record)?;
    if record.systemd {
        kubelet::reload().await?;
    }
    let lines: String = removed.iter().map(|path| format!("removed {}\n", path.display())).collect();
    print(&format!("{lines}The Node is still there: kubectl delete node {}\n", record.node))?;
    Ok(Outcome::Done)
}
