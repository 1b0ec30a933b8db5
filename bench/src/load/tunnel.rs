//! Tunnels: streams opened by HTTP/2 CONNECT with prior knowledge, as node agents open them.
//!
//! A stream is open when the gateway has answered 200; then it carries the same hello and the same exchanges as a plain
//! connection. Built on the `h2` crate, on one thread.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{Method, Request, StatusCode, Uri};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};

use super::Work;
use super::pingpong::MESSAGE_BYTES;
use crate::backend::ANSWER_BYTES;
use crate::hello::{Order, client_hello};
use crate::site::Cluster;

/// Window of a stream and of a connection: large enough that the load is never what a transfer waits for.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;
/// Length of one bulk transfer, as on the plain path.
const TRANSFER: u64 = 64 << 20;
/// Data handed to HTTP/2 at a time; it cuts them into frames as the gateway allows.
const CHUNK: usize = 64 * 1024;

/// One HTTP/2 connection to a gateway; ends when dropped.
pub(crate) struct Connection {
    requests: SendRequest<Bytes>,
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    /// Connects and exchanges settings.
    pub(crate) async fn open(gateway: SocketAddrV4) -> Result<Self> {
        let socket =
            TcpStream::connect(gateway).await.with_context(|| format!("cannot connect to {gateway}"))?;
        socket.set_nodelay(true).context("cannot set TCP_NODELAY")?;
        let (requests, connection) = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake(socket)
            .await
            .with_context(|| format!("no HTTP/2 at {gateway}"))?;
        // A connection that breaks shows in its streams.
        let driver = tokio::spawn(async move { drop(connection.await) });
        Ok(Self { requests, driver })
    }

    /// Opens a stream to the cluster and exchanges the hello.
    pub(crate) async fn stream(&self, cluster: &Cluster, order: Order) -> Result<Stream> {
        let authority = cluster.authority.as_str();
        let uri = Uri::builder().authority(authority).build().context("an authority makes a URI")?;
        let request =
            Request::builder().method(Method::CONNECT).uri(uri).body(()).context("a CONNECT request")?;
        let mut requests =
            self.requests.clone().ready().await.context("the gateway takes no more streams")?;
        let (answer, mut out) = requests.send_request(request, false).context("cannot send CONNECT")?;
        let answer = answer.await.with_context(|| format!("CONNECT {authority} got no answer"))?;
        ensure!(answer.status() == StatusCode::OK, "CONNECT {authority} got {}", answer.status());
        out.send_data(client_hello(&cluster.host, order).into(), false).context("cannot send the hello")?;
        let mut stream = Stream { out, back: answer.into_body(), early: 0 };
        stream.take(ANSWER_BYTES as u64).await.context("no answer to the hello")?;
        Ok(stream)
    }
}

/// An open stream whose hello has been answered.
pub(crate) struct Stream {
    out: SendStream<Bytes>,
    back: RecvStream,
    /// Bytes received that nobody has asked for yet.
    early: u64,
}

impl Stream {
    /// Sends one message and waits for its echo.
    pub(crate) async fn round_trip(&mut self) -> Result<()> {
        self.out
            .send_data(Bytes::from_static(&[0x17; MESSAGE_BYTES]), false)
            .context("cannot send a message")?;
        self.take(MESSAGE_BYTES as u64).await
    }

    /// Ends our half and waits for the other.
    pub(crate) async fn end(mut self) -> Result<()> {
        self.out.send_data(Bytes::new(), true).context("cannot end a stream")?;
        while let Some(data) = self.back.data().await {
            let data = data.context("a stream broke at its end")?;
            self.back.flow_control().release_capacity(data.len()).context("more released than received")?;
        }
        Ok(())
    }

    /// Waits for this many bytes. The answer to the hello may share a frame with what follows it.
    async fn take(&mut self, wanted: u64) -> Result<()> {
        while self.early < wanted {
            let data = self.back.data().await.context("a stream ended early")?.context("a stream broke")?;
            self.back.flow_control().release_capacity(data.len()).context("more released than received")?;
            self.early += data.len() as u64;
        }
        self.early -= wanted;
        Ok(())
    }

