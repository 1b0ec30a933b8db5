//! The data plane: moves TCP bytes between clients and hosted control planes.
//!
//! `entry` accepts and learns where a client wants to go, by its ClientHello, its port or its CONNECT
//! request. `admission` finds the route in `route_store` and checks the client against allow list and budget
//! (`cluster`). For CONNECT it also checks the credential (`auth`, which may ask an `api_server`). `upstream`
//! connects to an endpoint. `session` counts the connection, by listener in `doors`, while `portico-net` or
//! `portico-tunnel` carries its bytes; `access` writes the line that is left of it. `outcome` is the table of
//! every way a connection ends. A `worker` is the thread this happens on.
//!
//! The table itself is computed in `portico-routes` and arrives through [`Gateway::apply`]: nothing here
//! watches objects or reads a manifest. Only `auth` asks Kubernetes: where tokens are reviewed, it posts
//! TokenReviews to the API servers of clusters.

mod access;
mod admission;
mod api_server;
mod auth;
mod cluster;
mod config;
mod descriptors;
mod doors;
mod entry;
mod fair_share;
mod first_bytes;
mod line_limit;
mod outcome;
mod proxy_header;
mod record;
mod route_store;
mod session;
mod shared;
mod upstream;
mod worker;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use portico_routes::route::BackendId;
use portico_routes::table::Update;
use thiserror::Error;
use tokio::sync::watch;

pub use auth::{
    Identities, Method, OUTCOMES, REVIEW_BUCKETS, ReviewTotals, StaticTokens, TokenSettings, TokensError,
};
pub use cluster::{Cluster, ClusterSnapshot, HANDSHAKE_BUCKETS};
pub use config::{Config, IdleTimeouts, Keepalive, ProxyMode, ProxyProtocol};
pub use doors::{Client, DoorSnapshot, LAST_CLIENTS};
pub use fair_share::{ShareUse, Use};
pub use outcome::{End, Refusal, Side};
pub use portico_net::access::{AccessFormat, AccessLog};
pub use portico_net::takeover::{Offer, Predecessor, TakeOverError, take_over};
pub use record::{Listener, Record};
pub use route_store::{RouteStore, Routes};
pub use shared::{Shared, Totals};
pub use upstream::{Endpoint, Upstream};

use crate::entry::listen::Listeners;
use crate::worker::Worker;

/// How long cancelled connections may take to end at the very end of a drain.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// A successor has read its manifests, or filled its caches from the Kubernetes API, when it asks for
/// sockets. Then it opens its own.
const SUCCESSOR_TIMEOUT: Duration = Duration::from_secs(120);

