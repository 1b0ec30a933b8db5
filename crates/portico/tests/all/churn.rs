//! A change to one cluster never touches a byte of another: 200 connections with heartbeats stay while a
//! thousand other clusters come and go.

use std::io;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Duration;

use crate::common::PATIENCE;
use crate::proof::*;
use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use portico_lab::long_form;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

const STEADY: &str = "steady";
const BY_NAME: usize = 100;
const BY_HTTP1: usize = 20;
/// HTTP/2 streams, as node agents carry them: many on one socket.
const SOCKETS: usize = 4;
const STREAMS_PER_SOCKET: usize = 20;
const CONNECTIONS: usize = BY_NAME + BY_HTTP1 + SOCKETS * STREAMS_PER_SOCKET;

/// Clusters added; all but the last [`WINDOW`] are removed again.
const CHANGES: usize = 1_000;
/// [`CHANGES`] for `scripts/prove`.
const CHANGES_PROVED: usize = 20_000;
/// Clusters there at a time.
const WINDOW: usize = 5;
/// The first NodePort given to them.
const FIRST_PORT: u16 = 30_000;

/// Between two heartbeats of one connection: 200 of them are to beat during every change, and to leave the
/// changes a core.
const PAUSE: Duration = Duration::from_millis(100);

/// One long-lived connection.
enum Connection {
    Tcp(TcpStream),
    Stream(SendStream<Bytes>, RecvStream),
}

impl Connection {
    async fn by_name(gateway: SocketAddr) -> io::Result<Self> {
        let mut stream = TcpStream::connect(gateway).await?;
        exchange(&mut stream, &hello(STEADY)).await?;
        Ok(Self::Tcp(stream))
    }

    async fn by_http1(gateway: SocketAddr) -> io::Result<Self> {
        let mut stream = TcpStream::connect(gateway).await?;
        stream.write_all(connect_request(STEADY).as_bytes()).await?;
        let mut answer = [0; ESTABLISHED.len()];
        stream.read_exact(&mut answer).await?;
        assert_eq!(answer, ESTABLISHED);
        Ok(Self::Tcp(stream))
    }

    async fn by_http2(requests: SendRequest<Bytes>) -> io::Result<Self> {
        let uri = http::Uri::builder().authority(authority(STEADY)).build().map_err(io::Error::other)?;
        let request =
            http::Request::builder().method("CONNECT").uri(uri).body(()).map_err(io::Error::other)?;
        let mut requests = requests.ready().await.map_err(io::Error::other)?;
        let (answer, send) = requests.send_request(request, false).map_err(io::Error::other)?;
        let answer = answer.await.map_err(io::Error::other)?;
        assert_eq!(answer.status(), 200);
        Ok(Self::Stream(send, answer.into_body()))
    }

    /// One round trip.
    async fn beat(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (send, receive) = match self {
            Self::Tcp(stream) => return exchange(stream, bytes).await,
            Self::Stream(send, receive) => (send, receive),
        };
        send.send_data(Bytes::copy_from_slice(bytes), false).map_err(io::Error::other)?;
        let mut answer = Vec::new();
        while answer.len() < bytes.len() {
            let data = receive.data().await.ok_or(io::ErrorKind::UnexpectedEof)?.map_err(io::Error::other)?;
            receive.flow_control().release_capacity(data.len()).map_err(io::Error::other)?;
            answer.extend_from_slice(&data);
        }
        if answer == bytes { Ok(()) } else { Err(io::Error::other(format!("got {answer:?} back"))) }
    }

    /// Beats until `stop`, and once more then. Returns the number of beats.
    async fn live(mut self, up: mpsc::Sender<()>, mut stop: watch::Receiver<bool>) -> io::Result<u64> {
        for count in 0_u64.. {
            let stopping = *stop.borrow_and_update();
            timeout(PATIENCE, self.beat(&count.to_be_bytes())).await??;
            if count == 0 {
                up.send(()).map_err(io::Error::other)?;
            }
            if stopping {
                return Ok(count);
            }
            // Pace, not synchronisation: either way the next beat follows.
            let _elapsed = timeout(PAUSE, stop.changed()).await;
        }
        Ok(u64::MAX)
    }
}

