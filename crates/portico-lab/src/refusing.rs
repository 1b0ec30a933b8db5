//! An address at which connections are refused for as long as a test needs it.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};

/// A socket that is bound and does not listen. So it refuses connections, and nothing else gets its port: one
/// that was free a moment ago may be anybody's.
pub struct Refusing {
    _socket: OwnedFd,
    address: SocketAddr,
}

impl Refusing {
    /// At a free port of 127.0.0.1.
    pub fn start() -> io::Result<Self> {
        Self::at((Ipv4Addr::LOCALHOST, 0).into())
    }

    /// At this address over IPv4; port 0 is a free one.
    pub fn at(address: SocketAddr) -> io::Result<Self> {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        bind(&socket, &address)?;
        let address = getsockname(&socket)?.try_into()?;
        Ok(Self { _socket: socket, address })
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
