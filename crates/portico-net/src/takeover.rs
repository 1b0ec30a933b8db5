//! Handing the listening sockets to a successor, so that no connection attempt fails while one process
//! replaces another.
//!
//! The running process offers its sockets on a Unix socket. A successor connects, receives them
//! (`SCM_RIGHTS`), begins to accept on those whose address it is configured to listen on, and confirms that.
//! Only then does the old process stop accepting and drain. A socket that a connection waits in is never
//! closed, unless its address is given up. If either side fails on the way, the other goes on. The old
//! process then serves as before. A successor learns of it from [`Predecessor::gone`], and serves with the
//! sockets it has.
//!
//! The protocol uses `SOCK_SEQPACKET`, so that messages keep their bounds. The old process sends any number
//! of messages, each a JSON list of listener names with as many descriptors. Then it sends an empty list. The
//! successor sends `ready`. The names have a meaning only between processes of one kind.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recv,
    recvmsg, send, sendmsg, socket_with,
};
use socket2::SockRef;
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

/// Descriptors in one message; Linux admits 253.
const BATCH: usize = 128;

/// Longest message: 128 names of at most 56 characters (an IPv6 address with scope and port), with quotes and
/// commas.
const MESSAGE: usize = 8 * 1024;

/// Before the second attempt to ask, when the process has closed the first connection.
const CLOSED_PAUSE: Duration = Duration::from_millis(50);

/// What the successor says once it accepts connections.
const READY: &[u8] = b"ready";

/// Rest after a failed accept(2), for want of descriptors nearly always.
const ACCEPT_REST: Duration = Duration::from_millis(500);

/// How long either side may take to send, or to receive, all sockets.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two attempts to connect while others wait to be accepted: the kernel holds only a few.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

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
        /// The error of the system.
        source: io::Error,
    },
    /// Something else is at the path: it would be lost.
    #[error("{path} is there and is no Unix socket; give --take-over a path of its own")]
    NotSocket {
        /// The path.
        path: PathBuf,
    },
    /// The other process is there, and does not hand its sockets over in time.
    #[error(
        "the process at {path}{} was asked for its listening sockets and has not sent them within \
         {HAND_OVER_TIMEOUT:?}: it hangs, or serves another successor; end it if it hangs, then start this \
         one again",
        pid.map(|pid| format!(" (PID {pid})")).unwrap_or_default()
    )]
    Hangs {
        /// The Unix socket.
        path: PathBuf,
        /// The other process; `None` in another PID namespace.
        pid: Option<i32>,
    },
    /// The other process closed the connection instead of sending its sockets.
    #[error(
        "the process at {path} has closed the connection, twice, before all its listening sockets were \
         here: it has handed over to another successor, has ended, or refuses this one, which its log says; \
         if no other process serves now, start this one again"
    )]
    Closed {
        /// The Unix socket.
        path: PathBuf,
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

/// A running process whose sockets were received. It waits for the confirmation that they are in use.
#[derive(Debug)]
pub struct Predecessor {
    connection: UnixStream,
    path: PathBuf,
    sockets: Vec<(String, OwnedFd)>,
}

/// The sockets of a predecessor, by the address they listen on.
#[derive(Debug, Default)]
pub struct Inherited(HashMap<SocketAddr, Vec<OwnedFd>>);

impl Inherited {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sockets that listen on exactly `address`.
    pub fn take(&mut self, address: SocketAddr) -> Vec<OwnedFd> {
        self.0.remove(&address).unwrap_or_default()
    }

    /// Whether the port of `address` is a predecessor's at another address, such as 0.0.0.0. If so, it is
    /// made shareable: a socket with `SO_REUSEPORT` can be bound to `address` before the predecessor lets go.
    pub fn share_port(&self, address: SocketAddr) -> io::Result<bool> {
        let same_port = self.0.iter().filter(|(other, _)| other.port() == address.port());
        let mut shared = false;
        for socket in same_port.flat_map(|(_, sockets)| sockets) {
            SockRef::from(socket).set_reuse_port(true)?;
            shared = true;
        }
        Ok(shared)
    }
}

impl FromIterator<(SocketAddr, OwnedFd)> for Inherited {
    fn from_iter<I: IntoIterator<Item = (SocketAddr, OwnedFd)>>(sockets: I) -> Self {
        let mut inherited = Self::default();
        for (address, socket) in sockets {
            inherited.0.entry(address).or_default().push(socket);
        }
        inherited
    }
}

/// Asks the process that offers its sockets at `path` for them. `None` if no process is there: the first
/// start, or it has died just now. On a tokio runtime; a process that does not answer is an error after some
/// seconds.
pub async fn take_over(path: &Path) -> Result<Option<Predecessor>, TakeOverError> {
    // The socket of this process will take the place of what is there.
    if std::fs::symlink_metadata(path).is_ok_and(|there| !there.file_type().is_socket()) {
        return Err(TakeOverError::NotSocket { path: path.into() });
    }
    let mut pid = None;
    let mut may_ask_again = true;
    let asked = timeout(HAND_OVER_TIMEOUT, async {
        loop {
            let Some(connection) = connect_to(path).await? else { return Ok(None) };
            pid = connection.peer_cred().ok().and_then(|peer| peer.pid()).filter(|pid| *pid != 0);
            match receive_all(&connection, path).await {
                // It died, stops, or has handed over to another. One that dies closes what it had one after
                // the other.
                Err(TakeOverError::Closed { .. }) if std::mem::take(&mut may_ask_again) => {
                    sleep(CLOSED_PAUSE).await;
                }
                Err(error) => return Err(error),
                Ok(sockets) => return Ok(Some(Predecessor { connection, path: path.into(), sockets })),
            }
        }
    });
    let outcome = asked.await;
    outcome.unwrap_or_else(|_| Err(TakeOverError::Hangs { path: path.into(), pid }))
}

async fn connect_to(path: &Path) -> Result<Option<UnixStream>, TakeOverError> {
    let failed = |what, source| TakeOverError::Socket { what, path: path.into(), source };
    let address = SocketAddrUnix::new(path).map_err(|error| failed("using the path", error.into()))?;
    let socket = unix_socket().map_err(|error| failed("opening a Unix socket for", error.into()))?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            Err(Errno::AGAIN) => sleep(CONNECT_PAUSE).await,
            Err(error) => return Err(failed("connecting to", error.into())),
        }
    }
    let connection = UnixStream::from_std(socket.into());
    connection.map(Some).map_err(|error| failed("waiting on", error))
}