/// Opens all connections and keeps them alive until `stop`. Returns their heartbeats, or why one broke.
async fn connections(
    sni: SocketAddr,
    tunnel: SocketAddr,
    up: mpsc::Sender<()>,
    stop: watch::Receiver<bool>,
) -> Vec<Result<u64, String>> {
    let mut tasks = Vec::new();
    let mut start = |kind: &'static str, connection: Connection| {
        let live = connection.live(up.clone(), stop.clone());
        tasks.push(tokio::spawn(async move { live.await.map_err(|error| format!("{kind}: {error}")) }));
    };
    for _ in 0..BY_NAME {
        start("by server name", Connection::by_name(sni).await.unwrap());
    }
    for _ in 0..BY_HTTP1 {
        start("by HTTP/1.1 CONNECT", Connection::by_http1(tunnel).await.unwrap());
    }
    for _ in 0..SOCKETS {
        let socket = TcpStream::connect(tunnel).await.unwrap();
        let (requests, connection) = h2::client::handshake(socket).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..STREAMS_PER_SOCKET {
            start("by HTTP/2 CONNECT", Connection::by_http2(requests.clone()).await.unwrap());
        }
    }
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.unwrap());
    }
    outcomes
}

#[test]
fn a_thousand_clusters_come_and_go_and_none_of_200_connections_of_another_breaks() {
    let (site, endpoint) = (Site::new(), echo(LOOPBACK));
    site.put(STEADY, &manifest(STEADY, None, endpoint));
    let gateway = Gateway::start(&site, &[]);
    let (sni, tunnel) = (gateway.sni, gateway.tunnel);
    let (up, is_up) = mpsc::channel();
    let (stop, stopped) = watch::channel(false);
    let clients = std::thread::spawn(move || runtime().block_on(connections(sni, tunnel, up, stopped)));
    for _ in 0..CONNECTIONS {
        is_up.recv_timeout(PATIENCE).expect("every connection is served");
    }

    let changes = long_form(CHANGES, CHANGES_PROVED);
    let name = |change: usize| format!("other-{change}");
    let port = |change: usize| FIRST_PORT + u16::try_from(change % 1_000).unwrap();
    for change in 0..changes {
        let (added, added_port) = (name(change), port(change));
        site.put(&added, &manifest(&added, Some(added_port), endpoint));
        if let Some(removed) = change.checked_sub(WINDOW) {
            site.remove(&name(removed));
        }
        // Each is really served before the next comes, each path in its turn.
        match change % 3 {
            0 => wait_until("the cluster is reached by name", || by_name(&gateway, &added).is_some()),
            1 => {
                wait_until("the cluster is reached by authority", || by_authority(&gateway, &added).is_some())
            }
            _ => wait_until("the cluster is reached by port", || by_port(&gateway, added_port).is_some()),
        }
    }

    let last = changes - 1;
    assert!(by_name(&gateway, &name(last)).is_some());
    assert!(by_authority(&gateway, &name(last)).is_some());
    assert!(by_port(&gateway, port(last)).is_some());
    let gone = last - WINDOW;
    wait_until("the removed ones are gone", || by_port(&gateway, port(gone)).is_none());
    assert!(by_name(&gateway, &name(gone)).is_none());
    assert!(by_authority(&gateway, &name(gone)).is_none());
    let metrics = gateway.get("/metrics");
    assert_eq!(metric(&metrics, "portico_routes{by=\"port\"}"), WINDOW as u64);
    assert_eq!(metric(&metrics, "portico_node_ports_failed"), 0);
    // No client reconnected: these are the connections of the beginning.
    let open = metric(&metrics, "portico_cluster_open_connections{cluster=\"steady\"}");
    let ever = metric(&metrics, "portico_cluster_connections_total{cluster=\"steady\"}");
    assert_eq!((open, ever), (CONNECTIONS as u64, CONNECTIONS as u64));

    stop.send(true).unwrap();
    let outcomes = clients.join().unwrap();
    let broken: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert!(broken.is_empty(), "{} of {CONNECTIONS} connections broke: {broken:?}", broken.len());
    let beats = outcomes.into_iter().flatten();
    report(format_args!("heartbeats of {CONNECTIONS} connections: {}", beats.sum::<u64>()));
}
