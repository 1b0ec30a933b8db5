//! What a certificate is to say.

use std::collections::BTreeSet;
use std::net::IpAddr;

use jiff::SignedDuration;

use crate::certificate;

/// Validity of a certificate that is no authority, as in KKP.
pub const LIFETIME: SignedDuration = SignedDuration::from_hours(365 * 24);

/// The content of a certificate, before an [`Authority`](crate::Authority) signs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The common name. To Kubernetes, a client's user name.
    pub common_name: String,
    /// The organisation. To Kubernetes, a client's group.
    pub organisation: Option<String>,
    /// The names of a server.
    pub names: Names,
    /// What it is for.
    pub usage: Usage,
    /// How long it is valid, in whole seconds.
    pub lifetime: SignedDuration,
}

/// DNS names and addresses of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// DNS names. Upper and lower case are the same.
    pub dns: BTreeSet<String>,
    /// Addresses.
    pub ips: BTreeSet<IpAddr>,
}

impl Names {
    /// The names of a certificate.
    pub(crate) fn of(pem: &str) -> Result<Self, String> {
        let (der, _) = certificate::first(pem)?;
        let mut names = Self::default();
        for name in certificate::alternative_names(&certificate::parse(&der)?)? {
            match name.parse() {
                Ok(ip) => _ = names.ips.insert(ip),
                Err(_) => _ = names.dns.insert(name),
            }
        }
        Ok(names)
    }
}

/// What a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// TLS servers.
    Server,
    /// TLS clients.
    Client,
    /// Both: members of etcd are servers to each other and clients of each other.
    ServerAndClient,
}

impl Usage {
    pub(crate) fn is_server(self) -> bool {
        matches!(self, Self::Server | Self::ServerAndClient)
    }

    pub(crate) fn is_client(self) -> bool {
        matches!(self, Self::Client | Self::ServerAndClient)
    }
}
