//! `portico routes`: what would be exposed, where, by which object, to which endpoints.

use crate::listing::Listing;
use crate::offline::Flags;
use crate::outcome::{Outcome, print};

/// Prints the listing.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let site = flags.load()?;
    let mut text = Vec::new();
    Listing::of(&site.pipeline).write(flags.output, &mut text)?;
    print(&String::from_utf8_lossy(&text))?;
    Ok(Outcome::Done)
}
