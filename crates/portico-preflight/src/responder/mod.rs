//! The other end of the checks: accepts TCP, returns datagrams, and tries the way back when asked.
//!
//! Safe on a machine in production. It binds only the addresses it is given, and leaves ports of another
//! program alone. A raw socket (`raw`) answers probes to a UDP port in use, beside that program. The
//! responder answers only configured peers, never with more bytes than it got. It tries back only towards the
//! very peer that asks, and only configured targets. Everything is bounded: [`Bounds`].

mod raw;
mod shared;
mod tcp;
mod udp;

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::bucket::Bucket;
use crate::check::Limits;
use crate::transport::Transport;

use self::shared::Shared;
pub use self::shared::{Bounds, Counts};

/// What a responder does.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Addresses of this machine.
    pub addresses: Vec<IpAddr>,
    /// What to answer on each of them.
    pub transports: BTreeSet<Transport>,
    /// The machines that are answered.
    pub peers: Vec<IpNet>,
    /// The targets that may be tried towards a peer that asks for it.
    pub may_try: BTreeSet<Transport>,
    /// Limits of what is tried.
    pub limits: Limits,
}

/// How one transport is answered on one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opened {
    /// By a socket of its own.
    Bound,
    /// By a raw socket: beside the program that has the UDP port, or for IP-in-IP.
    Raw,
    /// By the program that has the TCP port.
    InUse,
    /// Not at all.
    Silent {
        /// Why.
        why: Box<str>,
    },
}

/// Sockets that are open, and answered once [`Responder::serve`] is called.
#[derive(Debug)]
pub struct Responder {
    shared: Arc<Shared>,
    opened: Vec<(IpAddr, Transport, Opened)>,
    tcp: Vec<tokio::net::TcpListener>,
    udp: Vec<tokio::net::UdpSocket>,
    raw: Vec<raw::RawSocket>,
}

impl Responder {
    /// Opens every socket that can be had. What cannot is in [`Responder::opened`].
    pub fn open(settings: Settings, bounds: Bounds) -> Self {
        let mut responder = Sockets::default();
        for address in &settings.addresses {
            let mut in_use = BTreeSet::new();
            for transport in settings.transports.iter().filter(|transport| transport.leads_to(*address)) {
                let opened = match transport {
                    Transport::Tcp(port) => responder.open_tcp(SocketAddr::new(*address, *port)),
                    Transport::Udp(port) => match responder.open_udp(SocketAddr::new(*address, *port)) {
                        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                            in_use.insert(*port);
                            continue;
                        }
                        opened => opened,
                    },
                    Transport::IpInIp => responder.open_raw(raw::RawSocket::ip_in_ip(*address)),
                };
                responder.note(*address, *transport, opened);
            }
            if !in_use.is_empty() {
                let opened = responder.open_raw(raw::RawSocket::udp(*address, in_use.clone()));
                let opened = opened.map_err(|error| error.to_string());
                for port in in_use {
                    let opened = opened.clone().map_err(io::Error::other);
                    responder.note(*address, Transport::Udp(port), opened);
                }
            }
        }
        let silent = responder.opened.iter().filter(|(_, _, how)| matches!(how, Opened::Silent { .. }));
        let shared = Shared {
            silent: silent.map(|(_, transport, _)| *transport).collect(),
            peers: settings.peers,
            may_try: settings.may_try,
            limits: settings.limits,
            bounds,
            connections: Arc::new(Semaphore::new(bounds.connections)),
            datagrams: Bucket::new(bounds.datagrams_per_second),
            counts: Arc::default(),
        };
        let Sockets { opened, tcp, udp, raw } = responder;
        Self { shared: Arc::new(shared), opened, tcp, udp, raw }
    }

    /// What is open, and how.
    #[must_use]
    pub fn opened(&self) -> &[(IpAddr, Transport, Opened)] {
        &self.opened
    }

    /// What is being counted.
    #[must_use]
    pub fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.shared.counts)
    }

    /// Answers until dropped. A socket that fails ends the others too, and is named.
    pub async fn serve(self) -> io::Error {
        let failed = self.serve_until(std::future::pending()).await;
        failed.unwrap_or_else(|| io::Error::other("it was told to stop"))
    }

    /// Answers until `stop`, and has left every port when it returns. The error of one socket ends the others
    /// too, and is returned.
    pub async fn serve_until(self, stop: impl Future<Output = ()>) -> Option<io::Error> {
        let mut tasks = JoinSet::new();
        for listener in self.tcp {
            tasks.spawn(tcp::serve(listener, Arc::clone(&self.shared)));
        }
        for socket in self.udp {
            tasks.spawn(udp::serve(socket, Arc::clone(&self.shared)));
        }
        for socket in self.raw {
            tasks.spawn(raw::serve(socket, Arc::clone(&self.shared)));
        }
        let failed = tokio::select! {
            // Without a socket there is nothing to answer, which is no error.
            Some(failed) = tasks.join_next() => Some(failed.unwrap_or_else(io::Error::other)),
            () = stop => None,
        };
        tasks.shutdown().await;
        failed
    }
}

/// The sockets of a responder while they are being opened.
#[derive(Debug, Default)]
struct Sockets {
    opened: Vec<(IpAddr, Transport, Opened)>,
    tcp: Vec<tokio::net::TcpListener>,
    udp: Vec<tokio::net::UdpSocket>,
    raw: Vec<raw::RawSocket>,
}

impl Sockets {
    fn open_tcp(&mut self, address: SocketAddr) -> io::Result<Opened> {
        match tcp::listen(address) {
            Ok(listener) => {
                self.tcp.push(listener);
                Ok(Opened::Bound)
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(Opened::InUse),
            Err(error) => Err(error),
        }
    }

    fn open_udp(&mut self, address: SocketAddr) -> io::Result<Opened> {
        self.udp.push(udp::bind(address)?);
        Ok(Opened::Bound)
    }

    fn open_raw(&mut self, socket: io::Result<raw::RawSocket>) -> io::Result<Opened> {
        self.raw.push(socket?);
        Ok(Opened::Raw)
    }

    fn note(&mut self, address: IpAddr, transport: Transport, opened: io::Result<Opened>) {
        let opened = opened.unwrap_or_else(|error| Opened::Silent { why: error.to_string().into() });
        self.opened.push((address, transport, opened));
    }
}
