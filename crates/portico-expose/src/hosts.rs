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
        end_of_seed(seed, configuration).map(|end| Self(format!("{cluster}.{end}")))
    }

    /// The host name with `prefix` (empty, or `konnectivity-server.`) before the cluster's name.
    pub fn host(&self, prefix: &str) -> Result<HostName, HostNameError> {
        HostName::parse(&format!("{prefix}{}", self.0))
    }
}

/// `<seed>.<domain>`, below which the names of the Seed's clusters are. `None` while there is no domain.
pub fn host_of_seed(seed: &Seed, configuration: Option<&KubermaticConfiguration>) -> Option<HostName> {
    HostName::parse(&end_of_seed(seed, configuration)?).ok()
}

fn end_of_seed(seed: &Seed, configuration: Option<&KubermaticConfiguration>) -> Option<String> {
    let domain = configuration.map(|configuration| &*configuration.spec.ingress.domain)?;
    (!domain.is_empty()).then(|| format!("{}.{domain}", seed.dns_label()))
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
