//! TCP: a banner to each peer, and one request for the way back.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::shared::Shared;
use crate::check::{datagram, tcp, unix_millis};
use crate::observation::Observation;
use crate::probe::{Banner, LONGEST_LINE, Line, parse_back};
use crate::transport::Transport;

/// Connections that the kernel accepts ahead of us.
const BACKLOG: i32 = 64;

/// After a failed accept(2): descriptors are out, and trying at once would burn the core.
const ACCEPT_REST: Duration = Duration::from_millis(100);

pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), None)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Connections of a run before this one do not count.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>) -> io::Error {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => accepted(stream, peer.ip().to_canonical(), &shared),
            Err(error) => {
                tracing::warn!(%error, "the responder cannot accept a connection");
                sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// A stranger's connection is closed at once, and so is one too many. A check then knows that the port is
/// open.
fn accepted(stream: TcpStream, peer: IpAddr, shared: &Arc<Shared>) {
    if !shared.knows(peer) {
        return;
    }
    let Ok(permit) = Arc::clone(&shared.connections).try_acquire_owned() else {
        shared.counts.over_bounds.fetch_add(1, Relaxed);
        return;
    };
    shared.counts.answered.fetch_add(1, Relaxed);
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let limit = shared.bounds.connection;
        // A peer that is gone, or too slow, is no loss.
        let _ = timeout(limit, converse(stream, peer, &shared)).await;
        drop(permit);
    });
}

async fn converse(mut stream: TcpStream, peer: IpAddr, shared: &Shared) -> io::Result<()> {
    let banner = Banner { unix_millis: unix_millis(), silent: shared.silent.clone() };
    stream.write_all(banner.to_string().as_bytes()).await?;
    let mut bytes = Vec::with_capacity(LONGEST_LINE);
    loop {
        match parse_back(&bytes) {
            Line::Complete(transport) => {
                let seen = try_back(peer, transport, shared).await;
                let line = serde_json::to_string(&seen)? + "\n";
                return stream.write_all(line.as_bytes()).await;
            }
            Line::NeedMore => {}
            Line::Other => return Ok(()),
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    }
}

/// The handshake has proven that the peer has its address, so nobody else can be made a target.
async fn try_back(peer: IpAddr, transport: Transport, shared: &Shared) -> Observation {
    if !shared.may_try.contains(&transport) {
        return Observation::not_tried(format_args!(
            "the other side's inventory or model has no {transport} towards us"
        ));
    }
    match transport {
        Transport::Tcp(port) => tcp::check(SocketAddr::new(peer, port), shared.limits).await.seen,
        Transport::Udp(_) | Transport::IpInIp => datagram::check(peer, transport, shared.limits).await,
    }
}
