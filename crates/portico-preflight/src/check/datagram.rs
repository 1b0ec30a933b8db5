//! A probe that comes back: by UDP, or by IP-in-IP over a raw socket, without a tunnel device.
//!
//! The inner packet of IP-in-IP is addressed to the other machine with a protocol that RFC 3692 sets aside
//! for experiments. A host that does decapsulate drops it there.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket as StdUdpSocket};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};

use super::{AGAIN, Limits, micros, millis};
use crate::ip;
use crate::observation::Observation;
use crate::probe::{PROBE_LENGTH, Probe};
use crate::sys;
use crate::transport::Transport;

/// The largest packet of IP.
const LARGEST: usize = 65_535;

/// A socket that sends probes to one machine.
#[derive(Debug)]
pub(super) struct Prober {
    socket: UdpSocket,
    to: IpAddr,
    from: IpAddr,
    is_raw: bool,
    nonce: u64,
}

/// The answer to one probe.
#[derive(Debug)]
pub(super) enum Answer {
    /// It came back.
    Reply,
    /// A packet was too large for the next hop, which has this MTU.
    TooLarge { mtu: u32, by: Option<IpAddr> },
    /// An error.
    Failed(Observation),
}

/// Sends a probe, and waits for it to come back.
pub async fn check(to: IpAddr, transport: Transport, limits: Limits) -> Observation {
    let prober = match Prober::open(to, transport) {
        Ok(prober) => prober,
        Err(seen) => return seen,
    };
    let start = Instant::now();
    let asking = async {
        loop {
            let began = Instant::now();
            match timeout(AGAIN, prober.ask(PROBE_LENGTH)).await {
                Ok(Answer::Reply) => return Observation::Answered { micros: micros(began) },
                Ok(Answer::TooLarge { mtu, by }) => {
                    let why = format!("the next hop takes packets of {mtu} bytes").into();
                    return Observation::Unreachable { by, why };
                }
                Ok(Answer::Failed(seen)) => return seen,
                Err(_) => tracing::trace!(%to, %transport, after = ?start.elapsed(), "no reply yet"),
            }
        }
    };
    timeout(limits.answer, asking).await.unwrap_or(Observation::TimedOut { millis: millis(limits.answer) })
}

impl Prober {
    /// The error is what was seen instead.
    pub(super) fn open(to: IpAddr, transport: Transport) -> Result<Self, Observation> {
        let no_rights = |error: io::Error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                Observation::not_tried("a raw socket needs root, or the capability NET_RAW")
            }
            _ => Observation::of_error(&error, None),
        };
        let (kind, protocol, port, is_raw) = match (transport, to) {
            (Transport::Tcp(_), _) => return Err(Observation::not_tried("TCP has no datagrams")),
            (Transport::Udp(port), _) => (Type::DGRAM, Protocol::UDP, port, false),
            (Transport::IpInIp, IpAddr::V4(_)) => {
                (Type::RAW, Protocol::from(i32::from(ip::IP_IN_IP)), 0, true)
            }
            (Transport::IpInIp, IpAddr::V6(_)) => {
                return Err(Observation::not_tried("container networks carry IP-in-IP over IPv4 only"));
            }
        };
        let is_ipv6 = to.is_ipv6();
        let domain = if is_ipv6 { Domain::IPV6 } else { Domain::IPV4 };
        let socket = Socket::new(domain, kind.nonblocking(), Some(protocol)).map_err(no_rights)?;
        let open = || {
            sys::keep_icmp_errors(&socket, is_ipv6)?;
            sys::do_not_fragment(&socket, is_ipv6)?;
            if is_raw {
                socket.attach_filter(&ip::filter(ip::Headers::IpAndInner))?;
            }
            socket.connect(&SocketAddr::new(to, port).into())
        };
        open().map_err(|error| Observation::of_error(&error, None))?;
        // To the kernel a connected raw socket is sent to and received from like one of UDP.
        let socket = StdUdpSocket::from(socket);
        let wrapped = socket.local_addr().and_then(|from| Ok((from, UdpSocket::from_std(socket)?)));
        let (from, socket) = wrapped.map_err(|error| Observation::of_error(&error, None))?;
        Ok(Self { socket, to, from: from.ip(), is_raw, nonce: nonce() })
    }

    /// Headers of a packet beside the probe.
    pub(super) fn overhead(&self) -> usize {
        match (self.is_raw, self.to) {
            (true, _) => 2 * ip::IPV4_HEADER,
            (false, IpAddr::V4(_)) => ip::IPV4_HEADER + ip::UDP_HEADER,
            (false, IpAddr::V6(_)) => ip::IPV6_HEADER + ip::UDP_HEADER,
        }
    }

    /// Sends a probe of `length` bytes and waits for its reply, for ever.
    pub(super) async fn ask(&self, length: usize) -> Answer {
        let size = u16::try_from(length).unwrap_or(u16::MAX);
        let mut packet = Probe { is_reply: false, nonce: self.nonce, size }.write(length);
        if let (true, IpAddr::V4(from), IpAddr::V4(to)) = (self.is_raw, self.from, self.to) {
            packet = ip::inner(from, to, &packet);
        }
        if let Err(error) = self.socket.send(&packet).await {
            return self.failed(&error);
        }
        let mut bytes = vec![0; LARGEST];
        loop {
            match self.socket.recv(&mut bytes).await {
                Ok(length) => match self.reply(&bytes[..length]) {
                    Some(reply) if (reply.nonce, reply.size) == (self.nonce, size) => return Answer::Reply,
                    // One of another size that is late, or a stranger's.
                    _ => {}
                },
                Err(error) => return self.failed(&error),
            }
        }
    }

    fn reply(&self, bytes: &[u8]) -> Option<Probe> {
        let payload = if self.is_raw { ip::payload_of_inner(ip::payload(bytes)?)? } else { bytes };
        Probe::parse(payload).filter(|probe| probe.is_reply)
    }

    fn failed(&self, error: &io::Error) -> Answer {
        let icmp = sys::next_icmp_error(&self.socket);
        if error.raw_os_error() == Some(libc::EMSGSIZE) {
            let (mtu, by) = icmp.map_or((0, None), |icmp| (icmp.info, icmp.from));
            return Answer::TooLarge { mtu, by };
        }
        Answer::Failed(Observation::of_error(error, icmp))
    }
}

/// A number that a stranger does not guess.
fn nonce() -> u64 {
    RandomState::new().hash_one(super::unix_millis())
}
