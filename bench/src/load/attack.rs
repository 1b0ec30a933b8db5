//! Clients without an identity that mean harm: what each does, as fast as one thread of the load's core can.
//!
//! An [`Attack`] runs beside the measured requests until it is dropped. Connections are held for as long as
//! the proxy holds them, up to [`HELD`]; then the oldest makes room for the next. The proxy's answers are
//! read only where the attack would otherwise stand still.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use portico_lab::frames::{self, INITIAL_WINDOW_SIZE, RawClient, kind};
use rustls::ClientConfig;

use super::Dialer;

/// Connections held at a time, at most.
const HELD: usize = 4_000;
/// A proxy that takes no bytes for so long gets another connection.
const PATIENCE: Duration = Duration::from_secs(1);
/// Streams of a connection: as many as a proxy commonly admits.
const STREAMS: u32 = 1_000;
/// The largest frame that every HTTP/2 server must take (RFC 9113 section 6.5.2).
const FRAME: u32 = 16 * 1024;

/// What a client without an identity does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Connects to the SNI listener and says nothing, 1,640 times a second.
    SilentBySni,
    /// Connects to the tunnel listener and says nothing, as often.
    SilentByTunnel,
    /// Asks with made-up tokens for a cluster whose API server is silent.
    WaitingReviews,
    /// Asks for what is refused, and gives no window for the answers.
    UntakenRefusals,
    /// Like `UntakenRefusals`, and opens and closes the window over all streams.
    WindowStorm,
    /// Announces frames and holds back their last byte.
    HalfFrames,
}

impl Kind {
    /// All, in the order of the table.
    pub(crate) const ALL: [Self; 6] = [
        Self::SilentBySni,
        Self::SilentByTunnel,
        Self::WaitingReviews,
        Self::UntakenRefusals,
        Self::WindowStorm,
        Self::HalfFrames,
    ];

    /// For the table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SilentBySni => "silent connections (SNI)",
            Self::SilentByTunnel => "silent connections (tunnel)",
            Self::WaitingReviews => "made-up tokens",
            Self::UntakenRefusals => "refusals nobody takes",
            Self::WindowStorm => "windows opened and closed",
            Self::HalfFrames => "frames that never end",
        }
    }

    /// Connections in this time without which there was no attack. Silent ones have half of their pace; how
    /// many others come about is up to the proxy.
    fn least(self, length: Duration) -> u64 {
        match self {
            Self::SilentBySni | Self::SilentByTunnel => {
                (length.as_secs_f64() / self.pace().as_secs_f64() / 2.0) as u64
            }
            _ => 1,
        }
    }

    /// Between two connections.
    fn pace(self) -> Duration {
        match self {
            Self::SilentBySni | Self::SilentByTunnel => Duration::from_micros(610),
            Self::WaitingReviews => Duration::from_millis(20),
            Self::UntakenRefusals | Self::HalfFrames => Duration::from_millis(5),
            // Three connections, each busy for as long as it lives.
            Self::WindowStorm => Duration::ZERO,
        }
    }
}

/// Where an attack goes.
#[derive(Clone)]
pub(crate) struct Target {
    /// The listener.
    pub(crate) address: SocketAddrV4,
    /// What the requests ask for.
    pub(crate) authority: String,
    /// TLS without a certificate of the client's own.
    pub(crate) tls: Arc<ClientConfig>,
}

