//! A directory of manifests looked at once, as the gateway would: for the verbs that only answer a question.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use portico_api::problem::Severity;
use portico_expose::node_ports::PortKey;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_routes::index::Settings as IndexSettings;
use portico_source::{Event, Loaded, Object, read_directory};

use crate::args::annotation_key;
use crate::finding::Finding;
use crate::memory::MemoryFile;
use crate::outcome::OutputFormat;
use crate::pipeline::Pipeline;

/// Seed of the draw of NodePorts: the same question gets the same answer twice.
const DRAW: u64 = 0;

/// Where a gateway listens unless its flags say otherwise: no Service can have these as NodePorts.
const OWN_PORTS: [u16; 3] = [6_443, 8_088, 8_002];

/// What to look at, and how to say what was found.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Directory of manifests
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(crate) output: OutputFormat,
    /// Where a gateway remembers NodePorts and strategies [default: DIR/.portico]
    #[arg(long, value_name = "FOLDER")]
    state_dir: Option<PathBuf>,
    /// Look only at the Services of this namespace
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// The annotation by which a Service asks to be exposed
    #[arg(long, value_name = "KEY", default_value = portico_api::annotations::EXPOSE, value_parser = annotation_key)]
    expose_annotation: String,
    /// External address of a seed node, where clusters are reached if the Seed disables its nodeport-proxy; may be repeated
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    node_address: Vec<IpAddr>,
}

/// The objects of a directory and what follows from them. Nothing is written.
#[derive(Debug)]
pub(crate) struct Site {
    /// What could not be read, and the place of everything that could. Its objects are in the pipeline.
    loaded: Loaded,
    /// How many objects there are.
    pub(crate) objects: usize,
    pub(crate) pipeline: Pipeline,
    /// NodePorts that no gateway has remembered: one may draw others.
    pub(crate) drawn: Vec<u16>,
    /// What is wrong with the question.
    questionable: Vec<Finding>,
}

impl Flags {
    /// Reads the directory.
    pub(crate) fn load(&self) -> anyhow::Result<Site> {
        let directory: &Path = &self.directory;
        let mut loaded = read_directory(directory)?;
        let index = IndexSettings {
            expose_annotation: self.expose_annotation.as_str().into(),
            namespace: self.namespace.as_deref().map(Into::into),
        };
        let planner = PlannerSettings {
            node_ips: self.node_address.clone(),
            reserved_ports: OWN_PORTS.into(),
            ..PlannerSettings::new(Mode::Plan)
        };
        // NodePorts that a gateway has given are shown, and strategies that it keeps; other numbers are drawn, and may come out
        // differently there.
        let memory = MemoryFile::of(directory, self.state_dir.as_deref()).load()?;
        let remembered: BTreeSet<PortKey> = memory.node_ports.all().map(|(key, _)| key.clone()).collect();
        let questionable = self.questionable(&loaded);
        let mut pipeline = Pipeline::new(index, planner, memory, DRAW);
        let objects = std::mem::take(&mut loaded.objects);
        let count = objects.len();
        pipeline.apply(objects.into_iter().map(Event::Apply), true);
        let whole = loaded.problems.iter().all(|problem| problem.severity != Severity::Error);
        pipeline.first_picture_complete(whole);
        // The table itself is not asked for; what it says is in the rows and problems.
        let _update = pipeline.commit();
        let ports = pipeline.planner().memory().node_ports.all();
        let drawn = ports.filter(|(key, _)| !remembered.contains(key)).map(|(_, port)| port).collect();
        Ok(Site { loaded, objects: count, pipeline, drawn, questionable })
    }

    /// Asked of nothing, every question has the answer that all is well.
    fn questionable(&self, loaded: &Loaded) -> Vec<Finding> {
        let mut found = Vec::new();
        if loaded.files == 0 {
            let message =
                "no manifest is there: no file ends in .yaml, .yml or .json (hidden ones do not count)";
            let remedy = "name the directory that holds the manifests";
            let file = Some(self.directory.as_path());
            found.push(Finding::of_question(Severity::Error, "no-manifest", file, message.into(), remedy));
        } else if let Some(namespace) = &self.namespace
            && !loaded.objects.iter().any(|object| belongs_to(object, namespace))
        {
            let message = format!("no Service and no Cluster belongs to the namespace {namespace:?}");
            let remedy = "correct --namespace, or leave it out; that of a Cluster is cluster-NAME";
            found.push(Finding::of_question(Severity::Warning, "empty-namespace", None, message, remedy));
        }
        found
    }
}

impl Site {
    /// Everything wrong, in the order in which it is listed.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let manifest = self.loaded.problems.iter().map(Finding::of_manifest);
        let objects = self.pipeline.problems();
        let objects = objects
            .iter()
            .map(|problem| Finding::of_object(problem, self.loaded.line_of(&problem.object, &problem.field)));
        let mut findings: Vec<Finding> =
            self.questionable.iter().cloned().chain(manifest).chain(objects).collect();
        findings.sort();
        findings
    }
}

/// Whether `object` is looked at where only `namespace` is.
fn belongs_to(object: &Object, namespace: &str) -> bool {
    match object {
        Object::Service(service) => *service.metadata.namespace == *namespace,
        Object::Cluster(cluster) => cluster.name().namespace() == namespace,
        _ => false,
    }
}
