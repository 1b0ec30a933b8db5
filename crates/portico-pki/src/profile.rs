//! What a certificate is to say.

use std::collections::BTreeSet;
use std::net::IpAddr;

use jiff::SignedDuration;

/// Validity of a certificate that is no authority, as in KKP.
pub const LIFETIME: SignedDuration = SignedDuration::from_hours(365 * 24);

/// What a certificate is to say, before an [`Authority`](crate::Authority) signs it.
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