/// A running data plane.
#[derive(Debug)]
pub struct Gateway {
    shared: Arc<Shared>,
    workers: Vec<Arc<Worker>>,
    listeners: Mutex<Listeners>,
    /// NodePorts that could not be bound, with the reason.
    failed_ports: Mutex<HashMap<u16, Box<str>>>,
    stop: watch::Sender<bool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A NodePort listener that could not be opened. Tried again by [`Gateway::retry_failed_ports`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedPort {
    /// Its number.
    pub port: u16,
    /// The Service port that is not reached because of that.
    pub backend: BackendId,
    /// The error of the system, or which listener of this process has the port.
    pub error: Box<str>,
}

/// Why a gateway could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// A listener of its own could not be bound.
    #[error(
        "cannot listen on {address} for {what}: {source}; choose another address with {flag}, or stop what \
         uses this one"
    )]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What it would have served.
        what: &'static str,
        /// The flag that sets it.
        flag: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// A thread or its runtime could not be made.
    #[error(
        "cannot start a worker thread: {0}; the process may be at a limit of threads or file descriptors"
    )]
    Worker(#[from] io::Error),
    /// The predecessor's listeners are not those of a gateway.
    #[error(transparent)]
    TakeOver(#[from] TakeOverError),
}

impl Gateway {
    /// Starts the workers, then the SNI and tunnel listeners, then those of NodePorts. They use sockets of
    /// the `predecessor` where it had some for the same address. The `first` routes are in force before
    /// anything is accepted. Otherwise a client that waits in a socket of the predecessor would be refused,
    /// as if its cluster were unknown. Their NodePorts come last: a Service may ask for a port of the gateway
    /// itself, and must not keep it from starting. Nothing is accepted before all are open: a gateway that
    /// does not start leaves every client to its predecessor.
    pub fn start(
        config: Config,
        access: AccessLog,
        first: Option<&Update>,
        predecessor: Option<&mut Predecessor>,
    ) -> Result<Self, StartError> {
        let shared = Arc::new(Shared::new(config, access));
        let (stop, _) = watch::channel(false);
        let mut workers = Vec::new();
        let mut handles = Vec::new();
        let mut threads = Vec::new();
        for index in 0..shared.config.workers.max(1) {
            let worker = Arc::new(Worker::new(Arc::clone(&shared)));
            let (handle, thread) = worker.start(index, stop.subscribe())?;
            workers.push(Arc::clone(&worker));
            handles.push((worker, handle));
            threads.push(thread);
        }
        let inherited = predecessor.map(Predecessor::sockets::<Listener>).transpose()?.unwrap_or_default();
        let listeners = Listeners::new(handles, shared.config.downstream_keepalive, inherited);
        let gateway = Self {
            shared,
            workers,
            listeners: Mutex::new(listeners),
            failed_ports: Mutex::default(),
            stop,
            threads: Mutex::new(threads),
        };
        if gateway.shared.identities.asks()
            && let Some((_, handle)) = gateway.listeners().first_worker()
        {
            handle.spawn(supervise_credentials(Arc::clone(&gateway.shared), gateway.workers.clone()));
        }
        let first = first.map(|first| gateway.shared.apply(first));
        let config = &gateway.shared.config;
        let tunnel = config.tunnel_listen.filter(|_| !config.shared_port);
        let own = [
            (Listener::Sni, config.sni_listen, "connections routed by server name", "--sni-listen"),
            (Listener::Tunnel, tunnel, "CONNECT tunnels", "--tunnel-listen"),
        ];
        for (listener, address, what, flag) in own {
            if let Some(address) = address {
                let opened = gateway.listeners().open(listener, address);
                let bound = opened.map_err(|source| StartError::Listen { address, what, flag, source })?;
                gateway.shared.own.add(bound);
            }
        }
        for port in first.map(|applied| applied.opened_ports).unwrap_or_default() {
            gateway.open_port(port);
        }
        // No route of the first table leads there any more.
        gateway.listeners().drop_inherited();
        gateway.listeners().accept();
        Ok(gateway)
    }

    /// Takes over a new route table: opens and closes NodePort listeners, leaves everything alone that did
    /// not change.
    pub fn apply(&self, update: &Update) {
        let applied = self.shared.apply(update);
        for port in applied.closed_ports {
            self.listeners().close(Listener::NodePort(port));
            self.shared.own.closed(port);
            self.failed_ports().remove(&port);
        }
        for port in applied.opened_ports {
            self.open_port(port);
        }
        if let Some(limit) = self.shared.config.removed_endpoint_timeout
            && !applied.removed_endpoints.is_empty()
        {
            self.end_removed(applied.removed_endpoints, limit);
        }
    }

    /// Tries again to bind the NodePorts that could not be. Returns whether any still cannot.
    pub fn retry_failed_ports(&self) -> bool {
        let ports: Vec<u16> = self.failed_ports().keys().copied().collect();
        for port in ports {
            self.open_port(port);
        }
        !self.failed_ports().is_empty()
    }

    fn open_port(&self, port: u16) {
        if self.shared.is_draining() {
            return;
        }
        let address = SocketAddr::new(self.shared.config.node_port_address, port);
        let opened = self.listeners().open(Listener::NodePort(port), address);
        let mut failed = self.failed_ports();
        match opened {
            Ok(_) => {
                self.shared.own.opened(port);
                if failed.remove(&port).is_some() {
                    tracing::info!(port, "NodePort listener opened at last");
                }
            }
            Err(error) => {
                let error: Box<str> = match self.own_listener(port, &error) {
                    Some(flag) => format!("it is a port of Portico itself, by {flag}").into(),
                    None => error.to_string().into(),
                };
                if failed.get(&port) != Some(&error) {
                    let routes = self.shared.route_store.routes();
                    let service = routes.ports.get(&port).map(|upstream| upstream.id().to_string());
                    tracing::error!(
                        service, %address, %error, "cannot open a NodePort listener; trying again"
                    );
                    failed.insert(port, error);
                }
            }
        }
    }

    /// The flag of the listener of this process that has `port`, if that is why it could not be bound.
    fn own_listener(&self, port: u16, error: &io::Error) -> Option<&'static str> {
        if error.kind() != io::ErrorKind::AddrInUse {
            return None;
        }
        let own = self.listen_addresses().into_iter().filter_map(|(listener, address)| match listener {
            Listener::Sni => Some((address.port(), "--sni-listen")),
            Listener::Tunnel => Some((address.port(), "--tunnel-listen")),
            Listener::NodePort(_) => None,
        });
        let others = self.shared.config.other_listeners.iter().map(|(address, flag)| (address.port(), *flag));
        let mut all = own.chain(others);
        all.find_map(|(taken, flag)| (taken == port).then_some(flag))
    }

    fn end_removed(&self, removed: Vec<Arc<Endpoint>>, limit: Duration) {
        let workers = self.workers.clone();
        let Some((_, handle)) = self.listeners().first_worker() else { return };
        let removed: Vec<_> = removed.into_iter().map(|endpoint| (endpoint.moves(), endpoint)).collect();
        handle.spawn(async move {
            tokio::time::sleep(limit).await;
            // One that came back meanwhile keeps its connections; if it left again, their time began anew.
            let still_away = |(moves, endpoint): &&(u32, Arc<Endpoint>)| endpoint.moves() == *moves;
            let removed: Vec<_> = removed.iter().filter(still_away).map(|(_, endpoint)| endpoint).collect();
            let left =
                |record: &Record| removed.iter().any(|endpoint| Arc::ptr_eq(endpoint, record.endpoint()));
            for record in workers.iter().flat_map(|worker| worker.connections()) {
                if left(&record) {
                    record.cancel(End::EndpointRemoved);
                }
            }
        });
    }

    /// What the workers share: counters, clock, routes.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Every open connection and tunnel stream.
    pub fn connections(&self) -> Vec<Arc<Record>> {
        self.workers.iter().flat_map(|worker| worker.connections()).collect()
    }

    /// Where each listener is bound. If two listeners share a port, both are listed.
    pub fn listen_addresses(&self) -> Vec<(Listener, SocketAddr)> {
        let mut addresses = self.listeners().addresses();
        if self.shared.config.shared_port
            && let Some(&(_, shared)) = addresses.iter().find(|(listener, _)| *listener == Listener::Sni)
        {
            addresses.push((Listener::Tunnel, shared));
        }
        addresses
    }

    /// NodePorts that could not be bound, by number.
    pub fn failed_node_ports(&self) -> Vec<FailedPort> {
        let routes = self.shared.route_store.routes();
        let mut failed: Vec<_> = self
            .failed_ports()
            .iter()
            .filter_map(|(&port, error)| {
                let backend = routes.ports.get(&port)?.id();
                Some(FailedPort { port, backend, error: error.clone() })
            })
            .collect();
        failed.sort_unstable_by_key(|failed| failed.port);
        failed
    }

    /// Hands the listening sockets to a successor that comes to `offer`; done once one accepts on them. Then
    /// it is time to [`drain`](Self::drain).
    pub async fn hand_over(&self, offer: &Offer) {
        let sockets = || {
            let sockets = self.listeners().sockets()?;
            Ok(sockets.into_iter().map(|(listener, socket)| (listener.to_string(), socket)).collect())
        };
        offer.serve(Some(SUCCESSOR_TIMEOUT), sockets).await;
    }

    /// Stops accepting and lets connections finish for `limit`, then ends the rest. Returns how many that
    /// were.
    pub async fn drain(&self, limit: Duration) -> usize {
        let loops = self.listeners().close_all();
        for accept_loop in loops {
            // Its error can only say that it was cancelled.
            let _ = accept_loop.await;
        }
        self.shared.draining().send_replace(true);
        if tokio::time::timeout(limit, self.shared.all_ended()).await.is_ok() {
            return 0;
        }
        let left = self.connections();
        for record in &left {
            record.cancel(End::Drained);
        }
        let _elapsed = tokio::time::timeout(LAST_GRACE, self.shared.all_ended()).await;
        left.len()
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed_ports(&self) -> MutexGuard<'_, HashMap<u16, Box<str>>> {
        self.failed_ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gateway {
    /// Ends the workers, and with them every connection.
    fn drop(&mut self) {
        drop(self.listeners().close_all());
        self.stop.send_replace(true);
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A worker that panicked has reported it on its own.
            let _ = thread.join();
        }
    }
}

/// Cuts the streams whose credential is revoked, for as long as the gateway lives.
async fn supervise_credentials(shared: Arc<Shared>, workers: Vec<Arc<Worker>>) {
    let cut = || {
        let mut count = 0;
        for record in workers.iter().flat_map(|worker| worker.connections()) {
            if record.credential.as_ref().is_some_and(|credential| credential.is_revoked()) {
                record.cancel(End::Revoked);
                count += 1;
            }
        }
        count
    };
    shared.identities.supervise(cut).await;
}
