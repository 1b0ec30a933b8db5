//! Objects read once, as a gateway would read them: for verbs that only report. Nothing is written.
//!
//! A directory is one of two things. Either a gateway on a directory serves it: then Portico plans Services
//! and NodePorts for it. Or it is a copy of a seed (`kubectl get -o yaml`), where KKP's controllers have done
//! so. The second is read as a gateway in that seed reads it, and compared with what KKP serves
//! ([`crate::kkp_proxy`]).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use portico_api::annotations::ExposeKeys;
use portico_api::change::Change;
use portico_api::problem::{Problem, Severity};
use portico_expose::exposure::MANAGED_BY;
use portico_expose::node_ports::PortKey;
use portico_expose::persisted::PersistedState;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_routes::endpoint_rules::EndpointRules;
use portico_routes::index::Settings as IndexSettings;
use portico_routes::route::OwnAddresses;
use portico_source::directory::DirectoryError;
use portico_source::{Loaded, Object, read_directory};
use thiserror::Error;

use crate::kkp_proxy::{KkpProxy, unprojected};
use crate::persisted::{PersistedFile, PersistedFileError};
use crate::pipeline::Pipeline;

/// Seed of the allocation of NodePorts: the same directory gives the same ports twice.
const SEED: u64 = 0;

/// The default ports of a gateway, which no Service can have as NodePort.
const GATEWAY_PORTS: [u16; 3] = [6_443, 8_088, 8_002];

/// Why a directory cannot be read.
#[derive(Debug, Error)]
pub enum SiteError {
    /// The directory cannot be read.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The persisted state of a gateway cannot be read.
    #[error(transparent)]
    Persisted(#[from] PersistedFileError),
}

/// What the objects of a directory are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadAs {
    /// What a gateway with this directory serves.
    Directory,
    /// A copy of the objects of a seed where KKP's controllers run.
    Seed,
}

/// How to read objects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SiteSettings {
    /// The folder of a gateway's persisted state; `None` for the default.
    pub state_dir: Option<PathBuf>,
    /// The only namespace in use, if there is one.
    pub namespace: Option<String>,
    /// The annotations that expose a Service.
    pub expose_annotations: ExposeKeys,
    /// The one Seed that counts; `None` for all of them.
    pub seed: Option<String>,
    /// External addresses of the seed's nodes.
    pub node_addresses: Vec<IpAddr>,
    /// Networks that endpoints must be in; empty for no such bound.
    pub endpoint_networks: Vec<IpNet>,
}

/// Objects, and what follows from them.
#[derive(Debug)]
pub struct Site {
    /// The problems of unreadable files, and the location of every object that was read. Its objects are in
    /// the pipeline.
    pub loaded: Loaded,
    /// The number of objects.
    pub objects: usize,
    /// The objects that say what the site is, as read: all but EndpointSlices.
    pub originals: Vec<Object>,
    /// Whether an object belongs to the namespace in use; true without one.
    pub has_namespace: bool,
    /// The plans and routes.
    pub pipeline: Pipeline,
    /// NodePorts that no gateway has remembered: one may allocate others.
    pub allocated: Vec<u16>,
    /// What they were read as.
    pub read_as: ReadAs,
    /// Whether KKP's controllers keep the clusters: in a seed, unless Portico's operator exposes some.
    pub is_kkp_there: bool,
    /// Where a gateway in the seed would differ from KKP's proxy. There are none for a directory, and none
    /// where the operator exposes clusters: it does so only without KKP.
    pub differences: Vec<Problem>,
}

impl Site {
    /// Reads a directory, by default as what its objects look like. Blocks.
    pub fn read(
        directory: &Path,
        read_as: Option<ReadAs>,
        settings: &SiteSettings,
    ) -> Result<Self, SiteError> {
        let loaded = read_directory(directory)?;
        match read_as.unwrap_or_else(|| looks_like(&loaded.objects)) {
            // ExposedClusters are not read from files, so nothing is reported about them.
            ReadAs::Seed => Ok(Self::of(loaded, ReadAs::Seed, PersistedState::default(), settings)),
            ReadAs::Directory => {
                // NodePorts and strategies that a gateway remembers are reported as they are; other numbers
                // are allocated here, and may differ there.
                let persisted = PersistedFile::new(directory, settings.state_dir.as_deref()).load()?;
                Ok(Self::of(loaded, ReadAs::Directory, persisted, settings))
            }
        }
    }

    /// The site as a gateway in the seed makes it of the objects there.
    pub fn of_seed(loaded: Loaded, settings: &SiteSettings) -> Self {
        let unprojected = unprojected(&loaded.objects);
        let mut site = Self::of(loaded, ReadAs::Seed, PersistedState::default(), settings);
        site.differences.extend(unprojected);
        site
    }

