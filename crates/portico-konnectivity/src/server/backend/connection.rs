//! One connection of an agent whose bytes come and go in packets, for the task that carries them.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use h2::FlowControl;
use portico_wire::konnectivity::{ConnectId, Packet};

use super::{Backend, Item};
use crate::server::connection_end::ConnectionEnd;
use crate::server::inbox::{Ended, Inbox};

/// A connection of an agent whose bytes come in packets. Dropped, it is closed.
#[derive(Debug)]
pub(crate) struct PacketConnection {
    backend: Arc<Backend>,
    id: ConnectId,
    inbox: Arc<Inbox>,
    window: FlowControl,
    close_sent: Arc<AtomicBool>,
}

impl PacketConnection {
    pub(super) fn new(backend: Arc<Backend>, id: ConnectId, inbox: Arc<Inbox>) -> Self {
        let window = backend.window.clone();
        Self { backend, id, inbox, window, close_sent: Arc::default() }
    }

    /// The next bytes, or why there are none.
    pub(crate) async fn read(&mut self) -> Result<Bytes, Ended> {
        let (bytes, window) = poll_fn(|cx| self.inbox.poll_take(cx)).await?;
        // Fails only once the stream is closed.
        let _ = self.window.release_capacity(window);
        Ok(bytes)
    }

    /// Lets the agent go on while the frontend is behind. Returns why the connection has to end, when it has
    /// to.
    pub(crate) fn pace(&self) -> impl Future<Output = ConnectionEnd> + use<> {
        let (inbox, window) = (Arc::clone(&self.inbox), self.window.clone());
        let shared = Arc::clone(&self.backend.shared);
        async move {
            let give_back = |bytes| {
                // Fails only once the stream is closed.
                let _ = window.clone().release_capacity(bytes);
            };
            inbox.pace(&shared.counters.full_agents, give_back).await
        }
    }

    /// A handle for the direction to the agent.
    pub(crate) fn writer(&self) -> PacketWriter {
        let (backend, close_sent) = (Arc::clone(&self.backend), Arc::clone(&self.close_sent));
        PacketWriter { id: self.id, backend, close_sent }
    }
}

impl Drop for PacketConnection {
    fn drop(&mut self) {
        let mut state = self.backend.state();
        let was_open = state.connections.remove(&self.id).is_some();
        if was_open {
            state.closing.insert(self.id);
        }
        drop(state);
        // Fails only once the stream is closed.
        let _ = self.window.release_capacity(self.inbox.take_owed());
        if was_open && !self.close_sent.load(Relaxed) {
            self.backend.send(Packet::CloseRequest(self.id));
        }
    }
}

/// The direction to the agent.
#[derive(Debug)]
pub(crate) struct PacketWriter {
    id: ConnectId,
    backend: Arc<Backend>,
    close_sent: Arc<AtomicBool>,
}

impl PacketWriter {
    /// Queues bytes, in turn with other connections. An error: the agent is gone.
    pub(crate) async fn write(&mut self, payload: Bytes) -> Result<(), Ended> {
        let permit = self.backend.data.reserve().await.map_err(|_| Ended::AgentLost)?;
        permit.send((self.id, Item::Bytes(self.backend.activity.counted(payload))));
        Ok(())
    }

    /// Closes the connection, behind all that was written. What the endpoint has sent still comes.
    pub(crate) async fn close(&mut self) -> Result<(), Ended> {
        self.backend.data.send((self.id, Item::Close)).await.map_err(|_| Ended::AgentLost)?;
        self.close_sent.store(true, Relaxed);
        Ok(())
    }
}
