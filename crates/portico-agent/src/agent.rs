//! The data plane of an agent: listeners, tunnels and the connections of pods, all on one thread.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use portico_net::access::AccessLog;
use portico_net::takeover::Inherited;
use portico_tunnel::client::{Client, ClientSettings};
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::forward::Forward;
use crate::listen::{self, Listening};
use crate::shared::Shared;

/// How long connections that were cut may take to end, after the limit of a drain.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// What an agent listens on, and its limits.
#[derive(Debug)]
pub struct Settings {
    /// What to listen on.
    pub forwards: Vec<Forward>,
    /// How to reach gateways.
    pub client: ClientSettings,
    /// The most connections at once. More are refused.
    pub max_connections: u32,
    /// The most of them that wait for a gateway. More are refused.
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
        /// The system's error.
        source: io::Error,
    },
    /// The thread cannot be started.
    #[error(
        "cannot start the thread that moves bytes: {0}; the process may be at a limit of threads or \
         descriptors"
    )]
    Thread(#[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there: stop it, or, if it is the agent to be replaced, start both with \
             the same --take-over"
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
    /// Where everything runs.
    handle: Handle,
    listening: Mutex<Vec<Listening>>,
    /// `None` if it runs on a runtime of the caller.
    thread: Option<Thread>,
}

/// A thread with a runtime of its own.
#[derive(Debug)]
struct Thread {
    /// Dropped, it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// Starts to bring tunnels up, on a thread of its own. Listens on nothing until [`listen`](Self::listen).
    pub fn start(settings: Settings, access: AccessLog) -> Result<Self, StartError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let run = move || {
            // An error says that the agent was dropped, which ends the thread as well.
            let _ = runtime.block_on(stopped);
        };
        let thread =
            std::thread::Builder::new().name("data".into()).spawn(run).map_err(StartError::Thread)?;
        let mut agent = Self::start_on(handle, settings, access);
        agent.thread = Some(Thread { stop: Some(stop), thread: Some(thread) });
        Ok(agent)
    }

    /// As [`start`](Self::start), on a runtime of the caller. Connections then live until that ends.
    pub fn start_on(handle: Handle, settings: Settings, access: AccessLog) -> Self {
        let Settings { forwards, client, max_connections, max_waiting } = settings;
        let memory = client.memory.clone();
        let gateways = client.gateways.iter().map(|gateway| gateway.to_string().into()).collect();
        let shared = Arc::new(Shared::new(forwards, gateways, access, memory, max_connections, max_waiting));
        let client = {
            let _entered = handle.enter();
            Client::start(client)
        };
        Self { shared, client, handle, listening: Mutex::default(), thread: None }
    }

    /// Accepts on every forward from now on: on sockets of `inherited` where it has them. The others of
    /// `inherited` are closed.
    pub fn listen(&self, mut inherited: Inherited) -> Result<(), StartError> {
        let forwards = &self.shared.forwards;
        // Nothing is accepted before all are open: until then an inherited socket is still the predecessor's.
        let mut sockets = Vec::with_capacity(forwards.len());
        for forward in forwards {
            let opened = listen::open(forward, &self.handle, &mut inherited);
            sockets.push(opened.map_err(|source| StartError::Listen {
                listen: forward.listen,
                authority: forward.authority.clone(),
                source,
            })?);
        }
        let accept = |opened| Listening::accept(&self.shared, &self.client, opened, &self.handle);
        let listening = forwards.iter().zip(sockets).map(accept).collect();
        *self.listening() = listening;
        Ok(())
    }

    /// Returns a copy of every listening socket, for a successor.
    pub fn sockets(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        self.listening().iter().map(Listening::socket).collect()
    }

    /// The state that connections share: counters, and the list of them.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The tunnels.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Shows gateways the token that is in the file now.
    pub fn token_changed(&self) {
        self.client.token_changed();
    }

    /// Replaces tunnels, so that gateways see the certificate that is in the files now.
    pub fn certificate_changed(&self) {
        self.client.certificate_changed();
    }

    /// Stops listening, soon refuses pods that still wait for a gateway, and lets connections finish for
    /// `limit`. Then ends the rest. Returns how many those were.
    pub async fn drain(&self, limit: Duration) -> usize {
        let listening = std::mem::take(&mut *self.listening());
        for listening in listening {
            listening.close().await;
        }
        self.shared.stop();
        let client = self.client.clone();
        let drained = self.handle.spawn(async move { client.drain().await });
        if timeout(limit, self.shared.all_ended()).await.is_ok() {
            // No connection is left. A gateway that does not end its side yet is not waited for.
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

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has reported that itself.
            let _ = thread.join();
        }
    }
}
