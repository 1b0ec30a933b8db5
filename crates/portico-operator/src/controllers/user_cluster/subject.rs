//! The subject of a pass, and its result: a cluster as the seed has it, its status, its proofs.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::{ExposedCluster, MigrationState};
use portico_api::migration::{MigrationSettings, NodeMoves};
use portico_expose::migration::{Fact, Proof};
use portico_expose::user_cluster::Id;
use portico_kube::cached::Cached;
use portico_kube::untrusted_api::UntrustedApi;
use portico_source::served::ServedKind;

/// The reason of a cluster that clients do not find yet.
pub(super) const NOT_EXPOSED: &str = "NotExposed";

/// Status of the inside of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Readiness {
    pub(super) ready: bool,
    /// One word, in CamelCase.
    pub(super) reason: &'static str,
    /// A sentence with the finding and the remedy.
    pub(super) message: String,
    /// Whether to try again soon, with back-off. Otherwise a change of objects on the seed is waited for.
    pub(super) failed: bool,
}

impl Readiness {
    pub(super) fn ready(message: String) -> Self {
        Self { ready: true, reason: "Ready", message, failed: false }
    }

    pub(super) fn waits(reason: &'static str, message: String) -> Self {
        Self { ready: false, reason, message, failed: false }
    }

    pub(super) fn failed(reason: &'static str, message: String) -> Self {
        Self { ready: false, reason, message, failed: true }
    }
}

/// Clusters as a kind of the API, with what Portico manages of them.
pub(super) struct Clusters;

impl k8s_openapi::Resource for Clusters {
    const API_VERSION: &'static str = "kubermatic.k8c.io/v1";
    const GROUP: &'static str = Cluster::GROUP;
    const KIND: &'static str = "Cluster";
    const VERSION: &'static str = Cluster::VERSION;
    const URL_PATH_SEGMENT: &'static str = Cluster::PLURAL;
    type Scope = k8s_openapi::ClusterResourceScope;
}

/// A cluster, as the seed has it.
pub(super) struct Subject {
    pub(super) cluster: Cluster,
    pub(super) seen: Cached<Clusters>,
    /// Strategy and address in force.
    pub(super) exposed: ExposedCluster,
    /// Strategy and address of its second door, while it migrates, also while that door is being closed.
    pub(super) second: Option<ExposedCluster>,
    /// Its namespace.
    pub(super) namespace: String,
}

impl Subject {
    /// What is under way, while it migrates.
    pub(super) fn state(&self) -> Option<MigrationState> {
        self.exposed.spec.migration.as_ref().map(|migration| migration.state)
    }

    /// How it migrates. Where that cannot be read, nobody but people moves nodes.
    pub(super) fn settings(&self) -> MigrationSettings {
        let by_hand = || MigrationSettings { nodes: NodeMoves::ByHand, ..MigrationSettings::default() };
        self.cluster.migration_settings().unwrap_or_else(|_| by_hand())
    }

    /// Its second door, until that is being closed.
    pub(super) fn open_second(&self) -> Option<&ExposedCluster> {
        self.second.as_ref().filter(|_| self.state() != Some(MigrationState::Closing))
    }

    /// Whether its nodes have agents by one of its open doors.
    pub(super) fn has_tunnel(&self) -> bool {
        [Some(&self.exposed), self.open_second()].into_iter().flatten().any(|door| door.spec.tunnel.is_some())
    }
}

/// The known proofs of a state.
pub(super) type Known = BTreeMap<Proof, Fact>;

/// The result of a pass inside a user cluster.
pub(super) struct Kept {
    /// Status of the inside.
    pub(super) readiness: Readiness,
    /// Its API server has answered something.
    pub(super) answered: bool,
    /// The way there; `None` if the kubeconfig leads nowhere.
    pub(super) api: Option<UntrustedApi>,
    /// Objects that are somebody else's and not as wanted, each with its last writer.
    pub(super) others: Vec<(Id, String)>,
    /// The DaemonSets that it should have.
    pub(super) daemon_sets: Vec<Id>,
}

/// The remedy for an object that somebody else made, and that is not as wanted.
pub(super) fn foreign(id: &Id, writer: &str) -> String {
    let kept_by_itself = id.name == "kubernetes" && writer == "kube-apiserver";
    let remedy = if kept_by_itself {
        "start its API server with --endpoint-reconciler-type=none, or set \
         spec.componentsOverride.apiserver.endpointReconcilingDisabled of the Cluster"
    } else {
        "delete it, and it is made anew"
    };
    format!(
        "{id} inside the cluster was made by somebody else ({writer:?} wrote it last), and is not as \
             wanted: {remedy}"
    )
}

/// The host in the URL of an API server; an IPv6 address without its brackets.
pub(super) fn host_of(url: &str) -> &str {
    let authority = url.strip_prefix("https://").unwrap_or_default();
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// What a Secret holds under a key.
pub(super) fn text(secret: &Secret, key: &str) -> Option<String> {
    String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok()
}

#[cfg(test)]
mod tests {
    use super::host_of;

    #[test]
    fn the_host_of_an_url_is_that_of_its_certificate() {
        for (url, host) in [
            ("https://a.example.com:6443", "a.example.com"),
            ("https://a.example.com", "a.example.com"),
            ("https://[2001:db8::1]:6443", "2001:db8::1"),
            ("https://[2001:db8::1]", "2001:db8::1"),
            ("", ""),
        ] {
            assert_eq!(host_of(url), host);
        }
    }
}
