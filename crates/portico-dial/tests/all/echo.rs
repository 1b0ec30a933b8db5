//! A TLS server on loopback that sends back what it gets.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

use std::net::SocketAddr;
use std::sync::Arc;

use portico_lab::pki::Identity;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// Ends when dropped.
pub(super) struct Echo {
    pub(super) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Echo {
    pub(super) async fn start(identity: &Identity, alpn: &[&[u8]]) -> Self {
        let acceptor = TlsAcceptor::from(Arc::new(identity.server_config(alpn).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // Clients that do not like our certificate leave here.
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let (mut read, mut write) = tokio::io::split(stream);
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        Self { address, task }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.task.abort();
    }
}
