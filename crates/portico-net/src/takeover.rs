//! Handing the listening sockets to a successor, so that no connection attempt fails while one process
//! replaces another.
//!
//! The running process offers its sockets on a Unix socket. A successor connects, receives them
//! (`SCM_RIGHTS`), begins to accept on them, and says so; only then does the old process stop accepting and
//! drain. At no moment is a socket closed that a connection waits in. Whichever side fails on the way, the
//! other goes on: the old process as if nothing had been asked, a successor, which learns it from
//! [`Predecessor::gone`], with the sockets it has.
//!
//! The protocol, over `SOCK_SEQPACKET` so that messages keep their bounds: the old process sends any number
//! of messages, each a JSON list of listener names with as many descriptors, then an empty list; the
//! successor sends `ready`. The names have a meaning only between processes of one kind.

use std::collections::HashMap;
use std::hash::Hash;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recv,
    recvmsg, send, sendmsg, socket_with, sockopt,
};
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

/// Descriptors in one message; Linux admits 253.
const BATCH: usize = 128;

/// Longest message: 128 names of at most 56 characters (an IPv6 address with scope and port), with quotes and
/// commas.
const MESSAGE: usize = 8 * 1024;

/// What the successor says once it accepts connections.
const READY: &[u8] = b"ready";

/// Rest after a failed accept(2), for want of descriptors nearly always.
const ACCEPT_REST: Duration = Duration::from_millis(500);

/// How long either side may take for one message that the other waits for.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why sockets could not be taken over or offered.
#[derive(Debug, Error)]
pub enum TakeOverError {
    /// A system call on the Unix socket failed.
    #[error(
        "{what} {path}: {source}; check that the path is writable and that both processes run as the same \
         user"
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
        "the process at {path} sent something else than listening sockets: {problem}; is it the same verb of \
         portico, of about this version?"
    )]
    Protocol {
        /// The Unix socket.
        path: PathBuf,
        /// What was wrong.
        problem: String,
    },
}

/// A running process whose sockets were received, and which waits to hear that they are in use.
#[derive(Debug)]
pub struct Predecessor {
    connection: OwnedFd,
    path: PathBuf,
    sockets: Vec<(String, OwnedFd)>,
}

/// Asks the process that offers its sockets at `path` for them. `None` if no process is there: the first
/// start. Blocks until they are here, for some seconds at most.
pub fn take_over(path: &Path) -> Result<Option<Predecessor>, TakeOverError> {
    let failed = |what, error: Errno| TakeOverError::Socket { what, path: path.into(), source: error.into() };
    let connection =
        unix_socket(SocketFlags::CLOEXEC).map_err(|error| failed("opening a Unix socket for", error))?;
    let address = SocketAddrUnix::new(path).map_err(|error| failed("using the path", error))?;
    match connect(&connection, &address) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
        Err(error) => return Err(failed("connecting to", error)),
    }
    sockopt::set_socket_timeout(&connection, sockopt::Timeout::Recv, Some(MESSAGE_TIMEOUT))
        .map_err(|error| failed("setting up", error))?;
    let mut sockets = Vec::new();
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
        sockets.extend(names.into_iter().zip(fds));
    }
}

impl Predecessor {
    /// The sockets it had, by what their names mean. Once; the next time there are none.
    pub fn sockets<K: FromStr + Hash + Eq>(&mut self) -> Result<HashMap<K, Vec<OwnedFd>>, TakeOverError> {
        let mut sockets: HashMap<K, Vec<OwnedFd>> = HashMap::new();
        for (name, socket) in std::mem::take(&mut self.sockets) {
            let listener = name.parse().map_err(|_| TakeOverError::Protocol {
                path: self.path.clone(),
                problem: format!("unknown listener {name:?}"),
            })?;
            sockets.entry(listener).or_default().push(socket);
        }
        Ok(sockets)
    }

