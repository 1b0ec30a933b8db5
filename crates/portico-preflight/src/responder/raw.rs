//! Raw sockets: IP-in-IP, and UDP ports that another program has, such as VXLAN's.
//!
//! The kernel gives a raw socket a copy of each packet that the firewall has let in. The program that has the
//! port gets it as well. The packet filter of the socket drops all but probes in the kernel. So the traffic
//! of a container network costs some instructions a packet, and no copy.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket as StdUdpSocket};
use std::sync::Arc;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use super::shared::Shared;
use super::udp;
use crate::ip::{self, Headers, Udp};

/// The largest packet of IP.
const LARGEST: usize = 65_535;

/// A raw socket of one address of this machine.
#[derive(Debug)]
pub(super) struct RawSocket {
    socket: UdpSocket,
    address: IpAddr,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    IpInIp,
    /// For these ports; others have sockets of their own.
    Udp(BTreeSet<u16>),
}

impl RawSocket {
    pub(super) fn ip_in_ip(address: IpAddr) -> io::Result<Self> {
        if address.is_ipv6() {
            return Err(io::Error::other("container networks carry IP-in-IP over IPv4 only"));
        }
        let socket = open(address, Protocol::from(i32::from(ip::IP_IN_IP)), Headers::IpAndInner)?;
        Ok(Self { socket, address, kind: Kind::IpInIp })
    }

    pub(super) fn udp(address: IpAddr, ports: BTreeSet<u16>) -> io::Result<Self> {
        let headers = if address.is_ipv6() { Headers::Udp } else { Headers::IpAndUdp };
        let socket = open(address, Protocol::UDP, headers)?;
        Ok(Self { socket, address, kind: Kind::Udp(ports) })
    }

    /// The answer to a packet of `from`.
    fn reply(&self, packet: &[u8], from: IpAddr) -> Option<Vec<u8>> {
        let packet = if self.address.is_ipv4() { ip::payload(packet)? } else { packet };
        match (&self.kind, self.address, from) {
            (Kind::IpInIp, IpAddr::V4(address), IpAddr::V4(from)) => {
                Some(ip::inner(address, from, &udp::reply(ip::payload_of_inner(packet)?)?))
            }
            (Kind::IpInIp, ..) => None,
            (Kind::Udp(ports), ..) => {
                let request = Udp::parse(packet).filter(|request| ports.contains(&request.to))?;
                let payload = udp::reply(request.payload)?;
                let reply = Udp { from: request.to, to: request.from, payload: &payload };
                Some(reply.write(self.address, from))
            }
        }
    }
}

fn open(address: IpAddr, protocol: Protocol, headers: Headers) -> io::Result<UdpSocket> {
    let address = SocketAddr::new(address, 0);
    let socket = Socket::new(Domain::for_address(address), Type::RAW.nonblocking(), Some(protocol)).map_err(
        |error| io::Error::new(error.kind(), format!("a raw socket: {error}; it needs root or NET_RAW")),
    )?;
    socket.attach_filter(&ip::filter(headers))?;
    socket.bind(&address.into())?;
    // To the kernel a raw socket is sent to and received from like one of UDP.
    UdpSocket::from_std(StdUdpSocket::from(socket))
}

pub(super) async fn serve(socket: RawSocket, shared: Arc<Shared>) -> io::Error {
    let mut bytes = vec![0; LARGEST];
    loop {
        match socket.socket.recv_from(&mut bytes).await {
            Ok((length, from)) => {
                if let Some(reply) = socket.reply(&bytes[..length], from.ip())
                    && shared.admits_datagram(from.ip())
                {
                    // A full queue loses it, as the network may.
                    let _ = socket.socket.try_send_to(&reply, SocketAddr::new(from.ip(), 0));
                }
            }
            Err(error) => return error,
        }
    }
}
