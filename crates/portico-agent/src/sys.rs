//! What no safe wrapper covers: a socket for the packets of one interface, and waiting for descriptors that are neither TCP nor UDP.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The ARP packets of one interface, packet(7).
struct ArpOf(libc::sockaddr_ll);

// SAFETY: the closure gets the address and the size of a sockaddr_ll that is borrowed for the length of the call. It holds plain
// numbers only, all of them set, and is what the system calls expect for AF_PACKET.
unsafe impl SocketAddrArg for ArpOf {
    unsafe fn with_sockaddr<R>(&self, call: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        call((&raw const self.0).cast(), size_of::<libc::sockaddr_ll>() as SocketAddrLen)
    }
}

/// A socket that sends and receives whole Ethernet frames with ARP in them on one interface. Needs CAP_NET_RAW.
pub(crate) fn arp_socket(interface: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Of no protocol, so that nothing of other interfaces is received before it is bound to its own.
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    let of_interface = ArpOf(libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as libc::sa_family_t,
        sll_protocol: (libc::ETH_P_ARP as u16).to_be(),
        sll_ifindex: interface.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    });
    rustix::net::bind(&socket, &of_interface)?;
    Ok(socket)
}

/// Has the runtime tell when there is something to read.
pub(crate) fn readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open, and is the same descriptor of the same file until it is dropped; it moves into the AsyncFd, which
    // lends it out by shared reference only.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
    Ok(registered?)
}