    /// Tells the predecessor that its sockets are accepted on: from now on it drains.
    pub fn ready(self) -> Result<(), TakeOverError> {
        match send(&self.connection, READY, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(TakeOverError::Socket { what: "answering", path: self.path, source: error.into() })
            }
        }
    }

    /// Returns when the predecessor has ended, or does not wait for us any more.
    pub async fn gone(&self) -> io::Result<()> {
        let connection = stream(self.connection.try_clone()?)?;
        // It has nothing more to say: what can be read is its end.
        let end = || Ok(recv(&connection, &mut [0; 16], RecvFlags::DONTWAIT).map(drop)?);
        match connection.async_io(Interest::READABLE, end).await {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => Err(error),
            _ => Ok(()),
        }
    }
}

/// Where successors ask for the sockets of this process.
#[derive(Debug)]
pub struct Offer {
    listening: UnixListener,
    /// Whether a successor has the sockets and has not said yet that it accepts.
    successor: AtomicBool,
}

impl Offer {
    /// Listens at `path`, in place of whatever was there: a predecessor that has handed over, or what a crash
    /// left. On a tokio runtime.
    pub fn new(path: &Path) -> Result<Self, TakeOverError> {
        let failed = |what, source: io::Error| TakeOverError::Socket { what, path: path.into(), source };
        let listening = unix_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            .map_err(|error| failed("opening a Unix socket for", error.into()))?;
        // Bound beside and renamed over: there is no moment without a socket at the path.
        let beside = path.with_extension(format!("{}.new", std::process::id()));
        let beside_address =
            SocketAddrUnix::new(&beside).map_err(|error| failed("using the path", error.into()))?;
        // Left by a process of the same number, in another container for example.
        let _ = std::fs::remove_file(&beside);
        bind(&listening, &beside_address).map_err(|error| failed("binding", error.into()))?;
        listen(&listening, 4).map_err(|error| failed("listening on", error.into()))?;
        std::fs::rename(&beside, path).map_err(|error| failed("putting in place", error))?;
        let listening = UnixListener::from_std(listening.into());
        let listening = listening.map_err(|error| failed("waiting on", error))?;
        Ok(Self { listening, successor: AtomicBool::new(false) })
    }

    /// Serves successors one after the other, until one of them is ready, for which each has `patience`.
    ///
    /// `sockets` is asked anew for each. A successor that fails is logged and forgotten, and one that cannot
    /// be accepted now is accepted later: nothing about a successor is a reason to end. May be dropped at any
    /// time.
    pub async fn serve(
        &self,
        patience: Option<Duration>,
        sockets: impl Fn() -> io::Result<Vec<(String, OwnedFd)>>,
    ) {
        loop {
            let connection = self.accept().await;
            self.successor.store(true, Relaxed);
            match hand_over(connection, patience, &sockets).await {
                Ok(()) => return,
                Err(error) => {
                    self.successor.store(false, Relaxed);
                    tracing::warn!(
                        %error,
                        "a successor asked for the listeners but did not take over; going on"
                    );
                }
            }
        }
    }

    async fn accept(&self) -> UnixStream {
        let mut warned = false;
        loop {
            match self.listening.accept().await {
                Ok((connection, _)) => return connection,
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(
                            %error,
                            "cannot accept a successor; trying until it works (ulimit -n?)"
                        );
                    }
                    sleep(ACCEPT_REST).await;
                }
            }
        }
    }

    /// Whether a successor has asked for the sockets and not given up, also after [`serve`](Self::serve) was
    /// dropped meanwhile: the successor then sees this process gone, and goes on with what it has.
    pub fn has_successor(&self) -> bool {
        self.successor.load(Relaxed)
    }
}

