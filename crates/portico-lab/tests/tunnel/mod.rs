//! The parts of the stories about the tunnel: [`seed`] is what is served, [`client`] is who is served.

pub(crate) mod client;
pub(crate) mod seed;

use std::time::Duration;

/// How long anything may take that takes a second or two on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(90);

/// The domain below which user clusters have their names, and the gateways theirs.
pub(crate) const DOMAIN: &str = "kubermatic.kkp.example.com";
