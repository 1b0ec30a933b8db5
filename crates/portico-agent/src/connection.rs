//! The life of one connection of a pod: open a stream, carry the bytes, leave a record.
//!
//! A connection rests for hours, by the thousand, and what it needs to be opened it needs for milliseconds: so that part is boxed, and
//! what remains is the future that carries bytes.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use portico_tunnel::client::{Client, Stream};
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::record::{Entry, Record};
use crate::refusal::Refusal;
use crate::shared::{ForwardState, Shared};

/// Serves a connection that was accepted.
pub(crate) fn serve(
    shared: &Arc<Shared>,
    client: &Client,
    forward: &Arc<ForwardState>,
    socket: TcpStream,
    peer: SocketAddr,
) {
    forward.accepted.fetch_add(1, Relaxed);
    let record = Record::new(shared.next_id(), peer, shared.now(), Arc::clone(forward));
    let entry = Entry::new(shared, record);
    if shared.is_full() {
        return refuse(
            entry,
            socket,
            Refusal::TooMany,
            &"the agent carries as many connections as --max-connections allows",
        );
    }
    tokio::spawn(carry(Box::pin(open(client.clone(), entry, socket))));
}

/// What was opened.
struct Opened {
    stream: Stream,
    socket: TcpStream,
    entry: Entry,
}

async fn carry(opening: Pin<Box<impl Future<Output = Option<Opened>> + Send>>) {
    let Some(Opened { stream, socket, entry }) = opening.await else { return };
    stream.carry(socket, entry).await;
}

async fn open(client: Client, entry: Entry, socket: TcpStream) -> Option<Opened> {
    let Some(waiting) = entry.shared().wait() else {
        refuse(entry, socket, Refusal::TooManyWaiting, &"too many connections wait for a gateway");
        return None;
    };
    let opened = tokio::select! {
        biased;
        // Nobody reads the socket meanwhile; a reset is told without that.
        _ = socket.ready(Interest::ERROR) => None,
        opened = client.open(&entry.record().forward().authority) => Some(opened),
    };
    drop(waiting);
    // The pod knows why.
    let Some(opened) = opened else {
        entry.refused(Refusal::Left);
        return None;
    };
    match opened {
        Ok(stream) => {
            entry.opened(stream.endpoint());
            Some(Opened { stream, socket, entry })
        }
        Err(error) => {
            refuse(entry, socket, Refusal::from(&error), &error);
            None
        }
    }
}

/// Resets the pod's connection: closed in order it would look like an API server that has nothing to say.
fn refuse(entry: Entry, socket: TcpStream, refusal: Refusal, why: &dyn std::fmt::Display) {
    // Fails only for a socket that is gone.
    let _ = socket.set_zero_linger();
    if let Some(untold) = entry.shared().may_complain(Some(refusal)) {
        let record = entry.record();
        let forward = record.forward();
        tracing::warn!(
            forward = %forward.listen,
            name = %forward.authority,
            client = %record.client,
            reason = refusal.reason(),
            error = %why,
            untold,
            "a connection was not carried"
        );
    }
    // Counted before the pod knows.
    entry.refused(refusal);
    drop(socket);
}
