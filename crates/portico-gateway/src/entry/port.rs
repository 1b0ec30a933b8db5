//! Connections whose destination is the port they came by (NodePort): nothing to learn but, behind a load
//! balancer, the client's real address.

use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Established, carry, open};
use crate::admission::Arrival;
use crate::config::ProxyMode;
use crate::outcome::Refusal;
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
    carry(Arc::clone(&worker), Box::pin(establish(worker, stream, arrival, port)), idle, alive)
}

async fn establish(
    worker: Arc<Worker>,
    stream: TcpStream,
    mut arrival: Arrival,
    port: u16,
) -> Option<Established> {
    let mut bytes = Vec::new();
    let opened = async {
        learn_client(&worker, &stream, &mut arrival, &mut bytes).await?;
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

async fn learn_client(
    worker: &Worker,
    stream: &TcpStream,
    arrival: &mut Arrival,
    bytes: &mut Vec<u8>,
) -> Result<(), Refusal> {
    let config = &worker.shared.config;
    let mode = config.proxy_protocol.node_port;
    if mode == ProxyMode::Off {
        return Ok(());
    }
    let slot = worker.shared.start_handshake(arrival.learned.client.ip(), mode);
    let learn = arrival.read_proxy_header(&worker.shared, stream, &slot, mode, bytes);
    timeout(config.hello_timeout, learn).await.unwrap_or(Err(Refusal::TooSlow))
}
