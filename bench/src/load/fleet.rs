//! Thousands of agents: the tunnel client that `portico agent` is built on, many times in a process, with
//! pods behind some.
//!
//! The bench starts a few of these processes ([`Fleet`] is its end of them), because one may not have
//! descriptors for all. An agent has one tunnel and the identity of its cluster, which it shares with the
//! other agents of that cluster, as worker nodes do. A pod holds one stream with a heartbeat and opens
//! another when it ends, as a controller with a watch does.
//!
//! The bench asks by lines on standard input and reads the answers from standard output; the process ends
//! with its input.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use portico_dial::{ClientTls, ClientTlsFiles, Dialer, ProxyFiles, ProxySetting};
use portico_tunnel::client::{Client, ClientSettings, OpenError, TunnelState};
use portico_tunnel::{End, Meter};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::{Mutex, mpsc};
use tokio::time::{sleep, timeout};

use super::pingpong::MESSAGE_BYTES;
use crate::hello::ANSWER_BYTES;
use crate::hello::{Order, client_hello};
use crate::pki::{KeyFiles, Pki};
use crate::site::Cluster;

/// Between the starts of two agents of a process: at first they come one by one, as nodes do.
const PACE: Duration = Duration::from_millis(4);
/// Between two heartbeats of a pod.
const BEAT: Duration = Duration::from_secs(2);
/// Without an answer for so long, a pod takes its stream for dead.
const SILENCE: Duration = Duration::from_secs(20);
/// Before a pod whose stream ended asks for another.
const RETRY: Duration = Duration::from_millis(100);
/// How long a process may take to end after its input has.
const STOP: Duration = Duration::from_secs(10);

/// What one process simulates.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Certificates: see [`Pki`].
    pub(crate) pki: PathBuf,
    /// Tunnel listener of the gateway.
    pub(crate) gateway: SocketAddrV4,
    /// Where the backends listen.
    pub(crate) backend_port: u16,
    /// Clusters the agents belong to in turn.
    pub(crate) clusters: usize,
    /// The first agent's number, and how many there are.
    pub(crate) first: usize,
    /// See `first`.
    pub(crate) agents: usize,
    /// Every agent whose number this divides has a pod.
    pub(crate) pod_every: usize,
}

/// What has become of the agents of a process.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Agents that have a tunnel now.
    pub(crate) up: usize,
    /// Agents that have one now and opened it since the mark.
    pub(crate) back: usize,
    /// Pods that got their echo since the mark.
    pub(crate) beating: usize,
    /// Streams that ended unasked.
    pub(crate) broken: u64,
    /// Streams that a gateway refused.
    pub(crate) refused: u64,
    /// Streams that waited for a tunnel in vain.
    pub(crate) unanswered: u64,
    /// Attempts at a tunnel that failed.
    pub(crate) attempts: u64,
    /// Tunnels that did not answer a PING in time.
    pub(crate) unresponsive: u64,
}

impl std::ops::Add for Report {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            up: self.up + other.up,
            back: self.back + other.back,
            beating: self.beating + other.beating,
            broken: self.broken + other.broken,
            refused: self.refused + other.refused,
            unanswered: self.unanswered + other.unanswered,
            attempts: self.attempts + other.attempts,
            unresponsive: self.unresponsive + other.unresponsive,
        }
    }
}

/// What the bench asks.
const MARK: &str = "mark";
const REPORT: &str = "report";

// === the bench's end ===

/// The processes with the agents.
pub(crate) struct Fleet {
    members: Vec<Member>,
}

struct Member {
    child: Child,
    orders: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
}

