//! The state of a running gateway for the admin listener: the data plane, and the facts of the objects.
//!
//! Written by [`super::control`], read by [`super::pages`]. Locks are held for a look, never over I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use portico_api::meta::{Kind, ObjectRef};
use portico_api::problem::{Problem, Severity};
use portico_gateway::{FailedPort, Gateway};
use portico_source::kubernetes::KubernetesStatus;
use portico_source::{ManifestProblem, ProblemLog};
use portico_sync::Pipeline;

use super::tunnel_files::TunnelFile;
use crate::finding::Finding;
use crate::listing::Listing;

/// One gateway process.
#[derive(Debug)]
pub(crate) struct Status {
    /// Its data plane, once it has started.
    gateway: OnceLock<Arc<Gateway>>,
    pipeline: Mutex<Pipeline>,
    /// How the watches of a Kubernetes API are; `None` for a directory.
    watches: Option<Watches>,
    manifest_problems: Mutex<Arc<[ManifestProblem]>>,
    reported: Mutex<Reported>,
    problem_log: ProblemLog,
    /// Files of the tunnel listener that cannot be used as they are now, and why.
    tunnel_files: Mutex<BTreeMap<TunnelFile, String>>,
    stopping: AtomicBool,
}

/// Asks a Kubernetes source how it is.
pub(crate) struct Watches(pub(crate) Box<dyn Fn() -> KubernetesStatus + Send + Sync>);

impl fmt::Debug for Watches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watches")
    }
}

/// Problems of objects as they were reported last.
#[derive(Debug, Default)]
struct Reported {
    version: Option<(u64, u64)>,
    problems: BTreeSet<Problem>,
}

impl Status {
    pub(crate) fn new(pipeline: Pipeline, watches: Option<Watches>) -> Self {
        Self {
            gateway: OnceLock::new(),
            pipeline: Mutex::new(pipeline),
            watches,
            manifest_problems: Mutex::default(),
            reported: Mutex::default(),
            problem_log: ProblemLog::default(),
            tunnel_files: Mutex::default(),
            stopping: AtomicBool::new(false),
        }
    }

    /// The objects and what follows from them.
    pub(crate) fn pipeline(&self) -> MutexGuard<'_, Pipeline> {
        // A panic between two changes leaves an index that is merely behind.
        self.pipeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every cluster and route, in force or not, and what is wrong, as `/routes` lists them.
    pub(crate) fn listing(&self) -> Listing {
        let manifest = self.manifest_problems();
        let objects = self.object_problems();
        let objects = objects.iter().map(|problem| Finding::of_object(problem, None));
        let mut problems: Vec<Finding> = manifest.iter().map(Finding::of_manifest).chain(objects).collect();
        problems.sort();
        let mut listing = Listing::of(&self.pipeline(), problems);
        if let Some(gateway) = self.gateway() {
            listing.observe(gateway);
        }
        listing
    }

    /// How the watches of a Kubernetes API are; `None` for a directory.
    pub(crate) fn watches(&self) -> Option<KubernetesStatus> {
        self.watches.as_ref().map(|watches| (watches.0)())
    }

    /// What the source cannot read.
    pub(crate) fn manifest_problems(&self) -> Arc<[ManifestProblem]> {
        Arc::clone(&self.manifest_problems.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set_manifest_problems(&self, problems: Arc<[ManifestProblem]>) {
        *self.manifest_problems.lock().unwrap_or_else(PoisonError::into_inner) = problems;
    }

    /// Files of the tunnel listener that cannot be used as they are now, and why; what was read before stays
    /// in force.
    pub(crate) fn tunnel_files(&self) -> BTreeMap<TunnelFile, String> {
        self.tunnel_files.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes whether a file can be used; what was wrong with it before.
    pub(crate) fn set_tunnel_file(&self, file: TunnelFile, error: Option<String>) -> Option<String> {
        let mut files = self.tunnel_files.lock().unwrap_or_else(PoisonError::into_inner);
        match error {
            Some(error) => files.insert(file, error),
            None => files.remove(&file),
        }
    }

    /// What is wrong with objects that could be read, errors first: by themselves, or because this host has
    /// no room for them.
    pub(crate) fn object_problems(&self) -> BTreeSet<Problem> {
        let mut problems = self.pipeline().problems();
        if let Some(gateway) = self.gateway() {
            problems.extend(gateway.failed_node_ports().into_iter().map(port_problem));
        }
        problems
    }

    /// What is wrong with objects and was not when this was asked last.
    pub(crate) fn new_problems(&self) -> Vec<Problem> {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let pipeline = self.pipeline();
        let version = pipeline.problems_version();
        if reported.version == Some(version) {
            return Vec::new();
        }
        let now = pipeline.problems();
        drop(pipeline);
        let new = now.difference(&reported.problems).cloned().collect();
        *reported = Reported { version: Some(version), problems: now };
        new
    }

    /// Where new problems of objects are written.
    pub(crate) fn problem_log(&self) -> &ProblemLog {
        &self.problem_log
    }

    /// How many problems there are, by severity and reason.
    pub(crate) fn count_problems(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        let manifest = self.manifest_problems();
        let objects = self.object_problems();
        let all = manifest
            .iter()
            .map(|problem| (problem.severity, problem.reason))
            .chain(objects.iter().map(|problem| (problem.severity, problem.reason)));
        let mut counts = BTreeMap::new();
        for (severity, reason) in all {
            *counts.entry((severity_word(severity), reason)).or_default() += 1;
        }
        counts
    }

    /// The data plane; `None` until every object has been read, because until then it would send clients
    /// away.
    pub(crate) fn gateway(&self) -> Option<&Arc<Gateway>> {
        self.gateway.get()
    }

    /// The data plane has started. Once in the life of a process.
    pub(crate) fn set_gateway(&self, gateway: Arc<Gateway>) {
        // A second one cannot be: it would have failed to bind the ports of the first.
        let _first_stays = self.gateway.set(gateway);
    }

    /// Whether the process was asked to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Whether new connections are welcome.
    pub(crate) fn is_ready(&self) -> bool {
        self.gateway().is_some() && !self.is_stopping()
    }
}

/// That a port cannot be bound, as a problem of the Service that asks for it. (The log has it from the data
/// plane.)
fn port_problem(failed: FailedPort) -> Problem {
    let FailedPort { port, backend, error } = failed;
    Problem {
        severity: Severity::Error,
        reason: "node-port-failed",
        object: ObjectRef { kind: Kind::Service, key: backend.service },
        field: "spec.ports".into(),
        message: format!("NodePort {port} cannot be opened: {error}; trying again"),
        remedy: "stop what uses the port on this host, or choose another nodePort".into(),
    }
}

/// The word for a severity in metrics.
pub(crate) fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}
