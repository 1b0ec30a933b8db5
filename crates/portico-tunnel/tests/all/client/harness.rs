//! Wires between client and gateway that can freeze and break, and pods.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use portico_dial::{Dialer, ProxyFiles, ProxySetting, Target};
use portico_tunnel::client::{Client, ClientSettings, GatewayAddress, Security, Stream, TunnelState};
use portico_tunnel::{End, Meter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::common::{Report, Server, UPSTREAM, patiently};

/// What a wire does with bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    Carries,
    /// Nothing moves, without a sign: a frozen process, a lost network.
    Frozen,
    /// Every connection is reset, and so is every new one.
    Cut,
}

/// A wire to a gateway.
pub(super) struct Line {
    pub(super) address: SocketAddr,
    pub(super) wire: watch::Sender<Wire>,
    accepted: Arc<AtomicU32>,
    task: JoinHandle<()>,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Line {
    pub(super) async fn to(gateway: SocketAddr) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), gateway).await
    }

    /// From that address.
    pub(super) async fn at(address: SocketAddr, gateway: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let wire = watch::Sender::new(Wire::Carries);
        let accepted = Arc::new(AtomicU32::new(0));
        let (states, count) = (wire.clone(), Arc::clone(&accepted));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (near, _) = listener.accept().await.unwrap();
                count.fetch_add(1, SeqCst);
                connections.spawn(carry(near, gateway, states.subscribe()));
            }
        });
        Self { address, wire, accepted, task }
    }

    pub(super) fn accepted(&self) -> u32 {
        self.accepted.load(SeqCst)
    }
}

pub(super) async fn carry(mut near: TcpStream, gateway: SocketAddr, mut wire: watch::Receiver<Wire>) {
    let mut far = TcpStream::connect(gateway).await.unwrap();
    // A wire holds nothing back until something else is acknowledged.
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        let state = *wire.borrow_and_update();
        tokio::select! {
            biased;
            changed = wire.changed() => if changed.is_err() { return },
            read = near.read(&mut up), if state == Wire::Carries => match read {
                Ok(read) if read > 0 => far.write_all(&up[..read]).await.unwrap(),
                _ => return,
            },
            read = far.read(&mut down), if state == Wire::Carries => match read {
                Ok(read) if read > 0 => near.write_all(&down[..read]).await.unwrap(),
                _ => return,
            },
            () = std::future::ready(()), if state == Wire::Cut => {
                near.set_zero_linger().unwrap();
                far.set_zero_linger().unwrap();
                return;
            }
        }
    }
}

pub(super) fn settings(gateways: &[SocketAddr]) -> ClientSettings {
    let gateways = gateways.iter().map(|address| GatewayAddress {
        security: Security::Plaintext,
        target: Target { host: address.ip().to_string().into(), port: address.port() },
    });
    let dialer = Dialer::new(ProxySetting::Off, ProxyFiles::default()).unwrap();
    ClientSettings::new(gateways.collect(), Arc::new(dialer), UPSTREAM.into())
}

/// Returns once so many tunnels are in that state.
pub(super) async fn wait_for(client: &Client, state: TunnelState, count: usize) {
    let there = || client.status().iter().filter(|tunnel| tunnel.state == Some(state)).count();
    patiently(async {
        while there() != count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

pub(super) struct Count(Report, mpsc::UnboundedSender<Report>);

impl Meter for Count {
    fn carried(&mut self, up: usize, down: usize) {
        self.0.up += up;
        self.0.down += down;
    }

    fn ended(mut self, end: End) {
        self.0.end = Some(end);
        let _ = self.1.send(self.0);
    }
}

/// A pod's connection through a stream: the pod's socket, and what is reported at its end.
pub(super) struct Pod {
    pub(super) socket: TcpStream,
    pub(super) reports: mpsc::UnboundedReceiver<Report>,
}

impl Pod {
    pub(super) async fn on(stream: Stream) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (agent, _) = listener.accept().await.unwrap();
        Self::between(stream, socket, agent)
    }

    /// With both ends of its connection.
    pub(super) fn between(stream: Stream, socket: TcpStream, agent: TcpStream) -> Self {
        let (sender, reports) = mpsc::unbounded_channel();
        let meter = Count(Report { up: 0, down: 0, end: None }, sender);
        tokio::spawn(stream.carry(agent, meter));
        Self { socket, reports }
    }

    pub(super) async fn report(&mut self) -> Report {
        patiently(self.reports.recv()).await.unwrap()
    }
}

/// A pod and the API server it talks to.
pub(super) async fn connected(client: &Client, server: &Server) -> (Pod, TcpStream) {
    let stream = patiently(client.open(UPSTREAM)).await.unwrap();
    (Pod::on(stream).await, server.upstream().await)
}

/// One message each way.
pub(super) async fn beat(pod: &mut TcpStream, upstream: &mut TcpStream) {
    for (from, to) in [(&mut *pod, &mut *upstream)] {
        exchange(from, to).await;
        exchange(to, from).await;
    }
}

pub(super) async fn exchange(from: &mut TcpStream, to: &mut TcpStream) {
    from.write_all(b"beat").await.unwrap();
    let mut bytes = [0; 4];
    patiently(to.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"beat");
}
