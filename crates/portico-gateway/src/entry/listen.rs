//! Listening sockets: bound once, accepted on by every worker, closed or handed to a successor.
//!
//! Each worker has a socket of its own for every address (`SO_REUSEPORT`), so that the kernel spreads
//! connections and no thread hands one to another. Before an address is taken it is bound once without
//! `SO_REUSEPORT`: otherwise a second gateway of the same user would silently share its ports.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use portico_net::socket::{BACKLOG, is_out_of_descriptors, set_keepalive, unbound};
use portico_net::takeover::Inherited;
use socket2::{SockRef, Socket};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::{connect, port, sni};
use crate::admission::Arrival;
use crate::config::Keepalive;
use crate::record::Listener;
use crate::worker::Worker;

/// Between two looks at whether connections that ended have freed descriptors, while accepting rests.
const OUT_OF_DESCRIPTORS_PAUSE: Duration = Duration::from_millis(100);

/// The listeners of a gateway.
#[derive(Debug)]
pub(crate) struct Listeners {
    workers: Vec<(Arc<Worker>, Handle)>,
    keepalive: Keepalive,
    open: HashMap<Listener, OpenListener>,
    /// False until every listener of the first table is open.
    accepts: bool,
    /// Sockets a predecessor handed over that no listener has been opened on yet.
    inherited: Inherited,
}

#[derive(Debug)]
struct OpenListener {
    address: SocketAddr,
    sockets: Vec<Arc<TcpListener>>,
    loops: Vec<JoinHandle<()>>,
}

impl Listeners {
    pub(crate) fn new(
        workers: Vec<(Arc<Worker>, Handle)>,
        keepalive: Keepalive,
        inherited: Inherited,
    ) -> Self {
        Self { workers, keepalive, open: HashMap::new(), accepts: false, inherited }
    }

    /// Listens on `address` with every worker, on sockets of the predecessor if it listened exactly there.
    /// Returns the address bound, which has the port where port 0 was asked for. Nothing is accepted before
    /// [`Self::accept`].
    pub(crate) fn open(&mut self, listener: Listener, address: SocketAddr) -> io::Result<SocketAddr> {
        if let Some(open) = self.open.get(&listener) {
            return Ok(open.address);
        }
        let mut bound = self.inherited.take(address);
        // A port that the predecessor still has at another address cannot be probed.
        let address = match bound.is_empty() && !self.inherited.share_port(address)? {
            true => probe(address)?,
            false => address,
        };
        while bound.len() < self.workers.len() {
            match bind(address) {
                Ok(socket) => bound.push(socket),
                // A predecessor may have bound without sharing; then the workers share its sockets.
                Err(error) => bound.push(bound.first().ok_or(error)?.try_clone()?),
            }
        }
        let mut sockets = Vec::new();
        for (socket, (_, handle)) in bound.into_iter().zip(self.workers.iter().cycle()) {
            set_inherited_options(&socket, listener, self.keepalive)?;
            // The socket's events come to the runtime that is entered when it is registered.
            let _entered = handle.enter();
            sockets.push(Arc::new(TcpListener::from_std(socket.into())?));
        }
        let mut open = OpenListener { address, sockets, loops: Vec::new() };
        // Once nothing can fail any more: a loop that no listener knows would accept for ever.
        if self.accepts {
            open.accept(listener, &self.workers);
        }
        self.open.insert(listener, open);
        Ok(address)
    }

    /// Begins to accept on each listener, those that are opened later included.
    pub(crate) fn accept(&mut self) {
        self.accepts = true;
        for (listener, open) in &mut self.open {
            open.accept(*listener, &self.workers);
        }
    }

    /// Stops listening. Connections that were accepted stay.
    pub(crate) fn close(&mut self, listener: Listener) {
        if let Some(open) = self.open.remove(&listener) {
            open.loops.iter().for_each(JoinHandle::abort);
        }
    }

    /// Stops listening everywhere. Once the loops returned have ended, every connection that was accepted is
    /// known. Until then one may be between accept(2) and its task.
    pub(crate) fn close_all(&mut self) -> Vec<JoinHandle<()>> {
        self.drop_inherited();
        let loops: Vec<_> = self.open.drain().flat_map(|(_, open)| open.loops).collect();
        loops.iter().for_each(JoinHandle::abort);
        loops
    }