async fn receive_all(connection: &UnixStream, path: &Path) -> Result<Vec<(String, OwnedFd)>, TakeOverError> {
    let mut sockets = Vec::new();
    loop {
        let batch = connection.async_io(Interest::READABLE, || Ok(receive_batch(connection)?)).await;
        let (names, fds) = match batch {
            // It sends no empty message: that is the end.
            Ok((names, _)) if names.is_empty() => return Err(TakeOverError::Closed { path: path.into() }),
            Ok(batch) => batch,
            // It never accepted this connection.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(TakeOverError::Closed { path: path.into() });
            }
            Err(source) => {
                let what = "receiving sockets from";
                return Err(TakeOverError::Socket { what, path: path.into(), source });
            }
        };
        let protocol = |problem: String| TakeOverError::Protocol { path: path.into(), problem };
        let names: Vec<String> =
            serde_json::from_slice(&names).map_err(|error| protocol(error.to_string()))?;
        if names.len() != fds.len() {
            return Err(protocol(format!("{} names with {} descriptors", names.len(), fds.len())));
        }
        if names.is_empty() {
            return Ok(sockets);
        }
        sockets.extend(names.into_iter().zip(fds));
    }
}

impl Predecessor {
    /// The sockets it had. Each must have a name that means a `K`: others are those of another verb. Once;
    /// the next time there are none.
    pub fn sockets<K: FromStr>(&mut self) -> Result<Inherited, TakeOverError> {
        let mut sockets = Vec::new();
        for (name, socket) in std::mem::take(&mut self.sockets) {
            let known = name.parse::<K>().is_ok();
            let address = SockRef::from(&socket).local_addr().ok().and_then(|address| address.as_socket());
            let Some(address) = address.filter(|_| known) else {
                let problem = format!("unknown listener {name:?}");
                return Err(TakeOverError::Protocol { path: self.path.clone(), problem });
            };
            sockets.push((address, socket));
        }
        Ok(sockets.into_iter().collect())
    }

    /// Tells the predecessor that its sockets are accepted on: from now on it drains.
    pub fn ready(self) -> Result<(), TakeOverError> {
        match send(&self.connection, READY, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(TakeOverError::Socket { what: "answering", path: self.path, source: error.into() })
            }
        }
    }

    /// Returns when the predecessor has ended, or does not wait for us any more.
    pub async fn gone(&self) -> io::Result<()> {
        // It has nothing more to say: what can be read is its end.
        let end = || Ok(recv(&self.connection, &mut [0; 16], RecvFlags::DONTWAIT).map(drop)?);
        match self.connection.async_io(Interest::READABLE, end).await {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => Err(error),
            _ => Ok(()),
        }
    }
}

/// Where successors ask for the sockets of this process.
#[derive(Debug)]
pub struct Offer {
    listening: UnixListener,
    /// Whether a successor was sent the sockets and has not given up.
    successor: AtomicBool,
}

