//! The life of one connection of a pod: open a stream to a gateway, carry the bytes, leave a record.

use std::fmt::Display;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use portico_net::linger;
use portico_tunnel::client::{Client, OpenError, Stream};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::forward::ForwardState;
use crate::record::{Record, Upstream};
use crate::refusal::Refusal;
use crate::session::Session;
use crate::shared::Shared;

/// How long a connection may still be opened once the agent stops. A request that is under way is answered in
/// this time: a gateway tries three endpoints for a second each. A tunnel that is not up does not come up any
/// more.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Serves a connection that was accepted, in a task of its own.
pub(crate) fn serve(
    shared: &Arc<Shared>,
    client: &Client,
    forward: &Arc<ForwardState>,
    socket: TcpStream,
    peer: SocketAddr,
) {
    forward.count_accepted();
    let record = Record::new(shared.next_id(), peer, shared.now(), Arc::clone(forward));
    let session = Session::new(shared, record);
    if shared.is_full() {
        return refuse(
            session,
            socket,
            Refusal::TooMany,
            &"the agent carries as many connections as --max-connections allows",
        );
    }
    tokio::spawn(carry(Box::pin(open(client.clone(), session, socket))));
}

/// A connection that a gateway has opened.
struct Opened {
    stream: Stream,
    socket: TcpStream,
    session: Session,
}

/// Opening is boxed: it takes milliseconds, and a connection at rest for hours keeps only what carries bytes.
async fn carry(opening: Pin<Box<impl Future<Output = Option<Opened>> + Send>>) {
    let Some(Opened { stream, socket, session }) = opening.await else { return };
    stream.carry(socket, session).await;
}

async fn open(client: Client, session: Session, socket: TcpStream) -> Option<Opened> {
    let Some(waiting) = session.shared().wait() else {
        refuse(session, socket, Refusal::TooManyWaiting, &"too many connections wait for a gateway");
        return None;
    };
    let opened = tokio::select! {
        biased;
        // At most its first bytes are read meanwhile. The kernel reports a reset all the same.
        _ = socket.ready(Interest::ERROR) => None,
        () = stopped(session.shared()) => Some(Err(OpenError::Stopping)),
        opened = client.open_for(&session.record().forward().authority, &socket) => Some(opened),
    };
    drop(waiting);
    // The pod has reset the connection itself: nothing to tell it, and nothing to log.
    let Some(opened) = opened else {
        session.refused(Refusal::Left);
        return None;
    };
    match opened {
        Ok(stream) => {
            let endpoint = stream.endpoint();
            session.opened(Upstream { gateway: endpoint.gateway, address: endpoint.address });
            Some(Opened { stream, socket, session })
        }
        Err(error) => {
            refuse(session, socket, Refusal::from(&error), &error);
            None
        }
    }
}

/// Returns [`STOP_GRACE`] after the agent has begun to stop.
async fn stopped(shared: &Shared) {
    shared.stopping().await;
    sleep(STOP_GRACE).await;
}

/// Resets the pod's connection. Closed in order it would look like an API server that has nothing to say.
fn refuse(session: Session, socket: TcpStream, refusal: Refusal, why: &dyn Display) {
    linger::abort(&socket);
    if let Some(left_out) = session.shared().may_log(Some(refusal)) {
        let record = session.record();
        let forward = record.forward();
        tracing::warn!(
            forward = %forward.listen,
            name = %forward.authority,
            client = %record.client,
            reason = refusal.reason(),
            error = %why,
            left_out,
            "a connection was not carried"
        );
    }
    // Counted before the pod sees the reset.
    session.refused(refusal);
    drop(socket);
}
