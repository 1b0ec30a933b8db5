//! The one system call of the data plane that no safe wrapper covers.
#![allow(unsafe_code)]

use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ` of tcp(7), the same on every Linux architecture we build for (asm-generic/ioctls.h).
const SIOCOUTQ: Opcode = 0x5411;

/// Bytes written to the socket that its peer has not yet acknowledged. 0 where the socket cannot say.
pub(crate) fn send_queue(socket: impl AsFd) -> u64 {
    // SAFETY: SIOCOUTQ writes one C int to the address it is given, which is the output type named here, and has no
    // other effect. On a descriptor that is no socket it fails without writing.
    let queued = unsafe { ioctl(socket, Getter::<SIOCOUTQ, i32>::new()) };
    queued.ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

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
}
