//! Host names and tunnel authorities of a cluster's Services.

use portico_api::configuration::KubermaticConfiguration;
use portico_api::names::{Authority, ClusterName, HostName, HostNameError};
use portico_api::seed::Seed;

/// The end of the host names of one cluster: `<cluster>.<seed>.<domain>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSuffix(String);

impl HostSuffix {
    /// The suffix of `cluster`, `None` while the installation has no domain.
    pub fn of(
        cluster: &ClusterName,
        seed: &Seed,
        configuration: Option<&KubermaticConfiguration>,
    ) -> Option<Self> {
        let domain = configuration.map(|configuration| &*configuration.spec.ingress.domain)?;
        (!domain.is_empty()).then(|| Self(format!("{cluster}.{}.{domain}", seed.dns_label())))
    }

    /// The host name with `prefix` (empty, or `konnectivity-server.`) before the cluster's name.
    pub fn host(&self, prefix: &str) -> Result<HostName, HostNameError> {
        HostName::parse(&format!("{prefix}{}", self.0))
    }
}

/// `<service>.<namespace>.svc.cluster.local:<port>`. The domain is the seed's, not the user cluster's: the
/// name is compared, never looked up.
pub fn authority(service: &str, namespace: &str, port: u16) -> Result<Authority, HostNameError> {
    Ok(Authority::new(&HostName::parse(&format!("{service}.{namespace}.svc.cluster.local"))?, port))
}

/// A host as it stands before a port: an IPv6 address in brackets.
pub fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}
