//! The system calls of the data plane that no safe wrapper covers.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ` of tcp(7), the same on every Linux architecture we build for (asm-generic/ioctls.h).
const SIOCOUTQ: Opcode = 0x5411;

/// Bytes written to the socket that its peer has not yet acknowledged. 0 where the socket cannot say.
pub(crate) fn send_queue(socket: impl AsFd) -> u64 {
    // SAFETY: SIOCOUTQ writes one C int to the address it is given, which is the output type named here, and
    // has no other effect. On a descriptor that is no socket it fails without writing.
    let queued = unsafe { ioctl(socket, Getter::<SIOCOUTQ, i32>::new()) };
    queued.ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
}

/// Has the socket count as readable only with `bytes` in it, or at its end (`SO_RCVLOWAT`, socket(7)). What
/// it holds already is reported at once if that is enough. Where the system refuses, the socket goes on
/// reporting every byte.
pub(crate) fn set_receive_low_water_mark(socket: impl AsFd, bytes: u32) {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let length = size_of_val(&bytes) as libc::socklen_t;
    // SAFETY: the kernel reads one C int, of the length given, from the address of a local that lives past
    // the call. The descriptor is borrowed and therefore open. On one that is no socket the call fails
    // without effect.
    let _result = unsafe {
        let value = (&raw const bytes).cast();
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, length)
    };
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn bytes_that_the_peer_does_not_take_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _receiver = listener.accept().unwrap();
        assert_eq!(send_queue(&sender), 0);
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[0; 65536]).is_ok() {}
        assert!(send_queue(&sender) > 0);
    }

    #[test]
    fn a_socket_below_its_low_water_mark_is_not_readable_until_the_mark_is_taken_back() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        let readable = |patience: &Timespec| {
            poll(&mut [PollFd::new(&receiver, PollFlags::IN)], Some(patience)).unwrap() == 1
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        sender.write_all(&[0; 10]).unwrap();
        assert!(readable(&Timespec { tv_sec: 10, tv_nsec: 0 }));
        set_receive_low_water_mark(&receiver, 11);
        assert!(!readable(&now));
        set_receive_low_water_mark(&receiver, 1);
        assert!(readable(&now));
    }
}
