//! Connections whose destination is the port they came by (NodePort): nothing to learn but, behind a load
//! balancer, the client's real address.

use std::sync::Arc;

use tokio::net::TcpStream;

use super::{Established, carry, open};
use crate::admission::Arrival;
use crate::config::ProxyMode;
use crate::shared::Alive;
use crate::worker::Worker;

/// Serves a connection to a NodePort until it ends.
pub(crate) fn serve(
    worker: Arc<Worker>,
    stream: TcpStream,
    arrival: Arrival,
    port: u16,
    alive: Alive,
) -> impl Future<Output = ()> + Send {
    let idle = worker.shared.config.idle.node_port;
    carry(Box::pin(establish(worker, stream, arrival, port)), idle, alive)
}

async fn establish(
    worker: Arc<Worker>,
    stream: TcpStream,
    mut arrival: Arrival,
    port: u16,
) -> Option<Established> {
    let mut bytes = Vec::new();
    let opened = async {
        let mode = worker.shared.config.proxy_protocol.node_port;
        if mode != ProxyMode::Off {
            // Nothing more is to be learned: the slot is for the next one.
            drop(arrival.learn_client(&worker.shared, &stream, mode, &mut bytes).await?);
        }
        arrival.learned.look_up_port(&worker.shared, port);
        // Fails only for a client that is gone, and then no one reads the header.
        let local = || stream.local_addr().unwrap_or(arrival.learned.client);
        // No byte is awaited, since the server may speak first.
        open(&worker, &arrival.learned, local, false, &mut bytes, None).await
    }
    .await;
    match opened {
        Ok((session, upstream)) => {
            Some(Established { session, downstream: stream.into(), upstream: upstream.into(), first: bytes })
        }
        Err(refusal) => {
            arrival.learned.refuse(&worker.shared, refusal);
            None
        }
    }
}
