//! Carries the bytes of one connection between a frontend and an agent, where `portico-tunnel`'s bridge
//! cannot: where the frontend speaks gRPC or TLS, or the agent sends packets.
//!
//! | The frontend | towards an endpoint with a stream of its own | towards one by packets |
//! |---|---|---|
//! | ends its direction (HTTP CONNECT) | END_STREAM: a real half-close | CLOSE_REQ, then what still comes |
//! | sends CLOSE_REQ (gRPC) | END_STREAM, CLOSE_RSP, RST_STREAM `NO_ERROR` | CLOSE_REQ, CLOSE_RSP |
//! | is lost | RST_STREAM | CLOSE_REQ |
//!
//! Neither direction waits for the other, and a side that is lost ends both.

use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::backend::{Opened, PacketConnection, PacketWriter};
use super::connection_end::ConnectionEnd;
use super::counters::Counted;
use super::established::Established;
use super::inbox::Ended;
use super::native::{NativeReader, NativeWriter};
use super::settings::CLOSING;

/// Most bytes of one packet to an agent: others have their turn after it.
const PACKET: usize = 64 * 1024;

/// The bytes that count as progress once a frontend takes them. One that takes 26 KB/s makes some within
/// [`CLOSING`].
const PART: usize = 256 * 1024;

/// The frontend is lost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrontendLost;

/// What comes from a frontend.
pub(crate) trait Source: Send {
    /// The next bytes; `None` at the end. What was returned before has been passed on.
    fn read(&mut self) -> impl Future<Output = Result<Option<Bytes>, FrontendLost>> + Send;

    /// Polled while the endpoint does not take the bytes read. It counts further bytes meanwhile. Ready with
    /// the reason when the connection has to end.
    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd>;

    /// Whether the frontend wants no more answers once it has ended.
    fn closes_both(&self) -> bool;
}

/// What goes to a frontend.
pub(crate) trait Sink: Send {
    /// Sends bytes, which are some.
    fn write(&mut self, bytes: Bytes) -> impl Future<Output = Result<(), FrontendLost>> + Send;

    /// Nothing more comes from the endpoint.
    fn end(&mut self) -> impl Future<Output = Result<(), FrontendLost>> + Send;

    /// Ready once the frontend is lost. Reading shows this only while the frontend is read. It is not read
    /// while the endpoint takes nothing, nor after its end.
    fn lost(&mut self) -> impl Future<Output = ()> + Send;
}

enum AgentReader {
    Packets(PacketConnection),
    Native(NativeReader),
}

enum AgentWriter {
    Packets(PacketWriter),
    Native(NativeWriter),
}

impl AgentReader {
    async fn read(&mut self) -> Result<Bytes, Ended> {
        match self {
            Self::Packets(connection) => connection.read().await,
            Self::Native(stream) => stream.read().await,
        }
    }

    /// Like [`Source::poll_ahead`], for the direction from the agent.
    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        match self {
            // The agent's task has what comes.
            Self::Packets(_) => Poll::Pending,
            Self::Native(stream) => stream.poll_ahead(cx).map(|()| ConnectionEnd::Memory),
        }
    }
}

impl AgentWriter {
    async fn write(&mut self, mut bytes: Bytes) -> Result<(), Ended> {
        match self {
            Self::Native(stream) => stream.write(bytes).await,
            Self::Packets(connection) => {
                let is_large = bytes.len() > PACKET;
                while !bytes.is_empty() {
                    let part = bytes.split_to(bytes.len().min(PACKET));
                    // One part that waits would keep the memory of all of them.
                    let part = if is_large { Bytes::copy_from_slice(&part) } else { part };
                    connection.write(part).await?;
                }
                Ok(())
            }
        }
    }

    /// Nothing more comes from the frontend.
    async fn end(&mut self) -> Result<(), Ended> {
        match self {
            Self::Native(stream) => stream.end(),
            Self::Packets(connection) => connection.close().await,
        }
    }

    /// Ready once the endpoint of a stream of its own, or its agent, is lost. Writing shows it only while
    /// there is something to write, and reading only before the endpoint's end.
    async fn lost(&mut self) -> Ended {
        match self {
            Self::Native(stream) => stream.lost().await,
            // After the endpoint's end there is no connection any more.
            Self::Packets(_) => pending().await,
        }
    }
}