    /// Closes what a predecessor handed over and the first complete table did not ask for.
    pub(crate) fn drop_inherited(&mut self) {
        self.inherited = Inherited::default();
    }

    /// A worker, for a task that concerns them all.
    pub(crate) fn first_worker(&self) -> Option<(Arc<Worker>, Handle)> {
        self.workers.first().cloned()
    }

    /// A copy of every open socket, for a successor.
    pub(crate) fn sockets(&self) -> io::Result<Vec<(Listener, OwnedFd)>> {
        let all = self
            .open
            .iter()
            .flat_map(|(listener, open)| open.sockets.iter().map(|socket| (*listener, socket)));
        all.map(|(listener, socket)| Ok((listener, socket.as_fd().try_clone_to_owned()?))).collect()
    }

    /// Where each open listener is bound.
    pub(crate) fn addresses(&self) -> Vec<(Listener, SocketAddr)> {
        self.open.iter().map(|(listener, open)| (*listener, open.address)).collect()
    }
}

impl OpenListener {
    fn accept(&mut self, listener: Listener, workers: &[(Arc<Worker>, Handle)]) {
        let loops = self.sockets.iter().zip(workers.iter().cycle()).map(|(socket, (worker, handle))| {
            handle.spawn(accept_loop(Arc::clone(worker), Arc::clone(socket), listener))
        });
        self.loops = loops.collect();
    }
}

fn local_address(socket: &Socket) -> io::Result<SocketAddr> {
    socket.local_addr()?.as_socket().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Makes sure that no other process listens on `address`, and resolves a port of 0.
fn probe(address: SocketAddr) -> io::Result<SocketAddr> {
    let socket = unbound(address)?;
    socket.bind(&address.into())?;
    socket.listen(1)?;
    local_address(&socket)
}

fn bind(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = unbound(address)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Sets on a listening socket what accepted connections inherit, which saves the same calls on each of them.
fn set_inherited_options(socket: &OwnedFd, listener: Listener, keepalive: Keepalive) -> io::Result<()> {
    rustix::net::sockopt::set_tcp_nodelay(socket, true)?;
    set_keepalive(&SockRef::from(socket), keepalive)?;
    if listener == Listener::Sni {
        // The acknowledgement of the hello may travel with the first bytes back: one segment less. listen(2)
        // resets this.
        rustix::net::sockopt::set_tcp_quickack(socket, false)?;
    }
    Ok(())
}

/// Accepts until it is aborted. Survives every error: what cannot be accepted now is accepted later.
async fn accept_loop(worker: Arc<Worker>, socket: Arc<TcpListener>, listener: Listener) {
    let descriptors = Arc::clone(&worker.shared.descriptors);
    loop {
        let short = match socket.accept().await {
            Ok((stream, peer)) => {
                let short = descriptors.run_short(stream.as_fd());
                serve(&worker, stream, peer, listener);
                short
            }
            // The client may also have given up while it waited (ECONNABORTED and network errors, see
            // accept(2)).
            Err(error) => {
                worker.shared.count_accept_error();
                is_out_of_descriptors(&error)
            }
        };
        if short {
            let _rest = descriptors.rest();
            worker.shared.warn_of_descriptors();
            loop {
                tokio::time::sleep(OUT_OF_DESCRIPTORS_PAUSE).await;
                if !descriptors.still_run_short(socket.as_fd()) {
                    break;
                }
            }
        }
    }
}

/// Starts the task that serves a new connection.
fn serve(worker: &Arc<Worker>, stream: TcpStream, peer: SocketAddr, listener: Listener) {
    worker.shared.count_accepted();
    let arrival = Arrival::new(&worker.shared, listener, peer);
    let alive = worker.shared.alive();
    let worker = Arc::clone(worker);
    match listener {
        Listener::Sni => tokio::spawn(sni::serve(worker, stream, arrival, alive)),
        Listener::NodePort(number) => tokio::spawn(port::serve(worker, stream, arrival, number, alive)),
        Listener::Tunnel => tokio::spawn(async move {
            connect::serve(worker, stream, arrival).await;
            drop(alive);
        }),
    };
}
