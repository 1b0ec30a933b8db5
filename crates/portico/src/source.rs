//! Which source the flags ask for, with the pipeline that suits it and what stands between two runs.

use std::net::SocketAddr;

use portico_expose::memory::Memory;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_routes::index::Settings as IndexSettings;
use portico_source::kubernetes::{KubernetesSettings, KubernetesSource, client};
use portico_source::{DirectorySource, Step};

use crate::gateway_flags::Flags;
use crate::memory::{MemoryFile, random_seed};
use crate::pipeline::Pipeline;
use crate::status::Watches;

/// Where objects come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A directory of manifests. Portico plans Services and draws NodePorts, as there is nobody else to do it.
    Directory { source: DirectorySource, memory: MemoryFile },
    /// A Kubernetes API, where Services exist and the API server gives the NodePorts.
    Kubernetes(KubernetesSource),
}

impl Source {
    /// Opens the source that `flags` name, and a pipeline with what an earlier run remembered.
    pub(crate) async fn open(flags: &Flags) -> anyhow::Result<(Self, Pipeline)> {
        let from = &flags.source;
        let namespace = from.namespace.as_deref().map(Into::into);
        let index = IndexSettings { expose_annotation: from.expose_annotation.as_str().into(), namespace };
        let Some(directory) = &from.manifests else {
            let settings = KubernetesSettings {
                namespace: from.namespace.clone(),
                annotation: Some(from.expose_annotation.clone()),
                ..KubernetesSettings::default()
            };
            let source = KubernetesSource::start(client(from.kubeconfig.as_deref()).await?, settings);
            let pipeline =
                Pipeline::new(index, planner(Mode::Observe, flags), Memory::default(), random_seed());
            return Ok((Self::Kubernetes(source), pipeline));
        };
        let memory = MemoryFile::of(directory, from.state_dir.as_deref());
        let pipeline = Pipeline::new(index, planner(Mode::Plan, flags), memory.load()?, random_seed());
        Ok((Self::Directory { source: DirectorySource::open(directory)?, memory }, pipeline))
    }

    /// How the source is doing, for whoever asks.
    pub(crate) fn watches(&self) -> Option<Watches> {
        match self {
            Self::Directory { .. } => None,
            Self::Kubernetes(source) => Some(Watches(Box::new(source.status()))),
        }
    }

    /// The next changes; waits for them. `None` only by a defect.
    pub(crate) async fn next(&mut self) -> Option<Step> {
        match self {
            Self::Directory { source, .. } => source.next().await,
            Self::Kubernetes(source) => source.next().await,
        }
    }

    /// Remembers what must be the same in the next run, before it takes effect in this one.
    pub(crate) fn remember(&mut self, pipeline: &Pipeline) {
        if let Self::Directory { memory, .. } = self {
            memory.store(pipeline.planner());
        }
    }

    /// Whether that could not be done, and is to be tried again.
    pub(crate) fn owes_memory(&self) -> bool {
        matches!(self, Self::Directory { memory, .. } if memory.owes())
    }
}

fn planner(mode: Mode, flags: &Flags) -> PlannerSettings {
    let listeners = &flags.listeners;
    let own = [listeners.sni_listen, listeners.tunnel_listen, listeners.admin_listen];
    let reserved_ports = own.iter().filter_map(|listen| listen.0.as_ref().map(SocketAddr::port)).collect();
    let default = PlannerSettings::new(mode);
    // In a cluster, clients come by a Service that has a port of its own.
    let sni_port = match (mode, listeners.sni_listen.0) {
        (Mode::Plan, Some(address)) if address.port() != 0 => address.port(),
        _ => default.sni_port,
    };
    PlannerSettings { node_ips: flags.source.node_address.clone(), reserved_ports, sni_port, ..default }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    #[test]
    fn addresses_name_the_port_of_the_listener_unless_a_service_stands_before_it() {
        for (mode, listen, port) in [
            (Mode::Plan, "127.0.0.1:27402", 27_402),
            (Mode::Plan, "off", 6_443),
            (Mode::Plan, "127.0.0.1:0", 6_443),
            (Mode::Observe, "127.0.0.1:27402", 6_443),
        ] {
            let line = Line::try_parse_from(["gateway", "--sni-listen", listen]).unwrap();
            assert_eq!(planner(mode, &line.flags).sni_port, port, "{mode:?} {listen}");
        }
    }
}
