//! A client of the tunnel that speaks HTTP/2, and the certificates of its gateway.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use portico_gateway::{Gateway, Listener};
use portico_lab::pki::{Certificate, Pki};
use portico_tunnel::{Settings, Tls, TlsFiles};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};

use super::PATIENCE;

pub fn tunnel_address(gateway: &Gateway) -> SocketAddr {
    let addresses = gateway.listen_addresses();
    addresses
        .iter()
        .find(|(listener, _)| *listener == Listener::Tunnel)
        .expect("the tunnel listener is open")
        .1
}

/// The name that every client asks the gateway's certificate for.
pub fn gateway_name() -> ServerName<'static> {
    ServerName::try_from("gateway.test").unwrap()
}

/// The certificate of a gateway, which asks its clients for none.
pub fn tls_files(pki: &Pki, names: &[&str]) -> TlsFiles {
    pki.issue("gateway", Certificate::server(names));
    let (certificate, key) = (pki.file("gateway.crt"), pki.file("gateway.key"));
    TlsFiles { certificate, key, client_ca: Vec::new(), client_crl: None }
}

/// A tunnel under TLS.
pub fn secured(files: TlsFiles) -> Settings {
    Settings { tls: Some(Arc::new(Tls::load(files).unwrap())), ..Settings::default() }
}

/// An HTTP/2 client on a thread of its own, which ends with it.
pub struct Client {
    pub runtime: tokio::runtime::Handle,
    pub requests: h2::client::SendRequest<Bytes>,
    token: Option<String>,
    /// The reason of the last answer that was a refusal.
    reason: Mutex<String>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Client {
    /// A client of a tunnel in plain text.
    pub fn plaintext(gateway: &Gateway) -> Self {
        Self::over(tunnel_address(gateway), async |stream| stream)
    }

    pub fn new(gateway: &Gateway, tls: Arc<ClientConfig>) -> Self {
        let connector = tokio_rustls::TlsConnector::from(tls);
        Self::over(tunnel_address(gateway), async move |stream| {
            connector.connect(gateway_name(), stream).await.unwrap()
        })
    }

    fn over<S>(address: SocketAddr, secure: impl AsyncFnOnce(tokio::net::TcpStream) -> S) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let requests = runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let (requests, connection) = h2::client::handshake(secure(stream).await).await.unwrap();
            tokio::spawn(connection);
            requests
        });
        let handle = runtime.handle().clone();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || drop(runtime.block_on(stopped)));
        Self { runtime: handle, requests, token: None, reason: Mutex::default(), _stop: stop }
    }

    /// From now on, this token comes with each request.
    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    pub fn send(&self, request: http::request::Builder, end: bool) -> (u16, SendStream<Bytes>, RecvStream) {
        let request = match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        };
        let request = request.body(()).unwrap();
        self.runtime.block_on(async {
            let mut requests = self.requests.clone().ready().await.unwrap();
            let (answer, send) = requests.send_request(request, end).unwrap();
            let answer = tokio::time::timeout(PATIENCE, answer).await.unwrap().unwrap();
            if answer.status() == 401 {
                assert_eq!(answer.headers()["www-authenticate"], "Bearer");
            }
            let reason = answer.headers().get(portico_tunnel::REASON);
            *self.reason.lock().unwrap() =
                reason.map(|reason| reason.to_str().unwrap().to_owned()).unwrap_or_default();
            (answer.status().as_u16(), send, answer.into_body())
        })
    }

    /// Why the last request was refused; empty if it was not.
    pub fn reason(&self) -> String {
        self.reason.lock().unwrap().clone()
    }

    /// The status of a CONNECT, and both directions of its stream.
    pub fn connect(&self, authority: &str) -> (u16, SendStream<Bytes>, RecvStream) {
        let uri = http::Uri::builder().authority(authority).build().unwrap();
        self.send(http::Request::builder().method("CONNECT").uri(uri), false)
    }

    /// What comes next on a stream; `None` at its end in order.
    pub fn read(&self, recv: &mut RecvStream) -> Option<Result<Bytes, h2::Error>> {
        self.runtime.block_on(async { tokio::time::timeout(PATIENCE, recv.data()).await.unwrap() })
    }
}
