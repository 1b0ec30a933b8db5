//! Listening sockets, and the tasks that begin with a connection.

use std::future::poll_fn;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::{fmt, fs, io};

use portico_net::ReadAhead;
use portico_net::slots::{Slot, Source};
use portico_net::socket::{BACKLOG, Keepalive, is_out_of_descriptors, set_keepalive, unbound};
use rustix::fs::Mode as Permissions;
use rustix::process::umask;
use socket2::SockRef;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::agents::{self, Caller};
use super::authentication::Authentication;
use super::claims::identities_of;
use super::frontend::{Mode, connect, proxy};
use super::settings::{AWAY, HELLO};
use super::shared::Shared;
use super::tls::ServerTls;
use super::unauthenticated::{Crowded, Unauthenticated};
use crate::authority::Authority;

/// Between two attempts to accept while the process has no descriptor left.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// What others may do with a Unix socket: nothing. As upstream: 0770.
const SOCKET_MASK: Permissions = Permissions::from_raw_mode(0o007);

/// A listener could not be opened.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Over TCP.
    #[error("cannot listen on {address} for {what}: {source}; is another server running there?")]
    Tcp {
        /// For which clients.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// The error of the system.
        source: io::Error,
    },
    /// On a Unix socket.
    #[error(
        "cannot listen on the Unix socket {}: {source}; check that its folder exists and is writable, and \
         that no other server has it", path.display()
    )]
    Unix {
        /// Where.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

/// Where frontends connect.
#[derive(Debug)]
pub enum FrontendListen {
    /// To a Unix socket, without TLS.
    Unix {
        /// Its path.
        path: PathBuf,
        /// Whether a socket that is there already is removed first.
        replace: bool,
    },
    /// Over TCP with mutual TLS.
    Tcp {
        /// Where.
        address: SocketAddr,
        /// The certificates.
        tls: Arc<ServerTls>,
    },
}

impl fmt::Display for FrontendListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { path, .. } => write!(f, "{}", path.display()),
            Self::Tcp { address, .. } => write!(f, "{address}"),
        }
    }
}

/// An open socket for frontends.
pub(crate) enum FrontendListener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener, Arc<ServerTls>),
}

impl FrontendListen {
    pub(crate) fn open(self) -> Result<FrontendListener, ListenError> {
        match self {
            Self::Unix { path, replace } => match unix(&path, replace) {
                Ok(listener) => Ok(FrontendListener::Unix(listener, path)),
                Err(source) => Err(ListenError::Unix { path, source }),
            },
            Self::Tcp { address, tls } => Ok(FrontendListener::Tcp(tcp("frontends", address, None)?, tls)),
        }
    }
}

fn unix(path: &Path, replace: bool) -> io::Result<UnixListener> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    if replace && is_socket {
        fs::remove_file(path)?;
    }
    // Before the socket exists, or others could connect in between.
    let before = umask(SOCKET_MASK);
    let listener = UnixListener::bind(path);
    umask(before);
    listener
}

/// Bytes that the kernel takes for a frontend beyond those it could send. By itself it takes megabytes, and
/// has room again only once a third of them was read: a slow reader would seem to read nothing.
const UNSENT: u32 = 64 * 1024;

/// `unread`: how long the kernel lets a peer take nothing, for peers that always read. One that may pause has
/// none: its connection would end although it answers each probe.
pub(crate) fn tcp(
    what: &'static str,
    address: SocketAddr,
    unread: Option<Duration>,
) -> Result<TcpListener, ListenError> {
    let open = || {
        let socket = unbound(address)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        // Inherited by what is accepted.
        socket.set_tcp_nodelay(true)?;
        set_keepalive(&SockRef::from(&socket), Keepalive::default())?;
        SockRef::from(&socket).set_tcp_user_timeout(unread)?;
        if unread.is_none() {
            SockRef::from(&socket).set_tcp_notsent_lowat(UNSENT)?;
        }
        TcpListener::from_std(socket.into())
    };
    open().map_err(|source| ListenError::Tcp { what, address, source })
}

/// Accepts frontends until it is dropped.
pub(crate) async fn frontends(shared: Arc<Shared>, listener: FrontendListener, mode: Mode) {
    match listener {
        FrontendListener::Unix(listener, _) => loop {
            let accepted = listener.accept().await.map(|(stream, _)| stream);
            let Some(stream) = check(&shared, accepted).await else { continue };
            let (shared, slot) = (Arc::clone(&shared), shared.idle_frontends.enter(None));
            match mode {
                Mode::Grpc => tokio::spawn(proxy::serve(shared, Authority::new(stream), slot)),
                Mode::HttpConnect => tokio::spawn(connect::serve_plain(shared, stream, slot)),
            };
        },
        FrontendListener::Tcp(listener, tls) => loop {
            let Some((stream, peer)) = check(&shared, listener.accept().await).await else { continue };
            let slot = shared.idle_frontends.enter(Some(Source::of(peer.ip())));
            tokio::spawn(frontend_over_tls(Arc::clone(&shared), stream, peer, Arc::clone(&tls), mode, slot));
        },
    }
}

