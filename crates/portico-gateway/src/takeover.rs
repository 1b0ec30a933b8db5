//! Handing the listening sockets to a successor, so that no connection attempt fails while one process replaces another.
//!
//! The running gateway offers its sockets on a Unix socket. A successor connects, receives them (`SCM_RIGHTS`), begins to
//! accept on them, and says so; only then does the old process stop accepting and drain. At no moment is a socket closed
//! that a connection waits in. Whichever side fails on the way, the old process goes on as if nothing had been asked.
//!
//! The protocol, over `SOCK_SEQPACKET` so that messages keep their bounds: the old process sends any number of messages, each a JSON
//! list of listener names with as many descriptors, then an empty list; the successor answers [`READY`].

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recv, recvmsg, send, sendmsg, socket_with, sockopt,
};
use thiserror::Error;

use crate::record::Listener;

/// Descriptors in one message; Linux admits 253.
const BATCH: usize = 128;

/// Longest message: 128 names of at most 16 characters, with quotes and commas.
const MESSAGE: usize = 8 * 1024;

/// What the successor says once it accepts connections.
const READY: &[u8] = b"ready";

/// A successor reads its manifests, or fills its caches from the Kubernetes API, before it is ready.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// Why sockets could not be taken over or offered.
#[derive(Debug, Error)]
pub enum TakeOverError {
    /// A system call on the Unix socket failed.
    #[error(
        "{what} {path}: {source}; check that the path is writable and that both processes run as the same user"
    )]
    Socket {
        /// What was tried.
        what: &'static str,
        /// The Unix socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The other process does not speak this protocol.
    #[error(
        "the process at {path} sent something else than listening sockets: {problem}; is it a portico gateway of about this version?"
    )]
    Protocol {
        /// The Unix socket.
        path: PathBuf,
        /// What was wrong.
        problem: String,
    },
}

/// A running gateway whose sockets were received, and which waits for word that they are in use.
#[derive(Debug)]
pub struct Predecessor {
    connection: OwnedFd,
    path: PathBuf,
    pub(crate) sockets: HashMap<Listener, Vec<OwnedFd>>,
}

/// Asks the gateway that offers its sockets at `path` for them. `None` if nobody is there: the first start.
pub fn take_over(path: &Path) -> Result<Option<Predecessor>, TakeOverError> {
    let failed = |what, error: rustix::io::Errno| TakeOverError::Socket {
        what,
        path: path.into(),
        source: error.into(),
    };
    let connection = unix_socket().map_err(|error| failed("opening a Unix socket for", error))?;
    let address = SocketAddrUnix::new(path).map_err(|error| failed("using the path", error))?;
    match connect(&connection, &address) {
        Ok(()) => {}
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED) => return Ok(None),
        Err(error) => return Err(failed("connecting to", error)),
    }
    set_timeout(&connection, Duration::from_secs(10)).map_err(|error| failed("setting up", error))?;
    let mut sockets: HashMap<Listener, Vec<OwnedFd>> = HashMap::new();
    loop {
        let (names, fds) =
            receive_batch(&connection).map_err(|error| failed("receiving sockets from", error))?;
        let protocol = |problem: String| TakeOverError::Protocol { path: path.into(), problem };
        let names: Vec<String> =
            serde_json::from_slice(&names).map_err(|error| protocol(error.to_string()))?;
        if names.len() != fds.len() {
            return Err(protocol(format!("{} names with {} descriptors", names.len(), fds.len())));
        }
        if names.is_empty() {
            return Ok(Some(Predecessor { connection, path: path.into(), sockets }));
        }
        for (name, fd) in names.iter().zip(fds) {
            let listener = parse_name(name).ok_or_else(|| protocol(format!("unknown listener {name:?}")))?;
            sockets.entry(listener).or_default().push(fd);
        }
    }
}

impl Predecessor {
    /// Tells the predecessor that its sockets are accepted on: from now on it drains.
    pub fn ready(self) -> Result<(), TakeOverError> {
        match send(&self.connection, READY, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(TakeOverError::Socket { what: "answering", path: self.path, source: error.into() })
            }
        }
    }
}

/// Where successors ask for the sockets of this process.
#[derive(Debug)]
pub struct Offer {
    listening: OwnedFd,
}

impl Offer {
    /// Listens at `path`, in place of whatever was there: a predecessor that has handed over, or what a crash left.
    pub fn new(path: &Path) -> Result<Self, TakeOverError> {
        let failed = |what, source: io::Error| TakeOverError::Socket { what, path: path.into(), source };
        let listening = unix_socket().map_err(|error| failed("opening a Unix socket for", error.into()))?;
        // Bound beside and renamed over: there is no moment without a socket at the path.
        let beside = path.with_extension(format!("{}.new", std::process::id()));
        let beside_address =
            SocketAddrUnix::new(&beside).map_err(|error| failed("using the path", error.into()))?;
        bind(&listening, &beside_address).map_err(|error| failed("binding", error.into()))?;
        listen(&listening, 4).map_err(|error| failed("listening on", error.into()))?;
        std::fs::rename(&beside, path).map_err(|error| failed("putting in place", error))?;
        Ok(Self { listening })
    }

