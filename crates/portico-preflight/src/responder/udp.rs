//! UDP on a port of our own: requests of peers become replies. Replies are never answered, so that two
//! responders cannot talk to each other.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use socket2::{Domain, Socket, Type};
use tokio::net::UdpSocket;

use super::shared::Shared;
use crate::probe::Probe;

/// The largest request.
const LARGEST: usize = 65_535;

pub(super) fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM.nonblocking(), None)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    UdpSocket::from_std(socket.into())
}

pub(super) async fn serve(socket: UdpSocket, shared: Arc<Shared>) -> io::Error {
    let mut bytes = vec![0; LARGEST];
    loop {
        match socket.recv_from(&mut bytes).await {
            Ok((length, from)) => {
                if let Some(reply) = reply(&bytes[..length])
                    && shared.admits_datagram(from.ip())
                {
                    // A full queue loses it, as the network may.
                    let _ = socket.try_send_to(&reply, from);
                }
            }
            Err(error) => return error,
        }
    }
}

/// The reply to a request: its head, however long it was. `None`: no request.
pub(super) fn reply(bytes: &[u8]) -> Option<Vec<u8>> {
    let request = Probe::parse(bytes).filter(|probe| !probe.is_reply)?;
    let size = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    Some(Probe { is_reply: true, size, ..request }.write(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::PROBE_LENGTH;

    #[test]
    fn a_reply_is_never_larger_than_its_request_and_never_answered() {
        for length in [0, 100, 1472] {
            let request = Probe { is_reply: false, nonce: 7, size: 0 }.write(length);
            let answer = reply(&request).unwrap();
            assert_eq!(answer.len(), PROBE_LENGTH);
            assert!(answer.len() <= request.len());
            assert_eq!(Probe::parse(&answer).unwrap().size, request.len() as u16);
            assert_eq!(reply(&answer), None);
        }
        assert_eq!(reply(b"anything else"), None);
    }
}
