//! Tunnels: streams opened by HTTP/2 CONNECT with prior knowledge, as node agents open them.
//!
//! A stream is open when the gateway has answered 200; then it carries the same hello and the same exchanges
//! as a plain connection. Built on the `h2` crate, on one thread.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{Method, Request, StatusCode, Uri};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::pingpong::MESSAGE_BYTES;
use crate::hello::ANSWER_BYTES;
use crate::hello::{Order, client_hello};
use crate::site::Cluster;

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
        let (requests, connection) =
            h2::client::handshake(socket).await.with_context(|| format!("no HTTP/2 at {gateway}"))?;
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
    /// Bytes received and not asked for yet.
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
