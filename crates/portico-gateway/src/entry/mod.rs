//! The ways in. [`listen`] accepts; [`sni`], [`port`] and [`connect`] learn where a client wants to go.
//!
//! From there on all three are the same: [`open`] admits the client, connects it to an endpoint and opens its
//! session. The bytes of [`sni`] and [`port`] are then carried by [`carry`]; those of CONNECT streams by
//! `portico-tunnel`.

pub(crate) mod connect;
pub(crate) mod listen;
pub(crate) mod port;
pub(crate) mod sni;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use portico_net::{Meter, Stream, copy};
use tokio::net::TcpStream;

use crate::admission::Learned;
use crate::auth::Credential;
use crate::outcome::Refusal;
use crate::record::{Listener, Record, State};
use crate::session::Session;
use crate::shared::Alive;
use crate::upstream::Connected;
use crate::worker::Worker;

/// Both ends of a connection, and the session that counts it.
struct Established {
    session: Session,
    downstream: Stream,
    upstream: Stream,
    /// What goes to the upstream before all else.
    first: Vec<u8>,
}

/// A connection that is being established. In a box of its own: it is needed for milliseconds, the connection
/// may live for hours. Yields nothing for a client that was refused, or served as a tunnel.
type Establishing<F> = Pin<Box<F>>;

/// Admits a client, connects it to an endpoint and opens its session. `bytes` are what the client sent
/// already; a PROXY header goes before them if the Service asks for one. What the endpoint has not taken of
/// them stays in `bytes`.
async fn open(
    worker: &Arc<Worker>,
    learned: &Learned,
    local: impl FnOnce() -> SocketAddr,
    client_first: bool,
    bytes: &mut Vec<u8>,
    credential: Option<Arc<Credential>>,
) -> Result<(Session, TcpStream), Refusal> {
    let admitted = learned.admit(&worker.shared)?;
    if admitted.upstream.backend().send_proxy {
        bytes.splice(..0, learned.proxy_header(local()));
    }
    let Connected { stream, endpoint, sent } = admitted.connect(&worker.shared, client_first, bytes).await?;
    // An accepted connection holds a promise of this descriptor. A CONNECT request holds none.
    if learned.listener == Listener::Tunnel && worker.shared.descriptors.run_short(stream.as_fd()) {
        return Err(Refusal::OutOfDescriptors);
    }
    let record = Record {
        id: learned.id,
        listener: learned.listener,
        client: learned.client,
        name: learned.name.clone(),
        upstream: admitted.upstream,
        accepted: learned.accepted,
        credential,
        endpoint,
        _open: admitted.open,
        state: State::default(),
    };
    let session = Session::open(worker, record);
    session.record().count_up(sent);
    // The room of a hello would stay for the hours of a watch.
    *bytes = bytes.split_off(sent);
    Ok((session, stream))
}

/// Carries the bytes of a connection from when it is established until it ends.
async fn carry(
    establishing: Establishing<impl Future<Output = Option<Established>> + Send>,
    idle: Option<Duration>,
    alive: Alive,
) {
    let Some(Established { mut session, downstream, upstream, first }) = establishing.await else { return };
    let end = copy(&downstream, &upstream, first, &mut session, idle).await;
    session.ended(end);
    // The sockets are closed before the gateway may count this connection as ended.
    drop((downstream, upstream, alive));
}
