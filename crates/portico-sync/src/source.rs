//! The source that settings name, with the pipeline that suits it and the state that is persisted
//! between two runs.

use std::net::IpAddr;
use std::path::PathBuf;

use portico_api::annotations::ExposeKeys;
use portico_expose::persisted::PersistedState;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_kube::{ClientError, client};
use portico_routes::endpoint_rules::EndpointRules;
use portico_routes::index::Settings as IndexSettings;
use portico_routes::route::OwnAddresses;
use portico_source::directory::DirectoryError;
use portico_source::kubernetes::{ClustersFrom, KubernetesSettings, KubernetesSource, KubernetesStatus};
use portico_source::{DirectorySource, Step};
use thiserror::Error;

use crate::persisted::{PersistedFile, PersistedFileError, random_seed};
use crate::pipeline::Pipeline;

/// Why a source cannot be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Nothing says where objects come from.
    #[error("{0}, or a directory of manifests by --manifests")]
    Nowhere(#[source] ClientError),
    /// No way to the Kubernetes API.
    #[error(transparent)]
    Client(ClientError),
    /// The persisted state of an earlier run cannot be read.
    #[error(transparent)]
    Persisted(#[from] PersistedFileError),
    /// The directory cannot be read or watched.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
}

impl From<ClientError> for OpenError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::NotInCluster(_) => Self::Nowhere(error),
            _ => Self::Client(error),
        }
    }
}

/// Where objects come from, and what the pipeline must know of the gateway.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceSettings {
    /// A directory of manifests; `None` for a Kubernetes API.
    pub manifests: Option<PathBuf>,
    /// The folder of the persisted state; `None` for the default.
    pub state_dir: Option<PathBuf>,
    /// How to reach the Kubernetes API; `None` for the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// The only namespace in use, if there is one.
    pub namespace: Option<String>,
    /// For a Kubernetes API: where it comes from what a cluster allows.
    pub clusters_from: ClustersFrom,
    /// The annotations that expose a Service.
    pub expose_annotations: ExposeKeys,
    /// Which addresses may be endpoints.
    pub endpoints: EndpointRules,
    /// The one Seed that counts; `None` for all of them.
    pub seed: Option<String>,
    /// Whether, as far as the gateway's configuration shows, connections may come without the addresses of
    /// their clients; a Service in front may show otherwise.
    pub masked_clients: bool,
    /// Addresses of the gateway itself.
    pub own_addresses: Vec<IpAddr>,
    /// External addresses of the seed's nodes.
    pub node_addresses: Vec<IpAddr>,
    /// Ports of the gateway itself, which no Service can have as NodePort.
    pub reserved_ports: Vec<u16>,
    /// Port of the SNI listener, if it is known and open.
    pub sni_port: Option<u16>,
}

/// A source of objects.
#[derive(Debug)]
pub enum Source {
    /// A directory of manifests. Portico plans Services and allocates NodePorts, because nothing else does.
    Directory {
        /// The objects.
        source: DirectorySource,
        /// The state that must be the same in the next run.
        persisted: PersistedFile,
    },
    /// A Kubernetes API, where Services exist and the API server allocates NodePorts.
    Kubernetes(KubernetesSource),
}

impl Source {
    /// Opens the source that `settings` name, and a pipeline with what an earlier run remembered.
    pub async fn open(settings: &SourceSettings) -> Result<(Self, Pipeline), OpenError> {
        let index = IndexSettings {
            expose_annotations: settings.expose_annotations.clone(),
            namespace: settings.namespace.as_deref().map(Into::into),
            endpoints: settings.endpoints.clone(),
            in_kubernetes: settings.manifests.is_none(),
            own: OwnAddresses {
                addresses: settings.own_addresses.clone().into(),
                ports: settings.reserved_ports.clone().into(),
            },
        };
        let Some(directory) = &settings.manifests else {
            let watched = KubernetesSettings {
                namespace: settings.namespace.clone(),
                annotations: Some(settings.expose_annotations.clone()),
                clusters: settings.clusters_from,
                ..KubernetesSettings::default()
            };
            let source = KubernetesSource::start(client(settings.kubeconfig.as_deref()).await?, watched);
            let planner = settings.planner(Mode::Observe);
            let pipeline = Pipeline::new(index, planner, PersistedState::default(), random_seed());
            return Ok((Self::Kubernetes(source), pipeline.with_masked_clients(settings.masked_clients)));
        };
        let persisted = PersistedFile::new(directory, settings.state_dir.as_deref());
        let pipeline = Pipeline::new(index, settings.planner(Mode::Plan), persisted.load()?, random_seed());
        let source = Self::Directory { source: DirectorySource::open(directory)?, persisted };
        Ok((source, pipeline.with_masked_clients(settings.masked_clients)))
    }

    /// Returns a function that tells the state of the watches; `None` for a directory.
    pub fn status(&self) -> Option<impl Fn() -> KubernetesStatus + Send + Sync + use<>> {
        match self {
            Self::Directory { .. } => None,
            Self::Kubernetes(source) => Some(source.status()),
        }
    }

    /// Returns the next step; waits for it. Cancel-safe. `None` only by a defect.
    pub async fn next(&mut self) -> Option<Step> {
        match self {
            Self::Directory { source, .. } => source.next().await,
            Self::Kubernetes(source) => source.next().await,
        }
    }

    /// Stores what must be the same in the next run, before it takes effect in this one.
    pub fn persist(&mut self, pipeline: &Pipeline) {
        if let Self::Directory { persisted, .. } = self {
            persisted.store(pipeline.planner());
        }
    }

    /// Whether the last [`Self::persist`] failed, so that it is to be tried again.
    pub fn is_failing_to_persist(&self) -> bool {
        matches!(self, Self::Directory { persisted, .. } if persisted.is_failing())
    }
}

impl SourceSettings {
    fn planner(&self, mode: Mode) -> PlannerSettings {
        let default = PlannerSettings::new(mode);
        // In a cluster, clients arrive through a Service that has a port of its own.
        let sni_port = self.sni_port.filter(|_| mode == Mode::Plan).unwrap_or(default.sni_port);
        PlannerSettings {
            node_ips: self.node_addresses.clone(),
            reserved_ports: self.reserved_ports.clone(),
            seed: self.seed.as_deref().map(Into::into),
            sni_port,
            ..default
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_the_port_of_the_listener_unless_a_service_stands_before_it() {
        for (mode, listener, port) in [
            (Mode::Plan, Some(27_402), 27_402),
            (Mode::Plan, None, 6_443),
            (Mode::Observe, Some(27_402), 6_443),
        ] {
            let settings = SourceSettings { sni_port: listener, ..SourceSettings::default() };
            assert_eq!(settings.planner(mode).sni_port, port, "{mode:?} {listener:?}");
        }
    }
}
