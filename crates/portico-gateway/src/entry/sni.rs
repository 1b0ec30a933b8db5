//! Connections that say by their ClientHello where they want to go (RFC 6066, section 3). TLS is passed
//! through, never terminated: the bytes that were read go to the endpoint unchanged.

use std::sync::Arc;
use std::time::Duration;

use portico_api::names::HostName;
use portico_net::slots::Slot;
use portico_net::stream::send_some;
use portico_wire::{Parse, alert, hello};
use rustix::net::Shutdown;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connect::{self, Welcomed};
use super::{Established, carry, open};
use crate::admission::Arrival;
use crate::config::ProxyMode;
use crate::first_bytes::{discard_rest, read_more};
use crate::outcome::Refusal;
use crate::session::Session;
use crate::shared::Alive;
use crate::worker::Worker;

/// How long a refused client may take to fetch the alert. Closing before it has would reset the connection,
/// and with it the alert.
const ALERT_GRACE: Duration = Duration::from_secs(1);

/// Where the first bytes lead.
enum Way {
    /// Through, to the route of its name.
    Through,
    /// To the tunnel, on a port that serves both.
    Tunnel,
}

/// What follows once that is known.
enum Next {
    /// The bytes are carried to this endpoint.
    Carry(Session, TcpStream),
    /// The client asks the tunnel, which has the slot until it knows for what.
    Tunnel(Slot),
}

/// Serves a connection to the SNI listener until it ends.
pub(crate) fn serve(
    worker: Arc<Worker>,
    stream: TcpStream,
    arrival: Arrival,
    alive: Alive,
) -> impl Future<Output = ()> + Send {
    let idle = worker.shared.config.idle.sni;
    carry(Box::pin(establish(worker, stream, arrival)), idle, alive)
}

async fn establish(worker: Arc<Worker>, stream: TcpStream, mut arrival: Arrival) -> Option<Established> {
    let mut bytes = Vec::new();
    // For the alert; of the hello once there is one.
    let mut tls_version = 0x0303;
    let opened = async {
        let config = &worker.shared.config;
        let slot = worker.shared.start_handshake(arrival.learned.client.ip(), config.proxy_protocol.sni);
        let learn = learn_hello(&worker, &stream, &slot, &mut arrival, &mut bytes, &mut tls_version);
        let learnt = timeout(config.hello_timeout, learn).await;
        if let Way::Tunnel = learnt.unwrap_or(Err(Refusal::TooSlow))? {
            return Ok(Next::Tunnel(slot));
        }
        drop(slot);
        // Fails only for a client that is gone, and then no one reads the header.
        let local = || stream.local_addr().unwrap_or(arrival.learned.client);
        let (session, upstream) = open(&worker, &arrival.learned, local, true, &mut bytes, None).await?;
        Ok(Next::Carry(session, upstream))
    }
    .await;
    let refusal = match opened {
        Ok(Next::Carry(session, upstream)) => {
            let (downstream, upstream) = (stream.into(), upstream.into());
            return Some(Established { session, downstream, upstream, first: bytes });
        }
        Ok(Next::Tunnel(slot)) => {
            // Boxed by itself: connections that are passed through must not carry its room.
            let welcomed = Welcomed { arrival, slot, first: bytes };
            Box::pin(connect::serve_welcomed(worker, stream, welcomed)).await;
            return None;
        }
        Err(refusal) => refusal,
    };
    let client = arrival.learned.client.ip();
    arrival.learned.refuse(&worker.shared, refusal);
    drop(arrival);
    if let Some(description) = refusal.alert() {
        let alert = alert::fatal(description, tls_version);
        let slot = worker.shared.start_handshake(client, ProxyMode::Off);
        let _elapsed = timeout(ALERT_GRACE, send_alert(&stream, &slot, &alert)).await;
    }
    None
}

/// Reads until the ClientHello is complete, and looks up its name. All that was read of the client's own
/// bytes ends up in `bytes`.
async fn learn_hello(
    worker: &Worker,
    stream: &TcpStream,
    slot: &Slot,
    arrival: &mut Arrival,
    bytes: &mut Vec<u8>,
    tls_version: &mut u16,
) -> Result<Way, Refusal> {
    let shared = &worker.shared;
    let config = &shared.config;
    arrival.read_proxy_header(shared, stream, slot, config.proxy_protocol.sni, bytes).await?;
    let mut progress = hello::Progress::default();
    loop {
        if !bytes.is_empty() {
            match progress.parse(bytes) {
                Parse::Complete(hello) => {
                    *tls_version = hello.legacy_version;
                    if config.shared_port && leads_to_tunnel(worker, &hello) {
                        return Ok(Way::Tunnel);
                    }
                    let name = hello.server_name.ok_or(Refusal::NoServerName)?;
                    return arrival.learned.look_up_host(shared, &name).map(|()| Way::Through);
                }
                // Whether it is HTTP, the tunnel finds out.
                Parse::Malformed(_) if config.shared_port && config.tunnel.plaintext && !is_tls(bytes) => {
                    return Ok(Way::Tunnel);
                }
                Parse::Malformed(_) => return Err(Refusal::Malformed),
                Parse::NeedMore if bytes.len() >= hello::MAX_HELLO => return Err(Refusal::Malformed),
                Parse::NeedMore => {}
            }
        }
        read_more(stream, slot, bytes, hello::MAX_HELLO).await?;
    }
}

/// On a port that serves both: whether a hello is for the gateway itself. Agents say so by ALPN. Otherwise
/// the server name decides: a route's name leads to its cluster, a name of the gateway's certificate to the
/// gateway. A hello without a name has not asked for a route.
fn leads_to_tunnel(worker: &Worker, hello: &hello::ClientHello<'_>) -> bool {
    let Some(tls) = &worker.shared.config.tunnel.tls else { return false };
    if hello.alpn.iter().any(|protocol| protocol == portico_tunnel::ALPN) {
        return true;
    }
    match hello.server_name.as_deref().map(HostName::parse) {
        None => true,
        Some(Err(_)) => false,
        Some(Ok(name)) => {
            !worker.shared.route_store.routes().hosts.contains_key(&name) && tls.is_named(name.as_str())
        }
    }
}

/// Whether the first byte begins a TLS record.
fn is_tls(bytes: &[u8]) -> bool {
    const HANDSHAKE: u8 = 22;
    bytes.first() == Some(&HANDSHAKE)
}

/// Sends `alert`, closes our direction and reads what the client still sends, so that closing does not become
/// a reset. A client that does not fetch it holds a slot meanwhile, as one that says nothing does.
async fn send_alert(stream: &TcpStream, slot: &Slot, alert: &[u8]) {
    if stream.writable().await.is_err()
        || send_some(stream, alert).is_err()
        || rustix::net::shutdown(stream, Shutdown::Write).is_err()
    {
        return;
    }
    discard_rest(stream, slot).await;
}
