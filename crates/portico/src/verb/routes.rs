//! `portico routes`: what would be exposed, where, by which object, to which endpoints.

use crate::listing::Listing;
use crate::offline::Flags;
use crate::outcome::{Outcome, print};

/// Prints the listing.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let report = flags.load()?;
    let mut text = Vec::new();
    let site = &report.site;
    let listing = Listing::of(&site.pipeline, report.findings()).with_drawn(&site.allocated);
    listing.write(flags.output, &mut text)?;
    print(&String::from_utf8_lossy(&text))?;
    Ok(Outcome::Done)
}
