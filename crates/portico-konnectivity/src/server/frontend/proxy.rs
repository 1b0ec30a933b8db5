//! gRPC: one Proxy stream of a frontend carries one connection.
//!
//! A stream goes through three states: it waits for DIAL_REQ, it dials, it carries. Connections have numbers
//! of the server's own towards frontends. The frontend's number of the dial is what it gets back. Every
//! CLOSE_REQ is answered by CLOSE_RSP, for which kube-apiserver waits ten seconds.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, Request};
use portico_net::slots::Slot;
use portico_tunnel::connection::Activity;
use portico_wire::konnectivity::{Code, ConnectId, DataHead, DialId, PROXY_PATH, Packet};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout, timeout_at};

use crate::grpc::{Call, Error, Message, Receiver, Sender, Status};
use crate::server::backend::Opened;
use crate::server::connection_end::ConnectionEnd;
use crate::server::counters::{Counted, Segment};
use crate::server::established::Established;
use crate::server::http2::{self, Limits, OpenStream, Peer};
use crate::server::relay::{FrontendLost, Sink, Source, relay};
use crate::server::settings::{ANSWER, CLOSING, FRONTEND_STREAMS, PING_TIMEOUT, REQUEST};
use crate::server::shared::Shared;

/// Largest window of a Proxy stream, and so what a frontend may send before its endpoint takes it.
const WINDOW: u32 = 256 * 1024;

/// Most bytes of one packet to a frontend, which ends its tunnel for one of over 4 MiB.
const MOST_DATA: usize = 1 << 20;

/// Serves an HTTP/2 connection of a frontend. It has `slot` until it has asked for something.
pub(crate) async fn serve<S>(shared: Arc<Shared>, stream: S, slot: Slot)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let activity = Arc::new(Activity::within(&shared.memory, shared.memory.limit()));
    let peer = Arc::new(Peer::new(slot));
    let limits = Limits {
        streams: FRONTEND_STREAMS,
        stream_window: WINDOW,
        ping: (shared.settings.frontend_keepalive, PING_TIMEOUT),
        deadline: Instant::now() + REQUEST,
        idle: Some(REQUEST),
    };
    let start = |request: Request<RecvStream>, respond: SendResponse<Bytes>| {
        // Unless it is served.
        peer.refused.fetch_add(1, Relaxed);
        let Some(call) = Call::accept(request, respond) else { return };
        if call.path() != PROXY_PATH {
            return call.refuse(&Status::new(Code::UNIMPLEMENTED, "only ProxyService/Proxy is served here"));
        }
        peer.refused.store(0, Relaxed);
        peer.accept();
        tokio::spawn(stream_of(Arc::clone(&shared), call, Arc::clone(&activity), OpenStream::of(&peer)));
    };
    if let Err(error) = http2::serve(stream, limits, &activity, &peer, start, shared.stopped()).await {
        tracing::debug!(%error, "a frontend's connection ended");
    }
}

/// The task of one Proxy stream.
async fn stream_of(shared: Arc<Shared>, call: Call, activity: Arc<Activity>, _open: OpenStream) {
    let _counted = Counted::new(&shared.counters.proxy_streams);
    let memory = [shared.memory.clone()];
    let Ok((sender, receiver)) = call.start(HeaderMap::new(), &activity, &memory) else { return };
    let mut frontend = Frontend { shared: &shared, sender, receiver };
    // Boxed: a connection at rest does not keep the memory that opening needs.
    let Some(dial) = Box::pin(frontend.asked()).await else { return frontend.finish().await };
    let Some((opened, mut established)) = Box::pin(frontend.dial(&dial)).await else {
        return frontend.finish().await;
    };
    let connection = shared.next_connection();
    let (answer, begun) =
        (Packet::DialResponse { dial: dial.random, result: Ok(connection) }, Instant::now());
    let is_notified = tokio::select! {
        sent = timeout(ANSWER, frontend.send(&answer)) => matches!(sent, Ok(Ok(()))),
        // Bytes that the endpoint sends meanwhile must not hold up other connections of the agent.
        reason = opened.pace() => {
            established.ends(reason);
            false
        }
        () = shared.stopped() => false,
    };
    if !is_notified {
        return shared.counters.dial_failed("send_rsp");
    }
    shared.counters.frontend_written(begun.elapsed());
    let Frontend { sender, receiver, .. } = frontend;
    let mut source = Packets { shared: &shared, connection, receiver, unreleased: 0, is_over: false };
    let mut sink = Answers { shared: &shared, connection, sender };
    let notified = tokio::select! {
        notified = relay(opened, &mut source, &mut sink, Bytes::new(), established) => notified,
        () = shared.stopped() => false,
    };
    if notified {
        finish(sink.sender).await;
    }
}

