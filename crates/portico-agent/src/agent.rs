//! The data plane of an agent: one thread on which everything happens that is a byte of a pod.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use portico_net::access::AccessLog;
use portico_tunnel::client::{Client, ClientSettings};
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::forward::Forward;
use crate::listen::{Inherited, Listening};
use crate::shared::Shared;

/// How long connections that are cut may take to end at the very end of a drain.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// What an agent is to do.
#[derive(Debug)]
pub struct Settings {
    /// What to listen on.
    pub forwards: Vec<Forward>,
    /// How to reach gateways.
    pub client: ClientSettings,
    /// Most connections at once; over it they are refused.
    pub max_connections: u32,
    /// Most of them that wait for a gateway.
    pub max_waiting: u32,
}

/// Why an agent does not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// A forward cannot listen.
    #[error("--forward {listen}={authority}: cannot listen on {listen}: {source}; {}", remedy(.source))]
    Listen {
        /// Where.
        listen: SocketAddr,
        /// What it leads to.
        authority: Box<str>,
        /// What the system said.
        source: io::Error,
    },
    /// The thread cannot be made.
    #[error(
        "cannot start the thread that moves bytes: {0}; the process may be at a limit of threads or descriptors"
    )]
    Thread(#[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there: stop it, or, if it is the agent to be replaced, start both with the same --take-over"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this host has no such address: name one it has, or the one of --address"
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need CAP_NET_BIND_SERVICE: give the forward another port"
        }
        _ => "give the forward another address or port",
    }
}

/// A running data plane. Dropping it ends every connection.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    client: Client,
    handle: Handle,
    listening: Mutex<Vec<Listening>>,
    /// Dropped, it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// Starts to bring tunnels up. Nothing is listened on until [`listen`](Self::listen).
    pub fn start(settings: Settings, access: AccessLog) -> Result<Self, StartError> {
        let Settings { forwards, client, max_connections, max_waiting } = settings;
        let memory = client.memory.clone();
        let gateways = client.gateways.iter().map(|gateway| gateway.to_string().into()).collect();
        let shared = Arc::new(Shared::new(forwards, gateways, access, memory, max_connections, max_waiting));
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let run = move || {
            // An error says that the agent is gone without a word: time to stop, too.
            let _ = runtime.block_on(stopped);
        };
        let thread =
            std::thread::Builder::new().name("data".into()).spawn(run).map_err(StartError::Thread)?;
        let client = {
            let _entered = handle.enter();
            Client::start(client)
        };
        let listening = Mutex::default();
        Ok(Self { shared, client, handle, listening, stop: Some(stop), thread: Some(thread) })
    }

    /// Accepts on every forward from now on: on sockets of `inherited` where it has them. Those that no forward asks for are closed.
    pub fn listen(&self, mut inherited: Inherited) -> Result<(), StartError> {
        let mut listening = Vec::with_capacity(self.shared.forwards.len());
        for forward in &self.shared.forwards {
            let opened = Listening::open(&self.shared, &self.client, forward, &self.handle, &mut inherited);
            listening.push(opened.map_err(|source| StartError::Listen {
                listen: forward.listen,
                authority: forward.authority.clone(),
                source,
            })?);
        }
        *self.listening() = listening;
        Ok(())
    }

    /// A copy of every listening socket, for a successor.
    pub fn sockets(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        self.listening().iter().map(Listening::socket).collect()
    }

    /// What connections share: counters, and the list of them.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The tunnels.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The token file has changed.
    pub fn token_changed(&self) {
        self.client.token_changed();
    }

    /// The certificate or a CA has changed.
    pub fn certificate_changed(&self) {
        self.client.certificate_changed();
    }

    /// Stops listening and lets connections finish for `limit`, then ends the rest. Answers how many that were.
    pub async fn drain(&self, limit: Duration) -> usize {
        let listening = std::mem::take(&mut *self.listening());
        for listening in listening {
            listening.close().await;
        }
        let client = self.client.clone();
        let drained = self.handle.spawn(async move { client.drain().await });
        if timeout(limit, self.shared.all_ended()).await.is_ok() {
            // What the gateways do not say yet is no reason to wait for them.
            drop(timeout(LAST_GRACE, drained).await);
            return 0;
        }
        let left = self.shared.connections();
        left.iter().for_each(|record| record.cut());
        let _elapsed = timeout(LAST_GRACE, self.shared.all_ended()).await;
        left.len()
    }

    fn listening(&self) -> MutexGuard<'_, Vec<Listening>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on its own.
            let _ = thread.join();
        }
    }
}