/// An attack under way. Ends when dropped.
pub(crate) struct Attack {
    kind: Kind,
    begun: Instant,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Attack {
    /// Begins. All of its connections come from `source`. No other attack of the last minute may have come
    /// from there: what is closed holds its port for so long, towards every destination.
    pub(crate) fn start(kind: Kind, source: Ipv4Addr, target: Target) -> Result<Self> {
        let stop = Arc::new(AtomicBool::default());
        let dialer = Dialer::from_one(source);
        let attacker = Attacker { kind, target, stop: Arc::clone(&stop), dialer, begun: 0 };
        let thread = std::thread::Builder::new()
            .name("attack".into())
            .spawn(move || attacker.run())
            .context("cannot start the attacker's thread")?;
        Ok(Self { kind, begun: Instant::now(), stop, thread: Some(thread) })
    }

    /// Ends it; how many connections were begun. An error if they were too few to attack anything.
    pub(crate) fn end(mut self) -> Result<u64> {
        let begun = self.stop().and_then(|thread| thread.join().ok()).context("the attacker panicked")?;
        let length = self.begun.elapsed();
        ensure!(
            begun >= self.kind.least(length),
            "{begun} connections in {length:.1?}: there was no attack by {}",
            self.kind.name()
        );
        Ok(begun)
    }

    fn stop(&mut self) -> Option<JoinHandle<u64>> {
        self.stop.store(true, Relaxed);
        self.thread.take()
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        if let Some(thread) = self.stop() {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

/// Lets every other thread go first: the measured clients share the attacker's core, and what they wait for
/// is the proxy.
fn give_way() -> Result<()> {
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    // Idle, not nice: the clients may have real-time priority, which this thread would have too.
    let status = Command::new("chrt").args(["--idle", "--pid", "0", &thread]).status().context("no chrt")?;
    ensure!(status.success(), "chrt --idle: {status}");
    Ok(())
}

struct Attacker {
    kind: Kind,
    target: Target,
    stop: Arc<AtomicBool>,
    dialer: Dialer,
    begun: u64,
}

impl Attacker {
    /// Goes on until it is stopped; how many connections were begun.
    fn run(mut self) -> u64 {
        if let Err(error) = give_way() {
            eprintln!("  the attacker takes time of the measured clients: {error:#}");
        }
        let mut held = VecDeque::new();
        let mut next = Instant::now();
        while !self.stop.load(Relaxed) {
            // A proxy that refuses the connection has defended itself; the next one is due all the same.
            if let Ok(connection) = self.connect() {
                held.push_back(connection);
            }
            if held.len() > HELD {
                held.pop_front();
            }
            next += self.kind.pace();
            match next.checked_duration_since(Instant::now()) {
                Some(pause) => std::thread::sleep(pause),
                None => next = Instant::now(),
            }
        }
        self.begun
    }

    /// Does its work on one connection, which lasts for as long as what is returned.
    fn connect(&mut self) -> Result<Box<dyn Send>> {
        let socket = TcpStream::from(self.dialer.dial(self.target.address)?);
        self.begun += 1;
        if matches!(self.kind, Kind::SilentBySni | Kind::SilentByTunnel) {
            return Ok(Box::new(socket));
        }
        socket.set_nonblocking(false)?;
        let gateway = SocketAddr::from(self.target.address).ip();
        let mut client = RawClient::over(socket, gateway, &self.target.tls, PATIENCE)?;
        match self.kind {
            Kind::WaitingReviews => {
                client.send(&frames::opening(&[]))?;
                client.send(&self.requests(Some("made-up")))?;
            }
            Kind::UntakenRefusals => {
                client.send(&frames::opening(&[(INITIAL_WINDOW_SIZE, 0)]))?;
                client.send(&self.requests(None))?;
            }
            Kind::HalfFrames => {
                client.send(&frames::opening(&[]))?;
                client.send(&frames::header(FRAME, kind::HEADERS, frames::END_HEADERS, 1))?;
                client.send(&vec![0; FRAME as usize - 1])?;
            }
            Kind::WindowStorm => self.storm(&mut client)?,
            Kind::SilentBySni | Kind::SilentByTunnel => {}
        }
        Ok(Box::new(client))
    }

    /// As many requests as there may be streams.
    fn requests(&self, token: Option<&str>) -> Vec<u8> {
        (0..STREAMS)
            .flat_map(|number| frames::connect(2 * number + 1, &self.target.authority, token))
            .collect()
    }

    /// Opens and closes the window until the proxy ends the connection, or the attack ends.
    fn storm(&self, client: &mut RawClient) -> Result<()> {
        client.send(&frames::opening(&[(INITIAL_WINDOW_SIZE, 0)]))?;
        client.send(&self.requests(None))?;
        let burst: Vec<u8> =
            (0..1_000).flat_map(|turn| frames::settings(&[(INITIAL_WINDOW_SIZE, turn % 2)])).collect();
        client.socket().set_read_timeout(Some(Duration::from_millis(1)))?;
        while !self.stop.load(Relaxed) {
            client.send(&burst)?;
            // Acknowledgements that nobody reads would end the storm. An error says that no more are there.
            while client.receive().is_ok_and(|frame| frame.is_some()) {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustls::RootCertStore;
    use rustls::crypto::aws_lc_rs::default_provider;

    use super::*;

    #[test]
    fn an_attack_that_gets_no_port_is_an_error() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let tls = Arc::new(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth());
        let target = Target { address, authority: String::new(), tls };
        let not_ours = Ipv4Addr::new(203, 0, 113, 1);
        let attack = Attack::start(Kind::SilentBySni, not_ours, target).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let error = attack.end().unwrap_err();
        assert!(error.to_string().starts_with("0 connections"), "{error:#}");
    }

    #[test]
    fn half_of_the_pace_of_silent_connections_is_an_attack_and_less_is_none() {
        let second = Duration::from_secs(1);
        assert_eq!(Kind::SilentBySni.least(second), 819);
        assert_eq!(Kind::WindowStorm.least(second), 1);
    }
}
