//! `portico crds`: the kinds that Portico works with, as definitions for a Kubernetes API.

use clap::Args;

use crate::outcome::{Outcome, print};

/// KKP's kinds, for seeds without KKP.
const KUBERMATIC: &str = include_str!("../../../../deploy/crds-kubermatic.yaml");

/// Those that Portico adds.
const OWN: &str = include_str!("../../../../deploy/crds.yaml");

// `portico crds`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Only the kinds that Portico adds: for a seed with KKP, which has its own definitions of the others
    #[arg(long)]
    own: bool,
}

/// Prints the definitions.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    if flags.own {
        print(OWN)?;
    } else {
        print(&format!("{KUBERMATIC}---\n{OWN}"))?;
    }
    Ok(Outcome::Done)
}