impl Offer {
    /// Listens at `path`, in place of the socket of a predecessor that has handed over, or of one that a
    /// crash left. On a tokio runtime.
    pub fn new(path: &Path) -> Result<Self, TakeOverError> {
        let failed = |what, source: io::Error| TakeOverError::Socket { what, path: path.into(), source };
        let listening = unix_socket().map_err(|error| failed("opening a Unix socket for", error.into()))?;
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

    /// Listens at `path`, then tells the predecessor that it may drain. In this order the next successor
    /// always finds a process that serves.
    pub fn in_place_of(predecessor: Option<Predecessor>, path: &Path) -> Result<Self, TakeOverError> {
        let offer = Self::new(path)?;
        if let Some(Err(error)) = predecessor.map(Predecessor::ready) {
            tracing::warn!(
                %error,
                "the predecessor has ended meanwhile, or waits no more; end it if it still runs"
            );
        }
        Ok(offer)
    }

    /// Serves successors one after the other, until one of them is ready, for which each has `patience`.
    ///
    /// `sockets` is asked anew for each. A successor that fails is logged and forgotten, and one that cannot
    /// be accepted now is accepted later. Nothing about a successor is a reason to end. May be dropped at any
    /// time.
    pub async fn serve(
        &self,
        patience: Option<Duration>,
        sockets: impl Fn() -> io::Result<Vec<(String, OwnedFd)>>,
    ) {
        loop {
            let connection = self.accept().await;
            match hand_over(connection, patience, &sockets, &self.successor).await {
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

    /// Whether a successor was sent the sockets and has not given up. Stays true when [`serve`](Self::serve)
    /// is dropped meanwhile: the successor then sees this process gone, and goes on with the sockets it has.
    /// One that was not sent them yet asks again.
    pub fn has_successor(&self) -> bool {
        self.successor.load(Relaxed)
    }
}

async fn hand_over(
    connection: UnixStream,
    patience: Option<Duration>,
    sockets: impl Fn() -> io::Result<Vec<(String, OwnedFd)>>,
    are_sent: &AtomicBool,
) -> io::Result<()> {
    // rustix's way to ask is not used: it has no room for a process of another PID namespace, such as another
    // container.
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
    timeout(HAND_OVER_TIMEOUT, send_all).await??;
    are_sent.store(true, Relaxed);
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

fn receive_batch(connection: &UnixStream) -> rustix::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
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

fn unix_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[tokio::test]
    async fn what_is_no_socket_is_not_replaced_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link] = ["values.yaml", "link"].map(|name| dir.path().join(name));
        std::fs::write(&file, "precious").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link, &dir.path().to_owned()] {
            let refused = take_over(path).await.unwrap_err();
            assert!(refused.to_string().contains("is no Unix socket"), "{refused}");
        }
        assert_eq!(std::fs::read_to_string(file).unwrap(), "precious");
    }

    #[tokio::test]
    async fn no_process_at_the_path_means_a_first_start() {
        let dir = tempfile::tempdir().unwrap();
        assert!(take_over(&dir.path().join("gone.sock")).await.unwrap().is_none());
    }

    fn bound() -> (SocketAddr, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        (listener.local_addr().unwrap(), listener.into())
    }

    /// Offers `listeners`, by their ports, and takes them over with `succeed`. Returns what that returns once
    /// the offer is served.
    async fn offered<T>(listeners: &[(SocketAddr, OwnedFd)], succeed: impl AsyncFnOnce(&Path) -> T) -> T {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let sockets = || {
            let each = listeners
                .iter()
                .map(|(address, listener)| Ok((address.port().to_string(), listener.try_clone()?)));
            each.collect()
        };
        let ((), outcome) = tokio::join!(offer.serve(None, sockets), succeed(&path));
        outcome
    }

    async fn predecessor(path: &Path) -> Predecessor {
        take_over(path).await.unwrap().expect("an offer is open")
    }

    #[tokio::test]
    async fn more_sockets_than_fit_one_message_arrive_under_their_addresses() {
        let listeners: Vec<_> = (0..BATCH + 7).map(|_| bound()).collect();
        let mut sockets = offered(&listeners, async |path| {
            let mut predecessor = predecessor(path).await;
            let sockets = predecessor.sockets::<u16>().unwrap();
            predecessor.ready().unwrap();
            sockets
        })
        .await;
        for (address, _) in listeners {
            let taken = sockets.take(address);
            let bound = SockRef::from(&taken[0]).local_addr().unwrap();
            assert_eq!((taken.len(), bound.as_socket()), (1, Some(address)));
        }
        assert!(sockets.is_empty());
    }

    #[tokio::test]
    async fn a_successor_that_gives_up_leaves_the_offer_open_for_the_next() {
        offered(&[], async |path| {
            drop(predecessor(path).await);
            predecessor(path).await.ready().unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn an_unknown_name_is_an_error() {
        let listeners = [bound()];
        let error = offered(&listeners, async |path| {
            let error = predecessor(path).await.sockets::<std::net::Ipv6Addr>().unwrap_err();
            predecessor(path).await.ready().unwrap();
            error.to_string()
        })
        .await;
        assert!(error.contains("unknown listener"), "{error}");
    }

    #[tokio::test]
    async fn a_successor_learns_that_its_predecessor_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let predecessor = tokio::select! {
            () = offer.serve(None, || Ok(Vec::new())) => panic!("nobody was ready"),
            predecessor = predecessor(&path) => predecessor,
        };
        drop(offer);
        predecessor.gone().await.unwrap();
    }

    #[tokio::test]
    async fn a_successor_that_comes_second_learns_that_the_predecessor_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let first = async {
            let first = predecessor(&path).await;
            // The second waits to be accepted by now.
            let second = connect_to(&path).await.unwrap().expect("an offer is open");
            first.ready().unwrap();
            second
        };
        let ((), second) = tokio::join!(offer.serve(None, || Ok(Vec::new())), first);
        drop(offer);
        let error = receive_all(&second, &path).await.unwrap_err().to_string();
        assert!(error.contains("another successor") && !error.contains("writable"), "{error}");
    }

    #[tokio::test]
    async fn a_predecessor_that_closes_without_a_word_is_an_error_that_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let close_all = async {
            loop {
                drop(offer.accept().await);
            }
        };
        let error = tokio::select! {
            never = close_all => never,
            answer = take_over(&path) => answer.unwrap_err(),
        };
        assert!(matches!(error, TakeOverError::Closed { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_predecessor_that_dies_while_it_is_asked_means_a_first_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        for accepts in [true, false] {
            let offer = Offer::new(&path).unwrap();
            let die = async move {
                if accepts {
                    drop(offer.accept().await);
                }
                drop(offer);
            };
            let (answer, ()) = tokio::join!(biased; take_over(&path), die);
            assert!(answer.unwrap().is_none(), "accepts: {accepts}");
        }
    }

    #[tokio::test]
    async fn the_successor_of_a_predecessor_that_has_handed_over_to_another_asks_that_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let old = Offer::new(&path).unwrap();
        let replace = async {
            let new = Offer::new(&path).unwrap();
            drop(old);
            new.serve(None, || Ok(Vec::new())).await;
        };
        let succeed = async { predecessor(&path).await.ready().unwrap() };
        tokio::join!(biased; succeed, replace);
    }

    #[tokio::test]
    async fn one_that_was_not_sent_the_sockets_yet_is_no_successor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let offer = Offer::new(&path).unwrap();
        let sockets = || {
            assert!(!offer.has_successor(), "it would not ask a process again that stops now");
            Ok(Vec::new())
        };
        let succeed = async {
            let predecessor = predecessor(&path).await;
            assert!(offer.has_successor());
            predecessor.ready().unwrap();
        };
        tokio::join!(offer.serve(None, sockets), succeed);
    }

    #[tokio::test(start_paused = true)]
    async fn a_predecessor_that_hangs_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let _hangs = Offer::new(&path).unwrap();
        let error = take_over(&path).await.unwrap_err().to_string();
        let pid = format!("PID {}", std::process::id());
        assert!(error.contains("hangs") && error.contains(&pid), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_predecessor_that_hangs_since_many_successors_is_an_error_as_well() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portico.sock");
        let _hangs = Offer::new(&path).unwrap();
        let mut waiting = Vec::new();
        let address = SocketAddrUnix::new(&path).unwrap();
        loop {
            let socket = unix_socket().unwrap();
            if connect(&socket, &address).is_err() {
                break;
            }
            waiting.push(socket);
        }
        let error = take_over(&path).await.unwrap_err();
        assert!(matches!(error, TakeOverError::Hangs { pid: None, .. }), "{error}");
    }

    #[test]
    fn a_port_of_the_predecessor_can_be_bound_at_another_address_before_it_lets_go() {
        let socket = crate::socket::unbound((Ipv4Addr::UNSPECIFIED, 0).into()).unwrap();
        socket.set_reuse_address(false).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into()).unwrap();
        let old = socket.local_addr().unwrap().as_socket().unwrap();
        let inherited = Inherited::from_iter([(old, socket.into())]);
        let new = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), old.port());
        let socket = crate::socket::unbound(new).unwrap();
        socket.set_reuse_port(true).unwrap();
        assert!(socket.bind(&new.into()).is_err());
        assert!(inherited.share_port(new).unwrap());
        socket.bind(&new.into()).unwrap();
        socket.listen(1).unwrap();
    }
}
