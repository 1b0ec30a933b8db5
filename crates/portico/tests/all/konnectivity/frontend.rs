//! The side of kube-apiserver: connections through a server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::common::PATIENCE;

/// How frontends reach a server.
pub(crate) enum Frontend {
    /// Through this program, which uses upstream's client library; see `lab/konnectivity/frontend`.
    Grpc { program: SocketAddr },
    /// HTTP CONNECT on the Unix socket.
    Unix { socket: PathBuf },
    /// HTTP CONNECT over TCP with mutual TLS.
    Tls { address: SocketAddr, config: Arc<ClientConfig> },
}

/// Bytes both ways.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection to an endpoint.
pub(crate) type Connection = Box<dyn Duplex>;

/// The longest head of an answer.
const HEAD: usize = 4096;

impl Frontend {
    /// A connection to `target`, or why there is none: the client library's error, or the answer as it came.
    pub(crate) async fn open(&self, target: &str) -> Result<Connection, String> {
        let mut stream = self.ask(target).await;
        let answered = timeout(PATIENCE, self.answer(&mut stream));
        answered.await.expect("an answer comes in time")?;
        Ok(stream)
    }

    /// A connection to `target`, which must be had.
    pub(crate) async fn connect(&self, target: &str) -> Connection {
        match self.open(target).await {
            Ok(connection) => connection,
            Err(reason) => panic!("no connection to {target}: {reason}"),
        }
    }

    /// Asks for a connection to `target` and does not wait for an answer.
    pub(crate) async fn ask(&self, target: &str) -> Connection {
        let mut stream: Connection = match self {
            Self::Grpc { program } => Box::new(TcpStream::connect(program).await.unwrap()),
            Self::Unix { socket } => Box::new(UnixStream::connect(socket).await.unwrap()),
            Self::Tls { address, config } => {
                let stream = TcpStream::connect(address).await.unwrap();
                let name = ServerName::try_from("127.0.0.1").unwrap();
                let connector = TlsConnector::from(Arc::clone(config));
                Box::new(connector.connect(name, stream).await.expect("mutual TLS"))
            }
        };
        let request = match self {
            Self::Grpc { .. } => format!("{target}\n"),
            // Exactly what kube-apiserver sends.
            _ => format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
        };
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        stream
    }

    async fn answer(&self, stream: &mut Connection) -> Result<(), String> {
        if let Self::Grpc { .. } = self {
            let line = line(stream).await;
            return if line == "ok" { Ok(()) } else { Err(line) };
        }
        let (mut head, mut length) = (vec![0; HEAD], 0);
        // Go reads TLS record by record, and the head is one. This client would take the next one with it.
        let most = if let Self::Tls { .. } = self { 1 } else { HEAD };
        while !head[..length].ends_with(b"\r\n\r\n") {
            let room = most.min(HEAD - length);
            let read = stream.read(&mut head[length..length + room]).await.unwrap_or(0);
            let text = String::from_utf8_lossy(&head[..length]);
            assert!(length < HEAD, "an endless head: {text}");
            // A refusal ends with the connection.
            if read == 0 {
                return Err(text.into_owned());
            }
            length += read;
            let text = String::from_utf8_lossy(&head[..length]);
            // kube-apiserver gives up a connection that brings bytes with the head.
            let early = text.starts_with("HTTP/1.1 200") && text.contains("\r\n\r\n");
            assert!(!early || text.ends_with("\r\n\r\n"), "bytes came with the head: {text:?}");
        }
        let text = String::from_utf8_lossy(&head[..length]).into_owned();
        if text.starts_with("HTTP/1.1 200 ") {
            return Ok(());
        }
        let mut body = String::new();
        // A refusal may end with a reset once its body is there.
        let _ = stream.read_to_string(&mut body).await;
        Err(text + &body)
    }
}

/// One line, without what follows.
async fn line(stream: &mut Connection) -> String {
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await {
            Ok(b'\n') => return String::from_utf8_lossy(&line).into_owned(),
            Ok(byte) => line.push(byte),
            Err(error) => return format!("{} ({error})", String::from_utf8_lossy(&line)),
        }
    }
}

/// Sends bytes to an echo server and takes them back.
pub(crate) async fn round_trip(connection: &mut Connection, word: &[u8]) {
    let there_and_back = async {
        connection.write_all(word).await.expect("it takes bytes");
        connection.flush().await.expect("it takes bytes");
        let mut answer = vec![0; word.len()];
        connection.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(answer, word);
    };
    timeout(PATIENCE, there_and_back).await.expect("nothing holds it up");
}

/// Whether an echo comes back. Neither a refusal nor an end counts as one.
pub(crate) async fn is_alive(connection: &mut Connection) -> bool {
    let there_and_back = async {
        connection.write_all(b"alive?").await?;
        connection.flush().await?;
        connection.read_exact(&mut [0; 6]).await
    };
    timeout(PATIENCE, there_and_back).await.expect("a connection answers or ends").is_ok()
}
