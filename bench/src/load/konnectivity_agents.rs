//! Many agents of Konnectivity servers in this process: what `portico konnectivity agent` is built on, each
//! with a connection to every server.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use http::HeaderValue;
use portico_dial::{ClientTls, ClientTlsFiles, Dialer, ProxyFiles, ProxySetting};
use portico_konnectivity::agent::{Agent, CountSource, Policy, Settings};
use portico_net::MemoryBudget;
use tokio::time::sleep;

/// Between the starts of two agents: they come one by one, as nodes do.
const PACE: Duration = Duration::from_millis(2);
/// Between two counts.
const LOOK: Duration = Duration::from_millis(50);

/// Agents, until dropped.
pub(crate) struct Crowd {
    connections: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Crowd {
    /// So many agents of the servers at these ports of loopback, with the certificates in `dir`.
    pub(crate) fn start(dir: &Path, ports: &[u16], count: usize) -> Result<Self> {
        let settings = settings(dir, ports)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot make a runtime for agents")?;
        let (connections, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, stopped) = (Arc::clone(&connections), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                let mut agents = Vec::new();
                while !stopped.load(Relaxed) {
                    if agents.len() < count {
                        let agent_id = HeaderValue::from(agents.len());
                        agents.push(Agent::start(Settings { agent_id, ..settings.clone() }));
                    }
                    counted.store(agents.iter().map(|agent| agent.servers().len()).sum(), Relaxed);
                    sleep(if agents.len() < count { PACE } else { LOOK }).await;
                }
            });
        });
        Ok(Self { connections, stop, thread: Some(thread) })
    }

    /// Connections to servers that are up, of all agents together.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Relaxed)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has printed why.
            let _ = thread.join();
        }
    }
}

/// The defaults of the command line.
fn settings(dir: &Path, ports: &[u16]) -> Result<Settings> {
    let file = |name: &str| Some(dir.join(name));
    let files = ClientTlsFiles { ca: file("ca.crt"), certificate: file("agent.crt"), key: file("agent.key") };
    let dialer = || anyhow::Ok(Arc::new(Dialer::new(ProxySetting::Off, ProxyFiles::default())?));
    let servers = ports.iter().map(|port| format!("127.0.0.1:{port}").parse()).collect::<Result<_, _>>();
    Ok(Settings {
        servers: servers.context("an address with a port is a target")?,
        to_servers: dialer()?,
        to_endpoints: dialer()?,
        tls: Arc::new(ClientTls::konnectivity(files, vec![b"h2".to_vec()])?),
        token: None,
        agent_id: HeaderValue::from_static(""),
        identifiers: HeaderValue::from_static(""),
        user_agent: HeaderValue::from_static("portico-bench"),
        sync_interval: Duration::from_secs(1),
        sync_interval_cap: Duration::from_secs(10),
        sync_forever: false,
        count: CountSource::Responses,
        keepalive_time: Duration::from_secs(3600),
        policy: Policy::new([]),
        connection_buffer: 1 << 20,
        memory: MemoryBudget::new(64 << 20),
        max_connections: 10_000,
        max_dials: 1000,
        hello_timeout: Duration::from_secs(10),
    })
}