/// What a frontend asks for.
struct Dial {
    address: String,
    random: DialId,
}

/// A stream that carries nothing yet.
struct Frontend<'a> {
    shared: &'a Arc<Shared>,
    sender: Sender,
    receiver: Receiver,
}

impl Frontend<'_> {
    /// Waits for DIAL_REQ. `None`: the stream is over.
    async fn asked(&mut self) -> Option<Dial> {
        let deadline = Instant::now() + REQUEST;
        loop {
            match timeout_at(deadline, self.packet()).await.ok()?? {
                Packet::DialRequest { protocol, address, dial } if protocol == "tcp" => {
                    return Some(Dial { address, random: dial });
                }
                Packet::DialRequest { protocol, dial, .. } => {
                    let error = format!("dial: unknown network {protocol}");
                    return self.end_with(Packet::DialResponse { dial, result: Err(error) }).await;
                }
                Packet::Data { connection, .. } => {
                    let error = "backend not initialized".to_owned();
                    return self.end_with(Packet::CloseResponse { connection, error }).await;
                }
                Packet::CloseRequest(connection) => {
                    let error = "backend uninitialized".to_owned();
                    return self.end_with(Packet::CloseResponse { connection, error }).await;
                }
                Packet::CloseDial(_) => return None,
                _ => {}
            }
        }
    }

    /// Has an agent connect. `None`: the frontend got an error that gives the reason, or is gone.
    async fn dial(&mut self, dial: &Dial) -> Option<(Opened, Established)> {
        let shared = Arc::clone(self.shared);
        let dialled = tokio::select! {
            dialled = shared.dial(&dial.address) => dialled,
            () = self.cancelled(dial.random) => return None,
            () = shared.stopped() => return None,
        };
        match dialled {
            Ok((opened, backend)) => Some((opened, Established::new(&shared, &dial.address, backend))),
            Err(error) => {
                let result = Err(error.to_string());
                self.end_with(Packet::DialResponse { dial: dial.random, result }).await
            }
        }
    }

    /// Ready when the frontend does not wait for the dial any more.
    async fn cancelled(&mut self, random: DialId) {
        while let Some(packet) = self.packet().await {
            match packet {
                Packet::CloseDial(dial) if dial == random => return,
                Packet::CloseRequest(_) => return,
                _ => {}
            }
        }
    }

    /// The next packet; `None` if there will be none.
    async fn packet(&mut self) -> Option<Packet> {
        let message = receive(self.shared, &mut self.receiver).await.ok()??;
        self.receiver.release(message.window);
        let packet = Packet::decode(&message.bytes).ok()?;
        self.shared.counters.packet(Segment::FromClient, &packet);
        Some(packet)
    }

    async fn send(&mut self, packet: &Packet) -> Result<(), FrontendLost> {
        send(self.shared, &mut self.sender, packet).await
    }

    /// Sends the last packet, and reads what still comes until the frontend ends the stream.
    async fn end_with<T>(&mut self, packet: Packet) -> Option<T> {
        let sent_and_ended = async {
            if self.send(&packet).await.is_ok() {
                while self.packet().await.is_some() {}
            }
        };
        // A frontend that does not end it within this time gets the status all the same.
        let _ = timeout(CLOSING, sent_and_ended).await;
        None
    }

    async fn finish(self) {
        finish(self.sender).await;
    }
}