    fn of(mut loaded: Loaded, read_as: ReadAs, persisted: PersistedState, settings: &SiteSettings) -> Self {
        let index = IndexSettings {
            expose_annotations: settings.expose_annotations.clone(),
            namespace: settings.namespace.as_deref().map(Into::into),
            endpoints: EndpointRules {
                loopback: read_as == ReadAs::Directory,
                networks: settings.endpoint_networks.clone().into(),
            },
            in_kubernetes: read_as == ReadAs::Seed,
            own: OwnAddresses::default(),
        };
        let (mode, reserved_ports) = match read_as {
            ReadAs::Directory => (Mode::Plan, GATEWAY_PORTS.into()),
            ReadAs::Seed => (Mode::Observe, Vec::new()),
        };
        let planner = PlannerSettings {
            node_ips: settings.node_addresses.clone(),
            reserved_ports,
            seed: settings.seed.as_deref().map(Into::into),
            ..PlannerSettings::new(mode)
        };
        let remembered: BTreeSet<PortKey> = persisted.node_ports.all().map(|(key, _)| key.clone()).collect();
        let mut objects = std::mem::take(&mut loaded.objects);
        let count = objects.len();
        let namespace = settings.namespace.as_deref();
        let has_namespace =
            namespace.is_none_or(|name| objects.iter().any(|object| belongs_to(object, name)));
        let is_slice = |object: &&Object| matches!(object, Object::EndpointSlice(_));
        let originals = objects.iter().filter(|object| !is_slice(object)).cloned().collect();
        let is_kkp_there = read_as == ReadAs::Seed && !objects.iter().any(is_of_operator);
        let proxy = is_kkp_there.then(|| KkpProxy::of(&objects, settings.expose_annotations.first()));
        let mut pipeline = Pipeline::new(index, planner, persisted, SEED);
        if read_as == ReadAs::Seed {
            if objects.iter().any(|object| matches!(object, Object::Seed(_) | Object::Cluster(_))) {
                pipeline.require_policies();
            }
            // `portico front` writes nothing into these but facts that follow from the Clusters.
            objects.retain(|object| !matches!(object, Object::ExposedCluster(_)));
        }
        let services = objects.iter().filter_map(|object| match object {
            Object::Service(service) if read_as == ReadAs::Seed => Some(service),
            _ => None,
        });
        pipeline.apply_cluster_ips(services.flat_map(|service| service.cluster_ips()).map(Change::Apply));
        pipeline.apply(objects.into_iter().map(Change::Apply), true);
        let all_readable = loaded.problems.iter().all(|problem| problem.severity != Severity::Error);
        pipeline.initial_sync_complete(all_readable);
        // The update itself is not used; rows and problems have what it says.
        let _update = pipeline.commit();
        let ports = pipeline.planner().persisted().node_ports.all();
        let allocated = ports.filter(|(key, _)| !remembered.contains(key)).map(|(_, port)| port).collect();
        let differences = proxy.map(|proxy| proxy.differences(pipeline.rows())).unwrap_or_default();
        Self {
            loaded,
            objects: count,
            originals,
            has_namespace,
            pipeline,
            allocated,
            read_as,
            is_kkp_there,
            differences,
        }
    }
}

/// KKP's controllers make Services in the namespaces of Clusters. One that an API server has admitted has a
/// UID, which nobody writes into a manifest.
fn looks_like(objects: &[Object]) -> ReadAs {
    let clusters: BTreeSet<String> = objects
        .iter()
        .filter_map(|object| match object {
            Object::Cluster(cluster) => Some(cluster.name().namespace()),
            _ => None,
        })
        .collect();
    let is_made = |object: &Object| match object {
        Object::Service(service) => {
            !service.metadata.uid.is_empty() && clusters.contains(&*service.metadata.namespace)
        }
        _ => false,
    };
    if objects.iter().any(is_made) { ReadAs::Seed } else { ReadAs::Directory }
}

/// Whether it is a Service that Portico's operator made, for a cluster or for all. Beside KKP the operator
/// makes none.
fn is_of_operator(object: &Object) -> bool {
    let Object::Service(service) = object else { return false };
    let (key, value) = MANAGED_BY;
    let label = service.metadata.labels.get(key);
    label.is_some_and(|label| **label == *value)
}

fn belongs_to(object: &Object, namespace: &str) -> bool {
    match object {
        Object::Service(service) => *service.metadata.namespace == *namespace,
        Object::Cluster(cluster) => cluster.name().namespace() == namespace,
        _ => false,
    }
}