impl Fleet {
    /// Starts one process for each of `orders`, which are left in `dir`.
    pub(crate) fn start(dir: &Path, orders: &[Orders]) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut members = Vec::new();
        for (number, orders) in orders.iter().enumerate() {
            let path = dir.join(format!("agents-{number}.json"));
            fs::write(&path, serde_json::to_string(orders).context("orders are JSON")?)
                .with_context(|| format!("cannot write {}", path.display()))?;
            let mut child = Command::new(&program)
                .arg("--simulate-agents")
                .arg(path)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start a process for simulated agents")?;
            let orders = child.stdin.take();
            let reports = BufReader::new(child.stdout.take().context("a pipe was asked for")?);
            members.push(Member { child, orders, reports });
        }
        Ok(Self { members })
    }

    /// From now on agents that come back and pods that receive an echo are counted anew. Returns once all
    /// processes do so. Otherwise one that is busy with tunnels that end could count the first agent that
    /// comes back as one that never left.
    pub(crate) fn mark(&mut self) -> Result<Report> {
        self.members.iter_mut().try_for_each(|member| member.say(MARK))?;
        self.report()
    }

    /// How all agents are.
    pub(crate) fn report(&mut self) -> Result<Report> {
        self.members.iter_mut().try_for_each(|member| member.say(REPORT))?;
        let mut sum = Report::default();
        for member in &mut self.members {
            let mut line = String::new();
            member.reports.read_line(&mut line).context("cannot read from simulated agents")?;
            ensure!(!line.is_empty(), "a process with simulated agents ended; it has said why");
            sum = sum + serde_json::from_str(&line).context("a report is JSON")?;
        }
        Ok(sum)
    }
}