/// The next message; `None` at the end of the stream.
async fn receive(shared: &Shared, receiver: &mut Receiver) -> Result<Option<Message>, FrontendLost> {
    receiver.message().await.map_err(|error| {
        shared.counters.stream_failed(Segment::FromClient, &error, "Unknown");
        FrontendLost
    })
}

async fn send(shared: &Shared, sender: &mut Sender, packet: &Packet) -> Result<(), FrontendLost> {
    shared.counters.packet(Segment::ToClient, packet);
    write(shared, sender, &packet.encoded(), Bytes::new(), packet.type_name()).await
}

/// Sends a message, head and payload, once the one before is on its way.
async fn write(
    shared: &Shared,
    sender: &mut Sender,
    head: &[u8],
    payload: Bytes,
    packet: &'static str,
) -> Result<(), FrontendLost> {
    let written = async {
        sender.ready().await?;
        sender.send(head, payload);
        sender.ready().await
    };
    written.await.map_err(|error| {
        shared.counters.stream_failed(Segment::ToClient, &error, packet);
        FrontendLost
    })
}

async fn finish(mut sender: Sender) {
    // Fails only if the frontend is gone.
    if matches!(timeout(CLOSING, sender.ready()).await, Ok(Ok(()))) {
        let _ = sender.finish(&Status::ok());
    }
}

/// What the frontend sends on an established connection.
struct Packets<'a> {
    shared: &'a Arc<Shared>,
    connection: ConnectId,
    receiver: Receiver,
    /// Window of what was read last and is passed on once more is asked for.
    unreleased: usize,
    is_over: bool,
}

impl Source for Packets<'_> {
    async fn read(&mut self) -> Result<Option<Bytes>, FrontendLost> {
        self.receiver.release(std::mem::take(&mut self.unreleased));
        while !self.is_over {
            let message = receive(self.shared, &mut self.receiver).await?.ok_or(FrontendLost)?;
            let packet = Packet::decode(&message.bytes).map_err(|_| FrontendLost)?;
            self.shared.counters.packet(Segment::FromClient, &packet);
            match packet {
                Packet::Data { connection, payload }
                    if connection == self.connection && !payload.is_empty() =>
                {
                    self.unreleased = message.window;
                    return Ok(Some(payload));
                }
                // A stream has one connection: one that names another is confused, and ends.
                Packet::Data { connection, .. } if connection != self.connection && connection.0 != 0 => {
                    self.is_over = true;
                }
                Packet::CloseRequest(_) | Packet::CloseDial(_) => self.is_over = true,
                _ => {}
            }
            self.receiver.release(message.window);
        }
        Ok(None)
    }

    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        self.receiver.poll_ahead(cx).map(|error| {
            self.shared.counters.stream_failed(Segment::FromClient, &error, "Unknown");
            if matches!(error, Error::Memory) { ConnectionEnd::Memory } else { ConnectionEnd::FrontendLost }
        })
    }

    fn closes_both(&self) -> bool {
        true
    }
}

/// What the frontend gets on an established connection.
struct Answers<'a> {
    shared: &'a Arc<Shared>,
    connection: ConnectId,
    sender: Sender,
}

impl Sink for Answers<'_> {
    async fn write(&mut self, mut bytes: Bytes) -> Result<(), FrontendLost> {
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(MOST_DATA));
            self.shared.counters.data_packet(Segment::ToClient);
            let head = DataHead::new(self.connection, part.len());
            write(self.shared, &mut self.sender, head.as_bytes(), part, "DATA").await?;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), FrontendLost> {
        let packet = Packet::CloseResponse { connection: self.connection, error: String::new() };
        send(self.shared, &mut self.sender, &packet).await
    }

    async fn lost(&mut self) {
        // A reset, or the end of the connection below.
        let _ = poll_fn(|cx| self.sender.poll_reset(cx)).await;
    }
}
