//! A node: an agent on the runtime of the test, and pods that connect to it.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use portico_agent::forward::Forward;
use portico_agent::{Agent, ENDS, Inherited, Refusal, Settings};
use portico_dial::{Dialer, ProxyFiles, ProxySetting, Target};
use portico_lab::wait;
use portico_net::access::{AccessFormat, AccessLog};
use portico_tunnel::client::{ClientSettings, GatewayAddress, Security};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;

/// What the gateway is asked for.
pub(crate) const AUTHORITY: &str = "api.example.com:443";

/// How long a pod may wait for a gateway, unless a test says otherwise.
pub(crate) const OPEN_TIMEOUT: Duration = Duration::from_secs(20);

/// What takes longer does not happen.
const SOON: Duration = Duration::from_secs(20);

pub(crate) struct Node {
    pub(crate) agent: Agent,
    /// Where pods connect.
    pub(crate) address: SocketAddr,
}

/// A listening socket that an agent can inherit.
pub(crate) fn socket() -> (SocketAddr, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    (listener.local_addr().unwrap(), listener.into())
}

/// Waits until nothing listens at `address`. A test beside this one may be about to start a program, which
/// has a copy of each socket until then.
pub(crate) fn until_closed(address: SocketAddr) {
    wait::until("the listener to be closed", SOON, || {
        ensure!(std::net::TcpStream::connect(address).is_err(), "{address} accepts");
        Ok(())
    })
    .unwrap();
}

/// The settings of an agent for one gateway, with one tunnel.
pub(crate) fn settings(gateway: SocketAddr, listen: SocketAddr) -> Settings {
    let target = Target { host: gateway.ip().to_string().into(), port: gateway.port() };
    let gateway = GatewayAddress { security: Security::Plaintext, target };
    let dialer = Dialer::new(ProxySetting::Off, ProxyFiles::default()).unwrap();
    let mut client = ClientSettings::new(vec![gateway], Arc::new(dialer), AUTHORITY.into());
    client.tunnels = 1;
    client.max_tunnels = 1;
    client.open_timeout = OPEN_TIMEOUT;
    let forwards = vec![Forward { listen, authority: AUTHORITY.into() }];
    Settings { forwards, client, max_connections: 100, max_waiting: 100 }
}

pub(crate) fn no_access_log() -> AccessLog {
    AccessLog::start(AccessFormat::Off).unwrap()
}

impl Node {
    /// An agent that listens.
    pub(crate) fn start(gateway: SocketAddr) -> Self {
        Self::with(gateway, |_| {})
    }

    /// One with other settings.
    pub(crate) fn with(gateway: SocketAddr, change: impl FnOnce(&mut Settings)) -> Self {
        let (address, socket) = socket();
        let mut settings = settings(gateway, address);
        change(&mut settings);
        let agent = Agent::start_on(Handle::current(), settings, no_access_log());
        agent.listen(Inherited::from_iter([(address, socket)])).unwrap();
        Self { agent, address }
    }

    pub(crate) async fn pod(&self) -> Pod {
        Pod(TcpStream::connect(self.address).await.unwrap())
    }

    /// The reasons of all refusals so far, each as often as it was counted.
    pub(crate) fn refusals(&self) -> Vec<&'static str> {
        let counts = self.agent.shared().totals().refusals;
        let each = Refusal::REASONS.iter().zip(counts);
        each.flat_map(|(&word, count)| std::iter::repeat_n(word, count as usize)).collect()
    }

    /// Reason and side of all ends so far.
    pub(crate) fn ends(&self) -> Vec<(&'static str, &'static str)> {
        let counts = self.agent.shared().totals().ends;
        ENDS.iter().zip(counts).flat_map(|(&end, count)| std::iter::repeat_n(end, count as usize)).collect()
    }

    /// How many connections a gateway has opened, as far as the agent knows.
    pub(crate) fn opened(&self) -> u64 {
        self.agent.shared().forwards[0].opened()
    }

    pub(crate) fn waiting(&self) -> u32 {
        self.agent.shared().totals().waiting
    }
}

/// A connection of a pod.
pub(crate) struct Pod(pub(crate) TcpStream);

impl Pod {
    pub(crate) async fn write(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Everything until the agent ends its direction.
    pub(crate) async fn read_to_end(&mut self) -> String {
        let mut text = String::new();
        self.0.read_to_string(&mut text).await.unwrap();
        text
    }

    /// Ends the pod's direction.
    pub(crate) async fn finish(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    pub(crate) fn reset(self) {
        self.0.set_zero_linger().unwrap();
    }

    /// Whether the next thing that comes is a reset.
    pub(crate) async fn is_reset(&mut self) -> bool {
        let read = self.0.read(&mut [0; 1]).await;
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
    }
}
