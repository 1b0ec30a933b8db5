//! What reaches the supervisor, and how.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use h2::Reason;
use portico_dial::{ResolveError, Resolved};
use thiserror::Error;
use tokio::sync::{Notify, mpsc};

use super::backoff::Failed;
use super::tunnel::Tunnel;
use crate::cause::cause;

/// Events that may wait for the supervisor. When it is full, senders of results wait, and
/// [`Signals::changed`] sends nothing: the supervisor looks at everything after each event.
const EVENTS: usize = 64;

/// What has happened.
pub(super) enum Event {
    /// Something in the view: a tunnel changed its state or is full, or a stream waits for a tunnel. It may
    /// also be a renewed certificate, or the stop of the client.
    Changed,
    /// An attempt to connect has ended.
    Connected { attempt: AttemptId, result: Result<Connection, Failure> },
    /// The connection of a tunnel has ended.
    Closed { tunnel: Arc<Tunnel>, ended: Ended },
    /// A question to a name server has ended.
    Resolved { gateway: usize, result: Result<Resolved, ResolveError> },
}

/// One of the supervisor's attempts to connect, of which there are as many as tunnels are wanted, and one
/// more for replacements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AttemptId(pub(super) usize);

/// A connection that is up: the gateway has answered a PING.
pub(super) struct Connection {
    pub(super) tunnel: Arc<Tunnel>,
    /// To be polled until the connection ends.
    pub(super) driver: Pin<Box<dyn Future<Output = Ended> + Send>>,
}

/// Why an attempt to connect failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) how: Failed,
    pub(super) message: String,
}

/// How the connection of a tunnel ended.
#[derive(Debug, Error)]
pub(super) enum Ended {
    /// In order: GOAWAY, or we closed it.
    #[error("closed")]
    Closed,
    /// Lost, or broken by the gateway.
    #[error("{}", cause(.0))]
    Failed(#[from] h2::Error),
    /// The gateway sent nothing for this long, not even the answer to a PING.
    #[error("no sign of life for {0:.1?}")]
    Silent(Duration),
}

impl Ended {
    /// Whether the connection was closed or lost before any HTTP/2.
    pub(super) fn is_hang_up(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Failed(error) => {
                error.is_io() || error.reason() == Some(Reason::NO_ERROR) && !error.is_go_away()
            }
            Self::Silent(_) => false,
        }
    }
}

/// Reaches the supervisor, and openers that wait for a tunnel.
#[derive(Debug)]
pub(super) struct Signals {
    events: mpsc::Sender<Event>,
    /// Notified when a tunnel comes up, comes back, or is no longer full. Wakes all: several streams that end
    /// in one turn leave room for as many, and only the first of them finds the tunnel full.
    pub(super) available: Notify,
}

impl Signals {
    pub(super) fn new() -> (Arc<Self>, mpsc::Receiver<Event>) {
        let (events, receiver) = mpsc::channel(EVENTS);
        (Arc::new(Self { events, available: Notify::new() }), receiver)
    }

    /// Has the supervisor look at the view.
    pub(super) fn changed(&self) {
        // Fails if other events wait, after which the supervisor looks, or if it has ended.
        let _ = self.events.try_send(Event::Changed);
    }

    /// Sends the result of a task.
    pub(super) async fn send(&self, event: Event) {
        // Fails if the supervisor has ended.
        let _ = self.events.send(event).await;
    }

    /// Returns once the supervisor has ended.
    pub(super) async fn supervisor_ended(&self) {
        self.events.closed().await;
    }
}