async fn hand_over(
    connection: UnixStream,
    patience: Option<Duration>,
    sockets: impl Fn() -> io::Result<Vec<(String, OwnedFd)>>,
) -> io::Result<()> {
    // Not rustix's way to ask: that one has no room for a process of another PID namespace, which is what
    // another container is.
    let (peer, own) = (connection.peer_cred()?.uid(), rustix::process::geteuid());
    if peer != own.as_raw() && peer != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("it runs as user {peer}")));
    }
    let send_all = async {
        let sockets = sockets()?;
        for batch in sockets.chunks(BATCH) {
            send_batch(&connection, batch).await?;
        }
        send_batch(&connection, &[]).await
    };
    timeout(MESSAGE_TIMEOUT, send_all).await??;
    let answer = connection.async_io(Interest::READABLE, || {
        let mut answer = [0; 16];
        let (_, length) = recv(&connection, &mut answer, RecvFlags::empty())?;
        Ok(answer[..length] == *READY)
    });
    let ready = match patience {
        None => answer.await?,
        Some(patience) => timeout(patience, answer).await??,
    };
    if ready { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

async fn send_batch(connection: &UnixStream, batch: &[(String, OwnedFd)]) -> io::Result<()> {
    let names: Vec<&str> = batch.iter().map(|(name, _)| name.as_str()).collect();
    let names = serde_json::to_vec(&names)?;
    let fds: Vec<_> = batch.iter().map(|(_, socket)| socket.as_fd()).collect();
    let sent = connection.async_io(Interest::WRITABLE, || {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(sendmsg(connection, &[IoSlice::new(&names)], &mut control, SendFlags::NOSIGNAL)?)
    });
    sent.await.map(drop)
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
        return Err(Errno::MFILE);
    }
    bytes.truncate(received.bytes);
    Ok((bytes, fds))
}

fn unix_socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The connection as tokio waits on it. Waiting does not depend on the bounds of its messages.
fn stream(connection: OwnedFd) -> io::Result<UnixStream> {
    let connection = std::os::unix::net::UnixStream::from(connection);
    connection.set_nonblocking(true)?;
    UnixStream::from_std(connection)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use super::*;

    #[test]
    fn no_process_at_the_path_means_a_first_start() {
        let dir = tempfile::tempdir().unwrap();
        assert!(take_over(&dir.path().join("gone.sock")).unwrap().is_none());
    }

    /// Offers `listeners` at `path` on a thread of its own, by their ports.
    fn offer(path: &Path, listeners: Vec<TcpListener>) -> JoinHandle<()> {
        let path = path.to_owned();
        let (offered, waits) = std::sync::mpsc::channel();
        let served = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let offer = Offer::new(&path).unwrap();
                offered.send(()).unwrap();
                let sockets = || {
                    let each = listeners.iter().map(|listener| {
                        let port = listener.local_addr()?.port();
                        Ok((port.to_string(), OwnedFd::from(listener.try_clone()?)))
                    });
                    each.collect()
                };
                offer.serve(None, sockets).await;
            });
        });
        waits.recv().unwrap();
        served
    }

    #[test]
    fn more_sockets_than_fit_one_message_arrive_under_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let listeners: Vec<TcpListener> =
            (0..BATCH + 7).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<u16> =
            listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        let server = offer(&path, listeners);
        let mut predecessor = take_over(&path).unwrap().expect("an offer is open");
        let sockets: HashMap<u16, Vec<OwnedFd>> = predecessor.sockets().unwrap();
        for port in ports {
            let address = socket2::SockRef::from(&sockets[&port][0]).local_addr().unwrap();
            assert_eq!(address.as_socket().unwrap().port(), port);
        }
        predecessor.ready().unwrap();
        server.join().unwrap();
    }

    #[test]
    fn a_successor_that_gives_up_leaves_the_offer_open_for_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let server = offer(&path, Vec::new());
        drop(take_over(&path).unwrap().expect("an offer is open"));
        take_over(&path).unwrap().expect("the offer is still open").ready().unwrap();
        server.join().unwrap();
    }

    #[test]
    fn an_unknown_name_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let _server = offer(&path, vec![TcpListener::bind("127.0.0.1:0").unwrap()]);
        let mut predecessor = take_over(&path).unwrap().expect("an offer is open");
        let error = predecessor.sockets::<std::net::Ipv6Addr>().unwrap_err().to_string();
        assert!(error.contains("unknown listener"), "{error}");
    }

    #[tokio::test]
    async fn a_successor_learns_that_its_predecessor_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let asking = std::thread::spawn(move || take_over(&path).unwrap().expect("an offer is open"));
        let serving = offer.serve(None, || Ok(Vec::new()));
        let asked = async {
            while !asking.is_finished() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { () = serving => {}, () = asked => {} }
        let predecessor = asking.join().unwrap();
        drop(offer);
        predecessor.gone().await.unwrap();
    }
}
