//! Which source the flags ask for, and what stands between two runs of it.

use anyhow::bail;
use portico_routes::book::Settings;
use portico_source::{DirectorySource, Step};

use crate::gateway_flags::SourceFlags;
use crate::pipeline::Pipeline;

/// Where objects come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A directory of manifests.
    Directory(DirectorySource),
}

impl Source {
    /// Opens the source that `flags` name.
    pub(crate) fn open(flags: &SourceFlags) -> anyhow::Result<Self> {
        match &flags.manifests {
            Some(directory) => Ok(Self::Directory(DirectorySource::open(directory)?)),
            None => bail!("give a directory of manifests with --manifests DIR"),
        }
    }

    /// A pipeline for the objects of this source, with what an earlier run remembered.
    pub(crate) fn pipeline(&self, flags: &SourceFlags) -> anyhow::Result<Pipeline> {
        Ok(Pipeline::new(Settings {
            expose_annotation: flags.expose_annotation.as_str().into(),
            namespace: flags.namespace.as_deref().map(Into::into),
        }))
    }

    /// The next changes; waits for them.
    pub(crate) async fn next(&mut self) -> Option<Step> {
        match self {
            Self::Directory(source) => source.next().await,
        }
    }

    /// Remembers for the next run what must not change with it.
    pub(crate) fn remember(&mut self, _pipeline: &mut Pipeline) {}
}
