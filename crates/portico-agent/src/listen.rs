//! Listening sockets: bound or taken over, accepted on, closed or handed to a successor.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use portico_net::socket::{BACKLOG, Keepalive, is_out_of_descriptors, set_keepalive, unbound};
use portico_net::takeover::Inherited;
use portico_tunnel::client::Client;
use socket2::SockRef;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::connection::serve;
use crate::forward::ForwardState;
use crate::shared::Shared;

/// The pause after an accept(2) that failed for want of descriptors: another try at once would burn the core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One forward that is accepted on.
#[derive(Debug)]
pub(crate) struct Listening {
    forward: Arc<ForwardState>,
    socket: Arc<TcpListener>,
    accepting: JoinHandle<()>,
}

impl Listening {
    /// Accepts on `socket`, that of `forward`, on the runtime of `handle`.
    pub(crate) fn accept(
        shared: &Arc<Shared>,
        client: &Client,
        (forward, socket): (&Arc<ForwardState>, TcpListener),
        handle: &Handle,
    ) -> Self {
        let socket = Arc::new(socket);
        let accept =
            accept_loop(Arc::clone(shared), client.clone(), Arc::clone(forward), Arc::clone(&socket));
        Self { forward: Arc::clone(forward), socket, accepting: handle.spawn(accept) }
    }

    /// A copy of the socket, for a successor, under its name.
    pub(crate) fn socket(&self) -> io::Result<(String, OwnedFd)> {
        Ok((self.forward.listen.to_string(), self.socket.as_fd().try_clone_to_owned()?))
    }

    /// Stops listening, and returns once every connection that was accepted is listed.
    pub(crate) async fn close(mut self) {
        self.accepting.abort();
        // The error says that the task was aborted.
        let _ = (&mut self.accepting).await;
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Takes the socket of `forward` from `inherited`, or binds one, on the runtime of `handle`.
pub(crate) fn open(
    forward: &ForwardState,
    handle: &Handle,
    inherited: &mut Inherited,
) -> io::Result<TcpListener> {
    let socket = match inherited.take(forward.listen).pop() {
        Some(socket) => socket,
        None => bind(forward.listen, inherited.share_port(forward.listen)?)?,
    };
    // A socket belongs to the runtime that is entered when it is registered.
    let _entered = handle.enter();
    TcpListener::from_std(socket.into())
}

/// Binds a socket; with `shared`, while a predecessor has the port at another address.
fn bind(address: SocketAddr, shared: bool) -> io::Result<OwnedFd> {
    let socket = unbound(address)?;
    socket.set_reuse_port(shared)?;
    // All are inherited by accepted connections.
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    set_keepalive(&SockRef::from(&socket), Keepalive::default())?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    // The acknowledgement of the first bytes may travel with those of the answer: one segment less. listen(2)
    // resets this.
    rustix::net::sockopt::set_tcp_quickack(&socket, false)?;
    Ok(socket.into())
}

/// Accepts until it is aborted. Survives every error: connections wait in the kernel meanwhile.
async fn accept_loop(
    shared: Arc<Shared>,
    client: Client,
    forward: Arc<ForwardState>,
    listener: Arc<TcpListener>,
) {
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => serve(&shared, &client, &forward, socket, peer),
            // ECONNABORTED and network errors concern the one connection that was to be accepted, see
            // accept(2).
            Err(error) => {
                shared.count_accept_error();
                if !is_out_of_descriptors(&error) {
                    continue;
                }
                if let Some(left_out) = shared.may_log(None) {
                    let forward = forward.listen;
                    tracing::error!(
                        %forward, %error, left_out,
                        "cannot accept: open connections go on, new ones wait in the kernel; raise the limit \
                         (ulimit -n)"
                    );
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