/// Carries until the connection is over. `early` goes to the endpoint first. Returns whether the frontend
/// was notified in order; otherwise it is to be cut off.
pub(crate) async fn relay(
    opened: Opened,
    source: &mut impl Source,
    sink: &mut impl Sink,
    early: Bytes,
    mut established: Established,
) -> bool {
    let (pace, is_native) = (opened.pace(), matches!(opened, Opened::Native(_)));
    let (mut reader, mut writer) = match opened {
        Opened::Packets(connection) => {
            let writer = connection.writer();
            (AgentReader::Packets(connection), AgentWriter::Packets(writer))
        }
        Opened::Native(stream) => {
            let Ok(stream) = stream.answer() else {
                established.ends(ConnectionEnd::AgentLost);
                return tell(sink, ConnectionEnd::AgentLost).await;
            };
            let (reader, writer) = stream.split();
            (AgentReader::Native(reader), AgentWriter::Native(writer))
        }
    };
    let half_closes = is_native && !source.closes_both();
    let delivery = Delivery::default();
    let end = {
        let up = up(source, &mut writer, early, &established, &delivery);
        let down = down(&mut reader, sink, half_closes, &established, &delivery);
        tokio::select! {
            end = directions(up, down, is_native, &delivery) => end,
            reason = pace => reason,
        }
    };
    established.ends(end);
    // Before the frontend is notified, which may take its time. A reader's bytes are not counted meanwhile,
    // and with packets other connections wait for the window.
    drop(reader);
    if !is_native {
        drop(established);
        return tell(sink, end).await;
    }
    let notified = tell(sink, end).await;
    match &mut writer {
        // The stream ended in order. As it is dropped, h2 resets it with `NO_ERROR`, behind all that was
        // sent, if the agent has not ended its direction: nobody takes more. A frontend that has closed may
        // be gone by now, and what it sent before is on its way. One that half-closes has sent all, whichever
        // side was first; by gRPC it may still be sending.
        AgentWriter::Native(_)
            if end == ConnectionEnd::FrontendClosed
                || notified && half_closes && end == ConnectionEnd::EndpointClosed => {}
        AgentWriter::Native(stream) => stream.reset(),
        AgentWriter::Packets(_) => {}
    }
    notified
}

/// Tells a frontend that reads that its connection is over. Returns whether it was notified.
async fn tell(sink: &mut impl Sink, end: ConnectionEnd) -> bool {
    match end {
        ConnectionEnd::NotRead
        | ConnectionEnd::BufferFull
        | ConnectionEnd::Memory
        | ConnectionEnd::FrontendLost => false,
        _ => matches!(timeout(CLOSING, sink.end()).await, Ok(Ok(()))),
    }
}

/// How the direction to the endpoint ended.
enum Up {
    /// What comes back is still wanted.
    HalfClosed,
    /// The frontend wants no answer any more.
    Closed,
    Failed(ConnectionEnd),
}

async fn up(
    source: &mut impl Source,
    writer: &mut AgentWriter,
    early: Bytes,
    established: &Established,
    delivery: &Delivery,
) -> Up {
    let mut next = Ok(Some(early));
    loop {
        match next {
            Err(FrontendLost) => return Up::Failed(ConnectionEnd::FrontendLost),
            Ok(None) => break,
            Ok(Some(bytes)) => {
                let len = bytes.len();
                let written = while_ahead(|cx| source.poll_ahead(cx), writer.write(bytes));
                match counted(&established.counters().full_frontends, written).await {
                    Ok(Ok(())) => {}
                    Ok(Err(why)) => return Up::Failed(why.into()),
                    Err(reason) => return Up::Failed(reason),
                }
                established.moved(len, 0);
            }
        }
        let mut read = pin!(source.read());
        next = tokio::select! {
            biased;
            next = &mut read => next,
            why = writer.lost() => {
                delivery.lost.get_or_init(|| why.into());
                read.await
            }
        };
    }
    // CLOSE_REQ has its turn behind the bytes of others, which an agent may not take. It is the same then
    // with a frontend that left as while it wrote.
    match while_ahead(|cx| source.poll_ahead(cx), writer.end()).await {
        Err(reason) => Up::Failed(reason),
        Ok(Err(why)) => Up::Failed(why.into()),
        Ok(Ok(())) if source.closes_both() => Up::Closed,
        Ok(Ok(())) => Up::HalfClosed,
    }
}

