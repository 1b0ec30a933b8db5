//! The kubelet that this process stays with. A kubelet reads its kubeconfig once. This one is started anew
//! when that names another server.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::anyhow;
use jiff::Timestamp;
use portico_hosting::join::machine::{NewFile, Paths};
use portico_hosting::join::moving::server_of;
use serde::{Deserialize, Serialize};
use tokio::process::Child;
use tokio::time::sleep;

use crate::{files, kubelet};

/// Between two looks at the kubeconfig: nobody tells that it has changed.
const LOOK: Duration = Duration::from_secs(1);

/// What others on this machine may know of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// The server that it was started with.
    pub server: Option<String>,
    /// When it was.
    pub started: Timestamp,
}

/// A kubelet, and how it is started.
pub struct Staying<'a> {
    program: &'a Path,
    arguments: &'a [String],
    paths: &'a Paths,
    server: Option<String>,
    child: Child,
}

impl<'a> Staying<'a> {
    /// Starts it. It ends with this process.
    pub fn start(program: &'a Path, arguments: &'a [String], paths: &'a Paths) -> anyhow::Result<Self> {
        // It makes its kubeconfig from that of the bootstrap.
        let server = named(&paths.kubeconfig()).or_else(|| named(&paths.bootstrap()));
        let started = Timestamp::now();
        let child = kubelet::start(program, arguments)?;
        let running = Running { server: server.clone(), started };
        let content = serde_json::to_string(&running)?;
        if let Err(error) = files::put(&NewFile { path: paths.running(), content, mode: 0o644 }) {
            // A node that runs is worth more than one that can be moved.
            tracing::warn!(%error, "`portico join move` will not know with which server the kubelet runs");
        }
        Ok(Self { program, arguments, paths, server, child })
    }

    /// Stays with it until it ends by itself, which it never should.
    pub async fn stay(&mut self) -> anyhow::Result<()> {
        loop {
            tokio::select! {
                status = self.child.wait() => return Err(ended(status?)),
                server = other_server(self.paths, self.server.as_deref()) => {
                    let before = self.server.as_deref();
                    tracing::info!(server, before, "the kubelet starts anew, with another server");
                }
            }
            self.end().await?;
            *self = Self::start(self.program, self.arguments, self.paths)?;
        }
    }

    /// Asks it to end, and waits until it has.
    pub async fn end(&mut self) -> anyhow::Result<()> {
        kubelet::end(&mut self.child).await
    }
}

/// Returns another server than this one, once the kubeconfig names it.
async fn other_server(paths: &Paths, server: Option<&str>) -> String {
    loop {
        sleep(LOOK).await;
        match named(&paths.kubeconfig()) {
            Some(other) if server != Some(&other) => return other,
            _ => {}
        }
    }
}

/// With which server the kubelet runs that a `portico join` stays with, or stayed with at last.
pub(crate) fn running(paths: &Paths) -> Option<Running> {
    serde_json::from_str(&files::read(&paths.running()).ok()??).ok()
}

fn named(kubeconfig: &Path) -> Option<String> {
    server_of(&files::read(kubeconfig).ok()??)
}

fn ended(status: ExitStatus) -> anyhow::Error {
    anyhow!("the kubelet ended ({status}); what it wrote above says why")
}