impl Member {
    fn say(&mut self, line: &str) -> Result<()> {
        let orders = self.orders.as_mut().context("orders end with the process")?;
        writeln!(orders, "{line}").context("a process with simulated agents ended; it has said why")
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.members.iter_mut().for_each(|member| drop(member.orders.take()));
        let deadline = Instant::now() + STOP;
        for Member { child, .. } in &mut self.members {
            while Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(RETRY);
            }
            // A child that has ended cannot be killed, which is as well.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

// === the agents' end ===

/// What the pods of this process have seen.
#[derive(Debug, Default)]
struct Tally {
    marks: AtomicU32,
    broken: AtomicU64,
    refused: AtomicU64,
    unanswered: AtomicU64,
}

/// An agent, and how many tunnels it had opened when the mark was set.
struct Agent {
    client: Client,
    opened: u64,
}

/// A pod: the last mark after which it got an echo.
struct Pod {
    client: Client,
    cluster: Cluster,
    tally: Arc<Tally>,
    loopback: Arc<Loopback>,
    last_echo: Arc<AtomicU32>,
}

/// Does what the file says until standard input ends.
pub(crate) fn simulate(orders: &Path) -> Result<()> {
    let file = File::open(orders).with_context(|| format!("cannot read {}", orders.display()))?;
    let orders = serde_json::from_reader(BufReader::new(file)).context("orders are JSON")?;
    let runtime = Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
    runtime.block_on(serve(orders))
}

async fn serve(orders: Orders) -> Result<()> {
    let dialer =
        Arc::new(Dialer::new(ProxySetting::Off, ProxyFiles::default()).context("no proxy is needed")?);
    let pki = Pki::open(orders.pki);
    let mut identities = Vec::with_capacity(orders.clusters);
    for number in 0..orders.clusters {
        let cluster = Cluster::numbered(number, orders.backend_port);
        let KeyFiles { certificate, key } = pki.cluster(&cluster.id);
        let files = ClientTlsFiles { ca: Some(pki.ca()), certificate: Some(certificate), key: Some(key) };
        identities.push((cluster, Arc::new(ClientTls::load(files).context("cannot use a certificate")?)));
    }
    let gateway = format!("tls://{}", orders.gateway);
    let tally = Arc::new(Tally::default());
    let loopback = Arc::new(Loopback::open().await?);
    let mut agents: Vec<Agent> = Vec::with_capacity(orders.agents);
    let mut last_echoes: Vec<Arc<AtomicU32>> = Vec::new();
    let mut lines = lines_of_standard_input();
    let mut pace = tokio::time::interval(PACE);
    loop {
        tokio::select! {
            line = lines.recv() => match line.as_deref() {
                None => return Ok(()),
                Some(MARK) => {
                    tally.marks.fetch_add(1, Relaxed);
                    for agent in &mut agents {
                        agent.opened = agent.client.totals().tunnels_opened;
                    }
                }
                Some(REPORT) => {
                    let report = report(&agents, &last_echoes, &tally);
                    let line = serde_json::to_string(&report).context("a report is JSON")?;
                    writeln!(std::io::stdout(), "{line}").context("the bench is gone")?;
                }
                Some(other) => bail!("the bench said {other:?}"),
            },
            _ = pace.tick(), if agents.len() < orders.agents => {
                let number = orders.first + agents.len();
                let (cluster, identity) = &identities[number % identities.len()];
                let address = gateway.parse().context("an address makes a gateway")?;
                let authority = cluster.authority.as_str().into();
                let mut settings = ClientSettings::new(vec![address], Arc::clone(&dialer), authority);
                settings.tls = Some(Arc::clone(identity));
                // A gateway may hold as many sockets as descriptors: see the row.
                settings.tunnels = 1;
                let client = Client::start(settings);
                if number.is_multiple_of(orders.pod_every) {
                    let pod = Pod {
                        client: client.clone(),
                        cluster: cluster.clone(),
                        tally: Arc::clone(&tally),
                        loopback: Arc::clone(&loopback),
                        last_echo: Arc::new(AtomicU32::new(u32::MAX)),
                    };
                    last_echoes.push(Arc::clone(&pod.last_echo));
                    tokio::spawn(pod.live());
                }
                agents.push(Agent { client, opened: 0 });
            }
        }
    }
}

/// Read by a thread, as a read of a pipe waits.
fn lines_of_standard_input() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            // Either end of the pipe may be gone: then there is nothing more to say.
            let Ok(line) = line else { return };
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

fn report(agents: &[Agent], last_echoes: &[Arc<AtomicU32>], tally: &Tally) -> Report {
    let mark = tally.marks.load(Relaxed);
    let mut report = Report {
        beating: last_echoes.iter().filter(|last_echo| last_echo.load(Relaxed) == mark).count(),
        broken: tally.broken.load(Relaxed),
        refused: tally.refused.load(Relaxed),
        unanswered: tally.unanswered.load(Relaxed),
        ..Report::default()
    };
    for agent in agents {
        let totals = agent.client.totals();
        let up = agent.client.status().iter().any(|row| row.state == Some(TunnelState::Live));
        report.up += usize::from(up);
        report.back += usize::from(up && totals.tunnels_opened > agent.opened);
        report.attempts += totals.tunnel_failures;
        report.unresponsive += totals.tunnels_unresponsive;
    }
    report
}

impl Pod {
    async fn live(self) {
        loop {
            match self.client.open(&self.cluster.authority).await {
                Ok(stream) => {
                    if let Ok((near, far)) = self.loopback.pair().await {
                        tokio::spawn(stream.carry(far, Uncounted));
                        // Whatever ended it: it was not this pod.
                        let _ = self.beat(near).await;
                        self.tally.broken.fetch_add(1, Relaxed);
                    }
                }
                Err(OpenError::Refused { .. }) => drop(self.tally.refused.fetch_add(1, Relaxed)),
                Err(_) => drop(self.tally.unanswered.fetch_add(1, Relaxed)),
            }
            sleep(RETRY).await;
        }
    }

    /// Heartbeats until the stream ends or falls silent.
    async fn beat(&self, mut socket: TcpStream) -> Result<()> {
        let mut answer = [0; ANSWER_BYTES];
        socket.write_all(&client_hello(&self.cluster.host, Order::Echo)).await?;
        timeout(SILENCE, socket.read_exact(&mut answer)).await??;
        let mut echo = [0x17; MESSAGE_BYTES];
        loop {
            socket.write_all(&[0x17; MESSAGE_BYTES]).await?;
            timeout(SILENCE, socket.read_exact(&mut echo)).await??;
            self.last_echo.store(self.tally.marks.load(Relaxed), Relaxed);
            sleep(BEAT).await;
        }
    }
}

/// Makes pairs of connected sockets.
struct Loopback {
    listener: Mutex<TcpListener>,
}

impl Loopback {
    async fn open() -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on loopback")?;
        Ok(Self { listener: Mutex::new(listener) })
    }

    /// One after the other, so that what is accepted is what was connected.
    async fn pair(&self) -> std::io::Result<(TcpStream, TcpStream)> {
        let listener = self.listener.lock().await;
        let address = listener.local_addr()?;
        let (near, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (near, (far, _)) = (near?, accepted?);
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        Ok((near, far))
    }
}

/// What a simulated agent carried is not asked for.
struct Uncounted;

impl Meter for Uncounted {
    fn carried(&mut self, _up: usize, _down: usize) {}

    fn ended(self, _end: End) {}
}