/// Does `write`, and polls `ahead` while that waits. An error is the reason that `ahead` has for an end.
async fn while_ahead<T>(
    mut ahead: impl FnMut(&mut Context<'_>) -> Poll<ConnectionEnd>,
    write: impl Future<Output = T>,
) -> Result<T, ConnectionEnd> {
    let mut write = pin!(write);
    poll_fn(|cx| match write.as_mut().poll(cx) {
        Poll::Ready(written) => Poll::Ready(Ok(written)),
        Poll::Pending => ahead(cx).map(Err),
    })
    .await
}

/// Counts one while `work` waits.
async fn counted<T>(counter: &AtomicU64, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        return done;
    }
    let _waits = Counted::new(counter);
    work.await
}

/// How far what an endpoint sent has come.
#[derive(Default)]
struct Delivery {
    /// Messages, or [`PART`]s of them, that the frontend has taken.
    taken: AtomicU64,
    /// One is being written.
    waits: AtomicBool,
    /// All of it, and the end behind it: what the frontend sends may still be on its way.
    is_complete: AtomicBool,
    /// Why nobody would take that any more.
    lost: OnceLock<ConnectionEnd>,
}

impl Delivery {
    /// Why the connection is over once the endpoint has sent all, although the frontend sends nothing.
    fn lost_after_all(&self) -> Option<ConnectionEnd> {
        self.lost.get().copied().filter(|_| self.is_complete.load(Relaxed))
    }
}

async fn down(
    reader: &mut AgentReader,
    sink: &mut impl Sink,
    half_closes: bool,
    established: &Established,
    delivery: &Delivery,
) -> ConnectionEnd {
    loop {
        let read = tokio::select! {
            biased;
            read = reader.read() => read,
            () = sink.lost() => return ConnectionEnd::FrontendLost,
        };
        let mut bytes = match read {
            Ok(bytes) => bytes,
            Err(Ended::Closed) if half_closes => {
                if sink.end().await.is_ok() {
                    delivery.is_complete.store(true, Relaxed);
                    // Nothing else shows it while the endpoint takes nothing.
                    sink.lost().await;
                }
                return ConnectionEnd::FrontendLost;
            }
            Err(why) => return why.into(),
        };
        let (len, begun) = (bytes.len(), Instant::now());
        delivery.waits.store(true, Relaxed);
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(PART));
            match while_ahead(|cx| reader.poll_ahead(cx), sink.write(part)).await {
                Ok(Ok(())) => {}
                Ok(Err(FrontendLost)) => return ConnectionEnd::FrontendLost,
                Err(reason) => return reason,
            }
            delivery.taken.fetch_add(1, Relaxed);
        }
        delivery.waits.store(false, Relaxed);
        established.counters().frontend_written(begun.elapsed());
        established.moved(0, len);
    }
}

/// Waits for both directions, or for the one that ends the connection. Returns why it ended.
async fn directions(
    up: impl Future<Output = Up>,
    down: impl Future<Output = ConnectionEnd>,
    is_native: bool,
    delivery: &Delivery,
) -> ConnectionEnd {
    let (mut up, mut down) = (pin!(up), pin!(down));
    let up_ended = tokio::select! {
        // The bytes that a frontend sent before it was lost come first, as far as the endpoint takes them.
        biased;
        ended = &mut up => ended,
        end = &mut down => return end,
        // Polling those has set what it looks at.
        end = poll_fn(|_| delivery.lost_after_all().map_or(Poll::Pending, Poll::Ready)) => return end,
    };
    match up_ended {
        Up::Closed => ConnectionEnd::FrontendClosed,
        // The endpoint takes no more. What it sent before is still the frontend's.
        Up::Failed(reason) if is_endpoints(reason) => rest_delivered(down, delivery).await.unwrap_or(reason),
        Up::Failed(reason) => reason,
        Up::HalfClosed if delivery.is_complete.load(Relaxed) => ConnectionEnd::EndpointClosed,
        // An agent answers CLOSE_REQ soon; over a stream, the endpoint may take its time.
        Up::HalfClosed if !is_native => {
            rest_delivered(down, delivery).await.unwrap_or(ConnectionEnd::FrontendClosed)
        }
        Up::HalfClosed => delivered(down, delivery).await.unwrap_or(ConnectionEnd::FrontendClosed),
    }
}