async fn frontend_over_tls(
    shared: Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    tls: Arc<ServerTls>,
    mode: Mode,
    slot: Slot,
) {
    let unauthenticated = Unauthenticated::new(slot);
    let stream = match handshake(stream, &tls, &unauthenticated).await {
        Ok(stream) => stream,
        Err(why) => return shared.refused_frontend(peer, &why),
    };
    // It has a certificate of the CA.
    unauthenticated.limit.lift();
    match mode {
        Mode::Grpc => proxy::serve(shared, stream, unauthenticated.slot).await,
        Mode::HttpConnect => {
            // The end of a frontend that is not read shows only there. Without it, a reset is seen by the
            // next read or write.
            let socket = socket_of(&stream).ok();
            connect::serve_tls(shared, stream, socket, unauthenticated.slot).await;
        }
    }
}

/// Accepts agents until it is dropped.
pub(crate) async fn agents(
    shared: Arc<Shared>,
    listener: TcpListener,
    tls: Arc<ServerTls>,
    authentication: Arc<Authentication>,
) {
    loop {
        let Some((stream, peer)) = check(&shared, listener.accept().await).await else { continue };
        let unauthenticated =
            Unauthenticated::new(shared.unauthenticated_agents.enter(Some(Source::of(peer.ip()))));
        let (shared, tls, authentication) =
            (Arc::clone(&shared), Arc::clone(&tls), Arc::clone(&authentication));
        tokio::spawn(async move {
            match handshake(stream, &tls, &unauthenticated).await {
                Ok(mut stream) => {
                    let certificates = stream.get_ref().1.peer_certificates();
                    let names = certificates.and_then(|chain| chain.first()).map(|leaf| identities_of(leaf));
                    let caller = Caller { address: peer, names: names.unwrap_or_default(), unauthenticated };
                    if agents::serve(Arc::clone(&shared), authentication, &mut stream, caller).await {
                        end_of_silent(&shared, stream).await;
                    }
                }
                Err(why) => shared.refused(why.reason(), peer, &why),
            }
        });
    }
}

/// Ends the connection of an upstream agent that is silent, and has the kernel send the end again until there
/// is a sign of life. By then the agent has read the end, or gets a reset.
async fn end_of_silent(shared: &Shared, stream: TlsStream<ReadAhead<TcpStream>>) {
    let (Ok(socket), Ok(_permit)) = (socket_of(&stream), shared.away.try_acquire()) else { return };
    // Its buffers are as large as those of an agent that is there.
    drop(stream);
    let options = SockRef::from(&socket);
    if options.set_tcp_user_timeout(Some(AWAY)).and_then(|()| options.shutdown(Shutdown::Write)).is_ok() {
        // An error is one of the socket, which ends as well.
        let _ = timeout(AWAY, socket.readable()).await;
    }
}

/// The socket below TLS, which keeps it to itself. Fails without a descriptor.
fn socket_of(stream: &TlsStream<ReadAhead<TcpStream>>) -> io::Result<TcpStream> {
    TcpStream::from_std(stream.get_ref().0.get_ref().as_fd().try_clone_to_owned()?.into())
}

/// A peer with which there is no TLS.
#[derive(Debug, Error)]
enum NoTls {
    #[error("TLS failed: {0}")]
    Failed(#[from] io::Error),
    #[error("no TLS within {HELLO:?}")]
    TooSlow,
    #[error(transparent)]
    Crowded(#[from] Crowded),
}

impl NoTls {
    /// The label value for metrics.
    fn reason(&self) -> &'static str {
        match self {
            Self::Failed(_) => "tls",
            Self::TooSlow => "silent",
            Self::Crowded(_) => "crowded",
        }
    }
}

/// TLS within its time.
async fn handshake(
    stream: TcpStream,
    tls: &ServerTls,
    unauthenticated: &Unauthenticated,
) -> Result<TlsStream<ReadAhead<TcpStream>>, NoTls> {
    let accept = TlsAcceptor::from(tls.current())
        .accept_with(ReadAhead::limited(stream, &unauthenticated.limit), |tls| {
            tls.set_buffer_limit(Some(portico_dial::TLS_BUFFER))
        });
    let stream = tokio::select! {
        accepted = timeout(HELLO, accept) => accepted.map_err(|_| NoTls::TooSlow)??,
        () = poll_fn(|cx| unauthenticated.poll_evicted(cx)) => return Err(Crowded.into()),
    };
    unauthenticated.limit.uncount();
    Ok(stream)
}

/// What was accepted. After an error it rests, or would burn the core while descriptors are out.
async fn check<T>(shared: &Shared, accepted: io::Result<T>) -> Option<T> {
    match accepted {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            shared.counters.accept_errors.fetch_add(1, Relaxed);
            if is_out_of_descriptors(&error) {
                shared.out_of_descriptors(&error);
                sleep(ACCEPT_REST).await;
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// The only thing that finds a frontend whose machine is gone, where no PING can be sent: HTTP CONNECT.
    #[tokio::test]
    async fn a_peer_that_says_nothing_is_probed_by_tcp() {
        let listener = tcp("frontends", (Ipv4Addr::LOCALHOST, 0).into(), None).unwrap();
        let connected = TcpStream::connect(listener.local_addr().unwrap());
        let (_peer, accepted) = tokio::try_join!(connected, listener.accept()).unwrap();
        let socket = SockRef::from(&accepted.0);
        assert!(socket.keepalive().unwrap());
        let Keepalive { time, interval, probes } = Keepalive::default();
        assert_eq!(socket.tcp_keepalive_time().unwrap(), time);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), interval);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), probes);
    }
}
