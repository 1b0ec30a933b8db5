//! A gateway of any make, that answers what a test wants.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use bytes::Bytes;
use h2::Reason;
use http::{Method, Response, StatusCode};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// An answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// With that status.
    Status(StatusCode),
    /// None: the stream is reset.
    Reset(Reason),
    /// None at all.
    Never,
}

pub(super) struct Scripted {
    pub(super) address: SocketAddr,
    pub(super) to_connect: watch::Sender<Answer>,
    pub(super) to_options: watch::Sender<StatusCode>,
    /// Whether new connections stay open.
    pub(super) accepts: watch::Sender<bool>,
    options: Arc<AtomicU32>,
    task: JoinHandle<()>,
}

impl Scripted {
    pub(super) async fn start(to_connect: Answer, to_options: StatusCode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to_connect, to_options) = (watch::Sender::new(to_connect), watch::Sender::new(to_options));
        let (accepts, options) = (watch::Sender::new(true), Arc::new(AtomicU32::new(0)));
        let (connects, identities, count) = (to_connect.clone(), to_options.clone(), Arc::clone(&options));
        let accepting = accepts.subscribe();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                if !*accepting.borrow() {
                    continue;
                }
                let scripts = (connects.subscribe(), identities.subscribe());
                connections.spawn(serve(stream, scripts, Arc::clone(&count)));
            }
        });
        Self { address, to_connect, to_options, accepts, options, task }
    }

    /// How often it was asked about an identity.
    pub(super) fn options(&self) -> u32 {
        self.options.load(SeqCst)
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    stream: TcpStream,
    (connects, identities): (watch::Receiver<Answer>, watch::Receiver<StatusCode>),
    options: Arc<AtomicU32>,
) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    let (mut held, mut unanswered) = (Vec::new(), Vec::new());
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let answer = if request.method() == Method::OPTIONS {
            options.fetch_add(1, SeqCst);
            Answer::Status(*identities.borrow())
        } else {
            *connects.borrow()
        };
        let status = match answer {
            Answer::Status(status) => status,
            Answer::Reset(reason) => {
                respond.send_reset(reason);
                continue;
            }
            Answer::Never => {
                unanswered.push((respond, request));
                continue;
            }
        };
        let response = Response::builder().status(status).body(()).unwrap();
        if request.method() == Method::CONNECT && status == StatusCode::OK {
            held.push((respond.send_response(response, false).unwrap(), request));
            continue;
        }
        let mut body = respond.send_response(response, false).unwrap();
        body.send_data(Bytes::from_static(b"as the test wants it"), true).unwrap();
    }
}