/// Whether a connection that ends so is over at the side of the endpoint.
fn is_endpoints(end: ConnectionEnd) -> bool {
    matches!(end, ConnectionEnd::EndpointClosed | ConnectionEnd::EndpointReset | ConnectionEnd::AgentLost)
}

/// Waits until the frontend has all that the endpoint sends. Returns why it will not have all of it.
async fn delivered(
    mut down: Pin<&mut impl Future<Output = ConnectionEnd>>,
    delivery: &Delivery,
) -> Option<ConnectionEnd> {
    poll_fn(|cx| match down.as_mut().poll(cx) {
        Poll::Ready(ConnectionEnd::EndpointClosed) => Poll::Ready(None),
        Poll::Pending if delivery.is_complete.load(Relaxed) => Poll::Ready(None),
        polled => polled.map(Some),
    })
    .await
}

/// Like [`delivered`], for an endpoint that sends no more. Waits as long as the frontend takes some bytes,
/// even slowly.
async fn rest_delivered(
    mut down: Pin<&mut impl Future<Output = ConnectionEnd>>,
    delivery: &Delivery,
) -> Option<ConnectionEnd> {
    loop {
        let taken = delivery.taken.load(Relaxed);
        match timeout(CLOSING, delivered(down.as_mut(), delivery)).await {
            Ok(end) => return end,
            Err(_) if delivery.taken.load(Relaxed) > taken => {}
            // It would take what it has for all there is.
            Err(_) if delivery.waits.load(Relaxed) => return Some(ConnectionEnd::NotRead),
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::*;

    /// How a connection to an upstream agent ends whose frontend has sent all.
    async fn half_closed(delivery: &Delivery, down: impl Future<Output = ConnectionEnd>) -> ConnectionEnd {
        directions(async { Up::HalfClosed }, down, false, delivery).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_frontend_that_has_said_all_gets_its_whole_answer() {
        let delivery = Delivery::default();
        let down = async {
            for _ in 0..5 {
                delivery.waits.store(true, Relaxed);
                sleep(CLOSING.mul_f64(0.9)).await;
                delivery.waits.store(false, Relaxed);
                delivery.taken.fetch_add(1, Relaxed);
            }
            ConnectionEnd::EndpointClosed
        };
        let begun = Instant::now();
        assert_eq!(half_closed(&delivery, down).await, ConnectionEnd::FrontendClosed);
        assert!(begun.elapsed() > 4 * CLOSING);
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_endpoint_sent_before_it_took_no_more_is_delivered() {
        for reason in [ConnectionEnd::EndpointReset, ConnectionEnd::AgentLost] {
            let delivery = Delivery::default();
            let down = async {
                sleep(CLOSING.mul_f64(0.5)).await;
                delivery.taken.fetch_add(1, Relaxed);
                sleep(CLOSING.mul_f64(0.9)).await;
                reason
            };
            assert_eq!(directions(async { Up::Failed(reason) }, down, true, &delivery).await, reason);
            assert_eq!(delivery.taken.load(Relaxed), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_loss_ends_the_connection_once_the_endpoint_has_said_all() {
        let delivery = Delivery::default();
        let up = async {
            delivery.lost.get_or_init(|| ConnectionEnd::AgentLost);
            pending().await
        };
        let down = async {
            sleep(100 * CLOSING).await;
            delivery.is_complete.store(true, Relaxed);
            pending().await
        };
        let begun = Instant::now();
        assert_eq!(directions(up, down, true, &delivery).await, ConnectionEnd::AgentLost);
        assert!(begun.elapsed() >= 100 * CLOSING, "a slow frontend has its answer first");
    }

    #[tokio::test(start_paused = true)]
    async fn a_frontend_that_takes_nothing_is_not_told_that_it_has_all() {
        let delivery = Delivery::default();
        let down = async {
            delivery.waits.store(true, Relaxed);
            pending().await
        };
        assert_eq!(half_closed(&delivery, down).await, ConnectionEnd::NotRead);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_does_not_answer_the_end_is_waited_for_as_long_as_others() {
        let begun = Instant::now();
        assert_eq!(half_closed(&Delivery::default(), pending()).await, ConnectionEnd::FrontendClosed);
        assert!(begun.elapsed() < CLOSING + Duration::from_secs(1));
    }
}
