//! What the agent dials: servers on loopback that echo, send, take, or do nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What is sent and expected: bytes that differ everywhere, repeated. The length is a prime, so that what is
/// lost or doubled by a buffer shows.
const PERIOD: usize = 65_521;

/// A server on a port of loopback, until dropped.
pub(crate) struct Endpoint {
    address: SocketAddr,
    open: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

/// What an endpoint does with a connection.
#[derive(Clone, Copy)]
enum Manner {
    Echo,
    Send(u64),
    Take(u64),
    Greet(&'static [u8]),
    Hold,
}

impl Endpoint {
    /// Sends back what it receives.
    pub(crate) async fn echo() -> Self {
        Self::start(Manner::Echo).await
    }

    /// Sends so many bytes of the pattern once it is asked by a byte, then ends. Only asked, as upstream's
    /// server loses what an endpoint says before the server has noted that the dial succeeded.
    pub(crate) async fn sender(bytes: u64) -> Self {
        Self::start(Manner::Send(bytes)).await
    }

    /// Takes so many bytes of the pattern, answers with one byte (1 if all were right) and ends.
    pub(crate) async fn taker(bytes: u64) -> Self {
        Self::start(Manner::Take(bytes)).await
    }

    /// Speaks first, then ends.
    pub(crate) async fn greeting(text: &'static [u8]) -> Self {
        Self::start(Manner::Greet(text)).await
    }

    /// Accepts, and neither reads nor writes, for ever.
    pub(crate) async fn holding() -> Self {
        Self::start(Manner::Hold).await
    }

    async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, open) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&open);
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let count = Arc::clone(&count);
                count.fetch_add(1, SeqCst);
                tokio::spawn(async move {
                    // How it ends is the client's to judge.
                    let _ = serve(stream, manner).await;
                    count.fetch_sub(1, SeqCst);
                });
            }
        });
        Self { address, open, accepting }
    }

    /// `HOST:PORT`, as a frontend names it.
    pub(crate) fn target(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Connections that are open now.
    pub(crate) fn open(&self) -> usize {
        self.open.load(SeqCst)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(mut stream: TcpStream, manner: Manner) -> std::io::Result<()> {
    match manner {
        Manner::Echo => {
            let (mut from, mut to) = stream.split();
            tokio::io::copy(&mut from, &mut to).await.map(drop)
        }
        Manner::Send(bytes) => {
            stream.read_u8().await?;
            send(&mut stream, bytes).await
        }
        Manner::Take(bytes) => {
            let right = take(&mut stream, bytes).await.is_ok();
            stream.write_all(&[u8::from(right)]).await
        }
        Manner::Greet(text) => stream.write_all(text).await,
        Manner::Hold => std::future::pending().await,
    }
}

fn pattern() -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    (0..PERIOD).map(step).collect()
}

/// Asks a sender, and takes so many bytes.
pub(crate) async fn fetch(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    bytes: u64,
) -> std::io::Result<()> {
    stream.write_all(b"?").await?;
    stream.flush().await?;
    take(stream, bytes).await
}

/// Sends so many bytes of the pattern.
pub(crate) async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: u64) -> std::io::Result<()> {
    let (pattern, mut left) = (pattern(), bytes);
    while left > 0 {
        let now = usize::try_from(left).unwrap_or(PERIOD).min(PERIOD);
        stream.write_all(&pattern[..now]).await?;
        left -= now as u64;
    }
    stream.flush().await
}

/// Takes so many bytes, and fails with the first that is not the pattern's.
pub(crate) async fn take(stream: &mut (impl AsyncRead + Unpin), bytes: u64) -> std::io::Result<()> {
    let (pattern, mut buffer, mut left) = (pattern(), vec![0; PERIOD], bytes);
    while left > 0 {
        let now = usize::try_from(left).unwrap_or(PERIOD).min(PERIOD);
        stream.read_exact(&mut buffer[..now]).await?;
        if buffer[..now] != pattern[..now] {
            let text = format!("wrong bytes {} to {}", bytes - left, bytes - left + now as u64);
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        left -= now as u64;
    }
    Ok(())
}
