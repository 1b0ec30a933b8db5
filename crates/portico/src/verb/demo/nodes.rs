//! A stand-in for the kubelet of one worker node, which has one pod with a log. A stand-in API server reaches
//! it by HTTP CONNECT on the Konnectivity server's Unix socket, as kube-apiserver does.
//!
//! No network stands between the kubelet and this machine. So it plays the firewall as well: it talks to
//! connections of this process only, in which nobody but the Konnectivity agent dials it.

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use portico_pki::Pair;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::stand_in::{Answer, StandIn, with_type};

/// The pod, for the API server's clients.
pub(super) const POD: &str = "/api/v1/namespaces/default/pods/web";
/// Its log.
pub(super) const POD_LOG: &str = "/api/v1/namespaces/default/pods/web/log";
/// The same as kubelets serve it.
pub(super) const KUBELET_LOG: &str = "/containerLogs/default/web/web";

/// The pace of the log.
const BETWEEN_LINES: Duration = Duration::from_secs(1);
/// Lines of a log that is not followed.
const LINES: u64 = 3;
/// How long the way to the kubelet may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest head of an answer.
const MAX_HEAD: usize = 4096;

/// Starts the kubelet.
pub(super) async fn kubelet(identity: &Pair) -> anyhow::Result<StandIn> {
    StandIn::start(identity, is_own, |request| async move {
        let follows = request.uri().query().unwrap_or_default().split('&').any(|pair| pair == "follow=true");
        let lines = stream::unfold(1_u64, move |line| async move {
            if follows && line > 1 {
                tokio::time::sleep(BETWEEN_LINES).await;
            }
            let text = format!("line {line} of the log of pod web, from its kubelet, by Konnectivity\n");
            let more = follows || line <= LINES;
            more.then(|| (Ok::<_, Infallible>(Frame::data(Bytes::from(text))), line + 1))
        });
        with_type("text/plain", StreamBody::new(lines).boxed_unsync())
    })
    .await
}

/// Whether a connection on loopback was opened by this process.
fn is_own(peer: SocketAddr) -> bool {
    inode(peer).is_some_and(|inode| {
        let wanted = PathBuf::from(format!("socket:[{inode}]"));
        let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        descriptors.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| target == wanted)
    })
}

/// The socket that is bound to an IPv4 address, as the kernel numbers it (proc(5)).
fn inode(address: SocketAddr) -> Option<String> {
    let SocketAddr::V4(address) = address else { return None };
    let ip = u32::from_ne_bytes(address.ip().octets());
    let local = format!("{ip:08X}:{:04X}", address.port());
    let table = fs::read_to_string("/proc/self/net/tcp").ok()?;
    let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.find(|row| row.get(1) == Some(&local.as_str()))?.get(9).map(|&inode| inode.to_owned())
}

/// The way to the kubelet.
pub(super) struct Nodes {
    socket: PathBuf,
    kubelet: SocketAddr,
    tls: TlsConnector,
}

impl Nodes {
    /// By the Konnectivity server at `socket`; `ca` signs the kubelet's certificate.
    pub(super) fn new(socket: &Path, kubelet: SocketAddr, ca: &str) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(ca.as_bytes()).context("reading the demo's own CA")?;
        roots.add(ca).context("trusting the demo's own CA")?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("making the TLS configuration of a client")?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { socket: socket.to_owned(), kubelet, tls: TlsConnector::from(Arc::new(config)) })
    }

    /// The log of the pod, as it comes from the kubelet.
    pub(super) async fn log(&self, query: &str) -> anyhow::Result<Answer> {
        let opened = timeout(PATIENCE, self.open(&format!("{KUBELET_LOG}?{query}"))).await;
        let body = opened.context("the kubelet does not answer in time")??;
        let chunks = stream::unfold(body, |mut body| async move {
            let mut chunk = vec![0; MAX_HEAD];
            // An error is an end: what came before is whole lines.
            let read = body.read(&mut chunk).await.unwrap_or(0);
            chunk.truncate(read);
            (read > 0).then(|| (Ok::<_, Infallible>(Frame::data(Bytes::from(chunk))), body))
        });
        Ok(with_type("text/plain", StreamBody::new(chunks).boxed_unsync()))
    }

    /// Asks the kubelet; what follows is the body, up to the end.
    async fn open(&self, path: &str) -> anyhow::Result<impl AsyncRead + Unpin + Send + use<>> {
        let socket = self.socket.display();
        let mut stream = UnixStream::connect(&self.socket)
            .await
            .with_context(|| format!("connecting to the Konnectivity server at {socket}"))?;
        let connect = format!("CONNECT {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", self.kubelet);
        ask(&mut stream, &connect).await.context("asking the Konnectivity server")?;
        let name = ServerName::from(self.kubelet.ip());
        let mut stream = self.tls.connect(name, stream).await.context("TLS with the kubelet")?;
        // HTTP/1.0: the body is what follows until the end.
        ask(&mut stream, &format!("GET {path} HTTP/1.0\r\n\r\n")).await.context("asking the kubelet")?;
        Ok(stream)
    }
}

/// Sends a request and reads the head of its answer, which must be a 200, and nothing behind it.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &str) -> anyhow::Result<()> {
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    let head = String::from_utf8_lossy(&head);
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.split(' ').nth(1) == Some("200"), "it answered {status:?}");
    Ok(())
}

/// What the API server knows of the pod.
pub(super) fn pod() -> Value {
    json!({
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": "web", "namespace": "default", "resourceVersion": "1"},
        "spec": {"nodeName": "node-1", "containers": [{"name": "web", "image": "portico.test/web"}]},
        "status": {"phase": "Running"},
    })
}
