//! The certificates and keys of a hosted cluster, for `portico-pki`, and what each Secret holds in words.

use portico_api::hosting::Layout;
use portico_expose::certificate::SubjectNames;
use portico_expose::doors::Doors;
use portico_expose::inputs::Inputs;
use portico_pki::inventory::{
    CA_CERTIFICATE, CA_KEY, LEAVES, SERVICE_ACCOUNT_KEYS, SIGNING_KEY, Signer, Stored, VERIFYING_KEYS,
};
use portico_pki::{ClusterPki, KeyKind, Names};
use serde::Serialize;

use crate::program::api_server;

/// A Secret, without what it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SecretUse {
    /// Its name.
    pub name: String,
    /// Its keys.
    pub keys: Vec<String>,
    /// What they hold, in words.
    pub holds: String,
}

/// The inputs for the certificates of the cluster of `inputs`.
///
/// Names of servers do not depend on the expose strategy, but on the known addresses. A load balancer that a
/// migration brings adds its address. Servers read the new certificate without a restart.
pub fn pki(inputs: &Inputs<'_>, doors: &Doors, layout: Layout, keys: KeyKind) -> ClusterPki {
    let (cluster, address) = (inputs.scope.cluster, &doors.first);
    let (addresses, agent_ip) = ((address, &doors.second), doors.agent_ip);
    let internal_url = format!("https://{}", address.internal_url);
    let names = |names: SubjectNames| Names { dns: names.dns, ips: names.ips };
    let host = inputs.host().map(|host| host.to_string());
    ClusterPki {
        cluster: cluster.metadata.name.to_string(),
        namespace: cluster.name().namespace(),
        external_name: host.unwrap_or_else(|| cluster.metadata.name.to_string()),
        api_server: names(SubjectNames::hosted(inputs, addresses, agent_ip)),
        konnectivity: names(SubjectNames::hosted_konnectivity(inputs, addresses, agent_ip)),
        external_url: (!address.url.is_empty()).then(|| address.url.to_string()),
        control_plane_url: match layout {
            Layout::Compact => format!("https://127.0.0.1:{}", api_server::PORT),
            Layout::Dedicated => internal_url.clone(),
        },
        internal_url,
        keys,
    }
}

/// Every Secret that Portico makes for a cluster, with what it holds. No key material.
pub fn secrets() -> Vec<SecretUse> {
    let authorities = Signer::OF_A_CLUSTER.map(|signer| SecretUse {
        name: signer.secret().to_owned(),
        keys: [CA_CERTIFICATE, CA_KEY].map(str::to_owned).to_vec(),
        holds: match signer {
            Signer::Cluster => "authority of servers: API server, Konnectivity server, kubelets",
            Signer::Clients => "authority of clients: users, kubelets, programs",
            Signer::FrontProxy => "authority of the API server towards extension API servers",
            Signer::Etcd => "authority of members and clients of etcd",
            Signer::Tunnel | Signer::Webhook => "authority of the seed",
        }
        .to_owned(),
    });
    let leaves = LEAVES.iter().filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer)).map(|leaf| {
        let what = match leaf.stored {
            Stored::Kubeconfig(_) => "kubeconfig of",
            Stored::Pair(..) => "certificate of",
        };
        let group = leaf.organisation.map(|group| format!(" ({group})")).unwrap_or_default();
        SecretUse {
            name: leaf.secret.to_owned(),
            keys: leaf.keys().into_iter().map(str::to_owned).collect(),
            holds: format!("{what} {}{group}, signed by {}", leaf.common_name, leaf.signer.secret()),
        }
    });
    let keys = SecretUse {
        name: SERVICE_ACCOUNT_KEYS.to_owned(),
        keys: [SIGNING_KEY, VERIFYING_KEYS].map(str::to_owned).to_vec(),
        holds: "keys that sign and verify the tokens of service accounts".to_owned(),
    };
    authorities.into_iter().chain([keys]).chain(leaves).collect()
}
