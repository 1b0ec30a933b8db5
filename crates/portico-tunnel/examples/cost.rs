//! What one tunnel costs the server half: CPU seconds a GB each way, CPU microseconds a round trip, bytes an idle stream.
//!
//! `cargo run --release -p portico-tunnel --example cost` starts itself again as the server and reads that process' figures from /proc;
//! load and backend stay in the first process. Once with the frames of our own agent (64 KiB), once with those of Envoy (16 KiB).

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for measuring, not for serving")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use http::Method;
use portico_tunnel::{End, Handler, Meter, Refusal, Request, Settings, Upstream, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const GB: f64 = 1e9;
const BULK: usize = 2_000_000_000;
const ROUND_TRIPS: u32 = 100_000;
const IDLE: usize = 10_000;
const PER_CONNECTION: usize = 500;

/// USER_HZ, which Linux fixes at 100 for every program.
const TICKS: f64 = 100.0;

struct To(SocketAddr);
struct Nothing;

impl Meter for Nothing {
    fn carried(&mut self, _: usize, _: usize) {}
    fn ended(self, _: End) {}
}

impl Handler for To {
    type Meter = Nothing;

    async fn connect(&self, _: &Request) -> Result<Upstream<Nothing>, Refusal> {
        let stream = TcpStream::connect(self.0).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Ok(Upstream { stream, meter: Nothing })
    }

    fn refused(&self, _: &Refusal) {}
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match std::env::args().nth(1) {
        Some(backend) => runtime.block_on(server(backend.parse().unwrap())),
        None => {
            for frame in [65_536, 16_384] {
                println!("frames of {frame} bytes");
                runtime.block_on(measure(frame));
            }
        }
    }
}

async fn server(backend: SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    let handler = Arc::new(To(backend));
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let handler = Arc::clone(&handler);
        tokio::spawn(async move {
            let settings = Settings { plaintext: true, ..Settings::default() };
            let _ = serve(stream, Bytes::new(), &settings, std::future::pending(), &handler).await;
        });
    }
}

async fn measure(frame: u32) {
    let backend = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = backend.local_addr().unwrap();
    tokio::spawn(backends(backend));
    let server = Server::start(address);

    let mut connections = Vec::new();
    let mut client = client(server.address, frame).await;
    let (mut send, mut recv) = tunnel(&mut client).await;

    round_trip(&mut send, &mut recv, 1000).await;
    let before = server.cpu();
    round_trip(&mut send, &mut recv, ROUND_TRIPS).await;
    println!("  round trip {:6.2} µs", (server.cpu() - before) / f64::from(ROUND_TRIPS) * 1e6);

    for (what, direction) in [("up  ", b'U'), ("down", b'D')] {
        let (mut send, mut recv) = tunnel(&mut client).await;
        let (before, clock) = (server.cpu(), Instant::now());
        bulk(direction, &mut send, &mut recv).await;
        let (cpu, time) = (server.cpu() - before, clock.elapsed().as_secs_f64());
        println!(
            "  bulk {what} {:5.3} s/GB, {:4.1} Gbit/s",
            cpu / (BULK as f64 / GB),
            BULK as f64 * 8.0 / GB / time
        );
    }

    let before = server.memory();
    let mut idle = Vec::with_capacity(IDLE);
    for _ in 0..IDLE / PER_CONNECTION {
        let mut client = self::client(server.address, frame).await;
        for _ in 0..PER_CONNECTION {
            let (mut send, mut recv) = tunnel(&mut client).await;
            round_trip(&mut send, &mut recv, 1).await;
            idle.push((send, recv));
        }
        connections.push(client);
    }
    println!("  idle stream {} bytes", (server.memory() - before) / IDLE);
}

struct Server {
    process: Child,
    address: SocketAddr,
}

impl Server {
    fn start(backend: SocketAddr) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut process = command.arg(backend.to_string()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { process, address: line.trim().parse().unwrap() }
    }

    /// CPU seconds so far.
    fn cpu(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        let fields: Vec<f64> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|f| f.parse().unwrap())
            .collect();
        fields.iter().sum::<f64>() / TICKS
    }

    /// Bytes of memory that are this process' own.
    fn memory(&self) -> usize {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.process.id())).unwrap();
        let line = rollup.lines().find(|line| line.starts_with("Pss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Echoes small messages; `U` swallows everything and confirms, `D` sends [`BULK`] bytes.
async fn backends(listener: TcpListener) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        tokio::spawn(async move {
            let mut first = [0; 128];
            let Ok(length) = stream.read(&mut first).await else { return };
            match first[0] {
                b'U' => {
                    let mut buffer = vec![0; 256 * 1024];
                    let mut left = BULK - length;
                    while left > 0 {
                        left -= stream.read(&mut buffer).await.unwrap();
                    }
                    stream.write_all(b"!").await.unwrap();
                }
                b'D' => {
                    let buffer = vec![0; 256 * 1024];
                    let mut left = BULK;
                    while left > 0 {
                        let part = left.min(buffer.len());
                        stream.write_all(&buffer[..part]).await.unwrap();
                        left -= part;
                    }
                }
                _ => {
                    stream.write_all(&first[..length]).await.unwrap();
                    while let Ok(length @ 1..) = stream.read(&mut first).await {
                        stream.write_all(&first[..length]).await.unwrap();
                    }
                }
            }
        });
    }
}

type Client = h2::client::SendRequest<Bytes>;

async fn client(address: SocketAddr, frame: u32) -> Client {
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 28).max_frame_size(frame);
    let (client, connection) = builder.max_send_buffer_size(1 << 20).handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn tunnel(client: &mut Client) -> (SendStream<Bytes>, RecvStream) {
    let uri = http::Uri::builder().authority("backend.test:443").build().unwrap();
    let request = http::Request::builder().method(Method::CONNECT).uri(uri).body(()).unwrap();
    let (answer, send) = client.clone().ready().await.unwrap().send_request(request, false).unwrap();
    (send, answer.await.unwrap().into_body())
}

async fn round_trip(send: &mut SendStream<Bytes>, recv: &mut RecvStream, times: u32) {
    let message = Bytes::from_static(&[b'.'; 64]);
    for _ in 0..times {
        send.send_data(message.clone(), false).unwrap();
        let mut left = message.len();
        while left > 0 {
            left -= receive(recv).await;
        }
    }
}

async fn receive(recv: &mut RecvStream) -> usize {
    let answer = tokio::time::timeout(Duration::from_secs(60), recv.data()).await.unwrap().unwrap().unwrap();
    recv.flow_control().release_capacity(answer.len()).unwrap();
    answer.len()
}

async fn bulk(direction: u8, send: &mut SendStream<Bytes>, recv: &mut RecvStream) {
    let mut left = BULK;
    if direction == b'U' {
        let chunk = Bytes::from(vec![direction; 64 * 1024]);
        while left > 0 {
            send.reserve_capacity(left.min(chunk.len()));
            let window = std::future::poll_fn(|cx| send.poll_capacity(cx)).await.unwrap().unwrap();
            let part = left.min(window).min(chunk.len());
            send.send_data(chunk.slice(..part), false).unwrap();
            left -= part;
        }
        receive(recv).await;
    } else {
        send.send_data(Bytes::from_static(b"D"), false).unwrap();
        while left > 0 {
            left -= receive(recv).await;
        }
    }
}
