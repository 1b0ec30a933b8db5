//! The socket options and the error queue that no safe wrapper covers.
//!
//! An ICMP error names the machine that sent it: a router, or a firewall that rejects. The kernel keeps the
//! error in the error queue of the socket (ip(7), `IP_RECVERR`), for TCP too while a connection is being
//! opened.
#![allow(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::{io, mem, ptr};

/// An ICMP error that the kernel received for a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IcmpError {
    /// The machine that sent it. `None` if this machine's own kernel found the error.
    pub(crate) from: Option<IpAddr>,
    /// What the socket would report.
    pub(crate) errno: i32,
    /// Type and code, as ICMP or ICMPv6 number them.
    pub(crate) kind: u8,
    pub(crate) code: u8,
    /// `ee_info`: the MTU of the next hop, where the packet was too large.
    pub(crate) info: u32,
}

/// Has the socket keep ICMP errors with their sender.
pub(crate) fn keep_icmp_errors(socket: impl AsFd, is_ipv6: bool) -> io::Result<()> {
    let (level, option) =
        if is_ipv6 { (libc::SOL_IPV6, libc::IPV6_RECVERR) } else { (libc::SOL_IP, libc::IP_RECVERR) };
    set(socket, level, option, 1)
}

/// Has the socket send packets of any size that the interface takes, never in fragments, whatever the kernel
/// has learnt about the path.
pub(crate) fn do_not_fragment(socket: impl AsFd, is_ipv6: bool) -> io::Result<()> {
    let (level, option, value) = if is_ipv6 {
        (libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)
    } else {
        (libc::SOL_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)
    };
    set(socket, level, option, value)
}

fn set(socket: impl AsFd, level: i32, option: i32, value: libc::c_int) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads one C int, of the length given, from the address of a local that lives past
    // the call. The descriptor is borrowed and therefore open.
    let result = unsafe {
        let value = (&raw const value).cast();
        libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, value, length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Room for one `sock_extended_err` with an address; the kernel needs less than 80 bytes.
#[repr(C, align(8))]
struct Control([u8; 256]);

/// Takes the oldest error from the queue of a socket that does not block.
pub(crate) fn next_icmp_error(socket: impl AsFd) -> Option<IcmpError> {
    let mut control = Control([0; 256]);
    // SAFETY: all zeros are valid values of these C structures.
    let (mut message, mut name) =
        unsafe { (mem::zeroed::<libc::msghdr>(), mem::zeroed::<libc::sockaddr_storage>()) };
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = size_of_val(&name) as libc::socklen_t;
    message.msg_control = (&raw mut control.0).cast();
    message.msg_controllen = size_of_val(&control.0) as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: name and control point to locals of the lengths given, which live past the call. There is no
    // buffer for data, which the kernel cuts off.
    let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    if received < 0 {
        return None;
    }
    // SAFETY: the kernel has filled the control buffer that the header points to, and set its length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: a header that these macros return lies within the control buffer, with its data behind it.
        let (level, kind, data) = unsafe {
            let length = (*header).cmsg_len as usize;
            let data = libc::CMSG_DATA(header);
            let length = length.saturating_sub(data.offset_from(header.cast()) as usize);
            let mut bytes = vec![0; length.min(size_of_val(&control.0))];
            ptr::copy_nonoverlapping(data, bytes.as_mut_ptr(), bytes.len());
            ((*header).cmsg_level, (*header).cmsg_type, bytes)
        };
        let is_error =
            matches!((level, kind), (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR));
        if is_error && let Some(error) = parse(&data) {
            return Some(error);
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    None
}

/// Reads a `sock_extended_err` and the socket address behind it (ip(7)).
fn parse(data: &[u8]) -> Option<IcmpError> {
    let word = |at: usize| Some(u32::from_ne_bytes(data.get(at..at + 4)?.try_into().ok()?));
    let errno = i32::try_from(word(0)?).ok()?;
    let (kind, code, info) = (*data.get(5)?, *data.get(6)?, word(8)?);
    let address = data.get(16..)?;
    let family = i32::from(u16::from_ne_bytes(address.get(..2)?.try_into().ok()?));
    let from = match family {
        libc::AF_INET => {
            let bytes: [u8; 4] = address.get(4..8)?.try_into().ok()?;
            Some(IpAddr::from(Ipv4Addr::from(bytes)))
        }
        libc::AF_INET6 => {
            let bytes: [u8; 16] = address.get(8..24)?.try_into().ok()?;
            Some(IpAddr::from(Ipv6Addr::from(bytes)).to_canonical())
        }
        _ => None,
    };
    Some(IcmpError { from, errno, kind, code, info })
}

/// The addresses of this machine's interfaces, without those that are unique to a link only.
pub(crate) fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut first: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the call writes the head of a list to the address of a local.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut next) = (Vec::new(), first);
    while !next.is_null() {
        // SAFETY: the list is valid until it is freed below; an address is null, or of its family's type.
        unsafe {
            let address = (*next).ifa_addr;
            if !address.is_null() {
                match i32::from((*address).sa_family) {
                    libc::AF_INET => {
                        let address = ptr::read_unaligned(address.cast::<libc::sockaddr_in>());
                        found.push(IpAddr::from(address.sin_addr.s_addr.to_ne_bytes()));
                    }
                    libc::AF_INET6 => {
                        let address = ptr::read_unaligned(address.cast::<libc::sockaddr_in6>());
                        found.push(IpAddr::from(address.sin6_addr.s6_addr));
                    }
                    _ => {}
                }
            }
            next = (*next).ifa_next;
        }
    }
    // SAFETY: the list came from getifaddrs, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    found.retain(|address| !matches!(address, IpAddr::V6(address) if address.is_unicast_link_local()));
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_icmp_error_names_its_sender() {
        let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        keep_icmp_errors(&socket, false).unwrap();
        socket.connect(closed).unwrap();
        assert_eq!(next_icmp_error(&socket), None);
        socket.send(b"anybody?").unwrap();
        // On loopback the answer is there when send(2) returns.
        let error = next_icmp_error(&socket).unwrap();
        assert_eq!(error.from, Some("127.0.0.1".parse().unwrap()));
        assert_eq!((error.errno, error.kind, error.code), (libc::ECONNREFUSED, 3, 3));
    }

    #[test]
    fn this_machine_has_its_loopback_address() {
        assert!(addresses().unwrap().contains(&IpAddr::from([127, 0, 0, 1])));
    }

    #[test]
    fn what_is_cut_off_is_no_error() {
        let whole = [&[111, 0, 0, 0, 2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &[2, 0, 0, 0, 192, 0, 2, 1]];
        let whole = whole.concat();
        assert_eq!(parse(&whole).unwrap().from, Some("192.0.2.1".parse().unwrap()));
        for length in 0..whole.len() {
            assert_eq!(parse(&whole[..length]), None, "{length}");
        }
    }
}
