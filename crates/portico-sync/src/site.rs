//! A directory of manifests read once, as a gateway would read it: for verbs that only report. Nothing is
//! written.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use portico_api::change::Change;
use portico_api::problem::Severity;
use portico_expose::node_ports::PortKey;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_routes::endpoint_rules::EndpointRules;
use portico_routes::index::Settings as IndexSettings;
use portico_source::directory::DirectoryError;
use portico_source::{Loaded, Object, read_directory};
use thiserror::Error;

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

/// Which directory, and how to read it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SiteSettings {
    /// The directory of manifests.
    pub directory: PathBuf,
    /// The folder of a gateway's persisted state; `None` for the default.
    pub state_dir: Option<PathBuf>,
    /// The only namespace in use, if there is one.
    pub namespace: Option<String>,
    /// The annotation that exposes a Service.
    pub expose_annotation: String,
    /// Which addresses may be endpoints.
    pub endpoints: EndpointRules,
    /// External addresses of the seed's nodes.
    pub node_addresses: Vec<IpAddr>,
}

/// The objects of a directory and what follows from them.
#[derive(Debug)]
pub struct Site {
    /// What could not be read, and the location of everything that could. Its objects are in the pipeline.
    pub loaded: Loaded,
    /// The number of objects.
    pub objects: usize,
    /// Whether an object belongs to the namespace in use; true without one.
    pub has_namespace: bool,
    /// The plans and routes.
    pub pipeline: Pipeline,
    /// NodePorts that no gateway has remembered: one may allocate others.
    pub allocated: Vec<u16>,
}

impl Site {
    /// Reads the directory. Blocks.
    pub fn read(settings: &SiteSettings) -> Result<Self, SiteError> {
        let mut loaded = read_directory(&settings.directory)?;
        let index = IndexSettings {
            expose_annotation: settings.expose_annotation.as_str().into(),
            namespace: settings.namespace.as_deref().map(Into::into),
            endpoints: settings.endpoints.clone(),
        };
        let planner = PlannerSettings {
            node_ips: settings.node_addresses.clone(),
            reserved_ports: GATEWAY_PORTS.into(),
            ..PlannerSettings::new(Mode::Plan)
        };
        // NodePorts and strategies that a gateway remembers are reported as they are; other numbers are
        // allocated here, and may differ there.
        let persisted = PersistedFile::new(&settings.directory, settings.state_dir.as_deref()).load()?;
        let remembered: BTreeSet<PortKey> = persisted.node_ports.all().map(|(key, _)| key.clone()).collect();
        let objects = std::mem::take(&mut loaded.objects);
        let count = objects.len();
        let namespace = settings.namespace.as_deref();
        let has_namespace =
            namespace.is_none_or(|name| objects.iter().any(|object| belongs_to(object, name)));
        let mut pipeline = Pipeline::new(index, planner, persisted, SEED);
        pipeline.apply(objects.into_iter().map(Change::Apply), true);
        let all_readable = loaded.problems.iter().all(|problem| problem.severity != Severity::Error);
        pipeline.initial_sync_complete(all_readable);
        // The update itself is not used; rows and problems have what it says.
        let _update = pipeline.commit();
        let ports = pipeline.planner().persisted().node_ports.all();
        let allocated = ports.filter(|(key, _)| !remembered.contains(key)).map(|(_, port)| port).collect();
        Ok(Self { loaded, objects: count, has_namespace, pipeline, allocated })
    }
}

fn belongs_to(object: &Object, namespace: &str) -> bool {
    match object {
        Object::Service(service) => *service.metadata.namespace == *namespace,
        Object::Cluster(cluster) => cluster.name().namespace() == namespace,
        _ => false,
    }
}
