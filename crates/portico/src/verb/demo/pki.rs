//! The demo's own certificate authority: one for the whole site, gone with the demo.

use std::net::IpAddr;

use jiff::{SignedDuration, Timestamp};
use portico_pki::{KeyKind, Names, Pair, Profile, Usage};

/// A month, for a demo that is left running.
const LIFETIME: SignedDuration = SignedDuration::from_hours(30 * 24);

/// Signs the certificates of the stand-in API servers, of the tunnel listener and of its clients.
pub(super) struct Authority {
    /// Its certificate in PEM.
    pub(super) certificate: String,
    signs: portico_pki::Authority,
}

impl Authority {
    pub(super) fn new() -> anyhow::Result<Self> {
        let now = Timestamp::now();
        let pair = portico_pki::Authority::create("portico demo CA", KeyKind::default(), now)?;
        let signs = portico_pki::Authority::read(&pair, now)?;
        Ok(Self { certificate: pair.certificate, signs })
    }

    /// A server certificate for `names` and `addresses`.
    pub(super) fn server(&self, names: &[String], addresses: &[IpAddr]) -> anyhow::Result<Pair> {
        let common_name = names.first().map_or("portico demo server", String::as_str);
        let names = Names { dns: names.iter().cloned().collect(), ips: addresses.iter().copied().collect() };
        self.issue(common_name, None, names, Usage::Server)
    }

    /// A client certificate that opens the tunnels of `cluster`.
    pub(super) fn client(&self, cluster: &str) -> anyhow::Result<Pair> {
        let organisation = format!("portico:cluster:{cluster}");
        self.issue("portico demo agent", Some(organisation), Names::default(), Usage::Client)
    }

    fn issue(
        &self,
        common_name: &str,
        organisation: Option<String>,
        names: Names,
        usage: Usage,
    ) -> anyhow::Result<Pair> {
        let common_name = common_name.to_owned();
        let profile = Profile { common_name, organisation, names, usage, lifetime: LIFETIME };
        Ok(self.signs.issue(&profile, KeyKind::default(), Timestamp::now())?)
    }
}
