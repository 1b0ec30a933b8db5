//! A directory of manifests looked at once, as the gateway would: for the verbs that only answer a question.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use portico_api::problem::Severity;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_routes::book::Settings as BookSettings;
use portico_source::{Event, Loaded, read_directory};

use crate::args::annotation_key;
use crate::memory::MemoryFile;
use crate::outcome::OutputFormat;
use crate::pipeline::Pipeline;

/// Seed of the draw of NodePorts: the same question gets the same answer twice.
const DRAW: u64 = 0;

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
    pub(crate) loaded: Loaded,
    /// How many objects there are.
    pub(crate) objects: usize,
    pub(crate) pipeline: Pipeline,
}

impl Flags {
    /// Reads the directory.
    pub(crate) fn load(&self) -> anyhow::Result<Site> {
        let directory: &Path = &self.directory;
        let mut loaded = read_directory(directory)?;
        let book = BookSettings {
            expose_annotation: self.expose_annotation.as_str().into(),
            namespace: self.namespace.as_deref().map(Into::into),
        };
        let planner =
            PlannerSettings { node_ips: self.node_address.clone(), ..PlannerSettings::new(Mode::Plan) };
        // NodePorts that a gateway has given are shown, and strategies that it keeps; other numbers are drawn, and may come out
        // differently there.
        let memory = MemoryFile::of(directory, self.state_dir.as_deref()).load()?;
        let mut pipeline = Pipeline::new(book, planner, memory, DRAW);
        let objects = std::mem::take(&mut loaded.objects);
        let count = objects.len();
        pipeline.apply(objects.into_iter().map(Event::Apply), true);
        let whole = loaded.problems.iter().all(|problem| problem.severity != Severity::Error);
        pipeline.first_picture_complete(whole);
        // The table itself is not asked for; what it says is in the rows and problems.
        let _update = pipeline.commit();
        Ok(Site { loaded, objects: count, pipeline })
    }
}
