//! Asking on a link whether someone has an address: the probe of RFC 5227.
//!
//! A probe is an ARP request that names no sender, so that nobody learns anything wrong from it. Shorter than the RFC's (seconds
//! of random waiting are for hosts that all boot at once and would take the address for good): three probes within a second.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, timeout_at};

use super::Mac;
use crate::sys::{arp_socket, readable};

/// `PROBE_NUM` of RFC 5227.
const PROBES: u32 = 3;

/// How long after each probe answers are waited for: a second in all.
pub(super) const PATIENCE: Duration = Duration::from_millis(330);

/// The same where an agent had the address a moment ago. Pods wait for this one, and an owner on the link would have been met before.
pub(super) const PATIENCE_OF_A_SUCCESSOR: Duration = Duration::from_millis(100);

/// Who answers on one interface: more than a few would not be read.
const ANSWERS: usize = 8;

/// An Ethernet header and an ARP packet for IPv4.
const FRAME: usize = 14 + 28;
/// What every ARP packet for IPv4 on Ethernet begins with: both types and both lengths.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// One interface to ask on.
#[derive(Debug)]
pub(super) struct Probe {
    socket: AsyncFd<OwnedFd>,
    mac: Mac,
}

impl Probe {
    /// Prepares to ask on the interface with this number and Ethernet address.
    pub(super) fn open(index: u32, mac: Mac) -> io::Result<Self> {
        Ok(Self { socket: readable(arp_socket(index)?)?, mac })
    }

    /// Who says that the `address` is theirs. What the host itself says (`own`), on another interface on the same wire, does not count.
    pub(super) async fn ask(
        &self,
        address: Ipv4Addr,
        own: &[Mac],
        patience: Duration,
    ) -> io::Result<Vec<Mac>> {
        let mut owners = Vec::new();
        let request = probe(self.mac, address);
        for _ in 0..PROBES {
            rustix::net::send(self.socket.get_ref(), &request, SendFlags::empty())?;
            let until = Instant::now() + patience;
            while let Ok(ready) = timeout_at(until, self.socket.readable()).await {
                let mut ready = ready?;
                // Would-block is an end of reading like any other.
                let _ = ready.try_io(|socket| self.read(socket.get_ref(), address, own, &mut owners));
                if Instant::now() >= until {
                    break;
                }
            }
        }
        Ok(owners)
    }

    /// Reads what has come, until there is no more.
    fn read(
        &self,
        socket: &OwnedFd,
        address: Ipv4Addr,
        own: &[Mac],
        owners: &mut Vec<Mac>,
    ) -> io::Result<()> {
        let mut buffer = [0; 64];
        // As many as a socket holds by default; on a wire with more than that the next round goes on.
        for _ in 0..256 {
            match rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((length, _)) => {
                    let owner = owner(&buffer[..length], address).filter(|owner| !own.contains(owner));
                    if let Some(owner) = owner
                        && !owners.contains(&owner)
                        && owners.len() < ANSWERS
                    {
                        owners.push(owner);
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// "Who has `address`?", from nobody.
fn probe(sender: Mac, address: Ipv4Addr) -> Vec<u8> {
    let mut frame = Vec::with_capacity(60);
    frame.extend_from_slice(&[0xff; 6]);
    frame.extend_from_slice(&sender.0);
    frame.extend_from_slice(&(libc::ETH_P_ARP as u16).to_be_bytes());
    frame.extend_from_slice(&ETHERNET_IPV4);
    frame.extend_from_slice(&REQUEST.to_be_bytes());
    frame.extend_from_slice(&sender.0);
    frame.extend_from_slice(&Ipv4Addr::UNSPECIFIED.octets());
    frame.extend_from_slice(&[0; 6]);
    frame.extend_from_slice(&address.octets());
    // The shortest frame that Ethernet carries.
    frame.resize(60, 0);
    frame
}

/// Who claims `address` with this frame: by a reply, or by an announcement, which asks for the sender's own address.
///
/// An ordinary request *from* the address is no claim, other than in the RFC: a node that answers a client elsewhere from the shared address
/// may send one. A real owner answers the probe as well.
fn owner(frame: &[u8], address: Ipv4Addr) -> Option<Mac> {
    let packet: &[u8; FRAME] = frame.first_chunk()?;
    let operation = u16::from_be_bytes([packet[20], packet[21]]);
    let (sender, target) = (&packet[28..32], &packet[38..42]);
    let claims = operation == REPLY || (operation == REQUEST && sender == target);
    let is_arp = packet[12..14] == (libc::ETH_P_ARP as u16).to_be_bytes() && packet[14..20] == ETHERNET_IPV4;
    let mac = Mac(packet[22..28].try_into().ok()?);
    (is_arp && claims && sender == address.octets()).then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);
    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    /// An ARP packet from `sender` at MAC.
    fn packet(operation: u16, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
        let mut frame = probe(MAC, target);
        frame[20..22].copy_from_slice(&operation.to_be_bytes());
        frame[28..32].copy_from_slice(&sender.octets());
        frame
    }

    #[test]
    fn replies_and_announcements_are_claims() {
        let other = Ipv4Addr::new(10, 0, 0, 1);
        assert_eq!(owner(&packet(REPLY, ADDRESS, other), ADDRESS), Some(MAC));
        assert_eq!(owner(&packet(REPLY, ADDRESS, Ipv4Addr::UNSPECIFIED), ADDRESS), Some(MAC));
        assert_eq!(owner(&packet(REQUEST, ADDRESS, ADDRESS), ADDRESS), Some(MAC));
        assert_eq!(owner(&packet(REPLY, other, ADDRESS), ADDRESS), None);
        assert_eq!(owner(&packet(REQUEST, ADDRESS, other), ADDRESS), None);
    }

    #[test]
    fn a_probe_of_another_node_claims_nothing() {
        assert_eq!(owner(&probe(MAC, ADDRESS), ADDRESS), None);
    }

    #[test]
    fn a_frame_that_is_cut_off_claims_nothing() {
        let frame = packet(REPLY, ADDRESS, ADDRESS);
        for end in 0..FRAME {
            assert_eq!(owner(&frame[..end], ADDRESS), None);
        }
        assert_eq!(owner(&frame[..FRAME], ADDRESS), Some(MAC));
    }

    #[test]
    fn another_protocol_in_the_same_place_claims_nothing() {
        for at in 12..20 {
            let mut frame = packet(REPLY, ADDRESS, ADDRESS);
            frame[at] ^= 0x10;
            assert_eq!(owner(&frame, ADDRESS), None);
        }
    }
}