    async fn give(&mut self, mut left: u64) -> Result<()> {
        let bytes = Bytes::from_static(&[0x17; CHUNK]);
        while left > 0 {
            let wanted = CHUNK.min(usize::try_from(left).unwrap_or(CHUNK));
            self.out.reserve_capacity(wanted);
            let room = std::future::poll_fn(|context| self.out.poll_capacity(context)).await;
            let room = room.context("a stream ended early")?.context("a stream broke")?.min(wanted);
            self.out.send_data(bytes.slice(..room), false).context("cannot send")?;
            left -= room as u64;
        }
        self.take(1).await.context("no receipt for an upload")
    }
}

/// Round trips on all streams at once until `length` is over.
pub(crate) async fn ping_pong(streams: &mut Vec<Stream>, length: Duration) -> Result<Work> {
    let end = Instant::now() + length;
    let mut tasks = JoinSet::new();
    for mut stream in streams.drain(..) {
        tasks.spawn(async move {
            let mut done = 0;
            loop {
                stream.round_trip().await?;
                done += 1;
                if Instant::now() >= end {
                    return anyhow::Ok((stream, done));
                }
            }
        });
    }
    let mut work = Work::default();
    while let Some(outcome) = tasks.join_next().await {
        let (stream, done) = outcome.context("a stream's task ended")??;
        streams.push(stream);
        work.units += done;
    }
    Ok(work)
}

/// Opens and ends `at_once` streams at a time on the given connections until `length` is over.
pub(crate) async fn churn(
    connections: &[Connection],
    clusters: &[Cluster],
    at_once: usize,
    length: Duration,
) -> Result<Work> {
    let end = Instant::now() + length;
    let lane = |first: usize| async move {
        let mut turn = first;
        let mut done = 0;
        while Instant::now() < end {
            let connection = &connections[turn % connections.len()];
            connection.stream(&clusters[turn % clusters.len()], Order::Answer).await?.end().await?;
            turn += at_once;
            done += 1;
        }
        anyhow::Ok(done)
    };
    let mut work = Work::default();
    let mut lanes: FuturesUnordered<_> = (0..at_once).map(lane).collect();
    while let Some(done) = lanes.next().await {
        work.units += done?;
    }
    Ok(work)
}

/// Transfers, one stream a connection, until `length` is over; finishes those under way.
pub(crate) async fn bulk(
    connections: &[Connection],
    clusters: &[Cluster],
    up: bool,
    length: Duration,
) -> Result<Work> {
    let end = Instant::now() + length;
    let order = if up { Order::Take(TRANSFER) } else { Order::Send(TRANSFER) };
    let lane = |number: usize| async move {
        let mut done = 0;
        while Instant::now() < end {
            let mut stream = connections[number].stream(&clusters[number], order).await?;
            if up {
                stream.give(TRANSFER).await?
            } else {
                stream.take(TRANSFER).await?
            }
            stream.end().await?;
            done += TRANSFER;
        }
        anyhow::Ok(done)
    };
    let mut work = Work::default();
    let mut lanes: FuturesUnordered<_> = (0..connections.len()).map(lane).collect();
    while let Some(done) = lanes.next().await {
        work.units += done?;
    }
    Ok(work)
}

/// Heartbeats on a stream until `until`; an error if it broke or fell silent.
pub(crate) async fn heartbeat(
    mut stream: Stream,
    every: Duration,
    silence: Duration,
    until: Instant,
) -> Result<()> {
    while Instant::now() < until {
        match tokio::time::timeout(silence, stream.round_trip()).await {
            Ok(beat) => beat?,
            Err(_) => bail!("no heartbeat for {silence:?}"),
        }
        tokio::time::sleep(every).await;
    }
    Ok(())
}