    /// Serves successors one after the other, until one of them is ready. Blocks.
    ///
    /// `sockets` is asked anew for each. A successor that fails is logged and forgotten.
    pub(crate) fn serve(&self, sockets: impl Fn() -> io::Result<Vec<(Listener, OwnedFd)>>) -> io::Result<()> {
        loop {
            let connection = accept_with(&self.listening, SocketFlags::CLOEXEC)?;
            match sockets().and_then(|sockets| hand_over(&connection, &sockets)) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    tracing::warn!(%error, "a successor asked for the listeners but did not take over; going on")
                }
            }
        }
    }
}

fn hand_over(connection: &OwnedFd, sockets: &[(Listener, OwnedFd)]) -> io::Result<()> {
    let peer = sockopt::socket_peercred(connection)?;
    let own = rustix::process::geteuid();
    if peer.uid != own && !peer.uid.is_root() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("it runs as user {}", peer.uid.as_raw()),
        ));
    }
    set_timeout(connection, READY_TIMEOUT)?;
    for batch in sockets.chunks(BATCH) {
        send_batch(connection, batch)?;
    }
    send_batch(connection, &[])?;
    let mut answer = [0; 16];
    let (_, length) = recv(connection, &mut answer, RecvFlags::empty())?;
    if answer[..length] == *READY { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn send_batch(connection: &OwnedFd, batch: &[(Listener, OwnedFd)]) -> io::Result<()> {
    let names: Vec<String> = batch.iter().map(|(listener, _)| listener.to_string()).collect();
    let names = serde_json::to_vec(&names)?;
    let fds: Vec<_> = batch.iter().map(|(_, socket)| socket.as_fd()).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(connection, &[IoSlice::new(&names)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive_batch(connection: &OwnedFd) -> rustix::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // This process may not open as many descriptors as its predecessor.
        return Err(rustix::io::Errno::MFILE);
    }
    bytes.truncate(received.bytes);
    Ok((bytes, fds))
}

fn unix_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn set_timeout(socket: &OwnedFd, limit: Duration) -> rustix::io::Result<()> {
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(limit))?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, Some(limit))
}

/// The opposite of `Listener`'s `Display`.
fn parse_name(name: &str) -> Option<Listener> {
    match name {
        "sni" => Some(Listener::Sni),
        "tunnel" => Some(Listener::Tunnel),
        _ => name.strip_prefix("node_port:")?.parse().ok().map(Listener::NodePort),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn names_of_listeners_survive_the_way() {
        for listener in [Listener::Sni, Listener::Tunnel, Listener::NodePort(31000)] {
            assert_eq!(parse_name(&listener.to_string()), Some(listener));
        }
        assert_eq!(parse_name("node_port:70000"), None);
        assert_eq!(parse_name("other"), None);
    }

    #[test]
    fn nobody_at_the_path_means_a_first_start() {
        let dir = tempfile::tempdir().unwrap();
        assert!(take_over(&dir.path().join("gone.sock")).unwrap().is_none());
    }

    #[test]
    fn more_sockets_than_fit_one_message_arrive_under_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let listeners: Vec<TcpListener> =
            (0..BATCH + 7).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<u16> =
            listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        let sockets = move || {
            let each = listeners.iter().map(|listener| {
                let port = listener.local_addr()?.port();
                Ok((Listener::NodePort(port), OwnedFd::from(listener.try_clone()?)))
            });
            each.collect()
        };
        let server = std::thread::spawn(move || offer.serve(sockets));
        let predecessor = take_over(&path).unwrap().expect("an offer is open");
        for port in ports {
            let socket = &predecessor.sockets[&Listener::NodePort(port)][0];
            let address = socket2::SockRef::from(socket).local_addr().unwrap().as_socket().unwrap();
            assert_eq!(address.port(), port);
        }
        predecessor.ready().unwrap();
        server.join().unwrap().unwrap();
    }

    #[test]
    fn a_successor_that_gives_up_leaves_the_offer_open_for_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let server = std::thread::spawn(move || offer.serve(|| Ok(Vec::new())));
        drop(take_over(&path).unwrap().expect("an offer is open"));
        take_over(&path).unwrap().expect("the offer is still open").ready().unwrap();
        server.join().unwrap().unwrap();
    }
}
